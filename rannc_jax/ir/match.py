"""Fingerprints of programs, and finding a plan's blocks again in a new trace.

Three prints: *identity* (paths, shapes and dtypes of parameters and batch), *program* (primitives and
wiring), *anchors* (equations that read parameters or multiply matrices, in order). A plan whose program
print matches is laid on by equation indices. Under another JAX version primitives in between may
change; as long as the anchors are the same, every cut is found again between them.
"""

import hashlib
from collections.abc import Iterable, Sequence

from rannc_jax.errors import PlanError, message
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.residuals import MATMULS
from rannc_jax.ir.roles import Role
from rannc_jax.ir.trace import Program, structure
from rannc_jax.plan import Block, Plan

Ranges = tuple[tuple[int, int], ...]


def identity_print(program: Program) -> str:
    """Fingerprint of what must be the same: paths, shapes (rows left open) and dtypes of arguments."""
    lines = []
    for leaf in program.inputs:
        if leaf.role in (Role.PARAM, Role.BATCH, Role.FROZEN, Role.MODEL_STATE):
            shape = ["rows" if d == leaf.batch_dim else n for d, n in enumerate(leaf.aval.shape)]
            lines.append(f"{leaf.path} {shape} {leaf.aval.dtype}")
    return _digest(lines)


def program_print(program: Program) -> str:
    """Fingerprint of primitives, wiring, dtypes and ranks of the flattened program."""
    lines = [repr(row) for row in structure(program)]
    lines += [f"{v.aval.dtype} {len(v.aval.shape)}" for v in program.vars]
    return _digest(lines)


def anchor_nodes(graph: Graph) -> list[int]:
    """Node indices of the anchors, in order."""
    params = {v for v, leaf in enumerate(graph.program.inputs) if leaf.role is Role.PARAM}
    return [
        n
        for n, node in enumerate(graph.nodes)
        if params.intersection(node.inputs) or MATMULS.intersection(_names(graph, n))
    ]


def anchor_print(graph: Graph) -> str:
    """Fingerprint of the anchors: what they read and multiply, in order."""
    inputs = graph.program.inputs
    lines = []
    for n in anchor_nodes(graph):
        reads = [inputs[v].path for v in graph.nodes[n].inputs if inputs[v].role is Role.PARAM]
        lines.append(f"{reads} {sorted(MATMULS.intersection(_names(graph, n)))}")
    return _digest(lines)


def block_coordinates(graph: Graph, blocks: Iterable[Iterable[int]]) -> list[tuple[Ranges, Ranges]]:
    """(ranges of equations, ranges of anchors) of the nodes of each block: what a plan remembers of it."""
    position = {n: k for k, n in enumerate(anchor_nodes(graph))}
    found = []
    for chosen in map(set, blocks):
        equations = sorted(e for n in chosen for e in graph.nodes[n].equations)
        anchors = sorted(position[n] for n in chosen if n in position)
        found.append((_ranges(equations), _ranges(anchors)))
    return found


def find_stages(graph: Graph, plan: Plan) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], bool]:
    """The nodes of every block of every stage of a plan, in a new trace.

    Returns:
        Per stage, the node indices of its blocks; and whether the program was the very same (else the
        cuts were found by their anchors).

    Raises:
        PlanError: the plan belongs to another model.
    """
    same = program_print(graph.program) == plan.program
    if same:
        home = _by_equations(graph, plan.blocks)
    elif anchor_print(graph) == plan.anchors:
        home = _by_anchors(graph, plan)
    else:
        raise PlanError(
            message(
                "the plan belongs to another model: its cuts are not found in this program.",
                f"program: {program_print(graph.program)}, planned: {plan.program}",
                f"anchors: {anchor_print(graph)}, planned: {plan.anchors}",
                hint="make a new plan for this function, or load the plan made for it.",
            )
        )
    blocks: list[list[int]] = [[] for _ in plan.blocks]
    for n, b in enumerate(home):
        blocks[b].append(n)
    stages = tuple(tuple(tuple(blocks[b]) for b in stage.blocks if blocks[b]) for stage in plan.stages)
    for index, stage in enumerate(stages):
        if not stage:
            raise PlanError(
                message(
                    f"stage {index} of the plan has nothing to do in this program.",
                    hint="make a new plan for this function.",
                )
            )
    return stages, same


def check_identity(program: Program, plan: Plan) -> None:
    """Refuse a plan that was made for other arguments.

    Raises:
        PlanError: shapes, dtypes or paths differ.
    """
    mine = identity_print(program)
    if mine != plan.identity:
        leaves = [leaf for leaf in program.inputs if leaf.role in (Role.PARAM, Role.BATCH)]
        listing = [f"{leaf.path}: {leaf.aval.dtype}{list(leaf.aval.shape)}" for leaf in leaves[:4]]
        raise PlanError(
            message(
                "the plan was made for another model.",
                f"identity of these arguments: {mine}, of the plan: {plan.identity}",
                "given: " + ", ".join(listing) + (", ..." if len(leaves) > 4 else ""),
                hint="paths, shapes and dtypes of parameters and batch must be those it was made for "
                "(the number of rows may differ); else make a new plan.",
            )
        )


def _by_equations(graph: Graph, blocks: Sequence[Block]) -> list[int]:
    home: dict[int, int] = {}
    for b, block in enumerate(blocks):
        for start, stop in block.equations:
            home.update(dict.fromkeys(range(start, stop), b))
    return [home[node.equations[0]] for node in graph.nodes]


def _by_anchors(graph: Graph, plan: Plan) -> list[int]:
    """Anchors go where the plan says; what lies between them as early as its operands allow."""
    block_of: dict[int, int] = {}
    anchors = anchor_nodes(graph)
    for b, block in enumerate(plan.blocks):
        for start, stop in block.anchors:
            block_of.update({anchors[k]: b for k in range(start, stop)})
    rank = {b: position for position, b in enumerate(b for stage in plan.stages for b in stage.blocks)}
    by_rank = {position: b for b, position in rank.items()}
    producers: dict[int, list[int]] = {}
    for edge in graph.edges:
        for consumer in edge.consumers:
            producers.setdefault(consumer, []).append(edge.producer)
    ranks: list[int] = []
    for n in range(len(graph.nodes)):
        least = max((ranks[p] for p in producers.get(n, ())), default=0)
        ranks.append(max(least, rank[block_of[n]]) if n in block_of else least)
    return [by_rank[r] for r in ranks]


def _names(graph: Graph, node: int) -> set[str]:
    return {graph.program.eqns[e].primitive.name for e in graph.nodes[node].equations}


def _ranges(numbers: Sequence[int]) -> Ranges:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number, number + 1])
    return tuple((start, stop) for start, stop in ranges)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
