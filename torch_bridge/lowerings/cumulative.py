"""Running sums, products and extremes along a dim.

Half precision accumulates in float32; a running extreme gives its gradient to the latest element that
holds it.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.reduction import summed_dtype
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import accumulation, jax_dtype

aten = torch.ops.aten


@lowering(aten.cumsum.default)
def cumsum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    result = summed_dtype(x, dtype)
    return jnp.cumsum(x.astype(accumulation(result)), dim).astype(result) if x.ndim else x.astype(result)


@lowering(aten.cumprod.default)
def cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    result = summed_dtype(x, dtype)
    return jnp.cumprod(x.astype(accumulation(result)), dim).astype(result) if x.ndim else x.astype(result)


@lowering(aten.logcumsumexp.default)
def logcumsumexp(x: Any, dim: int) -> Any:
    return lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x


def _cumulative(x: Any, dim: int, better: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Running extreme and the latest position that holds it."""
    if not x.ndim:
        return x, jnp.zeros((), jax_dtype(torch.int64))
    position = lax.broadcasted_iota(jax_dtype(torch.int64), x.shape, dim % x.ndim)

    def later(a: Any, b: Any) -> Any:
        take = better(b[0], a[0])
        return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

    _, index = lax.associative_scan(later, (lax.stop_gradient(x), position), axis=dim)
    return jnp.take_along_axis(x, index, dim), index


@lowering(aten.cummax.default)
def cummax(x: Any, dim: int) -> tuple[Any, Any]:
    return _cumulative(x, dim, lambda new, old: (new >= old) | jnp.isnan(new))


@lowering(aten.cummin.default)
def cummin(x: Any, dim: int) -> tuple[Any, Any]:
    return _cumulative(x, dim, lambda new, old: (new <= old) | jnp.isnan(new))
