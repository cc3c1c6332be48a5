"""Sampling a volume at points that a grid names, each coordinate from -1 to 1 across the volume."""

import itertools
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten
BILINEAR, NEAREST = 0, 1
ZEROS, BORDER, REFLECTION = 0, 1, 2


def _position(coordinate: Any, size: int, padding: int, align_corners: bool) -> Any:
    """Where the coordinate lies among the elements, as a real number."""
    if align_corners:
        position = (coordinate + 1) / 2 * (size - 1)
    else:
        position = ((coordinate + 1) * size - 1) / 2
    if padding == REFLECTION:
        position = _reflected(position, size, align_corners)
    return position if padding == ZEROS else _clipped(position, size - 1)


def _clipped(position: Any, last: int) -> Any:
    """torch's gradient is 0 at the borders themselves."""
    inside = (position > 0) & (position < last)
    return jnp.where(inside, position, jnp.clip(lax.stop_gradient(position), 0, last))


def _reflected(position: Any, size: int, align_corners: bool) -> Any:
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    if span == 0:
        return jnp.zeros_like(position)
    distance = jnp.abs(position - low)
    flips = jnp.floor(lax.stop_gradient(distance) / span)
    over = distance - flips * span
    return jnp.where(flips % 2 == 0, over + low, span - over + low)


def _gathered(x: Any, corner: list[Any]) -> Any:
    """x `[batch, channels, *space]` at integer places `[batch, points]` a dim; 0 outside."""
    space = x.shape[2:]
    flat = jnp.zeros((), corner[0].dtype)
    valid = jnp.ones((), bool)
    for place, size in zip(corner, space, strict=True):
        valid = valid & (place >= 0) & (place < size)
        flat = flat * size + jnp.clip(place, 0, size - 1)
    rows = x.reshape(*x.shape[:2], -1)
    values = jnp.take_along_axis(rows, flat[:, None, :], 2, mode="clip")
    return jnp.where(valid[:, None, :], values, 0)


@lowering(aten.grid_sampler_3d.default)
def grid_sampler_3d(x: Any, grid: Any, interpolation: int, padding: int, align_corners: bool) -> Any:
    """x `[batch, channels, D, H, W]`; grid `[batch, d, h, w, 3]`, whose last dim is W, H, D."""
    points = grid.reshape(grid.shape[0], -1, grid.shape[-1])
    positions = [
        _position(points[..., -1 - dim], size, padding, align_corners) for dim, size in enumerate(x.shape[2:])
    ]
    if interpolation == NEAREST:
        out = _gathered(x, [jnp.round(lax.stop_gradient(p)).astype(jnp.int32) for p in positions])
    else:
        lows = [jnp.floor(lax.stop_gradient(p)) for p in positions]
        out = jnp.zeros((), x.dtype)
        for corner in itertools.product((0, 1), repeat=len(positions)):
            weight = jnp.ones((), x.dtype)
            for p, low, high in zip(positions, lows, corner, strict=True):
                weight = weight * (p - low if high else low + 1 - p)
            places = [(low + high).astype(jnp.int32) for low, high in zip(lows, corner, strict=True)]
            out = out + _gathered(x, places) * weight[:, None, :]
    return out.reshape(*x.shape[:2], *grid.shape[1:-1])
