"""A stage at one number of rows: its forward as a program, its derivative, and how its values lie.

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
        return differentiate(self._function, self.input_avals, wrt=self.wrt, cotangents=self.cotangents)

    @functools.cached_property
    def input_avals(self) -> list[jax.ShapeDtypeStruct]:
        """What one program sees of the inputs, the replica's number and, where rows are masked, `valid`."""
        shapes = avals(self.program, self._part.inputs)
        shapes.append(jax.ShapeDtypeStruct((), jnp.int32))
        if self.masked:
            shapes.append(jax.ShapeDtypeStruct((self.program.rows,), jnp.bool_))
        return shapes

    @functools.cached_property
    def output_avals(self) -> list[jax.ShapeDtypeStruct]:
        """What one program makes: outputs, then results."""
        results = [self.program.jaxpr.jaxpr.outvars[k].aval for k in self.shape.part.results]
        made = avals(self.program, self._part.outputs)
        return [*made, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)]

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

        def run(*args: Any) -> tuple[Any, ...]:
            if residuals:
                outs, kept = self.diff.forward(self.with_number(args))
            else:
                outs, kept = self._function(self.with_number(args)), []
            return (*map(self.pack, outs, self.kinds), *(self.stack(x) for x in kept))

        kept = [self.residual_spec] * (len(self.diff.residuals) if residuals else 0)
        return self.compile(run, self.input_specs, [*self.output_specs, *kept])

    def with_number(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of a forward program as `diff` takes them: with the replica's number."""
        num_inputs = len(self.shape.part.inputs)
        return [*args[:num_inputs], self.number(), *args[num_inputs:]]

    @functools.cached_property
    def gradient_ids(self) -> tuple[int, ...]:
        """Inputs whose cotangents leave the stage: crossing values and batch leaves."""
        summed = set(self.shape.accumulated)
        return tuple(v for i in self.wrt if (v := self.shape.part.inputs[i]) not in summed)

    @property
    def accumulator_spec(self) -> PartitionSpec:
        """How accumulators lie on the sub-mesh."""
        return PartitionSpec(DATA_AXIS) if self.per_replica else PartitionSpec()

    def accumulator_shape(self, value: int) -> tuple[int, ...]:
        """Shape of the accumulator of a parameter or prologue value."""
        shape = tuple(self.graph.program.vars[value].aval.shape)
        return (self.mesh.size, *shape) if self.per_replica else shape

    # --- how values lie -----------------------------------------------------------------------

    @property
    def input_specs(self) -> list[PartitionSpec]:
        """Of the arguments of a forward program."""
        ins = [self.spec(self.value_kind(v)) for v in self.shape.part.inputs]
        return ins + [self.row_spec] * self.masked

    @property
    def output_specs(self) -> list[PartitionSpec]:
        """Of outputs and results."""
        return [self.spec(kind) for kind in self.kinds]

    @property
    def per_replica(self) -> bool:
        return self.spread is Spread.PER_REPLICA

    @property
    def row_spec(self) -> PartitionSpec:
        return PartitionSpec(DATA_AXIS)

    @property
    def residual_spec(self) -> PartitionSpec | None:
        return PartitionSpec(DATA_AXIS) if self.per_replica else None

    @functools.cached_property
    def kinds(self) -> list[RowLayout | str | None]:
        """Of every output: its layout, None (the same on every replica), or "stacked"."""
        info, part = self.graph.info, self.shape.part
        crossing = set(self.shape.crossing_out)
        kinds: list[RowLayout | str | None] = [
            self.value_kind(v) if v in crossing else "stacked" for v in part.outputs
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
        return self.kinds[position]

    def value_kind(self, value: int) -> RowLayout | None:
        layout = self.graph.info.layouts[value]
        return layout if layout is not None and layout.contiguous else None

    def spec(self, kind: RowLayout | str | None) -> PartitionSpec:
        if kind == "stacked":
            return PartitionSpec(DATA_AXIS) if self.per_replica else PartitionSpec()
        return sub_mesh_sharding(kind, self.mesh).spec  # type: ignore[arg-type]

    def pack(self, x: Any, kind: Any) -> Any:
        return jnp.asarray(x)[None] if kind == "stacked" else x

    def unpack(self, x: Any, kind: Any) -> Any:
        return x[0] if kind == "stacked" else x

    def stack(self, x: Any) -> Any:
        return x[None] if self.per_replica else x

    def unstack(self, x: Any) -> Any:
        return x[0] if self.per_replica else x

    def whole(self, gradient: Any, value: int) -> Any:
        """The gradient of a value; of one without rows every replica has a part."""
        if self.per_replica and self.value_kind(value) is None:
            return jax.lax.psum(gradient, DATA_AXIS)
        return gradient

    def share(self, cotangent: Any, kind: RowLayout | str | None) -> Any:
        """This replica's part of a cotangent that all of them have whole: their sums are added later."""
        return cotangent / self.mesh.size if self.per_replica and kind is None else cotangent

    def number(self) -> Any:
        return jax.lax.axis_index(DATA_AXIS) if self.per_replica else jnp.int32(0)

    def compile(
        self, run: Callable[..., Any], ins: Sequence[Any], outs: Sequence[Any], donate: tuple[int, ...] = ()
    ) -> Compiled:
        if self.per_replica:
            run = jax.shard_map(
                run, mesh=self.mesh, in_specs=tuple(ins), out_specs=tuple(outs), check_vma=False
            )
            return jax.jit(run, donate_argnums=donate)
        shardings = tuple(None if s is None else NamedSharding(self.mesh, s) for s in outs)
        return jax.jit(run, out_shardings=shardings, donate_argnums=donate)
