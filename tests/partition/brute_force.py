"""Every plan there is, priced from the definitions, with nothing taken from the search.

Slow and plain on purpose. Only the clock (`simulate`) is shared; it has an oracle of its own.
"""

import itertools
import math

from rannc_jax.contract import Remat
from rannc_jax.schedule import GPipe, OneFOneB, simulate

BOTH = (GPipe(), OneFOneB())
REMATS = tuple(Remat)


def all_plans(table, cluster, rows, *, schedules=BOTH, remats=REMATS, microbatches=None):
    """Yield (step seconds, description) of every plan that fits."""
    num_blocks = len(table.blocks)
    for num_stages in range(1, min(num_blocks, cluster.num_devices) + 1):
        for stages in cuts(table, num_stages):
            for m in microbatches or [m for m in range(1, rows + 1) if rows % m == 0]:
                for devices in device_ranges(cluster.num_devices, num_stages, rows // m):
                    for schedule in schedules:
                        yield from priced(table, cluster, rows // m, m, stages, devices, schedule, remats)


def best_step(*args, **kwargs):
    return min((step_s for step_s, _ in all_plans(*args, **kwargs)), default=math.inf)


def cuts(table, num_stages):
    """All ways to number the blocks by stage so that every value flows forward or stays."""
    num_blocks = len(table.blocks)
    for stage_of in itertools.product(range(num_stages), repeat=num_blocks):
        if len(set(stage_of)) < num_stages:
            continue
        if all(stage_of[v.producer] <= stage_of[c] for v in table.values for c in v.consumers):
            yield [[b for b in range(num_blocks) if stage_of[b] == s] for s in range(num_stages)]


def device_ranges(num_devices, num_stages, microbatch_rows):
    """All ascending disjoint ranges whose sizes divide the rows of a microbatch."""
    bounds = itertools.combinations_with_replacement(range(num_devices + 1), 2 * num_stages)
    for flat in bounds:
        ranges = [range(flat[2 * s], flat[2 * s + 1]) for s in range(num_stages)]
        if all(len(r) > 0 and microbatch_rows % len(r) == 0 for r in ranges):
            yield ranges


def priced(table, cluster, microbatch_rows, m, stages, devices, schedule, remats):
    num_stages = len(stages)
    options = []
    for s in range(num_stages):
        in_flight = schedule.in_flight(s, num_stages, m)
        options.append(
            [
                remat
                for remat in remats
                if all(
                    peak_bytes(
                        table,
                        cluster.device(d),
                        stages[s],
                        microbatch_rows // len(devices[s]),
                        remat,
                        in_flight,
                    )
                    <= cluster.device(d).usable_bytes
                    for d in devices[s]
                )
            ]
        )
    if not all(options):
        return
    transfers = transfer_seconds(table, cluster, microbatch_rows, stages, devices)
    tails = [tail_seconds(table, cluster, microbatch_rows, stages[s], devices[s]) for s in range(num_stages)]
    for chosen in itertools.product(*options):
        forward, backward = [], []
        for s in range(num_stages):
            rows = microbatch_rows // len(devices[s])
            prices = [[table.price(b, rows, cluster.device(d)) for b in stages[s]] for d in devices[s]]
            forward.append(max(sum(p.forward_s for p in on_device) for on_device in prices))
            backward.append(max(sum(p.backward_s[chosen[s]] for p in on_device) for on_device in prices))
        ends = simulate(schedule, m, forward, backward, transfers).stage_end_s
        yield (
            max(e + t for e, t in zip(ends, tails, strict=True)),
            (stages, devices, m, schedule.name, chosen),
        )


def peak_bytes(table, device, blocks, rows, remat, in_flight):
    prices = [table.price(b, rows, device) for b in blocks]
    total = sum(table.blocks[b].state.total for b in blocks)
    for tie in table.ties:
        if tie.blocks[0] in blocks:
            total += tie.state.total
        elif set(tie.blocks) & set(blocks):
            total += tie.state.parameters + tie.state.gradients
    total += in_flight * sum(p.residual_bytes[remat] for p in prices)
    total += max(p.working_bytes[remat] for p in prices)
    for value in table.values:
        inside = value.producer in blocks
        readers = [consumer in blocks for consumer in value.consumers]
        if (inside and not all(readers)) or (not inside and any(readers)):
            total += (2 if value.needs_grad else 1) * (value.bytes_per_row * rows + value.fixed_bytes)
    return total


def transfer_seconds(table, cluster, microbatch_rows, stages, devices):
    where = {b: s for s, blocks in enumerate(stages) for b in blocks}
    transfers = []
    for s, t in itertools.combinations(range(len(stages)), 2):
        crossing = [
            v for v in table.values if where[v.producer] == s and t in {where[c] for c in v.consumers}
        ]
        if not crossing:
            continue
        r_s, r_t = len(devices[s]), len(devices[t])
        link = cluster.intra_host
        for row in range(microbatch_rows):
            sender = devices[s][row * r_s // microbatch_rows]
            receiver = devices[t][row * r_t // microbatch_rows]
            if cluster.host(sender) != cluster.host(receiver):
                link = cluster.inter_host

        def seconds(values, link=link, r_s=r_s, r_t=r_t):
            moved = sum(
                v.bytes_per_row * microbatch_rows / min(r_s, r_t) + v.fixed_bytes * math.ceil(r_t / r_s)
                for v in values
            )
            return link.seconds(moved)

        back = [v for v in crossing if v.needs_grad]
        transfers.append((s, t, seconds(crossing), seconds(back) if back else None))
    return transfers


def tail_seconds(table, cluster, microbatch_rows, blocks, devices):
    rows, r = microbatch_rows // len(devices), len(devices)
    several = cluster.host(devices[0]) != cluster.host(devices[-1])
    link = cluster.inter_host if several else cluster.intra_host
    gradients = sum(table.blocks[b].state.gradients for b in blocks)
    updated = sum(table.blocks[b].state.update_bytes for b in blocks)
    total = max(sum(table.price(b, rows, cluster.device(d)).once_s for b in blocks) for d in devices)
    for tie in table.ties:
        if not set(tie.blocks) & set(blocks):
            continue
        gradients += tie.state.gradients
        if tie.blocks[0] in blocks:
            updated += tie.state.update_bytes
        else:
            updated += 2 * tie.state.parameters + tie.state.gradients
            hosts = cluster.host(cluster.num_devices - 1)
            total += 2 * (cluster.inter_host if hosts else cluster.intra_host).seconds(tie.state.parameters)
    if r > 1 and gradients:
        total += 2 * (r - 1) * link.latency_s + 2 * (r - 1) / r * gradients / link.bytes_per_s
    return total + updated / min(cluster.device(d).bytes_per_s for d in devices)
