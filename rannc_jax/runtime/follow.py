"""Stages for a second function of the same parameters: every equation goes where its parameters live."""

from collections.abc import Mapping, Sequence

from rannc_jax.ir.graph import Graph
from rannc_jax.ir.roles import Role
from rannc_jax.runtime.engine import Stages

_LASTING = (Role.PARAM, Role.FROZEN, Role.MODEL_STATE)


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
