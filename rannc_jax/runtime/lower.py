"""From stages and a schedule to the list of operations of a step, and the programs it names.

Prologue, forwards and backwards in the schedule's order with the moves between stages; what comes after
the last of them is in `ending`. The names of values are in `table`.
"""

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from rannc_jax.runtime.alike import Alike, Pool
from rannc_jax.runtime.backward import Backwards, Read, Source, seed_program
from rannc_jax.runtime.ending import end_gradients, end_loss, end_outputs
from rannc_jax.runtime.layout import Layout, Lowered
from rannc_jax.runtime.once import prologue_program
from rannc_jax.runtime.ops import Key
from rannc_jax.runtime.optimizer import grad_dtype
from rannc_jax.runtime.stage import Compiled
from rannc_jax.runtime.table import StageTable
from rannc_jax.runtime.transfer import sub_mesh_sharding
from rannc_jax.schedule.action import Action, Kind


def lower(table: StageTable, *, apart: Collection[int] = ()) -> Lowered:
    """All operations of a batch, up to gradients, loss, outputs and new model state.

    Args:
        table: the stages.
        apart: stages whose forwards are never joined to their backwards, so that what a program takes in for
            its time only (gathered parameters) is not there for both.
    """
    walk = _Walk(table, apart)
    walk.start()
    for action in table.layout.actions:
        walk.add(action)
    end_loss(table, walk.out)
    end_outputs(table, walk.out)
    if table.train:
        end_gradients(table, walk.out, walk.version)
    return walk.out


class _Walk:
    """Appends operations action by action. `version` counts the values each stage's accumulators had."""

    def __init__(self, table: StageTable, apart: Collection[int]) -> None:
        self.table, self.apart, self.out = table, apart, Lowered()
        self.version = [0] * table.num_stages
        self.backwards = [
            Backwards(code, self._arity(s)) if table.train and code.differentiates else None
            for s, code in enumerate(table.code)
        ]
        self.joined = self._joined()
        self.seeded: set[Key] = set()
        self.pool: Pool = {}

    def _arity(self, s: int) -> dict[int, int]:
        """Position of an output of a stage that takes cotangents -> how many arrive."""
        outputs = self.table.shapes[s].part.outputs
        crossing = [k for k in self.table.code[s].cotangents if k < len(outputs)]
        return {k: len(self.table.takers(outputs[k])) for k in crossing}

    def _joined(self) -> dict[Action, Action]:
        """Forwards and the backwards right behind them on the same devices, where nothing comes in between:
        they are one program."""
        found: dict[Action, Action] = {}
        before: dict[Mesh, Action] = {}
        for action in self.table.layout.actions:
            mesh = self.table.layout.meshes[action.stage]
            last, before[mesh] = before.get(mesh), action
            backwards = self.backwards[action.stage]
            follows = last == Action(action.stage, Kind.FORWARD, action.microbatch)
            is_backward = action.kind is not Kind.FORWARD and action.stage not in self.apart
            if last is not None and follows and is_backward and backwards is not None and not backwards.arity:
                found[last] = action
        return found

    def add(self, action: Action) -> None:
        """Append what an action does."""
        backwards = self.backwards[action.stage]
        if action.kind is Kind.FORWARD:
            behind = self.joined.get(action)
            if behind is not None and backwards is not None:
                self.forward_and_backward(action, behind, backwards)
            else:
                self.forward(action)
        elif backwards is not None and action not in self.joined.values():
            self.backward(action, self._as_run(action), backwards)

    def _as_run(self, action: Action) -> Kind | None:
        """What of a backward is run. A half with nothing to do leaves everything to the other one."""
        sends = bool(self.table.code[action.stage].gradient_ids)
        sums = bool(self.table.shapes[action.stage].accumulated)
        if action.kind is Kind.INPUT_GRAD and not (sends and sums):
            return Kind.BACKWARD if sends else None
        if action.kind is Kind.WEIGHT_GRAD and not (sends and sums):
            return None if sends else Kind.BACKWARD
        return action.kind

    def start(self) -> None:
        """Ties, keys of the microbatches, prologues, accumulators."""
        out = self.out
        for s, shape in enumerate(self.table.shapes):
            ties = [v for v in shape.params if self.table.owner[v] != s]
            out.move(s, [("param", v) for v in ties], [("param", v, s) for v in ties], [None] * len(ties))
            if shape.reads_rng:
                if s:
                    out.move(s, [("step_key",)], [("step_key", s)], [None])
                out.programs[f"keys{s}"] = _keys_program(self.table.layout)
                keys = [("rng", i, s) for i in range(self.table.layout.num_microbatches)]
                out.run(f"keys{s}", s, [("step_key", s) if s else ("step_key",)], keys)
            if shape.prologue is not None:
                mesh, program = self.table.layout.meshes[s], self.table.graph.program
                out.programs[f"prologue{s}"] = prologue_program(
                    program, shape.prologue, sub_mesh_sharding(None, mesh)
                )
                reads = [self.table.lasting(v, s) for v in shape.prologue.inputs]
                out.run(f"prologue{s}", s, reads, [("pro", v, s) for v in shape.prologue.outputs])
            if self.table.train and self.table.code[s].differentiates:
                out.programs[f"zeros{s}"] = self._zeros(s)
                out.run(f"zeros{s}", s, [], [("acc", v, s, 0) for v in shape.accumulated])

    def _zeros(self, s: int) -> Compiled:
        code = self.table.code[s]
        sharding = NamedSharding(self.table.layout.meshes[s], code.accumulator_spec)
        wide = [
            (code.accumulator_shape(v), grad_dtype(self.table.graph.program.vars[v].aval.dtype))
            for v in self.table.shapes[s].accumulated
        ]
        return jax.jit(lambda: tuple(jnp.zeros(*x) for x in wide), out_shardings=sharding)

    def forward(self, action: Action) -> None:
        """F, and what it sends."""
        s, i = action.stage, action.microbatch
        backwards = self.backwards[s]
        name = f"F{s}"
        if name not in self.out.programs:
            self._add(name, s, self.table.code[s].forward(residuals=backwards is not None))
        outputs = self._made(s, i)
        if backwards is not None:
            outputs += [("res", n, i, s) for n in range(len(backwards.code.diff.residuals))]
        self.out.run(name, s, self._arguments(s, i), outputs, label=str(action))
        self._send_values(s, i)

    def backward(self, action: Action, kind: Kind | None, backwards: Backwards) -> None:
        """B, I or W, and what they send."""
        if kind is None:
            return
        s, i = action.stage, action.microbatch
        name = f"{kind.value}{s}"
        make, reads = {
            Kind.BACKWARD: (backwards.whole, lambda: backwards.reads),
            Kind.INPUT_GRAD: (backwards.inputs, lambda: backwards.first_reads),
            Kind.WEIGHT_GRAD: (backwards.weights, lambda: backwards.second_reads),
        }[kind]
        if name not in self.out.programs:
            self._add(name, s, make())
        inputs = [key for read in reads() for key in self._read_keys(read, s, i)]
        outputs: list[Key] = []
        if kind is not Kind.WEIGHT_GRAD:
            outputs += self._gradients(s, i)
        frontier = [] if kind is Kind.BACKWARD else self._frontier(s, i, backwards)
        sums, new = ([], []) if kind is Kind.INPUT_GRAD else self._sums(s)
        if kind is Kind.WEIGHT_GRAD:
            inputs += frontier
        else:
            outputs += frontier
        self.out.run(name, s, [*inputs, *sums], [*outputs, *new], donates=sums, label=str(action))
        if kind is not Kind.WEIGHT_GRAD:
            self._send_gradients(s, i)

    def forward_and_backward(self, forward: Action, behind: Action, backwards: Backwards) -> None:
        """FB or FI, and what they send."""
        s, i = forward.stage, forward.microbatch
        kind = self._as_run(behind)
        if kind is None:  # the backward comes as a whole later
            self.forward(forward)
            return
        split = kind is Kind.INPUT_GRAD
        name = f"F{kind.value}{s}"
        if name not in self.out.programs:
            self.out.programs[name] = backwards.behind_forward(split=split)
        seeding = backwards.code.seeding
        seed: list[Key] = [("part_weight", i)] if seeding is not None and seeding.weight is None else []
        inputs = [*self._arguments(s, i), *seed]
        outputs = [*self._made(s, i), *self._gradients(s, i)]
        label = f"{forward}+{behind}"
        if split:
            outputs += [("res", n, i, s) for n in backwards.late_residuals]
            outputs += self._frontier(s, i, backwards)
            self.out.run(name, s, inputs, outputs, label=label)
        else:
            sums, new = self._sums(s)
            self.out.run(name, s, [*inputs, *sums], [*outputs, *new], donates=sums, label=label)
        self._send_values(s, i)
        self._send_gradients(s, i)

    def _add(self, name: str, s: int, program: Compiled) -> None:
        """A program of a stage; where stages share a sub-mesh it may be another's too."""
        mesh = self.table.layout.meshes[s]
        several = self.table.layout.meshes.count(mesh) > 1
        self.out.programs[name] = Alike(program, mesh, self.pool) if several else program

    # --- keys ---------------------------------------------------------------------------------

    def _arguments(self, s: int, i: int) -> list[Key]:
        """What a forward takes."""
        code, shape = self.table.code[s], self.table.shapes[s]
        return [self.table.input_key(v, i, s) for v in shape.part.inputs] + [("valid", i, s)] * code.masked

    def _made(self, s: int, i: int) -> list[Key]:
        """Outputs and results of a forward."""
        part = self.table.shapes[s].part
        made: list[Key] = [("act", v, i, s) for v in part.outputs]
        return made + [self.table.result_key(k, i) for k in part.results]

    def _read_keys(self, read: Read, s: int, i: int) -> list[Key]:
        """The arguments that a read stands for."""
        part = self.table.shapes[s].part
        if read.source is Source.NUMBER:
            return []
        if read.source is Source.INPUT:
            return [self._arguments(s, i)[read.index]]
        if read.source is Source.OUTPUT:
            return [self._made(s, i)[read.index]]
        if read.source is Source.RESIDUAL:
            return [("res", read.index, i, s)]
        if read.source is Source.COTANGENT:
            v = part.outputs[read.index]
            return [("ct", v, i, t, s) for t in self.table.takers(v)]
        return [self._seed(s, i)]

    def _seed(self, s: int, i: int) -> Key:
        seeding = self.table.code[s].seeding
        assert seeding is not None
        if seeding.weight is None or seeding.divisor is None:
            return ("part_weight", i)
        key: Key = ("seed", i)
        if key not in self.seeded:
            self.seeded.add(key)
            self.out.programs.setdefault("seed", seed_program())
            made = self._made(s, i)
            self.out.run("seed", s, [made[seeding.weight], made[seeding.divisor]], [key])
        return key

    def _gradients(self, s: int, i: int) -> list[Key]:
        return [self.table.gradient_key(v, i, s) for v in self.table.code[s].gradient_ids]

    def _frontier(self, s: int, i: int, backwards: Backwards) -> list[Key]:
        return [("front", n, i, s) for n in range(len(backwards.halves.frontier))]

    def _sums(self, s: int) -> tuple[list[Key], list[Key]]:
        """The accumulators of a stage before and after the next addition."""
        version = self.version[s]
        self.version[s] = version + 1
        ids = self.table.shapes[s].accumulated
        old, new = ([("acc", v, s, n) for v in ids] for n in (version, version + 1))
        return list(old), list(new)

    # --- moves --------------------------------------------------------------------------------

    def _send_values(self, s: int, i: int) -> None:
        for t, shape in enumerate(self.table.shapes):
            values = [v for v in self.table.shapes[s].crossing_out if v in shape.crossing_in]
            keys: list[Key] = [("act", v, i, s) for v in values]
            self._send(t, values, keys, [("act", v, i, t) for v in values])

    def _send_gradients(self, s: int, i: int) -> None:
        for t, shape in enumerate(self.table.shapes):
            values = [v for v in self.table.code[s].gradient_ids if v in shape.crossing_out]
            keys = [self.table.gradient_key(v, i, s) for v in values]
            self._send(t, values, keys, [("ct", v, i, s, t) for v in values])

    def _send(self, t: int, values: Sequence[int], keys: Sequence[Key], arrived: Sequence[Key]) -> None:
        self.out.move(t, keys, arrived, [self.table.value_layout(v) for v in values])


def _keys_program(layout: Layout) -> Compiled:
    count = layout.num_microbatches
    return jax.jit(lambda key: tuple(jax.random.fold_in(key, i) for i in range(count)))
