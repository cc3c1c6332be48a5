"""The compiled programs of one stage: prologue, forward, backward, and what ends a step.

Rows are spread over a stage's replicas in one of two ways. *Per replica* (separable programs): each
replica runs the program traced with its own rows under `shard_map`, gradients are summed locally and
reduced once a step. *Sharded* (rows that see each other, as in batch normalisation): one program
traced with the microbatch's rows, its arrays sharded, XLA inserts the collectives.

Per replica, values without rows that differ between replicas (losses, residuals, accumulators) carry
a leading replica dim of size 1 in the program and `num_replicas` outside ("stacked").
"""

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rannc_jax.contract import Remat
from rannc_jax.ir.align import Aligned
from rannc_jax.ir.autodiff import Differentiated, differentiate, stage_function
from rannc_jax.ir.batch import Dependence, RowLayout
from rannc_jax.ir.evaluate import Hook
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.roles import OutputKind
from rannc_jax.ir.rows import random_rows_hook, row_mask_hook
from rannc_jax.ir.slice import avals
from rannc_jax.ir.stage_shape import StageShape
from rannc_jax.runtime.transfer import DATA_AXIS, sub_mesh_sharding

Compiled = Callable[..., Sequence[Any]]


class Spread(enum.Enum):
    """How a stage's replicas share the rows of a microbatch (see the module's text)."""

    PER_REPLICA = "per replica"
    SHARDED = "sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeding:
    """How the stage that makes the loss seeds its backward.

    Args:
        position: of the loss among the stage's outputs.
        weight, divisor: positions of w and g(w) among the outputs; None where weights are given.
        select: parts of weight 0 are removed by selection.
    """

    position: int
    weight: int | None
    divisor: int | None
    select: bool


class StagePrograms:
    """Compiles a stage for one number of rows.

    Args:
        graph: of the function.
        aligned: its trace with the rows one program sees: those of a replica (per replica) or of a
            microbatch (sharded).
        shape: what the stage reads and makes.
        mesh: its sub-mesh.
        spread: see `Spread`.
        remat: what is kept for the backward.
        seeding: for the stage that makes the loss.
        asked: crossing outputs whose readers send a cotangent back.
        batch_grads: batch inputs whose gradient is asked for.
        masked: rows may be padding; programs take a last argument `valid`, bool [rows].
        mask_scale: rows that count weigh more where others are padding (a mean stays a mean).
    """

    def __init__(
        self,
        graph: Graph,
        aligned: Aligned,
        shape: StageShape,
        mesh: Mesh,
        spread: Spread,
        *,
        remat: Remat = Remat.SAVE_ALL,
        seeding: Seeding | None = None,
        asked: frozenset[int] = frozenset(),
        batch_grads: frozenset[int] = frozenset(),
        masked: bool = False,
        mask_scale: bool = False,
    ) -> None:
        self.graph, self.program, self.shape, self.mesh = graph, aligned.program, shape, mesh
        self._part = aligned.slice(shape.part)
        self._blocks = [aligned.slice(block) for block in shape.blocks]
        self.spread, self.seeding, self.masked = spread, seeding, masked
        self._asked, self._mask_scale = asked, mask_scale
        self._wanted = {*shape.accumulated, *batch_grads} | {v for v in shape.crossing_in if v in graph.flows}
        info = graph.info
        self._random = {
            aligned.equation(e): layout
            for e, layout in info.random.items()
            if e in shape.part.equations and spread is Spread.PER_REPLICA and mesh.size > 1
        }
        masks = info.row_masks or ()
        self._masks = [
            replace(m, equation=aligned.equation(m.equation))
            for m in masks
            if masked and m.equation in shape.part.equations
        ]
        self._remat = remat

    @property
    def differentiates(self) -> bool:
        """Whether the stage has a backward."""
        return bool(self.wrt) and bool(self.cotangents)

    @functools.cached_property
    def wrt(self) -> tuple[int, ...]:
        """Positions of the inputs that gradients are taken for."""
        return tuple(i for i, v in enumerate(self.shape.part.inputs) if v in self._wanted)

    @functools.cached_property
    def cotangents(self) -> tuple[int, ...]:
        """Positions of the outputs that take a cotangent: crossing values, then the loss."""
        part = self.shape.part
        out = [i for i, v in enumerate(part.outputs) if v in self._asked]
        return tuple(out + ([self.seeding.position] if self.seeding is not None else []))

    @functools.cached_property
    def diff(self) -> Differentiated:
        """Forward and backward of the stage at this number of rows."""
        shapes = avals(self.program, self._part.inputs)
        shapes.append(jax.ShapeDtypeStruct((), jnp.int32))
        if self.masked:
            shapes.append(jax.ShapeDtypeStruct((self.program.rows,), jnp.bool_))
        return differentiate(self._function, shapes, wrt=self.wrt, cotangents=self.cotangents)

    def _function(self, values: Sequence[Any]) -> list[Any]:
        """The stage in terms of its inputs, the replica's number and the valid rows."""
        num = len(self.shape.part.inputs)
        part, valid = values[num], values[num + 1] if self.masked else None
        run = stage_function(self.program, self._part, self._blocks, self._remat, self._hooks(part, valid))
        return run(values[:num])

    def _hooks(self, part: Any, valid: Any) -> dict[int, Hook]:
        hooks: dict[int, Hook] = {
            e: random_rows_hook(layout, self.program.rows, self.mesh.size, part)
            for e, layout in self._random.items()
        }
        scale = None
        if self.masked and self._mask_scale:
            scale = self.program.rows / jnp.maximum(jnp.sum(valid), 1)
        for mask in self._masks:
            hooks[mask.equation] = row_mask_hook(mask, valid, scale)
        return hooks

    # --- programs -----------------------------------------------------------------------------

    def forward(self, *, residuals: bool) -> Compiled:
        """`(*inputs[, valid]) -> (*outputs, *results, *residuals)`."""
        num_inputs = len(self.shape.part.inputs)

        def run(*args: Any) -> tuple[Any, ...]:
            values = [*args[:num_inputs], self._number(), *args[num_inputs:]]
            if residuals:
                outs, kept = self.diff.forward(values)
            else:
                outs, kept = self._function(values), []
            return (*map(self._pack, outs, self._kinds), *(self._stack(x) for x in kept))

        specs = [self._spec(kind) for kind in self._kinds]
        kept = [self._residual_spec] * (len(self.diff.residuals) if residuals else 0)
        ins = [self._spec(self._value_kind(v)) for v in self.shape.part.inputs]
        return self._compile(run, ins + [self._row_spec] * self.masked, specs + kept)

    def backward(self, arity: Sequence[int]) -> Compiled:
        """The backward, from what the forward left and the cotangents to sums and gradients.

        Its arguments are held inputs, kept outputs, residuals, cotangents, the loss's weight on the stage
        that makes it, and accumulators; it returns new accumulators and the gradients of `gradient_ids`.

        Args:
            arity: how many cotangents arrive for each crossing output that takes one; they are added in
                order.
        """
        diff, part = self.diff, self.shape.part
        held = self.held_positions
        counts = (len(held), len(diff.kept_outputs), len(diff.residuals), sum(arity))
        acc_ids = self.shape.accumulated
        seeding = self.seeding

        def run(*args: Any) -> tuple[Any, ...]:
            taken = iter(args)
            inputs = [next(taken) for _ in range(counts[0])]
            outputs = [self._unpack(next(taken), self._kinds[k]) for k in diff.kept_outputs]
            kept = [self._unstack(next(taken)) for _ in range(counts[2])]
            cotangents = [
                self._share(_total([next(taken) for _ in range(n)]), self._kinds[position])
                for position, n in zip(self.cotangents, arity, strict=False)
            ]
            weight = jnp.float32(1)
            if seeding is not None:
                weight = next(taken)[0]
                cotangents.append(weight.astype(self._loss_dtype()))
            accumulators = list(taken)
            values = self._with_part(inputs, held)
            grads = diff.backward(values, outputs, kept, cotangents)
            if seeding is not None and seeding.select:
                grads = [jnp.where(weight > 0, g, jnp.zeros_like(g)) for g in grads]
            by_id = {part.inputs[i]: g for i, g in zip(diff.wrt, grads, strict=True)}
            new = [
                acc + self._stack(by_id[v].astype(acc.dtype))
                for v, acc in zip(acc_ids, accumulators, strict=True)
            ]
            return (*new, *(self._whole(by_id[v], v) for v in self.gradient_ids))

        ins = [
            self._spec(self._value_kind(part.inputs[i])) if i < len(part.inputs) else self._row_spec
            for i in held
        ]
        ins += [self._spec(self._kinds[k]) for k in diff.kept_outputs]
        ins += [self._residual_spec] * counts[2]
        for position, n in zip(self.cotangents, arity, strict=False):
            ins += [self._spec(self._kinds[position])] * n
        ins += [PartitionSpec(DATA_AXIS) if self._per_replica else PartitionSpec()] * (seeding is not None)
        acc_spec = self.accumulator_spec
        ins += [acc_spec] * len(acc_ids)
        outs = [acc_spec] * len(acc_ids)
        outs += [self._spec(self._value_kind(v)) for v in self.gradient_ids]
        first = len(ins) - len(acc_ids)
        return self._compile(run, ins, outs, donate=tuple(range(first, len(ins))))

    def seed(self) -> Compiled:
        """`(w, g(w)) -> weight`, both stacked: the loss's seed where the program makes its own weight."""

        def run(weight: jax.Array, divisor: jax.Array) -> tuple[jax.Array]:
            return (jnp.where(weight > 0, divisor, 0).astype(jnp.float32),)

        return jax.jit(run)

    @functools.cached_property
    def held_positions(self) -> tuple[int, ...]:
        """Positions of inputs that the backward reads (a position behind the inputs is `valid`)."""
        part_position = len(self.shape.part.inputs)
        return tuple(i for i in self.diff.held if i != part_position)

    @functools.cached_property
    def gradient_ids(self) -> tuple[int, ...]:
        """Inputs whose cotangents leave the stage: crossing values and batch leaves."""
        summed = set(self.shape.accumulated)
        return tuple(v for i in self.wrt if (v := self.shape.part.inputs[i]) not in summed)

    @property
    def accumulator_spec(self) -> PartitionSpec:
        """How accumulators lie on the sub-mesh."""
        return PartitionSpec(DATA_AXIS) if self._per_replica else PartitionSpec()

    def accumulator_shape(self, value: int) -> tuple[int, ...]:
        """Shape of the accumulator of a parameter or prologue value."""
        shape = tuple(self.graph.program.vars[value].aval.shape)
        return (self.mesh.size, *shape) if self._per_replica else shape

    # --- how values lie -----------------------------------------------------------------------

    @property
    def _per_replica(self) -> bool:
        return self.spread is Spread.PER_REPLICA

    @property
    def _row_spec(self) -> PartitionSpec:
        return PartitionSpec(DATA_AXIS)

    @property
    def _residual_spec(self) -> PartitionSpec | None:
        return PartitionSpec(DATA_AXIS) if self._per_replica else None

    @functools.cached_property
    def _kinds(self) -> list[RowLayout | str | None]:
        """Of every output: its layout, None (the same on every replica), or "stacked"."""
        info, part = self.graph.info, self.shape.part
        crossing = set(self.shape.crossing_out)
        kinds: list[RowLayout | str | None] = [
            self._value_kind(v) if v in crossing else "stacked" for v in part.outputs
        ]
        for k in part.results:
            v = self.graph.program.output_ids()[k]
            layout = info.layouts[v] if v is not None else None
            kind = self.graph.program.outputs[k].kind
            reduced = v is not None and info.dependence[v] is not Dependence.FREE and layout is None
            if layout is not None and not layout.contiguous:
                layout = None  # one program sees all rows (the table of stages made sure of it)
            if kind is OutputKind.MODEL_STATE:
                kinds.append(layout)
            elif kind in (OutputKind.LOSS, OutputKind.WEIGHT) or reduced:
                kinds.append("stacked")
            else:
                kinds.append(layout)
        return kinds

    def output_kind(self, position: int) -> RowLayout | str | None:
        """How output `position` lies: a layout, None (replicated) or "stacked" ([replicas, ...])."""
        return self._kinds[position]

    def _value_kind(self, value: int) -> RowLayout | None:
        layout = self.graph.info.layouts[value]
        return layout if layout is not None and layout.contiguous else None

    def _spec(self, kind: RowLayout | str | None) -> PartitionSpec:
        if kind == "stacked":
            return PartitionSpec(DATA_AXIS) if self._per_replica else PartitionSpec()
        return sub_mesh_sharding(kind, self.mesh).spec  # type: ignore[arg-type]

    def _pack(self, x: Any, kind: Any) -> Any:
        return jnp.asarray(x)[None] if kind == "stacked" else x

    def _unpack(self, x: Any, kind: Any) -> Any:
        return x[0] if kind == "stacked" else x

    def _stack(self, x: Any) -> Any:
        return x[None] if self._per_replica else x

    def _unstack(self, x: Any) -> Any:
        return x[0] if self._per_replica else x

    def _whole(self, gradient: Any, value: int) -> Any:
        """The gradient of a value; of one without rows every replica has a part."""
        if self._per_replica and self._value_kind(value) is None:
            return jax.lax.psum(gradient, DATA_AXIS)
        return gradient

    def _share(self, cotangent: Any, kind: RowLayout | str | None) -> Any:
        """This replica's part of a cotangent that all of them have whole: their sums are added later."""
        return cotangent / self.mesh.size if self._per_replica and kind is None else cotangent

    def _number(self) -> Any:
        return jax.lax.axis_index(DATA_AXIS) if self._per_replica else jnp.int32(0)

    def _with_part(self, inputs: list[Any], held: Sequence[int]) -> list[Any]:
        """Inputs the backward reads, the replica's number among them where it is read."""
        by_position = dict(zip(held, inputs, strict=True))
        return [by_position[i] if i in by_position else self._number() for i in self.diff.held]

    def _loss_dtype(self) -> Any:
        assert self.seeding is not None
        k = self.shape.part.results[self.seeding.position - len(self.shape.part.outputs)]
        return self.program.jaxpr.jaxpr.outvars[k].aval.dtype

    def _compile(
        self, run: Callable[..., Any], ins: Sequence[Any], outs: Sequence[Any], donate: tuple[int, ...] = ()
    ) -> Compiled:
        if self._per_replica:
            run = jax.shard_map(
                run, mesh=self.mesh, in_specs=tuple(ins), out_specs=tuple(outs), check_vma=False
            )
            return jax.jit(run, donate_argnums=donate)
        shardings = tuple(None if s is None else NamedSharding(self.mesh, s) for s in outs)
        return jax.jit(run, out_shardings=shardings, donate_argnums=donate)


def _total(values: Sequence[Any]) -> Any:
    return functools.reduce(jnp.add, values)
