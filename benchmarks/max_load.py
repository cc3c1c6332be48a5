"""The public objective for the blocks of a program: seconds and transfers of the busiest device."""

from collections.abc import Sequence

from rannc_jax.contract import Remat
from rannc_jax.dag import CostGraph, GraphEdge, GraphNode
from rannc_jax.partition.baselines import Problem

MICROBATCHES = 16


def shared_graph(problem: Problem) -> CostGraph:
    """The blocks as a graph of seconds: one microbatch forward and backward, values and cotangents.

    A value is charged to the device that makes it, once, and to each other device that reads it.
    """
    cluster, table = problem.cluster, problem.table
    rows = max(1, problem.rows // MICROBATCHES)
    device, link = cluster.device(0), cluster.intra_host
    nodes, edges = [], []
    for block in range(len(table.blocks)):
        price = table.price(block, rows, device)
        nodes.append(GraphNode(id=block, seconds=price.forward_s + price.backward_s[Remat.SAVE_ALL]))
    sent: dict[tuple[int, int], float] = {}
    for value in table.values:
        moved = value.bytes_per_row * rows + value.fixed_bytes
        seconds = link.seconds(moved) * (2 if value.needs_grad else 1)
        for consumer in value.consumers:
            pair = value.producer, consumer
            sent[pair] = sent.get(pair, 0.0) + seconds
    edges = [GraphEdge(source=a, target=b, seconds=seconds) for (a, b), seconds in sent.items()]
    return CostGraph(nodes=tuple(nodes), edges=tuple(edges))


def loads_of(graph: CostGraph, cut: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of each device when blocks are cut so."""
    device_of = {block: device for device, blocks in enumerate(cut) for block in blocks}
    loads = [0.0] * len(cut)
    for node in graph.nodes:
        loads[device_of[node.id]] += node.seconds
    cost: dict[int, float] = {}
    readers: dict[int, set[int]] = {}
    for edge in graph.edges:
        cost[edge.source] = max(cost.get(edge.source, 0.0), edge.seconds)
        readers.setdefault(edge.source, set()).add(device_of[edge.target])
    for source, devices in readers.items():
        own = device_of[source]
        for device in devices | {own} if devices - {own} else ():
            loads[device] += cost[source]
    return loads
