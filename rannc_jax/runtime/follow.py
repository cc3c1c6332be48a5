"""Which equations a stage runs: as the plan says, or, for a second function, where its parameters live."""

import warnings
from collections.abc import Callable, Mapping, Sequence

import jax

from rannc_jax.ir.graph import Graph
from rannc_jax.ir.match import check_identity, find_stages
from rannc_jax.ir.roles import Role
from rannc_jax.plan import Plan
from rannc_jax.runtime.engine import Stages

_LASTING = (Role.PARAM, Role.FROZEN, Role.MODEL_STATE)


def planned_stages(plan: Plan) -> Callable[[Graph], Stages]:
    """Lays the plan's cut on a graph; the first graph must be that of the plan's own model.

    The function that is returned raises PlanError for another model, and warns once where the cuts had to be
    found again in the program of another JAX.
    """
    seen = 0

    def stages_of(graph: Graph) -> Stages:
        nonlocal seen
        if not seen:
            check_identity(graph.program, plan)
        stages, same = find_stages(graph, plan)
        if not same and not seen:
            made = plan.versions.get("jax", "unknown")
            warnings.warn(
                f"the plan was made for another program of the same model (under jax {made}, here "
                f"{jax.__version__}): the cuts were found again by its matrix products and parameters. "
                "Predicted times and memory may be off; a new plan knows better.",
                stacklevel=6,
            )
        seen += 1
        return stages

    return stages_of


def stages_by_parameters(graph: Graph, homes: Mapping[str, Sequence[int]], num_stages: int) -> Stages:
    """Per stage one block of nodes.

    A node runs on the stage of the parameters, frozen leaves and model state it reads, never before its
    operands. What several stages hold is read on the first of them that is late enough.

    Args:
        graph: of the second function.
        homes: path of an input -> stages that hold or read it while training, ascending.
        num_stages: of the plan.
    """
    producers: dict[int, list[int]] = {}
    for edge in graph.edges:
        for consumer in edge.consumers:
            producers.setdefault(consumer, []).append(edge.producer)
    inputs = graph.program.inputs
    stage_of: list[int] = []
    for n, node in enumerate(graph.nodes):
        least = max((stage_of[p] for p in producers.get(n, ())), default=0)
        for v in node.inputs:
            if inputs[v].role in _LASTING and inputs[v].path in homes:
                stages = homes[inputs[v].path]
                least = max(least, next((s for s in stages if s >= least), stages[-1]))
        stage_of.append(least)
    return tuple((tuple(n for n, s in enumerate(stage_of) if s == stage),) for stage in range(num_stages))
