"""An instrument that sees values pass through host memory.

`jax.transfer_guard` sees neither `np.asarray` nor a resharding `device_put` on CPU, so the ways to the
host are patched: `Array._value` and `Array.__array__` (every conversion ends in one of them), and
`jax.device_put`, which stays on the devices only between as many devices and equal specs.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding


@dataclass
class HostTraffic:
    """What was seen: shapes that were read on the host, and `device_put`s that go through it."""

    materialised: list[tuple[int, ...]] = field(default_factory=list)
    reshards: list[str] = field(default_factory=list)
    device_puts: int = 0

    @property
    def none(self) -> bool:
        return not self.materialised and not self.reshards


@contextlib.contextmanager
def watch_host_traffic() -> Iterator[HostTraffic]:
    """Count host materialisations and resharding copies while the block runs."""
    seen = HostTraffic()
    array = type(jnp.zeros(()))
    value, to_numpy, device_put = array._value, array.__array__, jax.device_put

    def watched_value(self: Any) -> Any:
        seen.materialised.append(self.shape)
        return value.fget(self)

    def watched_to_numpy(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.materialised.append(self.shape)
        return to_numpy(self, *args, **kwargs)

    def watched_device_put(x: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        seen.device_puts += 1
        leaves = jax.tree.leaves(x)
        targets = device if isinstance(device, (list, tuple)) else [device] * len(leaves)
        for leaf, target in zip(leaves, targets, strict=True):
            problem = _problem(leaf, target)
            if problem:
                seen.reshards.append(problem)
        return device_put(x, device, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array, "_value", property(watched_value))
        patch.setattr(array, "__array__", watched_to_numpy)
        patch.setattr(jax, "device_put", watched_device_put)
        yield seen


def _problem(leaf: Any, target: Any) -> str:
    """Why this copy would touch the host, or "" if it would not."""
    if not isinstance(leaf, jax.Array):
        return f"{type(leaf).__name__} comes from the host"
    source = leaf.sharding
    if isinstance(target, jax.Device):
        target = SingleDeviceSharding(target)
    if len(source.device_set) != len(target.device_set):
        return f"{leaf.shape}: {len(source.device_set)} devices to {len(target.device_set)}"
    if isinstance(source, NamedSharding) and isinstance(target, NamedSharding):
        return "" if source.spec == target.spec else f"{leaf.shape}: {source.spec} to {target.spec}"
    return "" if len(source.device_set) == 1 else f"{leaf.shape}: {source} to {target}"


def sub_mesh(*numbers: int) -> Mesh:
    """A 1-D mesh with axis "data" over these devices of the process."""
    devices = jax.devices()
    return Mesh(np.array([devices[n] for n in numbers]), ("data",))
