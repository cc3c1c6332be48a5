"""What the graph door takes and gives: nodes and edges with costs; a device for every node."""

import enum
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from rannc_jax.errors import CostError
from rannc_jax.mistakes import Mistakes


class Objective(enum.Enum):
    """What is made small.

    MAX_LOAD: the seconds of the busiest device; in steady state one batch leaves the pipeline so often.
    STEP_TIME: filling, and the busiest device for every further microbatch: sum of the loads plus
        (num_microbatches - 1) times the largest.
    """

    MAX_LOAD = "max_load"
    STEP_TIME = "step_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One piece of work.

    Args:
        id: its name, of any kind.
        seconds: on a device, of any unit that edges share.
        bytes: of memory that it needs where it runs.
        colocation: nodes of one class run on one device; None for a node of its own.
        is_backward: runs after the forward pass. Forward nodes go through the devices in order, backward
            ones through the same devices, in the same order or in the opposite one, as the edges say.
    """

    id: Hashable
    seconds: float
    bytes: float = 0.0
    colocation: Hashable | None = None
    is_backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdge:
    """A value that one node makes and another reads.

    Args:
        source, target: ids of nodes.
        seconds: to send it off its device, and again to take it in on each other one. A value that several
            nodes read is sent once: the largest `seconds` of a node's edges counts.
    """

    source: Hashable
    target: Hashable
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostGraph:
    """A DAG with costs.

    Args:
        nodes: in any order; ids are distinct.
        edges: between them.
        memory_bytes: of each device; None for no limit.

    Raises:
        CostError: ids that repeat or do not exist, and numbers that are negative or not finite, all in one
            message.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        mistakes = Mistakes(source="the graph")
        counts = Counter(node.id for node in self.nodes)
        for node, count in counts.items():
            if count > 1:
                mistakes.add(f"node {node!r}", f"there are {count} of them")
        for node in self.nodes:
            for name in ("seconds", "bytes"):
                _check_number(mistakes, f"node {node.id!r}", name, getattr(node, name))
        for edge in self.edges:
            where = f"edge {edge.source!r} -> {edge.target!r}"
            for end in (edge.source, edge.target):
                if end not in counts:
                    mistakes.add(where, f"there is no node {end!r}")
            _check_number(mistakes, where, "seconds", edge.seconds)
        if self.memory_bytes is not None:
            _check_number(mistakes, "memory_bytes", "memory_bytes", self.memory_bytes)
        mistakes.raise_if_any(CostError)


def _check_number(mistakes: Mistakes, where: str, name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        mistakes.add(where, f"{name} is {value!r}, expected a number of 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """A device for every node.

    Args:
        devices: node id -> device, from 0; devices are in the order in which values pass them.
        loads: seconds of each used device: its nodes, what it sends and what it takes in.
        objective: value of what was asked for.
        lower_bound: no assignment has a smaller one.
        is_optimal: whether this one is proved to be the best.
        num_ideals: sets of nodes that the search considered as what the first devices hold.
        seconds: that the search took.
    """

    devices: Mapping[Hashable, int]
    loads: tuple[float, ...]
    objective: float
    lower_bound: float
    is_optimal: bool
    num_ideals: int
    seconds: float
