"""One function over one set of stages, for whatever batches come.

An `Engine` traces the function for the batch it is given, lays the plan's stages on the program, lowers
it once per batch shape, and runs the operations. Cut, placement and state stay; a batch of another
size or length only brings new programs.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rannc_jax.contract import Remat, Sharding
from rannc_jax.errors import TraceError, message
from rannc_jax.ir import prepare
from rannc_jax.ir.align import Aligned, align
from rannc_jax.ir.batch import Coupling, CouplingKind, Dependence, LossKind, RowLayout
from rannc_jax.ir.example import Example, Subject, abstract, make_example, path_leaves
from rannc_jax.ir.graph import Graph, build_graph
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.ir.trace import trace
from rannc_jax.runtime.executor import Watch, execute
from rannc_jax.runtime.feed import microbatch, microbatch_rows, part_weights, valid_rows
from rannc_jax.runtime.fused import Fused
from rannc_jax.runtime.layout import Layout, Lowered
from rannc_jax.runtime.lower import lower
from rannc_jax.runtime.ops import Key, check, freed
from rannc_jax.runtime.sharded import share_state
from rannc_jax.runtime.shares import Shares
from rannc_jax.runtime.stage import Spread
from rannc_jax.runtime.table import StageTable
from rannc_jax.runtime.transfer import place, settled
from rannc_jax.schedule import linearise, schedule_named

Stages = tuple[tuple[tuple[int, ...], ...], ...]
_SHAPES_BEFORE_WARNING = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Routine:
    """How an engine works through a batch, apart from the cut.

    Args:
        remats: per stage.
        meshes: per stage.
        schedule: its name, or its actions as text.
        num_microbatches: wanted; fewer if the rows do not divide.
        train: with a backward.
        shardings: per stage; whole on every replica by default.
    """

    remats: tuple[Remat, ...]
    meshes: tuple[Mesh, ...]
    schedule: str
    num_microbatches: int
    train: bool
    shardings: tuple[Sharding, ...] = ()

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(mesh.size for mesh in self.meshes)

    def shares(self, layout: Layout) -> tuple[Shares, ...]:
        """How the state of every stage lies.

        Where one program sees all rows, sums are reduced with every microbatch anyway: then ZeRO-1, which
        differs from ZeRO-2 in nothing else, keeps shares of them too.
        """
        shardings = self.shardings or (Sharding.REPLICATED,) * len(layout.meshes)
        if layout.spread is Spread.SHARDED:
            shardings = tuple(Sharding.ZERO2 if x is Sharding.ZERO1 else x for x in shardings)
        return tuple(Shares(*pair) for pair in zip(layout.meshes, shardings, strict=True))


@dataclass(slots=True, kw_only=True, eq=False)
class Prepared:
    """A lowered batch shape: everything that does not depend on the arrays."""

    example: Example
    graph: Graph
    layout: Layout
    table: StageTable
    lowered: Lowered
    ops: list[Any]
    batch_dims: tuple[int | None, ...]
    shares: tuple[Shares, ...]
    constants: dict[Key, Any] = field(default_factory=dict)
    fused: Fused | None = None

    @property
    def loss_dtype(self) -> Any:
        """The dtype losses are added up in: float32, or the function's if that is wider."""
        position = self.table.loss_position
        assert position is not None
        return jnp.promote_types(self.graph.program.jaxpr.jaxpr.outvars[position].aval.dtype, jnp.float32)


class Engine:
    """Runs one function.

    Args:
        who: the function.
        example: what it was planned with; its batch may change from call to call.
        stages_of: lays the cut on a graph (per stage, the node indices of its blocks).
        routine: how batches are worked through.
        batch_dims: as the user gave them.
        allow_coupled: coupled programs may run as several microbatches.
        graph: of the example, if it is there already.
    """

    def __init__(
        self,
        who: Subject,
        example: Example,
        stages_of: Callable[[Graph], Stages],
        routine: Routine,
        *,
        batch_dims: Any = "auto",
        allow_coupled: bool = False,
        graph: Graph | None = None,
    ) -> None:
        self.who, self.example, self.routine = who, example, routine
        self._stages_of, self._batch_dims, self._allow_coupled = stages_of, batch_dims, allow_coupled
        self._graphs: dict[Any, Graph] = {}
        if graph is not None:
            self._graphs[_signature(example.batch)] = graph
        self._prepared: dict[Any, Prepared] = {}
        self._copies: dict[tuple[int, Mesh], tuple[Any, Any]] = {}

    def prepared(self, batch: Any, batch_grads: frozenset[int] = frozenset()) -> Prepared:
        """The lowered form for a batch of this shape."""
        shapes = self._as_planned(abstract(batch))
        key = (_signature(shapes), batch_grads)
        if key not in self._prepared:
            if len(self._prepared) == _SHAPES_BEFORE_WARNING:
                warnings.warn(
                    f"batches of {_SHAPES_BEFORE_WARNING + 1} different shapes have been seen; each compiles "
                    "programs of its own. Pad batches to a few sizes, or drop the last short one.",
                    stacklevel=_frames_in_here() + 1,
                )
            self._prepared[key] = self._prepare(shapes, batch_grads)
        return self._prepared[key]

    def _as_planned(self, shapes: Any) -> Any:
        """The shapes of a batch with the dtypes that were planned: arrays are cast when they are placed."""
        leaves, tree = jax.tree.flatten(shapes)
        if tree != jax.tree.structure(self.example.batch):
            return shapes  # said to the user when the example for it is made
        planned = jax.tree.leaves(self.example.batch)
        paths, _ = path_leaves(shapes)
        for path, leaf, wanted in zip(paths, leaves, planned, strict=True):
            if leaf.dtype != wanted.dtype and not jnp.can_cast(leaf.dtype, wanted.dtype, "same_kind"):
                raise TraceError(
                    message(
                        f"{path} has another dtype than planned.",
                        f"got {leaf.dtype}, expected {wanted.dtype}",
                        hint="cast it, or make another step for batches of this dtype.",
                    )
                )
        return tree.unflatten(
            jax.ShapeDtypeStruct(leaf.shape, wanted.dtype)
            for leaf, wanted in zip(leaves, planned, strict=True)
        )

    def _example_for(self, shapes: Any) -> Example:
        example = self.example
        if _signature(shapes) == _signature(example.batch):
            return example
        if jax.tree.structure(shapes) != jax.tree.structure(example.batch):
            raise TraceError(
                message(
                    "the batch has another structure than the one that was planned.",
                    f"got {jax.tree.structure(shapes)}",
                    f"expected {jax.tree.structure(example.batch)}",
                    hint="give the same leaves, or make another step.",
                )
            )
        fresh = make_example(
            self.who,
            example.params,
            shapes,
            frozen=example.frozen,
            model_state=example.model_state,
            rng=example.rng,
            batch_dims=self._batch_dims,
        )
        return replace(fresh, params=example.params)

    def graph(self, batch: Any) -> Graph:
        """The program for a batch of this shape, before anything is lowered."""
        shapes = self._as_planned(abstract(batch))
        return self._graph(shapes, self._example_for(shapes))

    def _graph(self, shapes: Any, example: Example) -> Graph:
        key = _signature(shapes)
        if key not in self._graphs:
            self._graphs[key] = prepare(self.who, example)
        return self._graphs[key]

    def _prepare(self, shapes: Any, batch_grads: frozenset[int]) -> Prepared:
        example = self._example_for(shapes)
        graph = self._graph(shapes, example)
        if batch_grads:
            graph = build_graph(graph.program, graph.twin, graph.info, batch_grads=batch_grads)
        layout = self._layout(graph, example)
        table = StageTable(
            graph,
            layout,
            self._traces(graph, example, layout),
            batch_grads=batch_grads,
            train=self.routine.train,
        )
        shares = self.routine.shares(layout)
        apart = {s for s, share in enumerate(shares) if share.sharding.shards_parameters}
        lowered = share_state(table, lower(table, apart=apart), shares)
        prepared = Prepared(
            example=example,
            graph=graph,
            layout=layout,
            table=table,
            lowered=lowered,
            ops=[],
            batch_dims=example.batch_dims,
            shares=shares,
        )
        prepared.ops = freed(lowered.ops, lowered.wanted)
        check(prepared.ops, self._given_keys(prepared), lowered.wanted)
        if len(layout.meshes) == 1:
            prepared.fused = Fused(layout, lowered, prepared.ops)
        return prepared

    def _layout(self, graph: Graph, example: Example) -> Layout:
        routine = self.routine
        meshes, parts = routine.meshes, self._microbatches(graph, example.rows, routine.replicas)
        if parts is None:  # one replica of every stage can always work alone
            meshes = tuple(Mesh(mesh.devices[:1], mesh.axis_names) for mesh in meshes)
            parts = self._microbatches(graph, example.rows, (1,) * len(meshes))
        if parts is None:
            raise self._indivisible(graph, example.rows)
        stages = self._stages_of(graph)
        alone = len(stages) == 1 and routine.train  # then all schedules are one
        schedule = schedule_named("1f1b" if alone else routine.schedule)
        return Layout(
            stages=stages,
            remats=routine.remats,
            meshes=meshes,
            actions=tuple(linearise(schedule.some_actions(len(stages), parts[0]))),
            num_microbatches=parts[0],
            rows=parts[1],
            batch_rows=example.rows,
            spread=spread_of(graph, [mesh.size for mesh in meshes]),
        )

    def _microbatches(
        self, graph: Graph, batch_rows: int, replicas: tuple[int, ...]
    ) -> tuple[int, int] | None:
        """(number of microbatches, rows of each); None if the rows cannot be spread so."""
        wanted, info = self.routine.num_microbatches, graph.info
        if info.couplings:
            wanted = 1 if self._coupled(graph) and not self._allow_coupled else wanted
            if batch_rows % wanted or any((batch_rows // wanted) % r for r in replicas):
                return None
            return wanted, batch_rows // wanted
        return microbatch_rows(batch_rows, wanted, replicas, pad=_may_pad(graph))

    def _coupled(self, graph: Graph) -> list[Coupling]:
        return [c for c in graph.info.couplings if c.kind is CouplingKind.OTHER]

    def _indivisible(self, graph: Graph, batch_rows: int) -> TraceError:
        first = (self._coupled(graph) or list(graph.info.couplings))[0]
        wanted = self.routine.num_microbatches
        why = "examples see each other" if self._coupled(graph) else "batch statistics"
        return TraceError(
            message(
                f"{batch_rows} rows do not divide into {wanted} microbatches, and the rows are coupled.",
                f"{first.primitive}{' in ' + first.path if first.path else ''}, at {first.source} ({why})",
                "another number of microbatches would be another loss.",
                hint=f"a batch whose rows divide by {wanted}.",
            )
        )

    def _traces(self, graph: Graph, example: Example, layout: Layout) -> dict[int, Aligned]:
        """The function traced with the rows of each stage's program."""
        per_replica = layout.spread is Spread.PER_REPLICA
        sizes = {layout.rows // mesh.size if per_replica else layout.rows for mesh in layout.meshes}
        base = graph.program
        return {
            rows: align(base, base if rows == base.rows else trace(self.who, example, rows))
            for rows in sorted(sizes)
        }

    # --- arrays -------------------------------------------------------------------------------

    def _given_keys(self, prepared: Prepared) -> list[Key]:
        table, layout = prepared.table, prepared.layout
        keys: list[Key] = [("step_key",), ("even",)]
        for v, leaf in enumerate(prepared.graph.program.inputs):
            if leaf.role is Role.PARAM:
                keys.append(("param", v))
        keys += [("state", v, 0) for v in table.written]
        for i in range(layout.num_microbatches):
            keys.append(("part_weight", i))
            for s, shape in enumerate(table.shapes):
                keys += [("batch", v, i, s) for v in shape.batch]
                keys.append(("valid", i, s))
        for s, shape in enumerate(table.shapes):
            keys += [("held", v, s) for v in shape.held]
        return keys

    def run(
        self,
        prepared: Prepared,
        leaves: Mapping[int, Any],
        batch: Any,
        step_key: Any = None,
        watch: Watch | None = None,
    ) -> dict[Key, Any]:
        """Run one batch.

        Args:
            prepared: for this batch.
            leaves: input value id -> array, for parameters, frozen leaves and model state, each on some
                sub-mesh; what lies elsewhere than it is read is copied.
            batch: the user's arrays.
            step_key: the key that microbatches fold their number into.
            watch: see `execute`.

        Returns:
            The wanted keys.
        """
        env = self.given(prepared, leaves, batch, step_key)
        if prepared.fused is not None and watch is None:
            return prepared.fused(env)
        execute(
            prepared.ops,
            env,
            programs=prepared.lowered.programs,
            meshes=prepared.layout.meshes,
            layouts=prepared.lowered.layouts,
            watch=watch,
        )
        return env

    def given(
        self, prepared: Prepared, leaves: Mapping[int, Any], batch: Any, step_key: Any
    ) -> dict[Key, Any]:
        """What the operations of one batch start from; arguments as of `run`."""
        table, layout = prepared.table, prepared.layout
        env: dict[Key, Any] = dict(self._constants(prepared))
        for v, leaf in enumerate(prepared.graph.program.inputs):
            if leaf.role is Role.PARAM or v in table.written:
                key = ("param", v) if leaf.role is Role.PARAM else ("state", v, 0)
                home = prepared.shares[table.owner[v]]
                share = home.parameter(leaf.aval.shape) if leaf.role is Role.PARAM else None
                env[key] = settled(leaves[v], home.mesh, share)
        for s, shape in enumerate(table.shapes):
            for v in shape.held:
                env["held", v, s] = self._held(prepared, v, s, leaves)
        if step_key is not None:
            env["step_key",] = place([step_key], [None], layout.meshes[0])[0]
        self._feed(prepared, batch, env)
        return env

    def _held(self, prepared: Prepared, v: int, s: int, leaves: Mapping[int, Any]) -> Any:
        """A frozen leaf or constant on a stage; copied once for as long as the source is the same."""
        program, mesh = prepared.graph.program, prepared.layout.meshes[s]
        source = leaves.get(v)
        if source is None:
            constants = [u for u, leaf in enumerate(program.inputs) if leaf.role is Role.CONST]
            source = program.const_values[constants.index(v)]
        cached = self._copies.get((v, mesh))
        if cached is None or cached[0] is not source:
            lies = source if v in leaves else np.asarray(source)  # a constant may lie on any device
            self._copies[v, mesh] = cached = (source, settled(lies, mesh))
        return cached[1]

    def _feed(self, prepared: Prepared, batch: Any, env: dict[Key, Any]) -> None:
        program, layout = prepared.graph.program, prepared.layout
        ids = [v for v, leaf in enumerate(program.inputs) if leaf.role is Role.BATCH]
        arrays = {}
        for v, array in zip(ids, jax.tree.leaves(batch), strict=True):
            wanted = program.inputs[v].aval.dtype
            array = array if isinstance(array, (np.ndarray, jax.Array)) else np.asarray(array)
            arrays[v] = array if array.dtype == wanted else array.astype(wanted)
        for s, shape in enumerate(prepared.table.shapes):
            keys, parts, layouts = [], [], []
            for i in range(layout.num_microbatches):
                for v in shape.batch:
                    keys.append(("batch", v, i, s))
                    dim = program.inputs[v].batch_dim
                    parts.append(microbatch(arrays[v], dim, i, layout.rows))
                    layouts.append(None if dim is None else RowLayout(dim))
            env.update(zip(keys, place(parts, layouts, layout.meshes[s]), strict=True))

    def _constants(self, prepared: Prepared) -> dict[Key, Any]:
        """Weights of parts and masks of padded rows: the same for every batch of this shape."""
        if prepared.constants:
            return prepared.constants
        layout, table = prepared.layout, prepared.table
        found = prepared.constants
        if table.loss_position is not None:
            mesh = layout.meshes[table.loss_stage]
            parts = mesh.size if layout.spread is Spread.PER_REPLICA else 1
            rows = RowLayout(0) if layout.spread is Spread.PER_REPLICA else None
            weights = [
                part_weights(layout.batch_rows, i, layout.rows, parts) for i in range(layout.num_microbatches)
            ]
            if prepared.graph.info.loss is not None and prepared.graph.info.loss.kind is LossKind.SUM:
                weights = [np.sign(weight) for weight in weights]  # every row counts as one, wherever it is
            placed = place(weights, [rows] * len(weights), mesh)
            found.update({("part_weight", i): w for i, w in enumerate(placed)})
        else:
            even = np.ones((layout.num_microbatches,), np.float32)
            found["even",] = jnp.asarray(even)
        if layout.padded:
            for s, mesh in enumerate(layout.meshes):
                masks = [
                    valid_rows(layout.batch_rows, i, layout.rows) for i in range(layout.num_microbatches)
                ]
                placed = place(masks, [RowLayout(0)] * len(masks), mesh)
                found.update({("valid", i, s): m for i, m in enumerate(placed)})
        return found


def _frames_in_here() -> int:
    """How many calls of this package lie between the user and the caller, the caller's included."""
    frame, count = inspect.currentframe(), -1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("rannc_jax."):
        frame, count = frame.f_back, count + 1
    return count


def spread_of(graph: Graph, replicas: Sequence[int]) -> Spread:
    """Per replica where rows are separable and the parts of every output can be put together."""
    info = graph.info
    if all(r == 1 for r in replicas):
        return Spread.PER_REPLICA
    if info.couplings or info.unspreadable:
        return Spread.SHARDED
    if info.loss is not None and info.loss.kind is LossKind.MEAN_OF_MEANS:
        return Spread.SHARDED  # it is the mean over microbatches, whatever the replicas
    for k, leaf in enumerate(graph.program.outputs):
        v = graph.program.output_ids()[k]
        if v is None or leaf.kind in (OutputKind.LOSS, OutputKind.WEIGHT):
            continue
        reduced = info.layouts[v] is None and info.dependence[v] is not Dependence.FREE
        if reduced and (leaf.kind is OutputKind.MODEL_STATE or v not in info.reductions):
            return Spread.SHARDED
    return Spread.PER_REPLICA


def _may_pad(graph: Graph) -> bool:
    """Whether padded rows can be kept out of the loss and of every output."""
    info, outputs = graph.info, graph.program.outputs
    if info.row_masks is None or info.couplings:
        return False
    for v, leaf in zip(graph.program.output_ids(), outputs, strict=True):
        if leaf.kind in (OutputKind.LOSS, OutputKind.WEIGHT) or v is None:
            continue
        if info.layouts[v] is None and info.dependence[v] is not Dependence.FREE:
            return False
    return True


def _signature(batch: Any) -> Any:
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)
