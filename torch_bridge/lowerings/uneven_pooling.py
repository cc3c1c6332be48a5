"""Max pooling over windows that are not evenly spaced (adaptive and fractional), and its inverse.

Every window is gathered at the width of the widest; what lies beyond a narrower one does not count.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import jax_dtype

aten = torch.ops.aten


def _max_over_windows(x: Any, starts: Sequence[Any], lengths: Sequence[Any]) -> tuple[Any, Any]:
    """(values, positions in the flattened spatial dims), for the last dims of x.

    Args:
        x: `[..., *spatial]`.
        starts: for each spatial dim, where its windows begin `[windows]`.
        lengths: how long they are (known at trace time).
    """
    spatial = x.shape[x.ndim - len(starts) :]
    rank = len(spatial)
    position, valid = jnp.zeros((), jax_dtype(torch.int64)), jnp.ones((), bool)
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        offset = np.arange(max(length))
        shape = [1] * (2 * rank)
        shape[dim], shape[rank + dim] = len(length), len(offset)
        place = jnp.minimum(start[:, None] + offset, spatial[dim] - 1).reshape(shape)
        position = position * spatial[dim] + place
        valid = valid & (offset < np.asarray(length)[:, None]).reshape(shape)
    windows = position.shape[:rank]
    position = position.reshape(*windows, -1)
    candidates = jnp.take(x.reshape(*x.shape[: x.ndim - rank], math.prod(spatial)), position, axis=-1)
    candidates = jnp.where(valid.reshape(position.shape), candidates, -jnp.inf)
    best = jnp.argmax(lax.stop_gradient(candidates), -1)[..., None]
    values = jnp.take_along_axis(candidates, best, -1)[..., 0]
    return values, jnp.take_along_axis(jnp.broadcast_to(position, candidates.shape), best, -1)[..., 0]


@lowering(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(x: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    starts, lengths = [], []
    for size, windows in zip(x.shape[x.ndim - len(output_size) :], output_size, strict=True):
        step = np.arange(windows)
        begin, end = step * size // windows, -(-(step + 1) * size // windows)
        starts.append(jnp.asarray(begin))
        lengths.append(end - begin)
    return _max_over_windows(x, starts, lengths)


@lowering(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(
    x: Any, kernel_size: Sequence[int], output_size: Sequence[int], samples: Any
) -> tuple[Any, Any]:
    """x `[(batch,) channels, *spatial]`; samples `[batch, channels, rank]`, in 2D last spatial dim first."""
    rank = len(kernel_size)
    spatial = x.shape[x.ndim - rank :]
    order = samples[..., ::-1] if rank == 2 else samples

    def one(image: Any, sample: Any) -> tuple[Any, Any]:
        starts = [
            _fractional_starts(sample[d], spatial[d], output_size[d], kernel_size[d]) for d in range(rank)
        ]
        lengths = [np.full(windows, size) for windows, size in zip(output_size, kernel_size, strict=True)]
        return _max_over_windows(image, starts, lengths)

    values, positions = jax.vmap(one)(x.reshape(-1, *spatial), order.reshape(-1, rank))
    shape = (*x.shape[: x.ndim - rank], *output_size)
    return values.reshape(shape), positions.reshape(shape)


def _fractional_starts(sample: Any, size: int, windows: int, kernel: int) -> Any:
    """The last window ends with the image; the others follow the sample."""
    last = jnp.asarray([size - kernel])
    if windows == 1:
        return last
    alpha = (size - kernel) / (windows - 1)
    steps = jnp.arange(windows - 1)
    starts = jnp.trunc((steps + sample) * alpha) - jnp.trunc(sample * alpha)
    return jnp.concatenate([starts.astype(last.dtype), last])


@lowering(aten.max_unpool2d.default, aten.max_unpool3d.default)
def max_unpool(x: Any, indices: Any, output_size: Sequence[int], *_: Any) -> Any:
    """Puts every value back where it came from, zeros elsewhere."""
    rank = len(output_size)
    lead = x.shape[: x.ndim - rank]
    flat = (math.prod(lead), math.prod(x.shape[x.ndim - rank :]))
    out = _placed(x.reshape(flat), indices.reshape(flat), math.prod(output_size))
    return out.reshape(*lead, *output_size)


@lowering(aten.max_pool2d_with_indices_backward.default)
def max_pool_backward(
    gradient: Any,
    x: Any,
    _kernel: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    _ceil_mode: bool,
    indices: Any,
) -> Any:
    """Every gradient goes to the element that its window took."""
    size = x.shape[-2] * x.shape[-1]
    flat = (math.prod(x.shape[:-2]), -1)
    rows = jnp.arange(flat[0])[:, None]
    out = jnp.zeros((flat[0], size), x.dtype)
    return out.at[rows, indices.reshape(flat)].add(gradient.reshape(flat)).reshape(x.shape)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _placed(x: Any, places: Any, size: int) -> Any:
    rows = jnp.arange(x.shape[0])[:, None]
    return jnp.zeros((x.shape[0], size), x.dtype).at[rows, places].set(x)


@_placed.defjvp
def _placed_jvp(size: int, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    """Where windows overlap, torch gives the place's gradient to every value that names it."""
    x, places = primals
    rows = jnp.arange(x.shape[0])[:, None]
    moved = jnp.zeros((x.shape[0], size), x.dtype).at[rows, places].add(tangents[0])
    return _placed(x, places, size), moved
