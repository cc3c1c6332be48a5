"""What goes between the stages of a plan, and how long it takes: by the rules of the search."""

from typing import TYPE_CHECKING

from rannc_jax.cluster import LinkSpec

if TYPE_CHECKING:
    from rannc_jax.plan.data import Plan, Stage


def transfers(plan: "Plan") -> list[tuple[int, int, float, float | None]]:
    """(source stage, target stage, seconds of values, seconds of cotangents or None), ascending.

    Seconds of one microbatch. The side with fewer replicas sets the pace; what has no rows goes to every
    replica.
    """
    trains, rows = plan.schedule != "forward", plan.rows // plan.num_microbatches
    values: dict[tuple[int, int], float] = {}
    cotangents: dict[tuple[int, int], float] = {}
    for crossing in plan.crossings:
        source = plan.stages[crossing.source]
        for index in crossing.targets:
            target = plan.stages[index]
            rows_moved = rows / min(source.num_replicas, target.num_replicas)
            copies = -(-target.num_replicas // source.num_replicas)
            moved = crossing.bytes_per_row * rows_moved + crossing.fixed_bytes * copies
            pair = (crossing.source, index)
            values[pair] = values.get(pair, 0.0) + moved
            if trains and crossing.needs_grad:
                cotangents[pair] = cotangents.get(pair, 0.0) + moved
    result = []
    for pair in sorted(values):
        link = link_between(plan, plan.stages[pair[0]], plan.stages[pair[1]])
        back_s = link.seconds(cotangents[pair]) if pair in cotangents else None
        result.append((*pair, link.seconds(values[pair]), back_s))
    return result


def link_between(plan: "Plan", source: "Stage", target: "Stage") -> LinkSpec:
    """The slowest link over which rows go: from the replica that has them to the one that needs them."""
    parts, hosts = source.num_replicas, [plan.cluster.host(device) for device in target.devices]
    for sender, device in enumerate(source.devices):
        first = sender * target.num_replicas // parts
        last = -(-(sender + 1) * target.num_replicas // parts)
        if set(hosts[first:last]) != {plan.cluster.host(device)}:
            return plan.cluster.inter_host
    return plan.cluster.intra_host
