"""Nodes that share a device, and the order in which devices must see them.

Nodes of one colocation class are one group. Values go through the devices in one order, so a group that
another one reads from comes first. Backward nodes may be written in the order of the forward pass (as a
mirrored copy of it) or as they run, from the end to the beginning: whichever leaves no cycle counts. What
is on a cycle after that can only share a device, and is one group.

Sets of groups are bit masks: bit g is group g.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

import networkx as nx

from rannc_jax.dag.data import CostGraph, GraphEdge


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What a node of `producer` makes and groups of `consumers` (a mask, without the producer) read."""

    producer: int
    consumers: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The problem that is solved.

    Args:
        members: node ids of each group; groups are numbered in a topological order.
        needs: for each group the mask of groups that come before it.
        seconds, bytes: of each group.
        values: that another group reads and that cost something.
        memory_bytes: of a device, None for no limit.
    """

    members: tuple[tuple[Hashable, ...], ...]
    needs: tuple[int, ...]
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    values: tuple[Value, ...]
    memory_bytes: float | None

    @property
    def everything(self) -> int:
        """The mask of all groups."""
        return (1 << len(self.members)) - 1


def bits(mask: int) -> Iterator[int]:
    """The groups of a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def make_groups(graph: CostGraph) -> Groups:
    """Gather nodes that share a device, and order them."""
    first = {node.colocation: node.id for node in reversed(graph.nodes) if node.colocation is not None}
    class_of = {
        node.id: node.id if node.colocation is None else first[node.colocation] for node in graph.nodes
    }
    order = _order(graph, class_of)
    if graph.memory_bytes is None or sum(node.bytes for node in graph.nodes) <= graph.memory_bytes:
        order = _free_ends_merged(graph, class_of, order)
    parts = nx.condensation(order)
    place = {part: k for k, part in enumerate(nx.lexicographical_topological_sort(parts))}
    group_of = {name: place[parts.graph["mapping"][name]] for name in order}
    group = {node.id: group_of[class_of[node.id]] for node in graph.nodes}
    return _gathered(graph, group, {(place[a], place[b]) for a, b in parts.edges}, len(place))


def _order(graph: CostGraph, class_of: dict[Hashable, Hashable]) -> nx.DiGraph:
    """Classes, with an edge from what comes first."""
    backward = {node.id for node in graph.nodes if node.is_backward}

    def ordered(turned: Callable[[GraphEdge], bool | None]) -> nx.DiGraph:
        order = nx.DiGraph()
        order.add_nodes_from(class_of[node.id] for node in graph.nodes)
        for edge in graph.edges:
            a, b, turn = class_of[edge.source], class_of[edge.target], turned(edge)
            if a != b and turn is not None:
                order.add_edge(*((b, a) if turn else (a, b)))
        return order

    def as_it_runs(edge: GraphEdge) -> bool | None:
        ends = (edge.source in backward, edge.target in backward)
        return True if all(ends) else None if any(ends) else False

    mirrored = ordered(lambda edge: False)
    return mirrored if not backward or nx.is_directed_acyclic_graph(mirrored) else ordered(as_it_runs)


def _free_ends_merged(graph: CostGraph, class_of: dict[Hashable, Hashable], order: nx.DiGraph) -> nx.DiGraph:
    """Put what takes no time and only feeds one class, or only reads from one, into that class.

    Anywhere else it would only add transfers. Not where memory is short: there it may have to.
    """
    busy = {class_of[node.id] for node in graph.nodes if node.seconds > 0}
    order = order.copy()
    again = True
    while again:
        again = False
        for name in list(order):
            near = set(order.predecessors(name)) | set(order.successors(name))
            if name not in busy and len(near) == 1 and order.number_of_nodes() > 1:
                (into,) = near
                if not (order.has_edge(name, into) and order.has_edge(into, name)):
                    order.remove_node(name)
                    for node, its in class_of.items():
                        if its == name:
                            class_of[node] = into
                    again = True
    return order


def _gathered(
    graph: CostGraph, group: dict[Hashable, int], edges: Iterable[tuple[int, int]], count: int
) -> Groups:
    needs, seconds, sizes = [0] * count, [0.0] * count, [0.0] * count
    members: list[list[Hashable]] = [[] for _ in range(count)]
    for before, after in edges:
        needs[after] |= 1 << before
    for node in graph.nodes:
        own = group[node.id]
        members[own].append(node.id)
        seconds[own] += node.seconds
        sizes[own] += node.bytes
    cost: dict[Hashable, float] = {}
    readers: dict[Hashable, int] = {}
    for edge in graph.edges:
        cost[edge.source] = max(cost.get(edge.source, 0.0), edge.seconds)
        if group[edge.source] != group[edge.target]:
            readers[edge.source] = readers.get(edge.source, 0) | 1 << group[edge.target]
    return Groups(
        members=tuple(map(tuple, members)),
        needs=tuple(needs),
        seconds=tuple(seconds),
        bytes=tuple(sizes),
        values=tuple(
            Value(producer=group[source], consumers=mask, seconds=cost[source])
            for source, mask in readers.items()
            if cost[source] > 0
        ),
        memory_bytes=graph.memory_bytes,
    )
