"""Resampling with anti-aliasing: a filter stretched by the step of the output, one dim after another.

The filters and their supports are Pillow's, which torch follows: a triangle, Keys' cubic with a = -1/2,
Lanczos with three lobes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    x, a = np.abs(x), -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _matrix(
    kernel: Callable[[np.ndarray], np.ndarray],
    reach: int,
    count: int,
    size: int,
    align_corners: bool,
    scale: float | None,
) -> np.ndarray:
    """Weights `[count, size]`; `reach` is how far the filter goes when it is not stretched."""
    if align_corners:
        step = (size - 1) / (count - 1) if count > 1 else 0.0
    else:
        step = size / count if scale is None or scale <= 0 else 1.0 / scale
    stretch = max(step, 1.0)
    centre = step * (np.arange(count) + 0.5)[:, None]
    first = np.maximum(np.trunc(centre - reach * stretch + 0.5), 0)
    end = np.minimum(np.trunc(centre + reach * stretch + 0.5), size)
    place = np.arange(size)[None]
    weights = np.where((place >= first) & (place < end), kernel((place - centre + 0.5) / stretch), 0)
    total = weights.sum(1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def _resampled(
    kernel: Callable[[np.ndarray], np.ndarray],
    reach: int,
    x: Any,
    size: Sequence[int],
    align_corners: bool,
    height: float | None = None,
    width: float | None = None,
) -> Any:
    for dim, count, scale in ((-1, size[1], width), (-2, size[0], height)):
        matrix = _matrix(kernel, reach, count, x.shape[dim], align_corners, scale)
        weights = jnp.asarray(matrix, x.dtype)
        out = jnp.tensordot(x, weights, ((dim,), (1,)), precision=lax.Precision.HIGHEST)
        x = jnp.moveaxis(out, -1, dim)
    return x


for _name, _kernel, _reach in (
    ("bilinear", _triangle, 1),
    ("bicubic", _cubic, 2),
    ("lanczos", _lanczos, 3),  # torch 2.13
):
    if hasattr(aten, f"_upsample_{_name}2d_aa"):
        lowering(getattr(aten, f"_upsample_{_name}2d_aa").default)(partial(_resampled, _kernel, _reach))
