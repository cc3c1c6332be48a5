"""Resampling of images: `[..., *space]` or, told so, `[batch, *space, channels]`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings.layouts import in_space
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten
Kernel = Callable[[np.ndarray], np.ndarray]


def _source_positions(count: int, size: int, scale: float | None, align_corners: bool) -> np.ndarray:
    """Where output positions lie in the input, as real numbers."""
    index = np.arange(count, dtype=np.float64)
    if align_corners:
        return index * ((size - 1) / (count - 1) if count > 1 else 0.0)
    factor = size / count if scale is None or scale <= 0 else 1.0 / scale
    return (index + 0.5) * factor - 0.5


def _linear_matrix(count: int, size: int, scale: float | None, align_corners: bool) -> np.ndarray:
    position = np.clip(_source_positions(count, size, scale, align_corners), 0, size - 1)
    low = np.floor(position).astype(np.int64)
    high = np.minimum(low + 1, size - 1)
    matrix = np.zeros((count, size))
    np.add.at(matrix, (np.arange(count), low), 1 - (position - low))
    np.add.at(matrix, (np.arange(count), high), position - low)
    return matrix


def _interpolated(x: Any, dim: int, matrix: np.ndarray) -> Any:
    out = jnp.tensordot(x, jnp.asarray(matrix, x.dtype), ((dim,), (1,)), precision=lax.Precision.HIGHEST)
    return jnp.moveaxis(out, -1, dim)


def _dims(x: Any, space: int, channels_last: bool) -> range:
    """The dims of space."""
    lead = 1 if channels_last else x.ndim - space
    return range(lead, lead + space)


def _linear(
    x: Any, size: Sequence[int], align_corners: bool, scales: Sequence[float | None], channels_last: bool
) -> Any:
    for dim, count, scale in zip(_dims(x, len(size), channels_last), size, scales, strict=True):
        x = _interpolated(x, dim, _linear_matrix(count, x.shape[dim], scale, align_corners))
    return x


@lowering(aten.upsample_linear1d.default, layouts=in_space(3))
def upsample_linear1d(
    x: Any, size: Any, align_corners: bool, scale: Any = None, *, channels_last: bool = False
) -> Any:
    return _linear(x, size, align_corners, (scale,), channels_last)


@lowering(aten.upsample_bilinear2d.default, layouts=in_space(4))
def upsample_bilinear2d(
    x: Any,
    size: Any,
    align_corners: bool,
    height: Any = None,
    width: Any = None,
    *,
    channels_last: bool = False,
) -> Any:
    return _linear(x, size, align_corners, (height, width), channels_last)


@lowering(aten.upsample_trilinear3d.default, layouts=in_space(5))
def upsample_trilinear3d(
    x: Any,
    size: Any,
    align_corners: bool,
    depth: Any = None,
    height: Any = None,
    width: Any = None,
    *,
    channels_last: bool = False,
) -> Any:
    return _linear(x, size, align_corners, (depth, height, width), channels_last)


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -0.5, which Pillow resizes with."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _antialiased_matrix(
    count: int, size: int, scale: float | None, align_corners: bool, kernel: Kernel, reach: int
) -> np.ndarray:
    """A kernel as wide as an output element at least, cut off at the borders, each row of sum 1."""
    if align_corners:
        step = (size - 1) / (count - 1) if count > 1 else 0.0
    else:
        step = size / count if scale is None or scale <= 0 else 1.0 / scale
    widening = max(step, 1.0)
    centres = step * (np.arange(count) + 0.5)
    first = np.maximum((centres - reach * widening + 0.5).astype(np.int64), 0)
    last = np.minimum((centres + reach * widening + 0.5).astype(np.int64), size)
    places = np.arange(size)
    weights = kernel((places[None, :] - centres[:, None] + 0.5) / widening)
    weights = np.where((places >= first[:, None]) & (places < last[:, None]), weights, 0)
    return weights / weights.sum(1, keepdims=True)


def _antialiased(kernel: Kernel, reach: int) -> Callable[..., Any]:
    def resize(
        x: Any,
        size: Any,
        align_corners: bool,
        height: Any = None,
        width: Any = None,
        *,
        channels_last: bool = False,
    ) -> Any:
        for dim, count, scale in zip(_dims(x, 2, channels_last), size, (height, width), strict=True):
            matrix = _antialiased_matrix(count, x.shape[dim], scale, align_corners, kernel, reach)
            x = _interpolated(x, dim, matrix)
        return x

    return resize


lowering(aten._upsample_bilinear2d_aa.default, layouts=in_space(4))(_antialiased(_triangle, 1))
lowering(aten._upsample_bicubic2d_aa.default, layouts=in_space(4))(_antialiased(_cubic, 2))
if hasattr(aten, "_upsample_lanczos2d_aa"):  # from torch 2.12 on
    lowering(aten._upsample_lanczos2d_aa.default, layouts=in_space(4))(_antialiased(_lanczos, 3))


def _nearest(x: Any, size: Sequence[int], scales: Sequence[float | None], channels_last: bool) -> Any:
    for dim, count, scale in zip(_dims(x, len(size), channels_last), size, scales, strict=True):
        factor = np.float32(x.shape[dim] / count if scale is None or scale <= 0 else 1.0 / scale)
        index = np.minimum(np.floor(np.arange(count, dtype=np.float32) * factor), x.shape[dim] - 1)
        x = jnp.take(x, jnp.asarray(index, np.int32), axis=dim)
    return x


@lowering(aten.upsample_nearest1d.default, layouts=in_space(3))
def upsample_nearest1d(x: Any, size: Any, scale: Any = None, *, channels_last: bool = False) -> Any:
    return _nearest(x, size, (scale,), channels_last)


@lowering(aten.upsample_nearest2d.default, layouts=in_space(4))
def upsample_nearest2d(
    x: Any, size: Any, height: Any = None, width: Any = None, *, channels_last: bool = False
) -> Any:
    return _nearest(x, size, (height, width), channels_last)


@lowering(aten.upsample_nearest3d.default, layouts=in_space(5))
def upsample_nearest3d(
    x: Any,
    size: Any,
    depth: Any = None,
    height: Any = None,
    width: Any = None,
    *,
    channels_last: bool = False,
) -> Any:
    return _nearest(x, size, (depth, height, width), channels_last)


def _target(x: Any, size: Any, factors: Any, channels_last: bool) -> tuple[Sequence[int], Sequence[Any]]:
    """(size, factors) of an output that `F.interpolate` was told by one of the two."""
    if size is not None:
        return size, (None,) * len(size)
    dims = _dims(x, len(factors), channels_last)
    return [int(x.shape[dim] * factor) for dim, factor in zip(dims, factors, strict=True)], factors


def _nearest_by_either(x: Any, size: Any, factors: Any, *, channels_last: bool = False) -> Any:
    return _nearest(x, *_target(x, size, factors, channels_last), channels_last)


def _linear_by_either(
    x: Any, size: Any, align_corners: bool, factors: Any, *, channels_last: bool = False
) -> Any:
    size, factors = _target(x, size, factors, channels_last)
    return _linear(x, size, align_corners, factors, channels_last)


for _space, (_near, _blend) in enumerate(
    (
        (aten.upsample_nearest1d.vec, aten.upsample_linear1d.vec),
        (aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec),
        (aten.upsample_nearest3d.vec, aten.upsample_trilinear3d.vec),
    ),
    3,
):
    lowering(_near, layouts=in_space(_space))(_nearest_by_either)
    lowering(_blend, layouts=in_space(_space))(_linear_by_either)


@lowering(aten.pixel_shuffle.default, layouts=in_space(4))
def pixel_shuffle(x: Any, factor: int, *, channels_last: bool = False) -> Any:
    if channels_last:
        rows, height, width, channels = x.shape
        x = x.reshape(rows, height, width, channels // factor**2, factor, factor)
        x = jnp.transpose(x, (0, 1, 4, 2, 5, 3))
        return x.reshape(rows, height * factor, width * factor, channels // factor**2)
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    n = len(lead)
    x = jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return x.reshape(*lead, channels // factor**2, height * factor, width * factor)


@lowering(aten.pixel_unshuffle.default, layouts=in_space(4))
def pixel_unshuffle(x: Any, factor: int, *, channels_last: bool = False) -> Any:
    if channels_last:
        rows, height, width, channels = x.shape
        x = x.reshape(rows, height // factor, factor, width // factor, factor, channels)
        x = jnp.transpose(x, (0, 1, 3, 5, 2, 4))
        return x.reshape(rows, height // factor, width // factor, channels * factor**2)
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    n = len(lead)
    x = jnp.transpose(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return x.reshape(*lead, channels * factor**2, height // factor, width // factor)
