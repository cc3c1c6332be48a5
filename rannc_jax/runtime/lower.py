"""From stages and a schedule to the list of operations of a step, and the programs it names.

Prologue, forwards and backwards in the schedule's order with the moves between stages; what comes after
the last of them is in `ending`. The names of values are in `table`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from rannc_jax.runtime.ending import end_gradients, end_loss, end_outputs
from rannc_jax.runtime.layout import Layout, Lowered
from rannc_jax.runtime.once import prologue_program
from rannc_jax.runtime.ops import Key
from rannc_jax.runtime.optimizer import grad_dtype
from rannc_jax.runtime.stage import Compiled, StagePrograms
from rannc_jax.runtime.table import StageTable
from rannc_jax.schedule.action import Action, Kind


def lower(table: StageTable) -> Lowered:
    """All operations of a batch, up to gradients, loss, outputs and new model state."""
    walk = _Walk(table)
    walk.start()
    for action in table.layout.actions:
        if action.kind is Kind.FORWARD:
            walk.forward(action)
        elif table.train and table.code[action.stage].differentiates:
            walk.backward(action)
    end_loss(table, walk.out)
    end_outputs(table, walk.out)
    if table.train:
        end_gradients(table, walk.out, walk.version)
    return walk.out


class _Walk:
    """Appends operations action by action. `version` counts the values each stage's accumulators had."""

    def __init__(self, table: StageTable) -> None:
        self.table, self.out = table, Lowered()
        self.version = [0] * table.num_stages

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
                out.programs[f"prologue{s}"] = prologue_program(program, shape.prologue, mesh)
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
        out, s, i = self.out, action.stage, action.microbatch
        code, shape = self.table.code[s], self.table.shapes[s]
        keeps = self.table.train and code.differentiates
        name = f"F{s}"
        if name not in out.programs:
            out.programs[name] = code.forward(residuals=keeps)
        inputs = [self.table.input_key(v, i, s) for v in shape.part.inputs]
        inputs += [("valid", i, s)] * code.masked
        outputs: list[Key] = [("act", v, i, s) for v in shape.part.outputs]
        outputs += [self.table.result_key(k, i) for k in shape.part.results]
        if keeps:
            outputs += [("res", n, i, s) for n in range(len(code.diff.residuals))]
        out.run(name, s, inputs, outputs, label=str(action))
        for t in range(self.table.num_stages):
            values = [v for v in shape.crossing_out if v in self.table.shapes[t].crossing_in]
            out.move(
                t,
                [("act", v, i, s) for v in values],
                [("act", v, i, t) for v in values],
                [self.table.value_layout(v) for v in values],
            )

    def backward(self, action: Action) -> None:
        out, s, i = self.out, action.stage, action.microbatch
        code, shape = self.table.code[s], self.table.shapes[s]
        crossing = [k for k in code.cotangents if k < len(shape.part.outputs)]
        takers = {v: self.table.takers(v) for v in (shape.part.outputs[k] for k in crossing)}
        name = f"B{s}"
        if name not in out.programs:
            arity = [len(takers[shape.part.outputs[k]]) for k in crossing]
            out.programs[name] = code.backward(arity)
        inputs: list[Key] = [
            self.table.input_key(shape.part.inputs[p], i, s)
            if p < len(shape.part.inputs)
            else ("valid", i, s)
            for p in code.held_positions
        ]
        num_out = len(shape.part.outputs)
        for k in code.diff.kept_outputs:
            inputs.append(
                ("act", shape.part.outputs[k], i, s)
                if k < num_out
                else self.table.result_key(shape.part.results[k - num_out], i)
            )
        inputs += [("res", n, i, s) for n in range(len(code.diff.residuals))]
        for v, stages in takers.items():
            inputs += [("ct", v, i, t, s) for t in stages]
        if code.seeding is not None:
            inputs.append(self._seed(code, i, s))
        version = self.version[s]
        accumulators = [("acc", v, s, version) for v in shape.accumulated]
        self.version[s] = version + 1
        outputs: list[Key] = [("acc", v, s, version + 1) for v in shape.accumulated]
        outputs += [self.table.gradient_key(v, i, s) for v in code.gradient_ids]
        out.run(name, s, [*inputs, *accumulators], outputs, donates=accumulators, label=str(action))
        for t in range(self.table.num_stages):
            values = [v for v in code.gradient_ids if v in self.table.shapes[t].crossing_out]
            out.move(
                t,
                [self.table.gradient_key(v, i, s) for v in values],
                [("ct", v, i, s, t) for v in values],
                [self.table.value_layout(v) for v in values],
            )

    def _seed(self, code: StagePrograms, i: int, s: int) -> Key:
        assert code.seeding is not None
        if code.seeding.weight is None or code.seeding.divisor is None:
            return ("part_weight", i)
        outputs = self.table.shapes[s].part.outputs
        if "seed" not in self.out.programs:
            self.out.programs["seed"] = code.seed()
        keys = [("act", outputs[code.seeding.weight], i, s), ("act", outputs[code.seeding.divisor], i, s)]
        self.out.run("seed", s, keys, [("seed", i)])
        return ("seed", i)


def _keys_program(layout: Layout) -> Compiled:
    count = layout.num_microbatches
    return jax.jit(lambda key: tuple(jax.random.fold_in(key, i) for i in range(count)))
