"""Resampling of images, in torch's layout: leading dims, then space."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


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
