"""From one dtype to another, from tensors to Python numbers and back, and what changes nothing.

A number that torch.export takes out of a tensor (`item`) stays an array without dims here, and arithmetic
on it is JAX's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import jax_dtype

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
    return lax.stop_gradient(x.reshape(()))
