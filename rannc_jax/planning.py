"""From a traced function to a `Plan`: the pure half of the house, called in order.

    prepare -> atoms -> blocks -> price -> search -> Plan

No device is touched and no array is made (unless costs are to be measured); the cluster is described,
not present.
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from numpy.typing import NDArray

from rannc_jax.cluster import ClusterSpec
from rannc_jax.contract import Sharding
from rannc_jax.cost import CostTable, OpenedGraph, node_seconds, open_graph, price
from rannc_jax.errors import InfeasibleError, PlanError, TraceError, message
from rannc_jax.ir import prepare
from rannc_jax.ir.align import align
from rannc_jax.ir.batch import Coupling, CouplingKind, LossKind
from rannc_jax.ir.example import Example, Subject
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.match import anchor_print, block_coordinates, identity_print, program_print
from rannc_jax.ir.paths import spanned_path
from rannc_jax.ir.roles import Role
from rannc_jax.ir.scans import closed_scans
from rannc_jax.ir.trace import aval_bytes, module_path, source_line, trace
from rannc_jax.partition.atomic import atoms
from rannc_jax.partition.block import NodeBlock, coarsen
from rannc_jax.partition.constraints import AUTO, Constraints
from rannc_jax.partition.decision import Decision
from rannc_jax.partition.rules import modules
from rannc_jax.partition.search import search
from rannc_jax.partition.space import Menu
from rannc_jax.plan import Block, Plan
from rannc_jax.progress import NoProgress, Progress
from rannc_jax.schedule import Forward, GPipe, Interleaved, OneFOneB, ZeroBubble, simulate
from rannc_jax.scheduling import with_fewer_splits, written_schedule

EVERYTHING = Menu(
    schedules=(OneFOneB(), GPipe(), ZeroBubble(), Interleaved(2), Interleaved(3), Interleaved(4), Forward()),
    shardings=tuple(Sharding),
    offloads=(False, True),
)
"""All that the planner knows to plan."""

MAX_BLOCKS = (32, 64)
"""Most blocks of a program, and most where nothing fits with those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be planned, besides the function and its arguments.

    Args:
        cluster: the machines.
        constraints: what is fixed.
        optimizer: None plans a forward only.
        allow_coupled: split the batch although its rows are coupled.
        menu: what there is to choose from.
        costs: "analytic", or "measured" on the device that is here.
    """

    cluster: ClusterSpec
    constraints: Constraints
    optimizer: optax.GradientTransformation | None
    allow_coupled: bool = False
    menu: Menu = EVERYTHING
    costs: str = "analytic"


def plan_function(
    who: Subject, example: Example, request: Request, progress: Progress | None = None
) -> tuple[Plan, Graph]:
    """Plan a function.

    Args:
        who: the function.
        example: shapes of its arguments.
        request: see `Request`.
        progress: told what takes long.

    Returns:
        The plan, and the graph it was made on.

    Raises:
        TraceError: the function cannot be cut, or its rows are coupled and were to be split.
        PlanError: nothing fits, or a constraint cannot hold.
    """
    progress = progress or NoProgress()
    progress.note("tracing")
    graph = prepare(who, example)
    if not graph.nodes:
        raise TraceError(_nothing_to_cut(who, graph))
    constraints, written = written_schedule(request.constraints)
    if written:
        menu = replace(request.menu, schedules=(*written, *request.menu.schedules))
        request = replace(request, constraints=constraints, menu=menu)
    splittable = _check_coupling(graph, example.rows, request)
    num_stages = request.constraints.with_axes(request.cluster.axes).fixed_num_stages or 1
    for max_blocks in (max(size, num_stages) for size in MAX_BLOCKS):
        finest = max_blocks >= min(MAX_BLOCKS[-1], len(graph.nodes))
        progress.note(f"pricing {len(graph.nodes)} pieces")
        blocks, table = price_blocks(graph, example.params, request, max_blocks)
        if request.costs == "measured":
            table = _measured(who, example, graph, blocks, table, request, progress)
        progress.note("searching")
        try:
            decision = _search(table, example.rows, request, splittable=splittable, explain=finest)
            break
        except InfeasibleError:
            if finest:
                raise
            progress.note("nothing fits; trying finer blocks")
    return _assemble(graph, blocks, with_fewer_splits(decision), example, request), graph


def _search(table: CostTable, rows: int, request: Request, *, splittable: bool, explain: bool) -> Decision:
    trains = request.optimizer is not None
    schedules = tuple(s for s in request.menu.schedules if s.has_backward == trains)
    return search(
        table,
        request.cluster,
        request.constraints,
        rows=rows,
        menu=replace(request.menu, schedules=schedules),
        simulate=simulate,
        beyond=EVERYTHING if request.menu is not EVERYTHING else None,
        splittable=splittable,
        explain=explain,
    )


def _nothing_to_cut(who: Subject, graph: Graph) -> str:
    """Why: there is no parameter, or none of them meets the batch."""
    parameters = graph.program.leaves(Role.PARAM)
    if not parameters:
        return message(
            f"there is nothing to cut in {who.name}: it has no parameters.",
            "params: got a tree without arrays",
            hint="weights as the first argument (those that a closure captures are constants and are not "
            "trained), or plain jax.jit for a function without weights.",
        )
    first = ", ".join(leaf.path for leaf in parameters[:3]) + (", ..." if len(parameters) > 3 else "")
    return message(
        f"there is nothing to cut in {who.name}: no work on its batch depends on its parameters.",
        f"parameters: {first}",
        hint="a result that depends on both, or plain jax.jit.",
    )


def _check_coupling(graph: Graph, rows: int, request: Request) -> bool:
    """Whether the batch may be split into microbatches."""
    hard = [c for c in graph.info.couplings if c.kind is CouplingKind.OTHER]
    wanted = request.constraints.num_microbatches
    fixed = wanted if isinstance(wanted, int) else 1
    if hard and fixed > 1 and not request.allow_coupled:
        raise TraceError(
            message(
                f"the batch cannot be split into {fixed} microbatches: its examples see each other.",
                *_where(hard[0]),
                "the loss of the parts would be another loss.",
                hint="num_microbatches=1 (the default here: exact, sharded over replicas), "
                "allow_coupled=True to take the mean over microbatches all the same, or "
                "rannc_jax.separable(fn) around code that treats every example on its own.",
            )
        )
    if graph.info.couplings and fixed > 1 and rows % fixed:
        raise TraceError(
            message(
                f"a batch of {rows} rows does not divide into {fixed} microbatches; its rows are coupled.",
                *_where(graph.info.couplings[0]),
                "another number of microbatches would be another loss.",
                hint=f"num_microbatches={_divisor(rows, fixed)}, or a batch that divides.",
            )
        )
    return not hard or request.allow_coupled


def _where(coupling: Coupling) -> tuple[str, ...]:
    path = f" in {coupling.path}" if coupling.path else ""
    kind = " (batch statistics)" if coupling.kind is CouplingKind.BATCH_STATISTICS else ""
    return (f"{coupling.primitive}{path}, at {coupling.source or 'an unknown line'}{kind}",)


def _divisor(rows: int, most: int) -> int:
    return next(m for m in range(most, 0, -1) if rows % m == 0)


def price_blocks(
    graph: Graph, params: Any, request: Request, max_blocks: int = MAX_BLOCKS[0]
) -> tuple[tuple[NodeBlock, ...], CostTable]:
    """Coarsen a graph into blocks and price them.

    Args:
        graph: the graph.
        params: the user's tree, as shapes.
        request: cluster, named cuts and optimizer are read.
        max_blocks: upper limit; where it is more than usual, blocks are balanced by parameters as well as by
            seconds.
    """
    cluster, constraints = request.cluster, request.constraints
    opened = open_graph(graph)
    _refuse_endless_loops(opened)
    owned, shared = _optimizer_bytes(graph, params, request.optimizer)
    rows = max(1, graph.program.rows // 4)
    seconds = node_seconds(opened, cluster.device(0), rows)
    cuts = [c for c in constraints.cuts if isinstance(c, str)] if constraints.cuts != AUTO else []
    named = [(name, module) for name, setting in constraints.by_stage.items() for module in modules(setting)]
    if max_blocks > MAX_BLOCKS[0]:
        held = _parameter_bytes(graph)
        seconds = (seconds + held * (seconds.sum() / max(held.sum(), 1.0))) / 2
    blocks = coarsen(
        atoms(graph, seconds.tolist(), rows),
        max_blocks=max_blocks,
        cuts=cuts,
        modules=named,
        seconds_per_byte=1 / cluster.intra_host.bytes_per_s,
    )
    table = price(
        graph,
        [block.nodes for block in blocks],
        cluster,
        optimizer_bytes=owned,
        shared_optimizer_bytes=shared,
        opened=opened,
    )
    return blocks, table


def _refuse_endless_loops(opened: OpenedGraph) -> None:
    """Loops whose number of turns is not known have no reverse-mode derivative in JAX: said before training.

    Raises:
        TraceError: a gradient goes through one.
    """
    program = opened.graph.program
    for index, eqn in enumerate(program.eqns):
        if eqn.primitive.name == "while" and any(v in opened.gradients for v in program.writes(index)):
            raise TraceError(
                message(
                    "a gradient goes through a while_loop, which JAX cannot differentiate backwards.",
                    f"while_loop at {source_line(eqn)}",
                    hint="lax.scan or fori_loop with bounds that are Python integers, a custom_vjp, or "
                    "jax.lax.stop_gradient on what goes into the loop.",
                )
            )


def _parameter_bytes(graph: Graph) -> NDArray[np.float64]:
    """Bytes of the parameters that each node is the first to read; float64 [nodes]."""
    held, seen = np.zeros(len(graph.nodes)), set[int]()
    parameters = {v for leaf in graph.program.leaves(Role.PARAM) for v in leaf.positions}
    for index, node in enumerate(graph.nodes):
        own = parameters.intersection(node.inputs) - seen
        held[index] = sum(graph.program.nbytes(value) for value in own)
        seen |= own
    return held


def _measured(
    who: Subject,
    example: Example,
    graph: Graph,
    blocks: Sequence[NodeBlock],
    table: CostTable,
    request: Request,
    progress: Progress,
) -> CostTable:
    """The table with seconds corrected by what the device here takes: the one step that touches a device."""
    from rannc_jax.cost.measured import Site, measure, sample_rows

    wanted = request.constraints.num_microbatches
    site = Site(
        graph=graph,
        blocks=[block.nodes for block in blocks],
        trace_at=lambda rows: align(graph.program, trace(who, example, rows)),
        rows=sample_rows(
            example.rows, request.cluster.num_devices, wanted if isinstance(wanted, int) else None
        ),
        cluster=request.cluster,
    )
    return measure(table, site, progress=progress)


def _optimizer_bytes(
    graph: Graph, params: Any, optimizer: optax.GradientTransformation | None
) -> tuple[Mapping[int, int], int]:
    """Bytes of optimizer state by parameter, and of what belongs to none: a leaf belongs to the parameter
    whose path ends its own. Single numbers that belong to none, as step counts, are not counted.

    Args:
        graph: its parameter inputs are the leaves of `params` or slices of them, in order.
        params: the user's tree, as shapes.
        optimizer: its `init` is traced, never run.

    Raises:
        PlanError: `init` fails on this tree.
    """
    leaves = graph.program.leaves(Role.PARAM)
    found = dict.fromkeys((v for leaf in leaves for v in leaf.positions), 0)
    if optimizer is None:
        return found, 0
    try:
        state = jax.eval_shape(optimizer.init, params)
    except Exception as error:
        raise PlanError(
            message(
                "the optimizer cannot be initialised on these parameters.",
                f"{type(error).__name__}: {error}",
                hint="its masks and labels must have the structure of params.",
            )
        ) from error
    by_path, shared = dict(zip(_key_paths(params), leaves, strict=True)), 0
    for path, leaf in zip(_key_paths(state), jax.tree.leaves(state), strict=True):
        ends = (path[start:] for start in range(len(path) + 1))
        owner = next((by_path[end] for end in ends if end in by_path), None)
        if owner is not None:
            share = aval_bytes(leaf) // len(owner.positions)
            found.update({v: found[v] + share for v in owner.positions})
        elif leaf.size > 1:
            shared += aval_bytes(leaf)
    return found, shared


def _key_paths(tree: Any) -> list[tuple[str, ...]]:
    """The path of every leaf, one text a key."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [tuple(str(key) for key in path) for path, _ in pairs]


def _assemble(
    graph: Graph, blocks: Sequence[NodeBlock], decision: Decision, example: Example, request: Request
) -> Plan:
    coordinates = block_coordinates(graph, [block.nodes for block in blocks])
    info = graph.info
    kinds = {c.kind for c in info.couplings}
    batching = "separable"
    if kinds:
        batching = "coupled" if CouplingKind.OTHER in kinds else "batch statistics"
    return Plan(
        identity=identity_print(graph.program),
        program=program_print(graph.program),
        anchors=anchor_print(graph),
        cluster=request.cluster,
        rows=example.rows,
        num_microbatches=decision.num_microbatches,
        schedule=decision.schedule.name,
        blocks=tuple(
            Block(
                path=spanned_path(graph.nodes[n].path for n in block.nodes),
                equations=equations,
                anchors=anchors,
            )
            for block, (equations, anchors) in zip(blocks, coordinates, strict=True)
        ),
        stages=decision.stages,
        crossings=decision.crossings,
        ties=decision.ties,
        batching=batching,
        loss="none" if info.loss is None else info.loss.kind.value,
        step_s=decision.step_s,
        bubble_fraction=decision.bubble_fraction,
        host_s=decision.host_s,
        bound_s=decision.bound_s,
        runners_up=decision.runners_up,
        notes=(*_batch_notes(graph, decision, request.constraints), *_loop_notes(graph), *decision.notes),
        versions={"rannc_jax": _version(), "jax": jax.__version__, "numpy": np.__version__},
    )


def _batch_notes(graph: Graph, decision: Decision, constraints: Constraints) -> tuple[str, ...]:
    notes = []
    firsts = {coupling.kind: coupling for coupling in reversed(graph.info.couplings)}
    for coupling in firsts.values():
        where = coupling.path or coupling.source or "the function"
        if coupling.kind is CouplingKind.BATCH_STATISTICS:
            notes.append(
                f"batch statistics (first in {where}) are those of a microbatch, "
                "shared by a stage's replicas: numbers depend on num_microbatches."
            )
        elif decision.num_microbatches == 1:
            notes.append(f"examples see each other ({coupling.primitive} in {where}): the batch stays whole.")
        else:
            notes.append(
                f"examples see each other ({coupling.primitive} in {where}), split by allow_coupled."
            )
    limit = constraints.said("memory_limit_bytes", "memory_margin")
    if limit:
        notes.append(f"planned with {limit}; the limits shown are those of the mesh.")
    if any(leaf.role is Role.RNG for leaf in graph.program.inputs):
        notes.append("random numbers are drawn a microbatch at a time: they depend on num_microbatches.")
    if graph.info.loss is not None and graph.info.loss.kind is LossKind.MEAN_OF_MEANS:
        notes.append("the loss is no plain mean, sum or sum(a)/sum(w): it is the mean over microbatches.")
    return tuple(notes)


def _loop_notes(graph: Graph) -> tuple[str, ...]:
    """Why the first loop with parameters is one piece, if there is one."""
    program = graph.program
    closed = closed_scans(program.jaxpr.jaxpr, [leaf.role for leaf in program.inputs])
    if not closed:
        return ()
    eqn, why = closed[0]
    where = module_path(eqn) or source_line(eqn) or "the function"
    more = f", like {len(closed) - 1} more" if len(closed) > 1 else ""
    return (f"the scan in {where} is not cut{more}: {why}.",)


def _version() -> str:
    try:
        return importlib.metadata.version("rannc-jax")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return "0.1.0"
