"""Counting values by interval. The last interval includes its right border, as in torch."""

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
    inside = (values >= edges[0]) & (values <= edges[-1])
    place = jnp.clip(jnp.searchsorted(edges, values, side="right") - 1, 0, edges.shape[0] - 2)
    amounts = jnp.ones(values.shape, x.dtype) if weight is None else weight.reshape(-1)
    return jnp.zeros(edges.shape[0] - 1, x.dtype).at[place].add(jnp.where(inside, amounts, 0))
