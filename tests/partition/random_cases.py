"""Random small programs and clusters, the same for the same seed."""

import random
from dataclasses import replace

from rannc_jax.cluster import ClusterSpec, DeviceGroup, DeviceSpec, LinkSpec
from rannc_jax.cost.table import AffineBlock, AffineTable, BlockValue, StateBytes, TiedState


def device(kind="a", memory_bytes=10**9, margin=0.0, bytes_per_s=1e6, dispatch_s=0.0, leaf_s=0.0):
    return DeviceSpec(
        kind=kind,
        platform="cpu",
        memory_bytes=memory_bytes,
        memory_margin=margin,
        bytes_per_s=bytes_per_s,
        dispatch_s=dispatch_s,
        leaf_s=leaf_s,
    )


LINK = LinkSpec(bytes_per_s=1e5, latency_s=1e-5)


def cluster(*groups, intra=LINK, inter=None):
    return ClusterSpec(groups=groups, intra_host=intra, inter_host=inter or intra)


def uniform(num_devices, **spec):
    return cluster(DeviceGroup(device=device(**spec), count_per_host=num_devices))


def random_cluster(rng, num_devices):
    """One host, two hosts, or two kinds."""
    memory = rng.choice([10**9, 10**9, 6000, 3000])
    shape = rng.choice(["one host", "one host", "two hosts", "two kinds"]) if num_devices > 1 else "one host"
    if shape == "one host":
        return uniform(num_devices, memory_bytes=memory)
    slow = LinkSpec(bytes_per_s=2e4, latency_s=1e-4)
    first = num_devices // 2
    if shape == "two hosts":
        spec = device(memory_bytes=memory)
        return cluster(
            DeviceGroup(device=spec, count_per_host=first),
            DeviceGroup(device=spec, count_per_host=num_devices - first),
            inter=slow,
        )
    return cluster(
        DeviceGroup(device=device(memory_bytes=memory), count_per_host=first),
        DeviceGroup(
            device=device("b", memory_bytes=2 * memory, bytes_per_s=5e5), count_per_host=num_devices - first
        ),
        inter=slow,
    )


def random_table(rng, num_blocks, *, chain):
    values = []
    for consumer in range(1, num_blocks):
        producers = {consumer - 1} if chain else {rng.randrange(consumer)}
        producers |= {p for p in range(consumer - 1) if rng.random() < 0.2}
        for producer in sorted(producers):
            values.append(
                BlockValue(
                    name=f"v{producer}_{consumer}",
                    producer=producer,
                    consumers=(consumer,),
                    bytes_per_row=rng.choice([1, 10, 60]),
                    fixed_bytes=rng.choice([0, 0, 20]),
                    needs_grad=rng.random() < 0.8,
                )
            )
    ties = ()
    if num_blocks > 2 and rng.random() < 0.3:
        size = rng.randrange(10, 300)
        state = StateBytes(parameters=size, gradients=size, optimizer=2 * size)
        ties = (TiedState(path="tied", blocks=(0, num_blocks - 1), state=state),)
    blocks = tuple(random_block(rng, index) for index in range(num_blocks))
    return AffineTable(affine=blocks, values=tuple(values), ties=ties, speeds={"b": 0.6})


def random_block(rng, index):
    size = rng.choice([0, 50, 200, 800])
    row_s = rng.choice([1e-4, 3e-4, 1e-3])
    fixed_s = rng.choice([0.0, 2e-4])
    saved = rng.choice([10, 50, 300])
    return AffineBlock(
        path=f"block_{index}",
        state=StateBytes(parameters=size, gradients=size, optimizer=2 * size, constants=rng.choice([0, 30])),
        forward_s=(fixed_s, row_s),
        backward_s=((fixed_s, 2 * row_s), (fixed_s, 2.3 * row_s), (2 * fixed_s, 3 * row_s)),
        residual_bytes=((0, saved), (0, saved // 2), (0, saved // 10)),
        working_bytes=((0, 5), (0, 10), (10, saved)),
        once_s=rng.choice([0.0, 1e-4]),
        num_arrays=index + 2,
    )


def random_problem(seed, *, most_blocks=5, most_devices=4):
    """(table, cluster, rows)"""
    rng = random.Random(seed)
    num_blocks = rng.randint(1, most_blocks)
    num_devices = rng.randint(1, most_devices)
    table = random_table(rng, num_blocks, chain=seed % 2 == 0)
    cluster, rows = random_cluster(rng, num_devices), rng.choice([1, 2, 4, 6])
    return table, with_slow_host(cluster, rng.choice([0.0, 2e-4, 1e-3])), rows


def with_slow_host(cluster, dispatch_s):
    """The same devices, whose programs take their host that long to call."""
    host = {"dispatch_s": dispatch_s, "leaf_s": dispatch_s / 20}
    groups = tuple(replace(group, device=replace(group.device, **host)) for group in cluster.groups)
    return replace(cluster, groups=groups)


def problem_on_hosts(seed):
    """(table, cluster, rows) of more blocks, on several hosts or two kinds of device."""
    rng = random.Random(seed)
    table = random_table(rng, rng.randint(5, 14), chain=rng.random() < 0.6)
    memory = rng.choice([10**9, 10**9, 20000, 8000])
    slow = LinkSpec(bytes_per_s=rng.choice([5e3, 2e4, 1e5]), latency_s=rng.choice([0, 1e-4]))
    hosts, count = rng.choice([(2, 2), (2, 4), (3, 2), (4, 2), (2, 3)])
    kinds = [device(memory_bytes=memory), device("b", memory_bytes=2 * memory, bytes_per_s=5e5)]
    groups = [DeviceGroup(device=kinds[0], hosts=hosts, count_per_host=count)]
    if rng.random() < 0.4:
        groups = [DeviceGroup(device=kind, count_per_host=count) for kind in rng.sample(kinds, 2)]
    return (
        table,
        with_slow_host(cluster(*groups, inter=slow), rng.choice([0, 0, 2e-4])),
        rng.choice([4, 8, 12, 16]),
    )


def smaller_clusters(whole):
    """Each kind alone, fewer hosts, half of a host."""
    first = whole.groups[0]
    if len(whole.groups) > 1:
        yield from (replace(whole, groups=(group,)) for group in whole.groups)
    else:
        yield from (replace(whole, groups=(replace(first, hosts=h),)) for h in range(1, first.hosts))
    half = replace(first, hosts=1, count_per_host=max(1, first.count_per_host // 2))
    yield replace(whole, groups=(half,))
