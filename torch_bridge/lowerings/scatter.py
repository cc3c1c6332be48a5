"""Writing into an array at places that data names: scatter, put and their reductions.

Where several values meet in one place and nothing says how they combine, the last one wins or none is
promised, as in torch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import countable, jax_dtype

aten = torch.ops.aten


def _along(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """Full index arrays of the elements that a scatter along `dim` touches."""
    grids = [lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim)]
    grids[dim % x.ndim] = index
    return tuple(grids)


def _scatter_place(x: Any, dim: int, index: Any, source: Any) -> tuple[Any, Any]:
    if not x.ndim:
        return x.reshape(1).at[index.reshape(-1)], None if source is None else jnp.reshape(source, (-1,))
    if isinstance(source, jax.Array) and source.ndim:
        source = source[tuple(slice(0, size) for size in index.shape)]
    return x.at[_along(x, dim, index)], source


@lowering(aten.scatter.src, aten.scatter.value)
def scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    source = jnp.asarray(source, x.dtype)
    place, source = _scatter_place(x, dim, index, source)
    return place.set(source).reshape(x.shape)


@lowering(aten.scatter_add.default)
def scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    place, source = _scatter_place(countable(x), dim, index, countable(source))
    return place.add(source).reshape(x.shape)


@lowering(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_reduce_old(x: Any, dim: int, index: Any, source: Any, *, reduce: str) -> Any:
    source = jnp.broadcast_to(jnp.asarray(source, x.dtype), index.shape)
    if reduce == "add":
        return scatter_add(x, dim, index, source)
    return scatter_reduce(x, dim, index, source, "prod")


@lowering(aten.scatter_reduce.two)
def scatter_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    x, source = countable(x), countable(source)
    start = (
        x
        if include_self
        else _scatter_place(x, dim, index, None)[0].set(_neutral(reduce, x)).reshape(x.shape)
    )
    if reduce == "prod" and jnp.issubdtype(x.dtype, jnp.inexact):
        source = jnp.broadcast_to(source, index.shape) if not source.ndim else source
        source = source[tuple(slice(0, size) for size in index.shape)].reshape(-1)
        places = (index,) if not x.ndim else _along(x, dim, index)
        return product_at(jnp.atleast_1d(start), tuple(p.reshape(-1) for p in places), source).reshape(
            x.shape
        )
    place, source = _scatter_place(start, dim, index, source)
    combine = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce]
    out = getattr(place, combine)(source).reshape(x.shape)
    if reduce != "mean":
        return out
    count = jnp.ones(x.shape, x.dtype) if include_self else jnp.zeros(x.shape, x.dtype)
    place, ones = _scatter_place(count, dim, index, jnp.ones(index.shape, x.dtype))
    count = jnp.maximum(place.add(ones).reshape(x.shape), 1)
    return out // count if jnp.issubdtype(x.dtype, jnp.integer) else out / count


def _neutral(reduce: str, x: Any) -> Any:
    info = jnp.finfo(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype)
    infinite = jnp.issubdtype(x.dtype, jnp.floating)
    return {
        "sum": 0,
        "mean": 0,
        "prod": 1,
        "amax": -jnp.inf if infinite else info.min,
        "amin": jnp.inf if infinite else info.max,
    }[reduce]


@jax.custom_jvp
def product_at(start: Any, places: tuple[Any, ...], source: Any) -> Any:
    """`start` multiplied at each place by every value of `source` that goes there."""
    return start.at[places].multiply(source)


@product_at.defjvp
def _product_at_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Each factor's share is the product of the others, which one zero among them makes zero."""
    start, places, source = primals
    nonzero = product_at(_one_for_zero(start), places, _one_for_zero(source))
    zeros = (start == 0).astype(jnp.int32).at[places].add((source == 0).astype(jnp.int32))

    def share(factor: Any, product: Any, zeros: Any) -> Any:
        others_nonzero = zeros == (factor == 0)
        return jnp.where(others_nonzero, product / _one_for_zero(factor), 0)

    tangent = share(start, nonzero, zeros) * tangents[0]
    moved = share(source, nonzero[places], zeros[places]) * tangents[2]
    return product_at(*primals), tangent.at[places].add(moved)


def _one_for_zero(x: Any) -> Any:
    return jnp.where(x == 0, jnp.ones_like(x), x)


@lowering(aten.index_reduce.default)
def index_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    """A scatter of whole slices; an integer mean is rounded down."""
    dim = dim % x.ndim if x.ndim else 0
    shape = (1,) * dim + (-1,) + (1,) * max(x.ndim - dim - 1, 0)
    full = jnp.broadcast_to(index.reshape(shape), source.shape) if x.ndim else index.reshape(-1)
    return scatter_reduce(x, dim, full, source, reduce, include_self=include_self)


@lowering(aten.put.default)
def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Counts elements of x in reading order."""
    if accumulate:
        x, source = countable(x), countable(source)
    place = x.reshape(-1).at[index.reshape(-1)]
    source = source.reshape(-1)
    return (place.add(source) if accumulate else place.set(source)).reshape(x.shape)


@lowering(aten.masked_scatter.default)
def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """The k-th true element of the mask takes the k-th element of `source`."""
    x, mask = jnp.broadcast_arrays(x, mask)
    if not source.size:
        return x
    order = jnp.cumsum(mask.reshape(-1)) - 1
    taken = jnp.take(source.reshape(-1), order, mode="clip").reshape(x.shape)
    return jnp.where(mask, taken, x)


@lowering(aten.nonzero_static.default)
def nonzero_static(x: Any, *, size: int, fill_value: int = -1) -> Any:
    if not x.ndim:
        return jnp.zeros((size, 0), jax_dtype(torch.int64))
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), -1)


@lowering(aten.diagonal_scatter.default)
def diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    steps = jnp.arange(source.shape[-1])
    place = moved.at[..., steps + max(-offset, 0), steps + max(offset, 0)]
    return jnp.moveaxis(place.set(source), (-2, -1), (dim1, dim2))
