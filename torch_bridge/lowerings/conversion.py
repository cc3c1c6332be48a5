"""From one dtype to another, from tensors to Python numbers and back, and what changes nothing.

A number that torch.export takes out of a tensor (`item`) stays an array without dims here, and arithmetic
on it is JAX's.
"""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import default_float, jax_dtype

aten = torch.ops.aten


@lowering(aten._to_copy.default)
def to_copy(x: Any, *, dtype: Any = None, **_: Any) -> Any:
    if dtype is None:
        return x
    wanted = jax_dtype(dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(wanted, jnp.complexfloating):
        x = jnp.real(x)
    return x.astype(wanted)


@lowering(aten.to.dtype, aten.to.dtype_layout, aten.type_as.default)
def to_dtype(x: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
    if isinstance(dtype, jax.Array):
        return x.astype(dtype.dtype)
    return to_copy(x, dtype=dtype)


@lowering(aten.clone.default, aten.alias.default, aten.contiguous.default, aten.lift_fresh_copy.default)
def identity(x: Any, **_: Any) -> Any:
    return x


@lowering(aten.copy.default)
def copy(x: Any, source: Any, *_: Any) -> Any:
    return jnp.broadcast_to(source.astype(x.dtype), x.shape)


@lowering(aten.item.default, aten._local_scalar_dense.default)
def item(x: Any) -> Any:
    return x.reshape(())


# Arithmetic on Python numbers that export leaves in the graph.
for _function in (
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.truediv,
    operator.mod,
    operator.pow,
    operator.neg,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.and_,
    operator.or_,
):
    lowering(_function)(_function)

lowering(torch.sym_float)(lambda x: jnp.asarray(x, default_float()))
lowering(torch.sym_int)(lambda x: jnp.trunc(x).astype(jax_dtype(torch.int64)))
lowering(torch.sym_not)(jnp.logical_not)
lowering(torch.sym_max)(jnp.maximum)
lowering(torch.sym_min)(jnp.minimum)
lowering(math.trunc)(jnp.trunc)
lowering(math.floor)(jnp.floor)
lowering(math.ceil)(jnp.ceil)
lowering(round)(jnp.round)
