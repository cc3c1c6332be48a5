"""What the machines are, as plain data: devices, links, hosts. No device is touched here.

A `ClusterSpec` is what a mesh file says and what a plan is made for. Units are in the names and SI
(bytes, seconds, flops); files may speak in GiB and microseconds, `config` converts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rannc_jax.errors import ConfigError, message

EFFICIENCY = {"convolution": 0.6, "attention": 1.0}
"""Shares of the matrix rate that other kernels reach, where nobody has measured them: convolutions of
ResNet shapes reach about 0.6 of the rate of large products in cuDNN."""

MOST_DEVICES = 65_536
"""More than any machine there is: a larger number is a slip of the pen, and plans grow with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One kind of accelerator.

    Args:
        kind: name of a preset or calibration file ("h200", "cpu").
        platform: "gpu" or "cpu": which lowering rules the plan assumes.
        memory_bytes: device memory.
        memory_margin: share of the memory that the planner leaves free, in [0, 1).
        flops_per_s: best dense matrix product rate by dtype name ("float32", "bfloat16", ...).
        efficiency: share of that rate that classes of kernels reach ("convolution", "attention": fused
            attention); what is missing stands at its usual share.
        bytes_per_s: device memory bandwidth, read plus write.
        launch_s: seconds that any equation costs at least, in a compiled program.
        dispatch_s: seconds of host time for one program call.
        leaf_s: seconds of host time for each array on each device that a call takes or gives.
        host_bytes_per_s: rate of copies to and from pinned host memory, each way.
    """

    kind: str
    platform: str
    memory_bytes: int
    memory_margin: float = 0.08
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: float
    launch_s: float = 2e-6
    dispatch_s: float = 60e-6
    leaf_s: float = 1.5e-6
    host_bytes_per_s: float = 12e9

    def __post_init__(self) -> None:
        rates = (self.bytes_per_s, self.host_bytes_per_s, *self.flops_per_s.values())
        times = (self.launch_s, self.dispatch_s, self.leaf_s)
        usable = self.memory_bytes > 0 and 0 <= self.memory_margin < 1 and self.usable_bytes > 0
        if not (usable and all(map(_is_rate, rates)) and all(map(_is_time, times))):
            raise ConfigError(
                message(
                    f"device kind {self.kind!r} is not usable.",
                    f"memory_bytes={self.memory_bytes}, bytes_per_s={self.bytes_per_s}, "
                    f"host_bytes_per_s={self.host_bytes_per_s}, "
                    f"memory_margin={self.memory_margin}, launch_s={self.launch_s}, "
                    f"dispatch_s={self.dispatch_s}, leaf_s={self.leaf_s}",
                    f"flops_per_s={dict(self.flops_per_s)}",
                    hint="positive memory, rates of 1 to 1e30 a second, times of 0 to 1e6 s, 0 <= margin < 1",
                )
            )
        object.__setattr__(self, "flops_per_s", dict(self.flops_per_s))
        object.__setattr__(self, "efficiency", {**EFFICIENCY, **self.efficiency})

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may fill."""
        return int(self.memory_bytes * (1 - self.memory_margin))


def _is_rate(per_s: float) -> bool:
    return 1 <= per_s <= 1e30


def _is_time(seconds: float) -> bool:
    return 0 <= seconds <= 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One class of links between devices, each way and per device."""

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not (_is_rate(self.bytes_per_s) and _is_time(self.latency_s)):
            raise ConfigError(
                message(
                    "a link is not usable.",
                    f"bytes_per_s={self.bytes_per_s}, latency_s={self.latency_s}",
                    hint="a bandwidth from 1 to 1e30 bytes a second, and a latency of 0 to 1e6 s.",
                )
            )

    def seconds(self, num_bytes: float) -> float:
        """Time to move `num_bytes` from one device to another."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """`hosts` equal hosts with `count_per_host` devices each."""

    device: DeviceSpec
    hosts: int = 1
    count_per_host: int

    @property
    def num_devices(self) -> int:
        return self.hosts * self.count_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """All devices, in order, and the links between them.

    Device indices count through the groups in order, host by host. `axes` holds what a mesh file fixes
    ("stage" and "data" sizes); what is missing is searched.
    """

    groups: tuple[DeviceGroup, ...]
    intra_host: LinkSpec
    inter_host: LinkSpec
    axes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= MOST_DEVICES:
            raise ConfigError(
                message(
                    f"the cluster has {self.num_devices} devices.",
                    hint=f"1 to {MOST_DEVICES}: hosts times count_per_host, over all [[devices]].",
                )
            )
        object.__setattr__(self, "axes", dict(self.axes))

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    def device(self, index: int) -> DeviceSpec:
        """The kind of device `index` (0 <= index < num_devices)."""
        return self.groups[self._group_of(index)[0]].device

    def host(self, index: int) -> int:
        """The host that device `index` sits in, counted over all groups."""
        group, offset = self._group_of(index)
        before = sum(g.hosts for g in self.groups[:group])
        return before + offset // self.groups[group].count_per_host

    def link(self, source: int, target: int) -> LinkSpec:
        """The link between two devices."""
        return self.intra_host if self.host(source) == self.host(target) else self.inter_host

    def _group_of(self, index: int) -> tuple[int, int]:
        offset = index
        for position, group in enumerate(self.groups):
            if offset < group.num_devices:
                return position, offset
            offset -= group.num_devices
        raise IndexError(f"device {index} of {self.num_devices}")
