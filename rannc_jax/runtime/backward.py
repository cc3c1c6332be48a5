"""The backward programs of a stage: whole, in two halves, and joined to the forward before them.

    B   held values, residuals, cotangents, sums        ->  gradients of inputs, new sums
    I   the same without sums                           ->  gradients of inputs, frontier
    W   what is left of it, frontier, sums              ->  new sums
    FB  the forward's arguments, sums                   ->  outputs, gradients of inputs, new sums
    FI  the forward's arguments                         ->  outputs, W's residuals, gradients, frontier

"Sums" are the accumulators of the gradients of weights. I and W are one B cut in two (`ir.halves`). FB and FI
are for a stage whose backward waits for nobody, the last one: no residual between F and B is ever stored.
"""

import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rannc_jax.ir.halves import Halves, halve
from rannc_jax.runtime.stage import Compiled, StagePrograms
from rannc_jax.runtime.transfer import DATA_AXIS


class Source(enum.Enum):
    """Where a backward program has a value from."""

    INPUT = "input"
    NUMBER = "number of the replica"
    OUTPUT = "output"
    RESIDUAL = "residual"
    COTANGENT = "cotangent"
    SEED = "weight of the loss"


@dataclass(frozen=True, slots=True)
class Read:
    """A value that a backward reads: input, output or residual `index`, the cotangents of output `index`."""

    source: Source
    index: int = 0


class Backwards:
    """Compiles the backward programs of a stage.

    Args:
        code: the stage; it differentiates.
        arity: position of a crossing output -> how many cotangents arrive for it; they are added in order.
    """

    def __init__(self, code: StagePrograms, arity: Mapping[int, int]) -> None:
        self.code, self.arity = code, dict(arity)

    @functools.cached_property
    def reads(self) -> tuple[Read, ...]:
        """What B reads, in the order of its arguments."""
        code, number = self.code, len(self.code.shape.part.inputs)
        held = [Read(Source.NUMBER) if i == number else Read(Source.INPUT, i) for i in code.diff.held]
        outputs = [Read(Source.OUTPUT, k) for k in code.diff.kept_outputs]
        residuals = [Read(Source.RESIDUAL, n) for n in range(len(code.diff.residuals))]
        cotangents = [Read(Source.COTANGENT, k) for k in self.arity]
        seed = [] if code.seeding is None else [Read(Source.SEED)]
        return (*held, *outputs, *residuals, *cotangents, *seed)

    @functools.cached_property
    def halves(self) -> Halves:
        """B in two."""
        part = self.code.shape.part
        leaving = set(self.code.gradient_ids)
        first = [n for n, i in enumerate(self.code.diff.wrt) if part.inputs[i] in leaving]
        closed = jax.make_jaxpr(lambda *values: self._gradients(values))(*map(self._aval, self.reads))
        return halve(closed, first, kept=[n for n, r in enumerate(self.reads) if self._stays(r)])

    @property
    def first_reads(self) -> tuple[Read, ...]:
        """What I reads."""
        return tuple(self.reads[n] for n in self.halves.first_reads)

    @property
    def second_reads(self) -> tuple[Read, ...]:
        """What W reads besides the frontier."""
        return tuple(self.reads[n] for n in self.halves.second_reads)

    @property
    def late_residuals(self) -> tuple[int, ...]:
        """The residuals that W reads."""
        return tuple(r.index for r in self.second_reads if r.source is Source.RESIDUAL)

    # --- programs -----------------------------------------------------------------------------

    def whole(self) -> Compiled:
        """B: `(*reads, *sums) -> (*gradients, *sums)`."""

        def run(*args: Any) -> tuple[Any, ...]:
            taken = iter(args)
            grads = self._gradients(self._values(self.reads, taken))
            return (*self._leaving(grads), *self._summed(self._weights(grads), list(taken)))

        ins, sums = self._specs(self.reads), self._sum_specs
        return self.code.compile(run, [*ins, *sums], [*self._leaving_specs, *sums], self._last(ins))

    def inputs(self) -> Compiled:
        """I: `(*first_reads) -> (*gradients, *frontier)`."""

        def run(*args: Any) -> tuple[Any, ...]:
            grads, frontier = self.halves.first(self._values(self.first_reads, iter(args)))
            return (*self._given_away(grads), *map(self.code.stack, frontier))

        outs = [*self._leaving_specs, *self._frontier_specs]
        return self.code.compile(run, self._specs(self.first_reads), outs)

    def weights(self) -> Compiled:
        """W: `(*second_reads, *frontier, *sums) -> sums`."""
        count = len(self.halves.frontier)

        def run(*args: Any) -> tuple[Any, ...]:
            taken = iter(args)
            values = self._values(self.second_reads, taken)
            frontier = [self.code.unstack(next(taken)) for _ in range(count)]
            return self._summed(self.halves.second(values, frontier), list(taken))

        ins = [*self._specs(self.second_reads), *self._frontier_specs]
        return self.code.compile(run, [*ins, *self._sum_specs], self._sum_specs, self._last(ins))

    def behind_forward(self, *, split: bool) -> Compiled:
        """FB: `(*forward's arguments[, seed], *sums) -> (*outputs, *results, *gradients, *sums)`; FI, if
        `split`: without sums, and `late_residuals` and the frontier as its last results.

        The seed is an argument where the program does not make its own weight.
        """
        code, num_args = self.code, len(self.code.input_specs)
        assert code.seeding is not None
        assert not self.arity
        seeded = code.seeding.weight is None

        def run(*args: Any) -> tuple[Any, ...]:
            inputs = code.with_number(args[:num_args])
            outs, residuals = code.diff.forward(inputs)
            weight = args[num_args][0] if seeded else self._own_seed(outs)
            values = [*(inputs[i] for i in code.diff.held), *(outs[k] for k in code.diff.kept_outputs)]
            values += [*residuals, weight]
            made = map(code.pack, outs, code.kinds)
            if split:
                grads, frontier = self.halves.first([values[n] for n in self.halves.first_reads])
                late = (residuals[n] for n in self.late_residuals)
                return (*made, *self._given_away(grads), *map(code.stack, (*late, *frontier)))
            grads = self._gradients(values)
            sums = self._summed(self._weights(grads), args[num_args + seeded :])
            return (*made, *self._leaving(grads), *sums)

        ins = [*code.input_specs, *[self._seed_spec] * seeded]
        outs = [*code.output_specs, *self._leaving_specs]
        if split:
            kept = [code.residual_spec] * len(self.late_residuals)
            return code.compile(run, ins, [*outs, *kept, *self._frontier_specs])
        sums = self._sum_specs
        return code.compile(run, [*ins, *sums], [*outs, *sums], self._last(ins))

    # --- inside a program ---------------------------------------------------------------------

    def _gradients(self, values: Sequence[Any]) -> list[Any]:
        """Gradients of the inputs `wrt`, from the values of `reads`; 0 for a part of weight 0."""
        diff, seeding = self.code.diff, self.code.seeding
        taken = iter(values)
        inputs = [next(taken) for _ in diff.held]
        outputs = [next(taken) for _ in diff.kept_outputs]
        residuals = [next(taken) for _ in diff.residuals]
        cotangents = [next(taken) for _ in self.arity]
        if seeding is None:
            return diff.backward(inputs, outputs, residuals, cotangents)
        weight = next(taken)
        loss_dtype = self.code.output_avals[seeding.position].dtype
        grads = diff.backward(inputs, outputs, residuals, [*cotangents, weight.astype(loss_dtype)])
        if seeding.select:
            grads = [jnp.where(weight > 0, g, jnp.zeros_like(g)) for g in grads]
        return grads

    def _own_seed(self, outs: Sequence[Any]) -> Any:
        """This replica's part of what `seed_program` makes."""
        seeding = self.code.seeding
        assert seeding is not None
        assert seeding.weight is not None
        assert seeding.divisor is not None
        return _seed(outs[seeding.weight], outs[seeding.divisor])

    def _values(self, reads: Sequence[Read], taken: Iterator[Any]) -> list[Any]:
        """The local values of some reads, from the arguments of a program."""
        return [self._value(r, taken) for r in reads]

    def _value(self, r: Read, taken: Iterator[Any]) -> Any:
        code = self.code
        if r.source is Source.NUMBER:
            return code.number()
        if r.source is Source.OUTPUT:
            return code.unpack(next(taken), code.kinds[r.index])
        if r.source is Source.RESIDUAL:
            return code.unstack(next(taken))
        if r.source is Source.COTANGENT:
            arrived = [next(taken) for _ in range(self.arity[r.index])]
            return code.share(functools.reduce(jnp.add, arrived), code.kinds[r.index])
        return next(taken)[0] if r.source is Source.SEED else next(taken)

    def _split(self, grads: Sequence[Any]) -> dict[int, Any]:
        inputs = self.code.shape.part.inputs
        return {inputs[i]: g for i, g in zip(self.code.diff.wrt, grads, strict=True)}

    def _leaving(self, grads: Sequence[Any]) -> tuple[Any, ...]:
        by_id = self._split(grads)
        return self._given_away([by_id[v] for v in self.code.gradient_ids])

    def _weights(self, grads: Sequence[Any]) -> list[Any]:
        by_id = self._split(grads)
        return [by_id[v] for v in self._summed_ids]

    def _given_away(self, grads: Sequence[Any]) -> tuple[Any, ...]:
        pairs = zip(grads, self.code.gradient_ids, strict=True)
        return tuple(self.code.whole(g, v) for g, v in pairs)

    def _summed(self, grads: Sequence[Any], sums: Sequence[Any]) -> tuple[Any, ...]:
        """Sums in the order of `shape.accumulated`, with gradients in the order of `_summed_ids` added."""
        by_id = dict(zip(self._summed_ids, grads, strict=True))
        pairs = zip(self.code.shape.accumulated, sums, strict=True)
        return tuple(acc + self.code.stack(by_id[v].astype(acc.dtype)) for v, acc in pairs)

    @functools.cached_property
    def _summed_ids(self) -> list[int]:
        """The inputs with sums, in the order in which they are differentiated."""
        ids = [self.code.shape.part.inputs[i] for i in self.code.diff.wrt]
        return [v for v in ids if v not in set(self.code.gradient_ids)]

    # --- how its values lie -------------------------------------------------------------------

    def _aval(self, r: Read) -> jax.ShapeDtypeStruct:
        code = self.code
        if r.source is Source.INPUT:
            return code.input_avals[r.index]
        if r.source is Source.NUMBER:
            return jax.ShapeDtypeStruct((), jnp.int32)
        if r.source is Source.RESIDUAL:
            return code.diff.residuals[r.index]
        return (
            jax.ShapeDtypeStruct((), jnp.float32) if r.source is Source.SEED else code.output_avals[r.index]
        )

    def _stays(self, r: Read) -> bool:
        """Whether a value stays in memory between I and W anyway."""
        if r.source is not Source.INPUT:
            return r.source in (Source.NUMBER, Source.SEED)
        shape = self.code.shape
        passing = {*shape.crossing_in, *shape.batch}
        return r.index >= len(shape.part.inputs) or shape.part.inputs[r.index] not in passing

    def _specs(self, reads: Sequence[Read]) -> list[PartitionSpec | None]:
        return [spec for r in reads for spec in self._read_specs(r)]

    def _read_specs(self, r: Read) -> list[PartitionSpec | None]:
        code, inputs = self.code, self.code.shape.part.inputs
        if r.source is Source.NUMBER:
            return []
        if r.source is Source.INPUT:
            masked = r.index >= len(inputs)
            return [code.row_spec if masked else code.spec(code.value_kind(inputs[r.index]))]
        if r.source is Source.RESIDUAL:
            return [code.residual_spec]
        if r.source is Source.SEED:
            return [self._seed_spec]
        arrive = self.arity[r.index] if r.source is Source.COTANGENT else 1
        return [code.spec(code.kinds[r.index])] * arrive

    @property
    def _seed_spec(self) -> PartitionSpec:
        return PartitionSpec(DATA_AXIS) if self.code.per_replica else PartitionSpec()

    @property
    def _sum_specs(self) -> list[PartitionSpec]:
        return [self.code.accumulator_spec] * len(self.code.shape.accumulated)

    @property
    def _leaving_specs(self) -> list[PartitionSpec]:
        return [self.code.spec(self.code.value_kind(v)) for v in self.code.gradient_ids]

    @property
    def _frontier_specs(self) -> list[PartitionSpec | None]:
        return [self.code.residual_spec] * len(self.halves.frontier)

    def _last(self, ins: Sequence[Any]) -> tuple[int, ...]:
        """Positions of the sums behind other arguments: their memory is taken over."""
        return tuple(range(len(ins), len(ins) + len(self.code.shape.accumulated)))


def seed_program() -> Compiled:
    """`(w, g(w)) -> weight`, all stacked: the loss's seed where the program makes its own weight."""
    return jax.jit(lambda weight, divisor: (_seed(weight, divisor),))


def _seed(weight: Any, divisor: Any) -> Any:
    return jnp.where(weight > 0, divisor, 0).astype(jnp.float32)
