"""One value that lives on devices and may be looked at, and written, from the host.

The device array is what the runtime reads and replaces; a host copy is made when somebody asks for it,
once, and kept until the next device value. Torch counts the writes to a tensor and all its views, so a
host copy that was written to (through whatever view) is noticed and goes back to the devices when they
next need the value.
"""

from dataclasses import dataclass

import jax
import torch

from torch_bridge.tensors import jax_dtype, to_jax, to_torch


@dataclass(slots=True)
class Traffic:
    """Bytes of tensor values copied between host and devices by this door, both ways, since the start."""

    to_host: int = 0
    to_device: int = 0


TRAFFIC = Traffic()


class Storage:
    """A value under a torch dtype.

    Args:
        array: on devices; a host write is put back where it lies.
        dtype: what torch sees; int64 where JAX holds int32.
    """

    __slots__ = ("_array", "_host", "_seen", "dtype")

    def __init__(self, array: jax.Array, dtype: torch.dtype) -> None:
        self._array = array
        self._host: torch.Tensor | None = None
        self._seen = 0
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    @property
    def array(self) -> jax.Array:
        """The value on its devices."""
        host = self._host
        if host is not None and host._version != self._seen:
            value = to_jax(host, what="a tensor").astype(jax_dtype(self.dtype))
            self._array = jax.device_put(value, self._array.sharding)
            self._seen = host._version
            TRAFFIC.to_device += self._array.nbytes
        return self._array

    @property
    def host(self) -> torch.Tensor:
        """The value on the host: a plain tensor; what is written to it reaches the devices later."""
        if self._host is None:
            with torch.inference_mode(False):  # inference tensors do not count their writes
                self._host = to_torch(self._array, dtype=self.dtype)
            self._seen = self._host._version
            TRAFFIC.to_host += self._array.nbytes
        return self._host

    def host_is_newer(self) -> None:
        """Somebody wrote to the host copy where torch does not count."""
        self._seen = -1

    def replace(self, array: jax.Array) -> None:
        """Give it a new device value; older host copies are no longer it."""
        assert array.shape == self._array.shape, (array.shape, self._array.shape)
        self._array, self._host = array, None
