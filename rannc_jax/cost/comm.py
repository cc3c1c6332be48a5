"""Seconds of moving bytes over a class of links: point to point, and ring collectives.

A `LinkSpec` says what one device can send, each way; a ring of n devices moves (n - 1) / n of the
bytes over every link once for a gather or a scatter of the sum, and twice for an all-reduce (Patarasuk
and Yuan, JPDC 2009), in as many steps as there are messages. `num_bytes` is always the size of the
whole array, not of a device's share. Over several hosts the collectives are taken apart: every device
exchanges its slice with its like on the other hosts, and the hosts exchange slices inside.
"""

from dataclasses import dataclass
from typing import Any

from rannc_jax.cluster import LinkSpec

COLLECTIVE_SHARE = 0.7
"""Collectives reach this share of a link's copy rate: on two NVLink H200 a 512 MiB all-reduce ran at
241 GiB/s where a copy ran at 347."""


def send(link: LinkSpec, num_bytes: float) -> float:
    """Seconds to copy `num_bytes` from one device to another."""
    return link.seconds(num_bytes)


def all_gather(link: LinkSpec, num_bytes: float, num_devices: int) -> float:
    """Seconds until every device holds all `num_bytes`, of which each began with an equal share.

    Example:
        >>> link = LinkSpec(bytes_per_s=100e9, latency_s=0.0)
        >>> round(all_gather(link, 70e9, 2), 3)
        0.5
    """
    if num_devices < 2 or num_bytes <= 0:
        return 0.0
    steps = num_devices - 1
    rate = link.bytes_per_s * COLLECTIVE_SHARE
    return steps * (link.latency_s + num_bytes / num_devices / rate)


def reduce_scatter(link: LinkSpec, num_bytes: float, num_devices: int) -> float:
    """Seconds until every device holds its equal share of the sum of `num_devices` arrays."""
    return all_gather(link, num_bytes, num_devices)


def all_reduce(link: LinkSpec, num_bytes: float, num_devices: int) -> float:
    """Seconds until every device holds the sum of `num_devices` arrays of `num_bytes` each."""
    return 2 * all_gather(link, num_bytes, num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The devices of a collective: inside one host, or over several.

    Args:
        intra_host, inter_host: links of a device to the others.
        hosts: how many hosts there are.
        fewest, most: devices on the host that has fewest, and most.
    """

    intra_host: LinkSpec
    inter_host: LinkSpec
    hosts: int
    fewest: int
    most: int

    def all_gather(self, num_bytes: Any, pieces: Any = 1) -> Any:
        """Seconds until every device holds all `num_bytes`, moved in so many pieces (arrays broadcast).

        Example:
            >>> fast, slow = (LinkSpec(bytes_per_s=b, latency_s=0.0) for b in (100e9, 10e9))
            >>> ring = Ring(intra_host=fast, inter_host=slow, hosts=2, fewest=4, most=4)
            >>> round(ring.all_gather(56e9), 3)  # 14e9 over two hosts, then 56e9 over four devices
            1.6
        """
        between, inside = self.inter_host, self.intra_host
        latency_s = (self.hosts - 1) * between.latency_s + (self.most - 1) * inside.latency_s
        per_byte = (1 - 1 / self.hosts) / self.fewest / (between.bytes_per_s * COLLECTIVE_SHARE)
        per_byte += (1 - 1 / self.most) / (inside.bytes_per_s * COLLECTIVE_SHARE)
        return (num_bytes > 0) * (pieces * latency_s + num_bytes * per_byte)

    def reduce_scatter(self, num_bytes: Any, pieces: Any = 1) -> Any:
        """Seconds until every device holds its share of the sum."""
        return self.all_gather(num_bytes, pieces)

    def all_reduce(self, num_bytes: Any) -> Any:
        """Seconds until every device holds the sum."""
        return 2 * self.all_gather(num_bytes)
