"""How a value of a program lies in memory: its dims in torch's order, or its channels last.

torch numbers the dims of an image `[batch, channels, *space]`; XLA's CPU backend and the tensor cores of
GPUs convolve `[batch, *space, channels]`. A value that lies so is a `ChannelsLast`. What the program means
is always torch's order: shapes, dims and random draws are those of that order. docs/explain/layouts.md.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.program import tree_map


@dataclass(frozen=True, slots=True)
class ChannelsLast:
    """A value `[batch, channels, *space]`, held as `[batch, *space, channels]`.

    `shape`, `ndim`, `size` and `dtype` are those of the value.
    """

    array: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        batch, *space, channels = self.array.shape
        return (batch, channels, *space)

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def size(self) -> int:
        return self.array.size

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def is_array(leaf: Any) -> bool:
    """Whether a leaf of an operator's arguments is a tensor of torch, in either layout."""
    return isinstance(leaf, jax.Array | np.ndarray | ChannelsLast)


def place(dim: int, ndim: int) -> int:
    """Which axis of a `ChannelsLast`'s array holds this dim."""
    dim %= ndim
    return (0, ndim - 1)[dim] if dim < 2 else dim - 1


def channels_last(x: Any) -> Any:
    """The array `[batch, channels, *space]` as `[batch, *space, channels]`."""
    batch, channels, *space = x.shape
    if channels == 1 or math.prod(space) == 1:  # the elements keep their order
        return jnp.reshape(x, (batch, *space, channels))
    return jnp.moveaxis(x, 1, -1)


def channels_second(x: Any) -> Any:
    """The inverse of `channels_last`."""
    batch, *space, channels = x.shape
    if channels == 1 or math.prod(space) == 1:
        return jnp.reshape(x, (batch, channels, *space))
    return jnp.moveaxis(x, -1, 1)


def plain(tree: Any) -> Any:
    """Nested arguments or results, every array in torch's order."""
    return tree_map(
        lambda leaf: channels_second(leaf.array) if isinstance(leaf, ChannelsLast) else leaf, tree
    )
