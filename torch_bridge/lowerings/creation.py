"""Operators that make tensors from nothing but sizes and numbers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import constant, default_float, jax_dtype

aten = torch.ops.aten


def _dtype_of(value: Any, dtype: Any) -> Any:
    if dtype is not None:
        return jax_dtype(dtype)
    if isinstance(value, bool):
        return np.dtype(bool)
    if isinstance(value, jax.Array):
        return value.dtype
    if isinstance(value, complex):
        return np.dtype(np.complex64)
    return jax_dtype(torch.int64) if isinstance(value, int) else default_float()


@lowering(aten.full.default)
def full(size: Sequence[int], value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.broadcast_to(constant(value, _dtype_of(value, dtype)), tuple(size))


@lowering(aten.full_like.default)
def full_like(x: Any, value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.broadcast_to(constant(value, x.dtype if dtype is None else jax_dtype(dtype)), x.shape)


@lowering(aten.new_full.default)
def new_full(x: Any, size: Sequence[int], value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.broadcast_to(constant(value, x.dtype if dtype is None else jax_dtype(dtype)), tuple(size))


@lowering(aten.zeros.default, aten.empty.memory_format)
def zeros(size: Sequence[int], *, dtype: Any = None, **_: Any) -> Any:
    return jnp.zeros(tuple(size), _dtype_of(0.0, dtype))


@lowering(aten.ones.default)
def ones(size: Sequence[int], *, dtype: Any = None, **_: Any) -> Any:
    return jnp.ones(tuple(size), _dtype_of(1.0, dtype))


@lowering(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(x: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.zeros(x.shape, x.dtype if dtype is None else jax_dtype(dtype))


@lowering(aten.ones_like.default)
def ones_like(x: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.ones(x.shape, x.dtype if dtype is None else jax_dtype(dtype))


@lowering(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(x: Any, size: Sequence[int], *, dtype: Any = None, **_: Any) -> Any:
    return jnp.zeros(tuple(size), x.dtype if dtype is None else jax_dtype(dtype))


@lowering(aten.new_ones.default)
def new_ones(x: Any, size: Sequence[int], *, dtype: Any = None, **_: Any) -> Any:
    return jnp.ones(tuple(size), x.dtype if dtype is None else jax_dtype(dtype))


@lowering(aten.empty_strided.default)
def empty_strided(size: Sequence[int], _stride: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.zeros(tuple(size), _dtype_of(0.0, dtype))


@lowering(aten.new_empty_strided.default)
def new_empty_strided(x: Any, size: Sequence[int], _stride: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.zeros(tuple(size), x.dtype if dtype is None else jax_dtype(dtype))


@lowering(aten.empty_permuted.default)
def empty_permuted(size: Sequence[int], _layout: Any, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.zeros(tuple(size), _dtype_of(0.0, dtype))


@lowering(aten.scalar_tensor.default)
def scalar_tensor(value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return constant(value, default_float() if dtype is None else jax_dtype(dtype))


@lowering(aten.arange.start_step)
def arange_step(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **_: Any) -> Any:
    """Integers stay exact; floats are start + i * step, as torch computes them."""
    whole = all(isinstance(n, int) for n in (start, end, step))
    wanted = _dtype_of(0 if whole else 0.0, dtype)
    if whole:
        return jnp.arange(start, end, step).astype(wanted)
    count = max(int(np.ceil((end - start) / step)), 0)
    return (start + jnp.arange(count) * jnp.asarray(step, default_float())).astype(wanted)


@lowering(aten.arange.start)
def arange_start(start: Any, end: Any, **options: Any) -> Any:
    return arange_step(start, end, 1, **options)


@lowering(aten.arange.default)
def arange(end: Any, **options: Any) -> Any:
    return arange_step(0, end, 1, **options)


@lowering(
    aten.linspace.default,
    aten.linspace.Tensor_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
)
def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, **_: Any) -> Any:
    wanted = _dtype_of(0.0, dtype)
    if not jnp.issubdtype(wanted, jnp.integer):
        return jnp.linspace(start, end, steps, dtype=wanted)
    # torch counts from both ends, themselves whole, in double precision and cuts towards zero.
    xp = jnp if isinstance(start, jax.Array) or isinstance(end, jax.Array) else np
    start, end = xp.trunc(start), xp.trunc(end)
    index, step = xp.arange(steps), (end - start) / max(steps - 1, 1)
    points = xp.where(index < max(steps // 2, 1), start + step * index, end - step * (steps - 1 - index))
    return jnp.asarray(xp.trunc(points), wanted)


@lowering(
    aten.logspace.default,
    aten.logspace.Tensor_Tensor,
    aten.logspace.Tensor_Scalar,
    aten.logspace.Scalar_Tensor,
)
def logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.logspace(start, end, steps, base=base, dtype=_dtype_of(0.0, dtype))


@lowering(aten.eye.default)
def eye(n: int, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.eye(n, dtype=_dtype_of(0.0, dtype))


@lowering(aten.eye.m)
def eye_m(n: int, m: int, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.eye(n, m, dtype=_dtype_of(0.0, dtype))


@lowering(aten.tril_indices.default)
def tril_indices(rows: int, cols: int, offset: int = 0, **_: Any) -> Any:
    return jnp.stack(jnp.tril_indices(rows, offset, cols))


@lowering(aten.triu_indices.default)
def triu_indices(rows: int, cols: int, offset: int = 0, **_: Any) -> Any:
    return jnp.stack(jnp.triu_indices(rows, offset, cols))


@lowering(aten.fill.Scalar)
def fill(x: Any, value: Any) -> Any:
    return full_like(x, value)


@lowering(aten.fill.Tensor)
def fill_tensor(x: Any, value: Any) -> Any:
    return jnp.broadcast_to(value.astype(x.dtype), x.shape)
