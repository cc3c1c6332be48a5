"""Resampling of images, in torch's layout: leading dims, then space."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

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


def _linear(x: Any, size: Sequence[int], align_corners: bool, scales: Sequence[float | None]) -> Any:
    for offset, (count, scale) in enumerate(zip(size, scales, strict=True)):
        dim = x.ndim - len(size) + offset
        x = _interpolated(x, dim, _linear_matrix(count, x.shape[dim], scale, align_corners))
    return x


@lowering(aten.upsample_linear1d.default)
def upsample_linear1d(x: Any, size: Any, align_corners: bool, scale: Any = None) -> Any:
    return _linear(x, size, align_corners, (scale,))


@lowering(aten.upsample_bilinear2d.default)
def upsample_bilinear2d(x: Any, size: Any, align_corners: bool, height: Any = None, width: Any = None) -> Any:
    return _linear(x, size, align_corners, (height, width))


@lowering(aten.upsample_trilinear3d.default)
def upsample_trilinear3d(
    x: Any, size: Any, align_corners: bool, depth: Any = None, height: Any = None, width: Any = None
) -> Any:
    return _linear(x, size, align_corners, (depth, height, width))


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
    def resize(x: Any, size: Any, align_corners: bool, height: Any = None, width: Any = None) -> Any:
        for dim, count, scale in ((-2, size[0], height), (-1, size[1], width)):
            matrix = _antialiased_matrix(count, x.shape[dim], scale, align_corners, kernel, reach)
            x = _interpolated(x, x.ndim + dim, matrix)
        return x

    return resize


lowering(aten._upsample_bilinear2d_aa.default)(_antialiased(_triangle, 1))
lowering(aten._upsample_bicubic2d_aa.default)(_antialiased(_cubic, 2))
if hasattr(aten, "_upsample_lanczos2d_aa"):  # from torch 2.12 on
    lowering(aten._upsample_lanczos2d_aa.default)(_antialiased(_lanczos, 3))


def _nearest(x: Any, size: Sequence[int], scales: Sequence[float | None]) -> Any:
    for offset, (count, scale) in enumerate(zip(size, scales, strict=True)):
        dim = x.ndim - len(size) + offset
        factor = np.float32(x.shape[dim] / count if scale is None or scale <= 0 else 1.0 / scale)
        index = np.minimum(np.floor(np.arange(count, dtype=np.float32) * factor), x.shape[dim] - 1)
        x = jnp.take(x, jnp.asarray(index, np.int32), axis=dim)
    return x


@lowering(aten.upsample_nearest1d.default)
def upsample_nearest1d(x: Any, size: Any, scale: Any = None) -> Any:
    return _nearest(x, size, (scale,))


@lowering(aten.upsample_nearest2d.default)
def upsample_nearest2d(x: Any, size: Any, height: Any = None, width: Any = None) -> Any:
    return _nearest(x, size, (height, width))


@lowering(aten.upsample_nearest3d.default)
def upsample_nearest3d(x: Any, size: Any, depth: Any = None, height: Any = None, width: Any = None) -> Any:
    return _nearest(x, size, (depth, height, width))


@lowering(aten.pixel_shuffle.default)
def pixel_shuffle(x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    n = len(lead)
    x = jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return x.reshape(*lead, channels // factor**2, height * factor, width * factor)


@lowering(aten.pixel_unshuffle.default)
def pixel_unshuffle(x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    n = len(lead)
    x = jnp.transpose(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return x.reshape(*lead, channels * factor**2, height // factor, width // factor)
