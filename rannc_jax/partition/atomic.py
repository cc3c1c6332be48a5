"""The atomic level: the smallest pieces that a cut may separate, with their weights.

An atom is a node of the graph; `Atoms` is the graph reduced to what the block level needs: seconds,
module paths, and values with their bytes. Atoms are numbered in a topological order. Equations that
must stay together (readers and writers of one written model_state leaf) must share a node; that is
checked here once more, because a cut between them would train with stale state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rannc_jax.errors import PlanError, message
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.roles import OutputKind, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomValue:
    """`nbytes` that atom `producer` makes and atoms `consumers` (ascending, all larger) read."""

    producer: int
    consumers: tuple[int, ...]
    nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Atoms:
    """A weighted DAG.

    Args:
        seconds: forward plus backward of each atom.
        paths: module path of each atom, components separated by "/".
        values: what flows between atoms.
    """

    seconds: tuple[float, ...]
    paths: tuple[str, ...]
    values: tuple[AtomValue, ...]

    def __post_init__(self) -> None:
        for value in self.values:
            if not value.consumers or min(value.consumers) <= value.producer:
                raise PlanError(
                    message(
                        "atoms are not numbered in a topological order.",
                        f"producer {value.producer}, consumers {value.consumers}",
                    )
                )


def atoms(graph: Graph, seconds: Sequence[float], rows: int) -> Atoms:
    """The atoms of a graph.

    Args:
        graph: the program as a graph.
        seconds: weight of each node, forward plus backward.
        rows: batch rows at which values are weighed; gradients that flow back count as much again.

    Raises:
        PlanError: a written model_state leaf is read and written by different nodes.
    """
    check_colocation(graph)
    first, second = graph.program, graph.twin
    step = second.rows - first.rows
    values = []
    for edge in graph.edges:
        low, high = first.nbytes(edge.value), second.nbytes(edge.value)
        nbytes = low + (high - low) * (rows - first.rows) / step if step else low
        values.append(
            AtomValue(
                producer=edge.producer,
                consumers=edge.consumers,
                nbytes=max(nbytes, 0.0) * (2 if edge.needs_grad else 1),
            )
        )
    return Atoms(
        seconds=tuple(float(s) for s in seconds),
        paths=tuple(node.path for node in graph.nodes),
        values=tuple(values),
    )


def check_colocation(graph: Graph) -> None:
    """Raise PlanError if a written model_state leaf has readers or writers in several nodes."""
    program = graph.program
    inputs = {
        leaf.path.removeprefix("model_state"): value
        for value, leaf in enumerate(program.inputs)
        if leaf.role is Role.MODEL_STATE
    }
    readers: dict[int, set[int]] = {}
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            readers.setdefault(value, set()).add(index)
    for leaf, output, writer in zip(program.outputs, program.output_ids(), graph.outputs, strict=True):
        value = inputs.get(leaf.path.removeprefix("model_state"))
        if leaf.kind is not OutputKind.MODEL_STATE or value is None or writer is None or output == value:
            continue
        apart = sorted(readers.get(value, set()) - {writer})
        if apart:
            raise PlanError(
                message(
                    f"model_state{leaf.path.removeprefix('model_state')} is written by node {writer} "
                    f"and read by others.",
                    *(f"node {index} ({graph.nodes[index].path or 'no module path'})" for index in apart),
                    hint="nodes that share written state must be merged when the graph is built.",
                )
            )
