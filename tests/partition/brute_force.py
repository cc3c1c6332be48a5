"""Every plan there is, priced from the definitions, with nothing taken from the search.

Slow and plain on purpose. Only the clock (`simulate`) is shared; it has an oracle of its own.
"""

import itertools
import math

from rannc_jax.contract import Remat, Sharding
from rannc_jax.cost.table import StateBytes
from rannc_jax.schedule import GPipe, OneFOneB, simulate

BOTH = (GPipe(), OneFOneB())
REMATS = tuple(Remat)
ONE_WAY = 0.7  # what collectives reach of a link


def all_plans(
    table,
    cluster,
    rows,
    *,
    schedules=BOTH,
    remats=REMATS,
    shardings=(Sharding.REPLICATED,),
    offloads=(False,),
    microbatches=None,
):
    """Yield (step seconds, description) of every plan that fits."""
    num_blocks = len(table.blocks)
    for num_stages in range(1, min(num_blocks, cluster.num_devices) + 1):
        for stages in cuts(table, num_stages):
            for m in microbatches or [m for m in range(1, rows + 1) if rows % m == 0]:
                for devices in device_ranges(cluster.num_devices, num_stages, rows // m):
                    for schedule in schedules:
                        modes = list(itertools.product(remats, shardings, offloads))
                        yield from priced(table, cluster, rows // m, m, stages, devices, schedule, modes)


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


def priced(table, cluster, microbatch_rows, m, stages, devices, schedule, modes):
    num_stages = len(stages)
    options = []
    for s in range(num_stages):
        in_flight = schedule.in_flight(s, num_stages, m)
        options.append(
            [
                mode
                for mode in modes
                if (len(devices[s]) > 1 or mode[1] is modes[0][1])  # one replica has nothing to shard
                and all(
                    peak_bytes(
                        table,
                        cluster.device(d),
                        stages[s],
                        microbatch_rows // len(devices[s]),
                        mode,
                        in_flight,
                        len(devices[s]),
                    )
                    <= cluster.device(d).usable_bytes
                    for d in devices[s]
                )
            ]
        )
    if not all(options):
        return
    transfers = transfer_seconds(table, cluster, microbatch_rows, stages, devices)
    for chosen in itertools.product(*options):
        timed = [
            stage_seconds(table, cluster, microbatch_rows, stages[s], devices[s], chosen[s])
            for s in range(num_stages)
        ]
        forward, backward, tails = zip(*timed, strict=True)
        ends = simulate(schedule, m, forward, backward, transfers).rank_end_s
        host_s = host_seconds(table, cluster, m, stages, devices)
        yield (
            max(host_s, *(e + t for e, t in zip(ends, tails, strict=True))),
            (stages, devices, m, schedule.name, chosen),
        )


def peak_bytes(table, device, blocks, rows, mode, in_flight, replicas):
    remat, sharding, offload = mode
    prices = [table.price(b, rows, device) for b in blocks]
    held = states(table, blocks)
    parameters = sum(s.parameters for s in held)
    gradients = sum(s.gradients for s in held)
    optimizer = sum(s.optimizer for s in held)
    prologue = sum(s.prologue for s in held)
    total = sum(s.constants for s in held)
    shards = 1 if sharding is Sharding.REPLICATED else replicas
    if offload:
        total += 2 * math.ceil(max(s.optimizer for s in held) / shards)
    else:
        total += math.ceil(optimizer / shards)
    total += math.ceil(gradients / (replicas if sharding in (Sharding.ZERO2, Sharding.FSDP) else 1))
    if sharding is Sharding.FSDP and replicas > 1:
        total += math.ceil(parameters / replicas) + math.ceil(prologue / replicas)
        total += 2 * max(s.parameters + s.prologue for s in held)
    else:
        total += parameters + prologue
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


def host_seconds(table, cluster, m, stages, devices):
    """Every host calls its programs one after another: two a stage and microbatch, and a copy for each way
    between two stages; of one stage the whole step is one program."""
    seconds = []
    for host in {cluster.host(d) for d in range(cluster.num_devices)}:
        mine = [[d for d in on if cluster.host(d) == host] for on in devices]
        calls = sum(2 for here in mine if here)
        arrays = sum(
            table.affine[b].num_arrays * len(mine[s]) for s, blocks in enumerate(stages) for b in blocks
        )
        for s, t, _, back in transfer_seconds(table, cluster, m, stages, devices):
            if mine[s] or mine[t]:
                calls += 1 if back is None else 2
        spec = max((cluster.device(d) for d in range(cluster.num_devices)), key=lambda d: d.dispatch_s)
        times = 1 if len(stages) == 1 else m
        calls = min(calls, 1) if len(stages) == 1 else calls
        seconds.append(times * (calls * spec.dispatch_s + arrays * spec.leaf_s))
    return max(seconds)


def states(table, blocks):
    """What lies on a stage, by block and tie; a borrowed parameter brings itself and its gradient."""
    held = [table.blocks[b].state for b in blocks]
    for tie in table.ties:
        if tie.blocks[0] in blocks:
            held.append(tie.state)
        elif set(tie.blocks) & set(blocks):
            held.append(StateBytes(parameters=tie.state.parameters, gradients=tie.state.gradients))
    return held


def gather_seconds(cluster, devices, num_bytes, pieces=1):
    """A slice goes round the hosts, then all slices round a host."""
    if not num_bytes:
        return 0.0
    on_host = [[d for d in devices if cluster.host(d) == h] for h in {cluster.host(d) for d in devices}]
    hosts, sizes = len(on_host), [len(each) for each in on_host]
    seconds = 0.0
    for link, n, whole in (
        (cluster.inter_host, hosts, num_bytes / min(sizes)),
        (cluster.intra_host, max(sizes), num_bytes),
    ):
        seconds += (n - 1) * pieces * link.latency_s + (n - 1) / n * whole / (ONE_WAY * link.bytes_per_s)
    return seconds


def exposed(compute_s, collective_s, share):
    return collective_s - share * min(compute_s, collective_s)


def stage_seconds(table, cluster, microbatch_rows, blocks, devices, mode):
    """Forward and backward of a microbatch, and the tail."""
    remat, sharding, offload = mode
    rows, r = microbatch_rows // len(devices), len(devices)
    prices = [[table.price(b, rows, cluster.device(d)) for b in blocks] for d in devices]
    forward_s = max(sum(p.forward_s for p in on_device) for on_device in prices)
    backward_s = max(sum(p.backward_s[remat] for p in on_device) for on_device in prices)
    held = states(table, blocks)
    used = sum(s.parameters + s.prologue for s in held)
    gradients = sum(s.gradients for s in held)
    optimizer = sum(s.optimizer for s in held)
    slowest = min((cluster.device(d) for d in devices), key=lambda d: d.bytes_per_s)
    tail_s = max(sum(p.once_s for p in on_device) for on_device in prices)
    hosts = cluster.host(cluster.num_devices - 1)
    for tie in table.ties:
        if set(tie.blocks) & set(blocks) and tie.blocks[0] not in blocks:
            tail_s += 2 * (cluster.inter_host if hosts else cluster.intra_host).seconds(tie.state.parameters)
    shards = 1 if sharding is Sharding.REPLICATED else r
    tail_s += sum(s.update_bytes for s in held) / shards / slowest.bytes_per_s
    if offload:
        tail_s += 2 * optimizer / shards / slowest.host_bytes_per_s
    if r > 1:
        once, each = gather_seconds(cluster, devices, gradients), len(blocks)
        if sharding is Sharding.REPLICATED:
            tail_s += exposed(backward_s, 2 * once, 0.75)
        elif sharding is Sharding.ZERO1:
            tail_s += exposed(backward_s, once, 0.75)
        else:
            gather = gather_seconds(cluster, devices, used, each) * (sharding is Sharding.FSDP)
            scatter = gather_seconds(cluster, devices, gradients, each)
            forward_s += exposed(forward_s, gather, 0.5)
            backward_s += exposed(backward_s, gather + scatter, 0.5)
        if sharding in (Sharding.ZERO1, Sharding.ZERO2) and gradients:
            tail_s += gather_seconds(cluster, devices, used)
    return forward_s, backward_s, tail_s
