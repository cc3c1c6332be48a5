"""What the compiled programs of a stage take, give, take over and need meanwhile: bytes on one device.

The search prices stages from blocks and rules. Once a cut is there, the stage's own forward and backward
can be traced (shapes only, nothing runs), and then arguments, results and donated buffers are known to
the byte and the peak of temporaries follows from the equations (`temporaries`). Everything is stated for
one replica and the rows it sees.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rannc_jax.contract import Remat
from rannc_jax.cost.operations import Operations, open_jaxpr
from rannc_jax.cost.temporaries import temporary_bytes
from rannc_jax.ir.align import Aligned
from rannc_jax.ir.autodiff import Differentiated, differentiate, stage_function
from rannc_jax.ir.batch import LossKind
from rannc_jax.ir.graph import Graph, written_state
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.ir.slice import Slice, as_function, avals
from rannc_jax.ir.stage_shape import StageShape, stage_shape
from rannc_jax.ir.trace import aval_bytes

POINTER_BYTES = 8
"""A program with several results returns a table of pointers to them, which XLA counts as output."""

_INPUT_CLASSES = {
    Role.PARAM: "parameters",
    Role.BATCH: "batch",
    Role.RNG: "keys",
    Role.FROZEN: "constants",
    Role.CONST: "constants",
    Role.MODEL_STATE: "constants",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramBytes:
    """One compiled program on one device.

    Args:
        name: "prologue", "zeros", "forward", "backward", or "forward and backward" in one.
        arguments: bytes by class of what it takes; what it does not read is not passed.
        outputs: bytes by class of what it gives, those that lie in donated arguments included.
        aliases: bytes of results that lie in donated arguments.
        temporaries: peak of what lives inside it besides arguments and results.
    """

    name: str
    arguments: Mapping[str, int]
    outputs: Mapping[str, int]
    aliases: int
    temporaries: int

    @property
    def argument_bytes(self) -> int:
        return sum(self.arguments.values())

    @property
    def output_bytes(self) -> int:
        return sum(self.outputs.values())

    @property
    def peak_bytes(self) -> int:
        """What the device holds for it at most."""
        return self.argument_bytes + self.output_bytes - self.aliases + self.temporaries


def stage_programs(
    graph: Graph,
    stages: Sequence[Sequence[Sequence[int]]],
    remats: Sequence[Remat],
    traces: Sequence[Aligned],
    *,
    train: bool = True,
    joined: Collection[int] = (),
) -> tuple[tuple[ProgramBytes, ...], ...]:
    """The programs of every stage.

    Args:
        graph: of the function.
        stages: per stage, the node indices of its blocks.
        remats: per stage.
        traces: per stage, the function at the rows that one replica sees of a microbatch. Batches whose
            rows do not divide, and so are padded, take a mask more.
        train: with backwards.
        joined: stages that run the forward and the backward of a microbatch as one program; no other stage
            sends them a cotangent.

    Complexity: traces and differentiates every stage once, about 1 ms an equation.
    """
    cut = _Cut(graph, stages)
    found: list[tuple[ProgramBytes, ...]] = []
    later: list[_Stage] = []
    for s in reversed(range(len(stages))):
        stage = _Stage(cut, s, remats[s], traces[s], later, train=train)
        later.insert(0, stage)
        found.insert(0, tuple(stage.programs(joined=s in joined)))
    return tuple(found)


class _Cut:
    """Where the outputs of a program are made, and what the loss's stage gives besides."""

    def __init__(self, graph: Graph, stages: Sequence[Sequence[Sequence[int]]]) -> None:
        self.graph, self.stages = graph, stages
        self.node_stage = {n: s for s, blocks in enumerate(stages) for block in blocks for n in block}
        self.written = written_state(graph.program)
        self.loss = next(
            (k for k, leaf in enumerate(graph.program.outputs) if leaf.kind is OutputKind.LOSS), None
        )

    def shape(self, stage: int) -> StageShape:
        kept = set(self.written.values())
        mine = [
            k
            for k, leaf in enumerate(self.graph.program.outputs)
            if (leaf.kind is not OutputKind.MODEL_STATE or k in kept) and self.maker(k) == stage
        ]
        extra = self.weights() if self.loss in mine else []
        return stage_shape(self.graph, stage, self.stages[stage], mine, extra, self.written)

    def maker(self, position: int) -> int:
        """The stage that computes an output: its node's, that of the state's reader, or the last."""
        node = self.graph.outputs[position]
        if node is not None:
            return self.node_stage[node]
        state = next((v for v, k in self.written.items() if k == position), None)
        readers = [self.node_stage[n] for n, x in enumerate(self.graph.nodes) if state in x.inputs]
        return min(readers, default=len(self.stages) - 1)

    def weights(self) -> list[int]:
        """The weight of a weighted loss, and its divisor."""
        rule = self.graph.info.loss
        if rule is None or rule.kind is not LossKind.WEIGHTED or rule.weight is None:
            return []
        return list(dict.fromkeys([rule.weight, rule.weight if rule.divisor is None else rule.divisor]))


class _Stage:
    """One stage's functions at the rows of a replica."""

    def __init__(
        self, cut: _Cut, index: int, remat: Remat, trace: Aligned, later: Sequence["_Stage"], *, train: bool
    ) -> None:
        self.cut, self.graph, self.program = cut, cut.graph, trace.program
        self.shape = shape = cut.shape(index)
        self.part = trace.slice(shape.part)
        blocks = [trace.slice(block) for block in shape.blocks]
        self.function = stage_function(self.program, self.part, blocks, remat)
        wanted = {*shape.accumulated} | {v for v in shape.crossing_in if v in self.graph.flows}
        self.wrt = [i for i, v in enumerate(shape.part.inputs) if v in wanted]
        self.arity = {v: sum(v in stage.sends for stage in later) for v in shape.crossing_out}
        self.seeds = cut.loss in shape.part.results
        self.cotangents = [i for i, v in enumerate(shape.part.outputs) if self.arity.get(v)]
        if train and self.seeds and cut.loss is not None:
            self.cotangents.append(len(shape.part.outputs) + shape.part.results.index(cut.loss))
        self.differentiates = train and bool(self.wrt) and bool(self.cotangents)
        summed = set(shape.accumulated)
        mine = [shape.part.inputs[i] for i in self.wrt] if self.differentiates else []
        self.sends = [v for v in mine if v not in summed]

    @functools.cached_property
    def diff(self) -> Differentiated:
        return differentiate(self.function, self._inputs(), wrt=self.wrt, cotangents=self.cotangents)

    def programs(self, *, joined: bool) -> list[ProgramBytes]:
        """Prologue, accumulators, forward and backward, as far as the stage has them."""
        found = []
        if self.shape.prologue is not None:
            found.append(self._prologue(self.shape.prologue))
        if self.differentiates:
            sums = [self._accumulator(v) for v in self.shape.accumulated]
            zeros = [jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in sums]
            found.append(
                _measured(
                    "zeros", lambda: [jnp.zeros(x.shape, x.dtype) for x in zeros], (), ("accumulators",)
                )
            )
        if not self.differentiates:
            return [*found, self._forward()]
        return [*found, self._joined()] if joined else [*found, self._forward(), self._backward()]

    def _inputs(self) -> list[jax.ShapeDtypeStruct]:
        return avals(self.program, self.part.inputs)

    def _class(self, v: int) -> str:
        """The class of an input of the stage, by its number in the planned trace."""
        inputs = self.graph.program.inputs
        if v >= len(inputs):
            return "received" if v in self.shape.crossing_in else "prologue"
        return "state" if v in self.cut.written else _INPUT_CLASSES[inputs[v].role]

    def _accumulator(self, v: int) -> jax.ShapeDtypeStruct:
        """Gradients are summed in float32, or wider."""
        aval = self.graph.program.vars[v].aval
        return jax.ShapeDtypeStruct(aval.shape, jnp.promote_types(aval.dtype, jnp.float32))

    def _prologue(self, part: Slice) -> ProgramBytes:
        program = self.graph.program
        run = as_function(program, part)
        given = [(self._class(v), x) for v, x in zip(part.inputs, avals(program, part.inputs), strict=True)]
        return _measured("prologue", lambda *xs: run(xs), given, ("prologue",))

    def _given(self) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        """Class and shape of what a forward takes."""
        return [(self._class(v), x) for v, x in zip(self.shape.part.inputs, self._inputs(), strict=True)]

    def _sums(self) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        """Class and shape of what gradients are added to."""
        sums = [self._accumulator(v) for v in self.shape.accumulated]
        return [("accumulators", jax.ShapeDtypeStruct((1, *x.shape), x.dtype)) for x in sums]

    def _forward(self) -> ProgramBytes:
        part = self.shape.part
        made = ["sent"] * len(part.outputs) + ["results"] * len(part.results) + ["residuals"]

        def run(*xs: Any) -> list[Any]:
            if not self.differentiates:
                return self.function(xs)
            outs, kept = self.diff.forward(xs)
            return [*outs, *(x[None] for x in kept)]  # one row a replica

        return _measured("forward", run, self._given(), made)

    def _backward(self) -> ProgramBytes:
        diff, part = self.diff, self.shape.part
        inputs = self._inputs()
        outputs = jax.eval_shape(self.function, inputs)
        given = [(self._class(part.inputs[i]), inputs[i]) for i in diff.held]
        given += [("results", outputs[k]) for k in diff.kept_outputs]
        given += [("residuals", x) for x in diff.residuals]
        arity = [self.arity[part.outputs[k]] for k in self.cotangents if k < len(part.outputs)]
        for k, times in zip(self.cotangents, arity, strict=False):
            given += [("cotangents", outputs[k])] * times
        given += [("weights", jax.ShapeDtypeStruct((), jnp.float32))] * self.seeds
        given += self._sums()
        run = functools.partial(self._run_backward, arity)
        made = ["accumulators"] * len(self.shape.accumulated) + ["cotangents"]
        return _measured("backward", run, given, made, donated="accumulators")

    def _joined(self) -> ProgramBytes:
        """Forward and backward of one microbatch; the weight is an argument unless the stage makes it."""
        part, diff = self.shape.part, self.diff
        weights, count = self.cut.weights(), len(self.shape.part.inputs)
        seeded = not weights
        given = self._given() + [("weights", jax.ShapeDtypeStruct((), jnp.float32))] * seeded + self._sums()

        def run(*args: Any) -> list[Any]:
            inputs, rest = args[:count], args[count:]
            outs, kept = diff.forward(inputs)
            if not seeded:
                weight, divisor = (outs[part.outputs.index(v)] for v in (weights[0], weights[-1]))
                rest = (jnp.where(weight > 0, divisor, 0).astype(jnp.float32), *rest)
            held = [*(inputs[i] for i in diff.held), *(outs[k] for k in diff.kept_outputs), *kept]
            return [*self._run_backward((), *held, *rest), *outs]

        made = ["accumulators"] * len(self.shape.accumulated) + ["cotangents"] * len(self.sends)
        made += ["sent"] * len(part.outputs) + ["results"]
        return _measured("forward and backward", run, given, made, donated="accumulators")

    def _run_backward(self, arity: Sequence[int], *args: Any) -> list[Any]:
        """Gradients of one microbatch added to the accumulators, and those that leave the stage."""
        diff, taken = self.diff, iter(args)
        held = [next(taken) for _ in diff.held]
        outputs = [next(taken) for _ in diff.kept_outputs]
        kept = [next(taken) for _ in diff.residuals]
        cotangents = [functools.reduce(jnp.add, [next(taken) for _ in range(n)]) for n in arity]
        weight = next(taken) if self.seeds else None
        if weight is not None:
            loss = self.program.jaxpr.jaxpr.outvars[self.cut.loss].aval
            cotangents.append(weight.astype(loss.dtype))
        grads = diff.backward(held, outputs, kept, cotangents)
        if weight is not None and self.cut.weights():
            grads = [jnp.where(weight > 0, g, jnp.zeros_like(g)) for g in grads]
        by_id = {self.shape.part.inputs[i]: g for i, g in zip(diff.wrt, grads, strict=True)}
        summed = zip(self.shape.accumulated, taken, strict=True)
        new = [sums + by_id[v].astype(sums.dtype)[None] for v, sums in summed]
        return [*new, *(by_id[v] for v in self.sends)]


def _measured(
    name: str,
    run: Callable[..., Any],
    given: Sequence[tuple[str, jax.ShapeDtypeStruct]],
    made: Sequence[str],
    donated: str = "",
) -> ProgramBytes:
    """Trace a program and add up.

    Args:
        name: of the program.
        run: its function.
        given: class and shape of every argument.
        made: class of every result; the last one stands for all that follow.
        donated: the class of arguments that the first results take the place of, one by one.
    """
    ops = open_jaxpr(jax.make_jaxpr(run)(*(x for _, x in given)).jaxpr)
    used = _needed(ops)
    arguments: dict[str, int] = {}
    for position, (kind, shape) in enumerate(given):
        if position in used:
            arguments[kind] = arguments.get(kind, 0) + aval_bytes(shape)
    outputs: dict[str, int] = {}
    sizes = [aval_bytes(x) for x in jax.tree.leaves(jax.eval_shape(run, *(x for _, x in given)))]
    for position, size in enumerate(sizes):
        kind = made[min(position, len(made) - 1)]
        outputs[kind] = outputs.get(kind, 0) + size
    outputs["table"] = POINTER_BYTES * len(sizes) if len(sizes) > 1 else 0
    inplace = [p for p, (kind, _) in enumerate(given) if kind == donated]
    return ProgramBytes(
        name=name,
        arguments=arguments,
        outputs=outputs,
        aliases=sum(aval_bytes(given[p][1]) for p in inplace),
        temporaries=temporary_bytes(ops, len(inplace)),
    )


def _needed(ops: Operations) -> set[int]:
    """Values that the outputs depend on; what only others read is never passed."""
    needed = set(ops.outputs)
    for op in reversed(ops.operations):
        if any(v in needed for v in op.writes) or op.eqn.effects:
            needed.update(op.reads)
    return needed
