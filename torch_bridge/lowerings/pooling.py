"""Pooling over evenly spaced windows: `[..., *space]` or, told so, `[batch, *space, channels]`."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings.convolution import each
from torch_bridge.lowerings.layouts import in_space
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


def _extra_end(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool) -> int:
    """Padding to add at the end so that a window that starts inside is kept (ceil_mode)."""
    reach = size + 2 * pad - dilation * (kernel - 1) - 1
    count = reach // stride + 1
    if ceil_mode and reach % stride:
        count += 1
        if (count - 1) * stride >= size + pad:  # a window must start inside the input or its left padding
            count -= 1
    return max((count - 1) * stride + dilation * (kernel - 1) + 1 - size - 2 * pad, 0)


def _windows(
    x: Any, lead: int, space: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Any:
    """Arguments of `lax.reduce_window`, for `space` dims that come after `lead` others."""
    kernel = each(kernel, space)
    stride = each(stride, space) if stride else kernel
    padding, dilation = each(padding, space), each(dilation, space)
    sizes = x.shape[lead : lead + space]
    ends = [
        _extra_end(size, k, s, p, d, ceil_mode)
        for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True)
    ]
    before, after = (1,) * lead, (1,) * (x.ndim - lead - space)
    pads = [(p, p + e) for p, e in zip(padding, ends, strict=True)]
    return {
        "window_dimensions": before + kernel + after,
        "window_strides": before + stride + after,
        "padding": [(0, 0)] * lead + pads + [(0, 0)] * len(after),
        "window_dilation": before + dilation + after,
    }


def _lead(x: Any, space: int, channels_last: bool) -> int:
    """How many dims come before those of space."""
    return 1 if channels_last else x.ndim - space


def _max_pool(space: int) -> Any:
    def pool(
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        *,
        channels_last: bool = False,
    ) -> Any:
        lead = _lead(x, space, channels_last)
        if max(each(dilation, space)) > 1:  # JAX has no derivative of this one
            return _dilated_max_pool(x, lead, space, kernel, stride, padding, dilation, ceil_mode)
        windows = _windows(x, lead, space, kernel, stride, padding, dilation, ceil_mode)
        return lax.reduce_window(x, _lowest(x.dtype), lax.max, **windows)

    return pool


def _dilated_max_pool(x: Any, lead: int, space: int, *windows: Any) -> Any:
    """By positions of the maxima, and a gather."""
    behind = tuple(range(lead + space, x.ndim))
    order = (*range(lead), *behind, *range(lead, lead + space))
    pooled, _ = _max_pool_with_indices(space)(jnp.transpose(x, order), *windows)
    return jnp.transpose(pooled, [order.index(dim) for dim in range(x.ndim)])


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.array(-np.inf, dtype)
    return np.array(jnp.iinfo(dtype).min, dtype)


for _space, _op in enumerate((aten.max_pool1d, aten.max_pool2d, aten.max_pool3d), 1):
    lowering(_op.default, layouts=in_space(_space + 2))(_max_pool(_space))


def _max_pool_with_indices(space: int) -> Any:
    def pool(
        x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> tuple[Any, Any]:
        """(maxima, flat positions of them within the space of each channel)."""
        lead = x.ndim - space
        windows = _windows(x, lead, space, kernel, stride, padding, dilation, ceil_mode)
        flat = jnp.arange(math.prod(x.shape[lead:]), dtype=np.int32).reshape(x.shape[lead:])
        flat = jnp.broadcast_to(flat, x.shape)

        def larger(a: Any, b: Any) -> Any:
            take = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
            return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

        start = (_lowest(x.dtype), np.int32(np.iinfo(np.int32).max))
        _, index = lax.reduce_window((lax.stop_gradient(x), flat), start, larger, **windows)
        rows = x.reshape(*x.shape[:lead], -1)
        values = jnp.take_along_axis(rows, index.reshape(*x.shape[:lead], -1), -1, mode="clip")
        return values.reshape(index.shape), index

    return pool


for _space, _op in enumerate(
    (aten.max_pool1d_with_indices, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices), 1
):
    lowering(_op.default)(_max_pool_with_indices(_space))


def _avg_pool(space: int) -> Any:
    def pool(
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        channels_last: bool = False,
    ) -> Any:
        lead = _lead(x, space, channels_last)
        windows = _windows(x, lead, space, kernel, stride, padding, 1, ceil_mode)
        zero = np.zeros((), x.dtype)
        total = lax.reduce_window(x, zero, lax.add, **windows)
        if divisor_override is not None:
            return total / divisor_override
        counts = _counts(x, lead, space, windows, padding, count_include_pad)
        return total / (counts[..., None] if channels_last else counts)

    return pool


def _counts(x: Any, lead: int, space: int, windows: Any, padding: Any, include_pad: bool) -> Any:
    """How many elements each window averages; what ceil_mode adds beyond the padding never counts."""
    where = slice(lead, lead + space)
    size = x.shape[where]
    pads = each(padding, space)
    inside = np.ones(size, np.float32)
    wide = np.pad(inside, [(p, p) for p in pads], constant_values=1.0 if include_pad else 0.0)
    for dim, (_, end) in enumerate(windows["padding"][where]):
        extra = [(0, 0)] * space
        extra[dim] = (0, end - pads[dim])
        wide = np.pad(wide, extra)
    kernel, stride = windows["window_dimensions"][where], windows["window_strides"][where]
    counted = np.lib.stride_tricks.sliding_window_view(wide, kernel)
    counted = counted[tuple(slice(None, None, s) for s in stride)]
    return jnp.asarray(counted.sum(tuple(range(-space, 0))), x.dtype)


for _space, _op in enumerate((aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d), 1):
    lowering(_op.default, layouts=in_space(_space + 2))(_avg_pool(_space))


def _bins(size: int, count: int) -> list[tuple[int, int]]:
    """torch's adaptive bins: from floor(i * size / count) to ceil((i + 1) * size / count)."""
    return [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def _adaptive(x: Any, output_size: Any, space: int, channels_last: bool) -> Any:
    lead = _lead(x, space, channels_last)
    for dim, count in enumerate(each(output_size, space), lead):
        size = x.shape[dim]
        if count is None or count == size:
            continue
        if size % count == 0:
            x = jnp.mean(x.reshape(*x.shape[:dim], count, size // count, *x.shape[dim + 1 :]), dim + 1)
        else:
            parts = [jnp.mean(lax.slice_in_dim(x, a, b, axis=dim), dim) for a, b in _bins(size, count)]
            x = jnp.stack(parts, dim)
    return x


@lowering(aten.adaptive_avg_pool1d.default, layouts=in_space(3))
def adaptive_avg_pool1d(x: Any, output_size: Any, *, channels_last: bool = False) -> Any:
    return _adaptive(x, output_size, 1, channels_last)


@lowering(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default, layouts=in_space(4))
def adaptive_avg_pool2d(x: Any, output_size: Any, *, channels_last: bool = False) -> Any:
    return _adaptive(x, output_size, 2, channels_last)


@lowering(aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default, layouts=in_space(5))
def adaptive_avg_pool3d(x: Any, output_size: Any, *, channels_last: bool = False) -> Any:
    return _adaptive(x, output_size, 3, channels_last)
