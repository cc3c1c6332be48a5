"""Sorting and selecting by rank. Ties keep their order; the gradient goes to the elements selected."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import jax_dtype

aten = torch.ops.aten


def _order(x: Any, dim: int, descending: bool) -> Any:
    x = lax.stop_gradient(x)
    return jnp.argsort(x, dim, stable=True, descending=descending)


@lowering(aten.sort.default)
def sort(x: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    if not x.ndim:
        return x, jnp.zeros((), jax_dtype(torch.int64))
    order = _order(x, dim, descending)
    return jnp.take_along_axis(x, order, dim), order


@lowering(aten.sort.stable)
def sort_stable(
    x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Any, Any]:
    del stable
    return sort(x, dim, descending)


@lowering(aten.argsort.default)
def argsort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    return sort(x, dim, descending)[1]


@lowering(aten.topk.default)
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> tuple[Any, Any]:
    del ordered
    if not x.ndim:
        return x, jnp.zeros((), jax_dtype(torch.int64))
    order = lax.slice_in_dim(_order(x, dim, largest), 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, order, dim), order


@lowering(aten.kthvalue.default)
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    return _at_rank(x, k - 1, dim, keepdim)


@lowering(aten.median.dim)
def median_dim(x: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower of the two middle values, as torch takes it."""
    return _at_rank(x, (x.shape[dim] - 1) // 2 if x.ndim else 0, dim, keepdim)


@lowering(aten.median.default)
def median(x: Any) -> Any:
    return median_dim(x.reshape(-1), 0)[0]


@lowering(aten.nanmedian.dim)
def nanmedian_dim(x: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower of the two middle values of what is not NaN; NaN sorts last."""
    if not x.ndim:
        return x, jnp.zeros((), jax_dtype(torch.int64))
    count = jnp.sum(~jnp.isnan(x), dim, keepdims=True)
    rank = jnp.maximum((count - 1) // 2, 0)
    index = jnp.take_along_axis(_order(x, dim, False), rank, dim)
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(index, dim))


@lowering(aten.nanmedian.default)
def nanmedian(x: Any) -> Any:
    return nanmedian_dim(x.reshape(-1), 0)[0]


@lowering(aten.mode.default)
def mode(x: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The commonest value along a dim, the least of several, and the last position that holds it."""
    if not x.ndim:
        return x, jnp.zeros((), jax_dtype(torch.int64))
    moved = jnp.moveaxis(x, dim, -1)
    order = jnp.argsort(lax.stop_gradient(moved), -1, stable=True)
    ranked = jnp.take_along_axis(lax.stop_gradient(moved), order, -1)
    starts = jax.vmap(lambda row: jnp.searchsorted(row, row, side="left"))
    ends = jax.vmap(lambda row: jnp.searchsorted(row, row, side="right"))
    rows = ranked.reshape(-1, ranked.shape[-1])
    best = jnp.argmax((ends(rows) - starts(rows)), -1)
    last = jnp.take_along_axis(ends(rows), best[:, None], -1) - 1
    index = jnp.take_along_axis(order, last.reshape(*order.shape[:-1], 1), -1)
    index = jnp.moveaxis(index, -1, dim)
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(index, dim))


def _at_rank(x: Any, rank: int, dim: int, keepdim: bool) -> tuple[Any, Any]:
    if not x.ndim:
        return x, jnp.zeros((), jax_dtype(torch.int64))
    dim %= x.ndim
    index = lax.slice_in_dim(_order(x, dim, False), rank, rank + 1, axis=dim)
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(index, dim))


@lowering(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    sequence: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    del out_int32
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    side = "right" if right or side == "right" else "left"
    values = jnp.asarray(values, sequence.dtype) if not hasattr(values, "dtype") else values
    if sequence.ndim == 1:
        return jnp.searchsorted(sequence, values, side=side)
    flat = sequence.reshape(-1, sequence.shape[-1])
    queries = values.reshape(-1, values.shape[-1])
    found = [jnp.searchsorted(row, query, side=side) for row, query in zip(flat, queries, strict=True)]
    return jnp.stack(found).reshape(values.shape)
