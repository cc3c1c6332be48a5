"""Counting values by interval. The last interval includes its right border, as in torch."""

import builtins
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


@lowering(aten.histc.default)
def histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Equal borders mean the range of the values, widened by 1 if that is empty too."""
    edges = _edges(x, bins, None if min == max else (min, max), widening=1.0)
    return _count(x, edges, None)


@lowering(aten.histogram.bin_ct)
def histogram(
    x: Any,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Any = None,
    density: bool = False,
) -> tuple[Any, Any]:
    return _histogram(x, _edges(x, bins, range, widening=0.5), weight, density)


@lowering(aten.histogram.bins_tensor)
def histogram_at(x: Any, bins: Any, *, weight: Any = None, density: bool = False) -> tuple[Any, Any]:
    return _histogram(x, bins, weight, density)


def _histogram(x: Any, edges: Any, weight: Any, density: bool) -> tuple[Any, Any]:
    counts = _count(x, edges, weight)
    if density:
        counts = counts / jnp.sum(counts) / jnp.diff(edges)
    return counts, edges


@lowering(aten._histogramdd_bin_edges.default)
def histogramdd_edges(
    x: Any,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Any = None,
    density: bool = False,
) -> tuple[Any, ...]:
    """x `[..., dims]`; edges for each dim."""
    del weight, density
    limits = [None] * len(bins) if range is None else list(zip(range[::2], range[1::2], strict=True))
    return tuple(_edges(x[..., dim], count, limits[dim], widening=0.5) for dim, count in enumerate(bins))


@lowering(aten._histogramdd_from_bin_cts.default)
def histogramdd(
    x: Any,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Any = None,
    density: bool = False,
) -> Any:
    return histogramdd_at(x, histogramdd_edges(x, bins, range=range), weight=weight, density=density)


@lowering(aten._histogramdd_from_bin_tensors.default)
def histogramdd_at(x: Any, bins: Sequence[Any], *, weight: Any = None, density: bool = False) -> Any:
    points = x.reshape(-1, len(bins))
    inside, place = jnp.ones(points.shape[0], bool), []
    for values, edges in zip(points.T, bins, strict=True):
        here, at = _located(values, edges)
        inside, place = inside & here, [*place, at]
    amounts = jnp.ones(points.shape[0], x.dtype) if weight is None else weight.reshape(-1)
    shape = [edges.shape[0] - 1 for edges in bins]
    counts = jnp.zeros(shape, x.dtype).at[tuple(place)].add(jnp.where(inside, amounts, 0))
    if not density:
        return counts
    for dim, edges in enumerate(bins):
        counts = counts / jnp.diff(edges).reshape([-1 if d == dim else 1 for d in builtins.range(len(bins))])
    return counts / jnp.sum(jnp.where(inside, amounts, 0))


def _located(values: Any, edges: Any) -> tuple[Any, Any]:
    """(whether a value lies within the outer edges, in which interval)."""
    inside = (values >= edges[0]) & (values <= edges[-1])
    return inside, jnp.clip(jnp.searchsorted(edges, values, side="right") - 1, 0, edges.shape[0] - 2)


def _edges(x: Any, bins: int, limits: Sequence[float] | None, *, widening: float) -> Any:
    """Equal borders are moved apart by `widening` on each side."""
    x = lax.stop_gradient(x)
    low, high = (jnp.min(x), jnp.max(x)) if limits is None else map(jnp.asarray, limits)
    empty = low == high
    return jnp.linspace(
        jnp.where(empty, low - widening, low), jnp.where(empty, high + widening, high), bins + 1
    )


def _count(x: Any, edges: Any, weight: Any) -> Any:
    values = x.reshape(-1)
    inside, place = _located(values, edges)
    amounts = jnp.ones(values.shape, x.dtype) if weight is None else weight.reshape(-1)
    return jnp.zeros(edges.shape[0] - 1, x.dtype).at[place].add(jnp.where(inside, amounts, 0))
