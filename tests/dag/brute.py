"""Every assignment of a small graph, tried: an oracle that shares nothing with the solver."""

import itertools
import random

from rannc_jax import CostGraph, GraphEdge, GraphNode


def best(graph: CostGraph, num_devices: int, num_microbatches: int | None = None) -> float | None:
    """The smallest largest load (or step time, for several microbatches), None if nothing fits."""
    ids = [node.id for node in graph.nodes]
    values = []
    for choice in itertools.product(range(num_devices), repeat=len(ids)):
        device = dict(zip(ids, choice, strict=True))
        if allowed(graph, device):
            loads = loads_of(graph, device, num_devices)
            further = 0 if num_microbatches is None else num_microbatches - 1
            values.append(max(loads) if num_microbatches is None else sum(loads) + further * max(loads))
    return min(values, default=None)


def allowed(graph: CostGraph, device: dict) -> bool:
    """Forward edges never go back, backward ones never forth; classes sit together; all fits."""
    back = {node.id for node in graph.nodes if node.is_backward}
    for edge in graph.edges:
        ends = (edge.source in back, edge.target in back)
        if ends == (False, False) and device[edge.source] > device[edge.target]:
            return False
        if ends == (True, True) and device[edge.source] < device[edge.target]:
            return False
    where: dict = {}
    held: dict = {}
    for node in graph.nodes:
        if (
            node.colocation is not None
            and where.setdefault(node.colocation, device[node.id]) != device[node.id]
        ):
            return False
        held[device[node.id]] = held.get(device[node.id], 0) + node.bytes
    return graph.memory_bytes is None or all(size <= graph.memory_bytes for size in held.values())


def loads_of(graph: CostGraph, device: dict, num_devices: int) -> list[float]:
    """By the definition: own nodes, own values read elsewhere once, foreign values read here once."""
    loads = [0.0] * num_devices
    cost: dict = {}
    readers: dict = {}
    for edge in graph.edges:
        cost[edge.source] = max(cost.get(edge.source, 0.0), edge.seconds)
        readers.setdefault(edge.source, set()).add(device[edge.target])
    for node in graph.nodes:
        own = device[node.id]
        loads[own] += node.seconds
        others = readers.get(node.id, set()) - {own}
        loads[own] += cost.get(node.id, 0.0) * bool(others)
        for other in others:
            loads[other] += cost[node.id]
    return loads


def random_graph(seed: int, *, trains: bool) -> CostGraph:
    """Up to eight forward nodes; with `trains`, up to four, each with its backward node."""
    draw = random.Random(seed)
    count = draw.randint(2, 4 if trains else 7)
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count) if draw.random() < 0.4]

    def node(name, **more) -> GraphNode:
        seconds, size = draw.choice((0.0, draw.uniform(0, 5))), draw.uniform(0, 3)
        return GraphNode(id=name, seconds=seconds, bytes=size, **more)

    def edge(a, b) -> GraphEdge:
        return GraphEdge(source=a, target=b, seconds=draw.choice((0.0, draw.uniform(0, 2))))

    nodes = [
        node(k, colocation=f"class {k}" if trains else draw.choice((None, None, "x"))) for k in range(count)
    ]
    edges = [edge(a, b) for a, b in pairs]
    if trains:
        nodes += [node(f"grad {k}", colocation=f"class {k}", is_backward=True) for k in range(count)]
        edges += [edge(f"grad {b}", f"grad {a}") for a, b in pairs]
        edges += [edge(k, f"grad {k}") for k in range(count)]
    limit = draw.choice((None, draw.uniform(2, 8), sum(n.bytes for n in nodes) / 2 + 1))
    return CostGraph(nodes=tuple(nodes), edges=tuple(edges), memory_bytes=limit)
