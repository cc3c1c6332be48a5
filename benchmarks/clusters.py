"""Clusters that plans are made for; none of them needs to be there."""

from collections.abc import Callable

from rannc_jax.cluster import ClusterSpec, DeviceGroup, DeviceSpec
from rannc_jax.cost.presets import device_preset, link_preset

PER_HOST = 8


def hosts_of_8(
    devices: int, kind: str = "h200", within: str = "nvlink4", between: str = "net100g"
) -> ClusterSpec:
    """`devices` of one kind, eight a host."""
    hosts = -(-devices // PER_HOST)
    group = DeviceGroup(device=device_preset(kind), hosts=hosts, count_per_host=devices // hosts)
    return ClusterSpec(groups=(group,), intra_host=link_preset(within), inter_host=link_preset(between))


def uniform_cluster(device: DeviceSpec, count: int, link: str) -> ClusterSpec:
    """One host with equal devices."""
    group = DeviceGroup(device=device, count_per_host=count)
    return ClusterSpec(groups=(group,), intra_host=link_preset(link), inter_host=link_preset("net100g"))


def mixed_hosts(*hosts: tuple[str, int, int], within: str, between: str) -> ClusterSpec:
    """Groups of (kind, hosts, devices a host), with the same links everywhere."""
    groups = tuple(
        DeviceGroup(device=device_preset(kind), hosts=number, count_per_host=per_host)
        for kind, number, per_host in hosts
    )
    return ClusterSpec(groups=groups, intra_host=link_preset(within), inter_host=link_preset(between))


CLUSTERS: dict[str, Callable[[], ClusterSpec]] = {
    "8 x H200, NVLink": lambda: hosts_of_8(8),
    "4 x 8 x H200, 100 Gb": lambda: hosts_of_8(32),
    "8 x V100 16 GB, PCIe": lambda: hosts_of_8(8, "v100", "pcie3"),
    "8 x H200 + 2 x 4 x A100": lambda: mixed_hosts(
        ("h200", 1, 8), ("a100", 2, 4), within="nvlink3", between="net100g"
    ),
    "3 x 4 x L40S + 4 x A100": lambda: mixed_hosts(
        ("l40s", 3, 4), ("a100-80gb", 1, 4), within="pcie4", between="net25g"
    ),
}


def matmul_dtype(cluster: ClusterSpec) -> str:
    """bfloat16, or float16 where the devices have no bfloat16 units."""
    rates = cluster.device(0).flops_per_s
    return "bfloat16" if rates["bfloat16"] > 2 * rates["float32"] else "float16"
