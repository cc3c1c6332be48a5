"""Vector norms, and distances between rows."""

import math
from typing import Any

import jax.numpy as jnp
import torch

from torch_bridge.lowerings.reduction import Dims, dims_of
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import accumulation, jax_dtype

aten = torch.ops.aten


def _vector_norm(x: Any, order: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    if order == 2 and not jnp.iscomplexobj(x):
        return _euclidean(x, dims, keepdim)
    size = jnp.abs(x)
    if order == math.inf:
        return jnp.max(size, dims, keepdims=keepdim)
    if order == -math.inf:
        return jnp.min(size, dims, keepdims=keepdim)
    if order == 0:
        return jnp.sum(x != 0, dims, keepdims=keepdim).astype(size.dtype)
    if order == 1:
        return jnp.sum(size, dims, keepdims=keepdim)
    return jnp.power(jnp.sum(jnp.power(size, order), dims, keepdims=keepdim), 1.0 / order)


def _euclidean(x: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    """torch's gradient at the zero vector is 0."""
    squares = jnp.sum(jnp.square(x), dims, keepdims=keepdim)
    zero = squares == 0
    return jnp.where(
        zero, jnp.zeros_like(squares), jnp.sqrt(jnp.where(zero, jnp.ones_like(squares), squares))
    )


@lowering(aten.linalg_vector_norm.default)
def linalg_vector_norm(
    x: Any, order: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    result = x.dtype if dtype is None else jax_dtype(dtype)
    out = _vector_norm(x.astype(accumulation(result)), order, dims_of(x, dim), keepdim)
    return out.astype(jnp.finfo(result).dtype)


@lowering(aten.norm.ScalarOpt_dim, aten.norm.Scalar)
def norm(x: Any, order: Any = 2, dim: Dims = None, keepdim: bool = False) -> Any:
    return linalg_vector_norm(x, 2 if order is None else order, dim, keepdim)


@lowering(aten.cdist.default, aten._cdist_forward.default)
def cdist(a: Any, b: Any, p: float = 2.0, *_: Any, **__: Any) -> Any:
    """Distances between the rows of a `[..., n, dim]` and b `[..., m, dim]`."""
    return minkowski(a[..., :, None, :] - b[..., None, :, :], p)


def minkowski(difference: Any, p: float) -> Any:
    """p-norms along the last dim; equal rows and equal entries have no gradient, as torch's distances."""
    if p in (0, 1, 2) or math.isinf(p):
        return _vector_norm(difference, p, (difference.ndim - 1,), False)
    differs = difference != 0
    powers = jnp.sum(jnp.where(differs, jnp.abs(jnp.where(differs, difference, 1)) ** p, 0), -1)
    apart = powers > 0
    return jnp.where(apart, jnp.where(apart, powers, 1) ** (1 / p), 0)
