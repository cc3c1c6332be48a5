"""What a stage reads and makes, in value ids: the same for every number of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rannc_jax.ir.graph import Graph
from rannc_jax.ir.roles import Role
from rannc_jax.ir.slice import Slice, blocks_of, prologue_slice, slice_nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageShape:
    """What a stage reads and makes, in value ids: the same for every number of rows.

    Args:
        index: of the stage.
        part: its equations as a slice; `part.outputs` are the values other stages read, then `extra`.
        blocks: the slices of its blocks.
        prologue: parameter-only work, None if there is none.
        params: inputs with role PARAM that part or prologue read.
        held: frozen leaves, constants and unwritten model_state they read.
        state: written model_state read or written here.
        batch: batch inputs read.
        reads_rng: the program's key is read.
        crossing_in: values of other stages read.
        crossing_out: values that other stages read.
        accumulated: parameters and prologue values that gradients are summed for.
    """

    index: int
    part: Slice
    blocks: tuple[Slice, ...]
    prologue: Slice | None
    params: tuple[int, ...]
    held: tuple[int, ...]
    state: tuple[int, ...]
    batch: tuple[int, ...]
    reads_rng: bool
    crossing_in: tuple[int, ...]
    crossing_out: tuple[int, ...]
    accumulated: tuple[int, ...]


def stage_shape(
    graph: Graph,
    index: int,
    blocks: Sequence[Sequence[int]],
    results: Sequence[int],
    extra: Sequence[int],
    written: Mapping[int, int],
) -> StageShape:
    """Collect what a stage reads and makes.

    Args:
        graph: the program's graph.
        index: of the stage.
        blocks: node indices of each of its blocks, in order.
        results: positions of the program outputs it computes.
        extra: further values to give out (the loss's weight).
        written: written model_state: input value id -> output position.
    """
    program = graph.program
    nodes = [n for block in blocks for n in block]
    part = slice_nodes(graph, nodes, results, extra)
    num_inputs = len(program.inputs)
    made_by_nodes = {v for node in graph.nodes for e in node.equations for v in program.writes(e)}
    inner = [v for v in part.inputs if v >= num_inputs]
    from_prologue = [v for v in inner if v not in made_by_nodes]
    prologue = prologue_slice(graph, from_prologue) if from_prologue else None
    reads = sorted({v for v in part.inputs if v < num_inputs} | set(prologue.inputs if prologue else ()))
    by_role: dict[Role, list[int]] = {role: [] for role in Role}
    for v in reads:
        by_role[program.inputs[v].role].append(v)
    state = [v for v in by_role[Role.MODEL_STATE] if v in written]
    state += [v for v, k in written.items() if k in results and v not in state]
    unwritten = [v for v in by_role[Role.MODEL_STATE] if v not in written]
    direct = [v for v in by_role[Role.PARAM] if v in part.inputs and v in graph.flows]
    return StageShape(
        index=index,
        part=part,
        blocks=tuple(blocks_of(graph, part, blocks)),
        prologue=prologue,
        params=tuple(by_role[Role.PARAM]),
        held=tuple(sorted([*by_role[Role.FROZEN], *by_role[Role.CONST], *unwritten])),
        state=tuple(sorted(state)),
        batch=tuple(by_role[Role.BATCH]),
        reads_rng=bool(by_role[Role.RNG]),
        crossing_in=tuple(v for v in inner if v in made_by_nodes),
        crossing_out=tuple(v for v in part.outputs if v not in set(extra) or _is_read(graph, v, nodes)),
        accumulated=(*direct, *(v for v in from_prologue if v in graph.flows)),
    )


def _is_read(graph: Graph, value: int, nodes: Sequence[int]) -> bool:
    inside = set(nodes)
    return any(e.value == value and any(c not in inside for c in e.consumers) for e in graph.edges)
