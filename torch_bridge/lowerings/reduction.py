"""Reductions. Half precision accumulates in float32, as torch's kernels do.

Where several elements share the extreme value, `amax` spreads the gradient evenly and `max` over a dim
gives it to the element whose index it returns.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.extreme import largest, smallest
from torch_bridge.lowerings.layouts import along
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import accumulation, floating, jax_dtype

aten = torch.ops.aten

Dims = Sequence[int] | int | None


def dims_of(x: Any, dim: Dims) -> tuple[int, ...]:
    """Normalised dims; None and () mean all of them."""
    if dim is None or (isinstance(dim, tuple | list) and not dim):
        return tuple(range(x.ndim))
    listed = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % x.ndim for d in listed) if x.ndim else ()


def summed_dtype(x: Any, dtype: Any) -> Any:
    if dtype is not None:
        return jax_dtype(dtype)
    integral = x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer)
    return jax_dtype(torch.int64) if integral else x.dtype


@lowering(aten.sum.default, aten.sum.dim_IntList, layouts=along("dim"))
def total(x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    result = summed_dtype(x, dtype)
    return jnp.sum(x.astype(accumulation(result)), dims_of(x, dim), keepdims=keepdim).astype(result)


@lowering(aten.nansum.default, layouts=along("dim"))
def nansum(x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return total(jnp.where(jnp.isnan(x), jnp.zeros_like(x), x), dim, keepdim, dtype=dtype)


@lowering(aten.mean.default, aten.mean.dim, layouts=along("dim"))
def mean(x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    result = x.dtype if dtype is None else jax_dtype(dtype)
    return jnp.mean(x.astype(accumulation(result)), dims_of(x, dim), keepdims=keepdim).astype(result)


@lowering(aten.nanmean.default, layouts=along("dim"))
def nanmean(x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    del dtype
    return jnp.nanmean(x, dims_of(x, dim), keepdims=keepdim)


@lowering(aten.prod.default)
def prod(x: Any, *, dtype: Any = None) -> Any:
    return jnp.prod(x.astype(summed_dtype(x, dtype)))


@lowering(aten.prod.dim_int)
def prod_dim(x: Any, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.prod(x.astype(summed_dtype(x, dtype)), dims_of(x, dim), keepdims=keepdim)


def variance(x: Any, dim: Dims, correction: Any, keepdim: bool) -> Any:
    dims = dims_of(x, dim)
    wide = x.astype(accumulation(x.dtype))
    centred = wide - jnp.mean(wide, dims, keepdims=True)
    count = math.prod(x.shape[d] for d in dims)
    squares = jnp.real(centred * jnp.conj(centred)) if jnp.iscomplexobj(x) else jnp.square(centred)
    free = count - (1 if correction is None else correction)
    return jnp.sum(squares, dims, keepdims=keepdim) / (free if free > 0 else 0.0)


@lowering(aten.var.correction, layouts=along("dim"))
def var(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return variance(x, dim, correction, keepdim)


@lowering(aten.std.correction, layouts=along("dim"))
def std(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return jnp.sqrt(variance(x, dim, correction, keepdim))


@lowering(aten.var_mean.correction, layouts=along("dim"))
def var_mean(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Any, Any]:
    return variance(x, dim, correction, keepdim), mean(x, dim, keepdim)


@lowering(aten.std_mean.correction, layouts=along("dim"))
def std_mean(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Any, Any]:
    return std(x, dim, correction=correction, keepdim=keepdim), mean(x, dim, keepdim)


def _correction(unbiased: bool) -> int:
    return 1 if unbiased else 0


@lowering(aten.var.dim, layouts=along("dim"))
def var_dim(x: Any, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Any:
    return variance(x, dim, _correction(unbiased), keepdim)


@lowering(aten.var.default)
def var_all(x: Any, unbiased: bool = True) -> Any:
    return variance(x, None, _correction(unbiased), False)


@lowering(aten.std.dim, layouts=along("dim"))
def std_dim(x: Any, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Any:
    return jnp.sqrt(var_dim(x, dim, unbiased, keepdim))


@lowering(aten.std.default)
def std_all(x: Any, unbiased: bool = True) -> Any:
    return jnp.sqrt(var_all(x, unbiased))


@lowering(aten.amax.default, layouts=along("dim"))
def amax(x: Any, dim: Dims = (), keepdim: bool = False) -> Any:
    return largest(x, tuple(dims_of(x, dim)), keepdim)


@lowering(aten.amin.default, layouts=along("dim"))
def amin(x: Any, dim: Dims = (), keepdim: bool = False) -> Any:
    return smallest(x, tuple(dims_of(x, dim)), keepdim)


@lowering(aten.aminmax.default)
def aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


lowering(aten.max.default)(amax)
lowering(aten.min.default)(amin)


def _extreme(arg: Callable[..., Any], x: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    if not x.ndim:
        return x, jnp.zeros((), jax_dtype(torch.int64))
    index = arg(lax.stop_gradient(x), dim, keepdims=True)
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(index, dim))


@lowering(aten.max.dim, layouts=along("dim"))
def max_dim(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return _extreme(jnp.argmax, x, dim, keepdim)


@lowering(aten.min.dim, layouts=along("dim"))
def min_dim(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return _extreme(jnp.argmin, x, dim, keepdim)


@lowering(aten.argmax.default)
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _arg(jnp.argmax, x, dim, keepdim)


@lowering(aten.argmin.default)
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _arg(jnp.argmin, x, dim, keepdim)


def _arg(function: Callable[..., Any], x: Any, dim: int | None, keepdim: bool) -> Any:
    if not x.ndim:
        return jnp.zeros((), jax_dtype(torch.int64))
    return function(x, dim, keepdims=keepdim)


@lowering(aten.any.default, aten.any.dim, aten.any.dims, layouts=along("dim"))
def any_of(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    return jnp.any(x, dims_of(x, dim), keepdims=keepdim)


@lowering(aten.all.default, aten.all.dim, aten.all.dims, layouts=along("dim"))
def all_of(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    return jnp.all(x, dims_of(x, dim), keepdims=keepdim)


@lowering(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, layouts=along("dim"))
def count_nonzero(x: Any, dim: Dims = None) -> Any:
    return jnp.sum(x != 0, dims_of(x, dim), dtype=jax_dtype(torch.int64))


@lowering(aten.logsumexp.default, layouts=along("dim"))
def logsumexp(x: Any, dim: Dims, keepdim: bool = False) -> Any:
    return jax.nn.logsumexp(floating(x), dims_of(x, dim), keepdims=keepdim)


@lowering(aten.hash_tensor.default)
def hash_tensor(x: Any, dim: Dims = (), *, keepdim: bool = False, mode: int = 0) -> Any:
    """The exclusive or of all elements' bits as 64-bit numbers, so it needs 64-bit JAX."""
    del mode  # torch has this one
    wide = jnp.issubdtype(x.dtype, jnp.floating)
    exact = x.astype(jax_dtype(torch.float64)) if wide else x.astype(jnp.int64)
    bits = lax.bitcast_convert_type(exact, jnp.uint64)
    dims = dims_of(x, dim)
    out = lax.reduce(bits, jnp.zeros((), bits.dtype), lax.bitwise_xor, dims)
    return jnp.expand_dims(out, dims) if keepdim else out


@lowering(aten.trace.default)
def trace(x: Any) -> Any:
    return jnp.trace(x, dtype=summed_dtype(x, None))
