"""From a plan's stages to the list of operations of a step, and the programs it names.

The list is the whole step: prologue, forwards and backwards in the schedule's order with the moves
between stages, the end of the loss, the one reduction, ties. The optimizer's operations are appended
by `update`. Keys:

    ("param", v) ("held", v, s) ("state", v, i)      parameters, constants, model state before microbatch i
    ("batch", v, i, s) ("rng", i, s) ("valid", i, s) what microbatch i brings to stage s
    ("act", v, i, s) ("ct", v, i, s, t)              a value on stage s; its cotangent from s, on t
    ("res", n, i, s) ("acc", v, s, n)                residuals, accumulators
    ("out", k, i)                                    program output k of microbatch i
    ("grad", v) ("loss",) ("scale", s)               what the optimizer reads
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rannc_jax.contract import Remat
from rannc_jax.ir.align import Aligned
from rannc_jax.ir.batch import LossKind, RowLayout
from rannc_jax.ir.graph import Graph, written_state
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.runtime.loss import combine_free, combine_rows, divisor_function, total_loss
from rannc_jax.runtime.once import finish_program, prologue_program
from rannc_jax.runtime.ops import Key, Op, OpKind
from rannc_jax.runtime.optimizer import grad_dtype
from rannc_jax.runtime.shape import StageShape, stage_shape
from rannc_jax.runtime.stage import Compiled, Seeding, Spread, StagePrograms
from rannc_jax.schedule.action import Action, Kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Where the work goes: everything `lower` needs to know of a plan.

    Args:
        stages: per stage, the node indices of its blocks.
        remats: per stage.
        meshes: per stage.
        actions: all actions in an order that respects their dependencies.
        num_microbatches: parts of the batch.
        rows: rows of one microbatch (padding included).
        batch_rows: rows of the batch as given.
        spread: how replicas share rows.
    """

    stages: tuple[tuple[tuple[int, ...], ...], ...]
    remats: tuple[Remat, ...]
    meshes: tuple[Mesh, ...]
    actions: tuple[Action, ...]
    num_microbatches: int
    rows: int
    batch_rows: int
    spread: Spread

    @property
    def padded(self) -> bool:
        """Whether some rows of the last microbatches are padding."""
        return self.rows * self.num_microbatches != self.batch_rows


@dataclass(slots=True, kw_only=True, eq=False)
class Lowered:
    """Operations in order, the programs they name, where moved values lie, and what they make."""

    ops: list[Op] = field(default_factory=list)
    programs: dict[str, Compiled] = field(default_factory=dict)
    layouts: dict[Key, RowLayout | None] = field(default_factory=dict)
    wanted: list[Key] = field(default_factory=list)

    def run(
        self,
        name: str,
        stage: int,
        inputs: Sequence[Key],
        outputs: Sequence[Key],
        donates: Sequence[Key] = (),
        label: str = "",
    ) -> None:
        """Append a RUN."""
        self.ops.append(
            Op(
                kind=OpKind.RUN,
                name=name,
                stage=stage,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                donates=frozenset(donates),
                label=label or name,
            )
        )

    def move(
        self, stage: int, inputs: Sequence[Key], outputs: Sequence[Key], layouts: Sequence[RowLayout | None]
    ) -> None:
        """Append a MOVE of all values that go to a stage at one time."""
        if inputs:
            self.layouts.update(zip(outputs, layouts, strict=True))
            self.ops.append(
                Op(kind=OpKind.MOVE, name="move", stage=stage, inputs=tuple(inputs), outputs=tuple(outputs))
            )


class StepLowering:
    """Lowers one function over one layout.

    Args:
        graph: of the function.
        layout: where the work goes.
        traces: the function traced with the rows each stage's program sees (rows -> trace).
        batch_grads: batch inputs whose gradient is asked for.
        train: with backward; else forward only.
    """

    def __init__(
        self,
        graph: Graph,
        layout: Layout,
        traces: Mapping[int, Aligned],
        *,
        batch_grads: frozenset[int] = frozenset(),
        train: bool = True,
    ) -> None:
        self.graph, self.layout, self.train = graph, layout, train
        self.written = written_state(graph.program)
        self.node_stage = {n: s for s, blocks in enumerate(layout.stages) for block in blocks for n in block}
        self.loss_position = next(
            (k for k, leaf in enumerate(graph.program.outputs) if leaf.kind is OutputKind.LOSS), None
        )
        self.batch_grads = batch_grads
        self.shapes = [self._shape(s) for s in range(len(layout.stages))]
        self.owner = self._owners()
        self.code = [self._code(s, traces) for s in range(len(layout.stages))]
        self.out = Lowered()

    # --- what stages are ----------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        return len(self.layout.stages)

    def result_stage(self, position: int) -> int:
        """The stage that computes a program output: its node's, or the last one."""
        node = self.graph.outputs[position]
        if node is not None:
            return self.node_stage[node]
        state = next((v for v, k in self.written.items() if k == position), None)
        readers = [self.node_stage[n] for n, x in enumerate(self.graph.nodes) if state in x.inputs]
        return min(readers, default=self.num_stages - 1)

    @property
    def loss_stage(self) -> int:
        assert self.loss_position is not None
        return self.result_stage(self.loss_position)

    def results(self) -> list[int]:
        """Positions of the program outputs that are computed (unwritten model_state is not)."""
        kept = set(self.written.values())
        return [
            k
            for k, leaf in enumerate(self.graph.program.outputs)
            if leaf.kind is not OutputKind.MODEL_STATE or k in kept
        ]

    def _extra(self, stage: int) -> list[int]:
        rule = self.graph.info.loss
        if self.loss_position is None or rule is None or rule.kind is not LossKind.WEIGHTED:
            return []
        if stage != self.loss_stage:
            return []
        assert rule.weight is not None
        return list(dict.fromkeys([rule.weight, rule.divisor if rule.divisor is not None else rule.weight]))

    def _shape(self, stage: int) -> StageShape:
        mine = [k for k in self.results() if self.result_stage(k) == stage]
        return stage_shape(
            self.graph, stage, self.layout.stages[stage], mine, self._extra(stage), self.written
        )

    def _owners(self) -> dict[int, int]:
        """The stage each input leaf lives on: the first that reads it, or stage 0."""
        owner: dict[int, int] = {}
        for v, leaf in enumerate(self.graph.program.inputs):
            if leaf.role in (Role.PARAM, Role.FROZEN, Role.CONST, Role.MODEL_STATE):
                readers = [s.index for s in self.shapes if v in s.params or v in s.held or v in s.state]
                owner[v] = readers[0] if readers else 0
        return owner

    def _code(self, stage: int, traces: Mapping[int, Aligned]) -> StagePrograms:
        layout, shape = self.layout, self.shapes[stage]
        mesh = layout.meshes[stage]
        rows = layout.rows // mesh.size if layout.spread is Spread.PER_REPLICA else layout.rows
        seeding = None
        rule = self.graph.info.loss
        if self.train and self.loss_position is not None and stage == self.loss_stage:
            outputs = shape.part.outputs
            extra = self._extra(stage)
            weighted = rule is not None and rule.kind is LossKind.WEIGHTED
            seeding = Seeding(
                position=len(outputs) + shape.part.results.index(self.loss_position),
                weight=outputs.index(extra[0]) if weighted else None,
                divisor=outputs.index(extra[-1]) if weighted else None,
                select=weighted or layout.padded,
            )
        return StagePrograms(
            self.graph,
            traces[rows],
            shape,
            mesh,
            layout.spread,
            remat=layout.remats[stage],
            seeding=seeding,
            batch_grads=self.batch_grads,
            masked=layout.padded,
            mask_scale=rule is not None and rule.kind in (LossKind.MEAN, LossKind.MEAN_OF_MEANS),
        )

    # --- the list -----------------------------------------------------------------------------

    def lower(self) -> Lowered:
        """All operations up to gradients, loss, outputs and new model state."""
        self._start()
        for action in self.layout.actions:
            if action.kind is Kind.FORWARD:
                self._forward(action)
            elif self.train and self.code[action.stage].differentiates:
                self._backward(action)
        self._end_of_loss()
        self._outputs()
        if self.train:
            self._gradients()
            self._batch_gradients()
        return self.out

    def _start(self) -> None:
        """Ties, keys of the microbatches, prologues, accumulators."""
        out = self.out
        for s, shape in enumerate(self.shapes):
            ties = [v for v in shape.params if self.owner[v] != s]
            out.move(s, [("param", v) for v in ties], [("param", v, s) for v in ties], [None] * len(ties))
            if shape.reads_rng:
                if s:
                    out.move(s, [("step_key",)], [("step_key", s)], [None])
                out.programs[f"keys{s}"] = _keys_program(self.layout)
                keys = [("rng", i, s) for i in range(self.layout.num_microbatches)]
                out.run(f"keys{s}", s, [("step_key", s) if s else ("step_key",)], keys)
            if shape.prologue is not None:
                mesh, program = self.layout.meshes[s], self.graph.program
                out.programs[f"prologue{s}"] = prologue_program(program, shape.prologue, mesh)
                reads = [self._lasting(v, s) for v in shape.prologue.inputs]
                out.run(f"prologue{s}", s, reads, [("pro", v, s) for v in shape.prologue.outputs])
            if self.train and self.code[s].differentiates:
                out.programs[f"zeros{s}"] = self._zeros(s)
                out.run(f"zeros{s}", s, [], [("acc", v, s, 0) for v in shape.accumulated])
        self._acc_version = dict.fromkeys(range(self.num_stages), 0)

    def _lasting(self, v: int, s: int) -> Key:
        """The key of a parameter or held leaf on a stage."""
        if self.graph.program.inputs[v].role is Role.PARAM:
            return ("param", v) if self.owner[v] == s else ("param", v, s)
        return ("held", v, s)

    def _zeros(self, s: int) -> Compiled:
        code = self.code[s]
        sharding = NamedSharding(self.layout.meshes[s], code.accumulator_spec)
        wide = [
            (code.accumulator_shape(v), grad_dtype(self.graph.program.vars[v].aval.dtype))
            for v in self.shapes[s].accumulated
        ]
        return jax.jit(lambda: tuple(jnp.zeros(*x) for x in wide), out_shardings=sharding)

    def _input_key(self, v: int, i: int, s: int) -> Key:
        inputs = self.graph.program.inputs
        if v >= len(inputs):
            shape = self.shapes[s]
            return ("act", v, i, s) if v in shape.crossing_in else ("pro", v, s)
        role = inputs[v].role
        if role is Role.BATCH:
            return ("batch", v, i, s)
        if role is Role.RNG:
            return ("rng", i, s)
        if role is Role.MODEL_STATE and v in self.written:
            return ("state", v, i)
        return self._lasting(v, s)

    def _forward(self, action: Action) -> None:
        out, s, i = self.out, action.stage, action.microbatch
        code, shape = self.code[s], self.shapes[s]
        keeps = self.train and code.differentiates
        name = f"F{s}"
        if name not in out.programs:
            out.programs[name] = code.forward(residuals=keeps)
        inputs = [self._input_key(v, i, s) for v in shape.part.inputs]
        inputs += [("valid", i, s)] * code.masked
        outputs: list[Key] = [("act", v, i, s) for v in shape.part.outputs]
        outputs += [self._result_key(k, i) for k in shape.part.results]
        if keeps:
            outputs += [("res", n, i, s) for n in range(len(code.diff.residuals))]
        out.run(name, s, inputs, outputs, label=str(action))
        for t in range(self.num_stages):
            values = [v for v in shape.crossing_out if v in self.shapes[t].crossing_in]
            out.move(
                t,
                [("act", v, i, s) for v in values],
                [("act", v, i, t) for v in values],
                [self._value_layout(v) for v in values],
            )

    def _result_key(self, position: int, i: int) -> Key:
        for v, k in self.written.items():
            if k == position:
                return ("state", v, i + 1)
        return ("out", position, i)

    def _value_layout(self, v: int) -> RowLayout | None:
        return self.graph.info.layouts[v]

    def _backward(self, action: Action) -> None:
        out, s, i = self.out, action.stage, action.microbatch
        code, shape = self.code[s], self.shapes[s]
        crossing = [k for k in code.cotangents if k < len(shape.part.outputs)]
        takers = {v: self._takers(v) for v in (shape.part.outputs[k] for k in crossing)}
        name = f"B{s}"
        if name not in out.programs:
            arity = [len(takers[shape.part.outputs[k]]) for k in crossing]
            out.programs[name] = code.backward(arity, [])
        inputs: list[Key] = [
            self._input_key(shape.part.inputs[p], i, s) if p < len(shape.part.inputs) else ("valid", i, s)
            for p in code.held_positions
        ]
        num_out = len(shape.part.outputs)
        for k in code.diff.kept_outputs:
            inputs.append(
                ("act", shape.part.outputs[k], i, s)
                if k < num_out
                else self._result_key(shape.part.results[k - num_out], i)
            )
        inputs += [("res", n, i, s) for n in range(len(code.diff.residuals))]
        for v, stages in takers.items():
            inputs += [("ct", v, i, t, s) for t in stages]
        if code.seeding is not None:
            inputs.append(self._seed(code, i, s))
        version = self._acc_version[s]
        accumulators = [("acc", v, s, version) for v in shape.accumulated]
        self._acc_version[s] = version + 1
        outputs: list[Key] = [("acc", v, s, version + 1) for v in shape.accumulated]
        outputs += [self._gradient_key(v, i, s) for v in code.gradient_ids]
        out.run(name, s, [*inputs, *accumulators], outputs, donates=accumulators, label=str(action))
        for t in range(self.num_stages):
            values = [v for v in code.gradient_ids if v in self.shapes[t].crossing_out]
            out.move(
                t,
                [self._gradient_key(v, i, s) for v in values],
                [("ct", v, i, s, t) for v in values],
                [self._value_layout(v) for v in values],
            )

    def _gradient_key(self, v: int, i: int, s: int) -> Key:
        return ("ct", v, i, s, s) if v >= len(self.graph.program.inputs) else ("batch_grad", v, i, s)

    def _takers(self, v: int) -> list[int]:
        """Stages that send a cotangent of a value back, ascending."""
        return [
            t
            for t, shape in enumerate(self.shapes)
            if v in shape.crossing_in and self.code[t].differentiates and v in self.code[t].gradient_ids
        ]

    def _seed(self, code: StagePrograms, i: int, s: int) -> Key:
        assert code.seeding is not None
        if code.seeding.weight is None or code.seeding.divisor is None:
            return ("part_weight", i)
        outputs = self.shapes[s].part.outputs
        self.out.programs["seed"] = code.seed()
        keys = [("act", outputs[code.seeding.weight], i, s), ("act", outputs[code.seeding.divisor], i, s)]
        self.out.run("seed", s, keys, [("seed", i)])
        return ("seed", i)

    def _end_of_loss(self) -> None:
        rule = self.graph.info.loss
        if self.loss_position is None or rule is None:
            return
        s, out = self.loss_stage, self.out
        microbatches = range(self.layout.num_microbatches)
        finish = total_loss(rule, divisor_function(self.graph.program, rule))
        losses = [("out", self.loss_position, i) for i in microbatches]
        extra = self._extra(s)
        weights = [("act", extra[0], i, s) if extra else ("part_weight", i) for i in microbatches]
        whole = NamedSharding(self.layout.meshes[s], PartitionSpec())
        m = self.layout.num_microbatches

        def run(*args: Any) -> tuple[Any, ...]:
            loss, scale, total = finish(args[:m], args[m:])
            per_microbatch = (
                jnp.ones((m,), jnp.float32)
                if rule.kind is LossKind.SUM
                else jnp.stack([jnp.sum(w.astype(jnp.float32)) for w in args[m:]])
            )
            return loss, scale, total, per_microbatch

        out.programs["loss"] = jax.jit(run, out_shardings=whole)
        made = [("loss",), ("scale", s), ("total_weight",), ("weights", s)]
        out.run("loss", s, [*losses, *weights], made)
        out.wanted += [("loss",), ("total_weight",)]
        for t in range(self.num_stages):
            if t != s:
                out.move(t, [("scale", s), ("weights", s)], [("scale", t), ("weights", t)], [None, None])

    def _outputs(self) -> None:
        """Put the auxiliary outputs of microbatches together, on the stages that made them."""
        outs = self.graph.program.outputs
        skip = (OutputKind.LOSS, OutputKind.WEIGHT, OutputKind.MODEL_STATE)
        microbatches = range(self.layout.num_microbatches)
        for s, (shape, code) in enumerate(zip(self.shapes, self.code, strict=True)):
            mine = [k for k in shape.part.results if outs[k].kind not in skip]
            for k in mine:
                kind = code.output_kind(len(shape.part.outputs) + shape.part.results.index(k))
                name = f"out{k}"
                keys: list[Key] = [("out", k, i) for i in microbatches]
                if isinstance(kind, RowLayout):
                    rows = self.layout.batch_rows if self.layout.padded else None
                    self.out.programs[name] = _rows_program(kind, rows)
                else:
                    self.out.programs[name] = self._free_program(k, kind == "stacked", s)
                    keys.append(("weights", s) if self.loss_position is not None else ("even",))
                self.out.run(name, s, keys, [("aux", k)])
                self.out.wanted.append(("aux", k))
        for v in self.written:
            self.out.wanted.append(("state", v, self.layout.num_microbatches))

    def _free_program(self, position: int, stacked: bool, stage: int) -> Compiled:
        whole = NamedSharding(self.layout.meshes[stage], PartitionSpec())
        value = self.graph.program.output_ids()[position]
        reduction = self.graph.info.reductions.get(value, "mean") if value is not None else "mean"

        def join(x: Any) -> Any:
            if not stacked or x.shape[0] == 1:
                return x[0] if stacked else x
            total = jnp.sum(x, axis=0)
            return total if reduction == "sum" else (total / x.shape[0]).astype(x.dtype)

        return jax.jit(
            lambda *args: (combine_free([join(x) for x in args[:-1]], args[-1]),), out_shardings=whole
        )

    def _gradients(self) -> None:
        """Reduce over replicas, divide, transpose prologues, add the parts of tied parameters."""
        out = self.out
        parts: dict[int, list[Key]] = {}
        for s, (shape, code) in enumerate(zip(self.shapes, self.code, strict=True)):
            targets = [v for v in shape.params if v in self.graph.flows]
            if not targets or not code.differentiates:
                continue
            version = self._acc_version[s]
            accumulators = [("acc", v, s, version) for v in shape.accumulated]
            reads = [self._lasting(v, s) for v in shape.prologue.inputs] if shape.prologue else []
            out.programs[f"finish{s}"] = finish_program(code)
            out.run(f"finish{s}", s, [*accumulators, ("scale", s), *reads], [("part", v, s) for v in targets])
            for v in targets:
                parts.setdefault(v, []).append(("part", v, s))
        for s in range(self.num_stages):
            foreign = [key for v, keys in parts.items() if self.owner[v] == s for key in keys if key[2] != s]
            out.move(s, foreign, [(*key, "home") for key in foreign], [None] * len(foreign))
            self._total_gradients(s, parts)

    def _total_gradients(self, s: int, parts: Mapping[int, list[Key]]) -> None:
        """Gradients of the parameters that live on a stage, in the dtype they were summed in."""
        out, program = self.out, self.graph.program
        mine = [v for v, leaf in enumerate(program.inputs) if leaf.role is Role.PARAM and self.owner[v] == s]
        if not mine:
            return
        avals = [program.vars[v].aval for v in mine]
        keys = [[k if k[2] == s else (*k, "home") for k in parts.get(v, [])] for v in mine]
        counts = [len(k) for k in keys]

        def add(*xs: Any) -> tuple[Any, ...]:
            taken = iter(xs)
            totals = []
            for count, aval in zip(counts, avals, strict=True):
                terms = [next(taken) for _ in range(count)]
                wide = grad_dtype(aval.dtype)
                total = sum(terms[1:], terms[0]) if terms else jnp.zeros(aval.shape, wide)
                totals.append(total.astype(wide))
            return tuple(totals)

        whole = NamedSharding(self.layout.meshes[s], PartitionSpec())
        out.programs[f"grads{s}"] = jax.jit(add, out_shardings=whole)
        made: list[Key] = [("grad", v) for v in mine]
        out.run(f"grads{s}", s, [key for group in keys for key in group], made)
        out.wanted += made

    def _batch_gradients(self) -> None:
        """Gradients of batch leaves: summed over the stages that read them, rows in order."""
        out, m = self.out, self.layout.num_microbatches
        for v in sorted(self.batch_grads):
            readers = [s for s, code in enumerate(self.code) if v in code.gradient_ids]
            layout = self.graph.info.layouts[v]
            if not readers:
                continue
            home = readers[0]
            for s in readers[1:]:
                keys: list[Key] = [("batch_grad", v, i, s) for i in range(m)]
                out.move(home, keys, [(*key, home) for key in keys], [layout] * m)
            rows = self.layout.batch_rows if self.layout.padded else None

            def join(
                *args: Any, layout: RowLayout | None = layout, count: int = len(readers), rows: Any = rows
            ) -> tuple[Any]:
                totals = [sum(args[i * count + 1 : (i + 1) * count], args[i * count]) for i in range(m)]
                joined = sum(totals[1:], totals[0]) if layout is None else combine_rows(totals, layout, rows)
                return ((joined * args[-1]).astype(joined.dtype),)

            inputs = [
                ("batch_grad", v, i, s) if s == home else ("batch_grad", v, i, s, home)
                for i in range(m)
                for s in readers
            ]
            out.programs[f"batch_grad{v}"] = jax.jit(join)
            out.run(f"batch_grad{v}", home, [*inputs, ("scale", home)], [("batch_grad", v)])
            out.wanted.append(("batch_grad", v))


def _keys_program(layout: Layout) -> Compiled:
    count = layout.num_microbatches
    return jax.jit(lambda key: tuple(jax.random.fold_in(key, i) for i in range(count)))


def _rows_program(layout: RowLayout, rows: int | None) -> Compiled:
    return jax.jit(lambda *parts: (combine_rows(parts, layout, rows),))
