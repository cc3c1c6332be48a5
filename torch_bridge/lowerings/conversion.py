"""From one dtype to another, from tensors to Python numbers and back, and what changes nothing.

A number that torch.export takes out of a tensor (`item`) stays an array without dims here, and arithmetic
on it is JAX's.
"""

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.layouts import pointwise
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import jax_dtype

aten = torch.ops.aten


@lowering(aten._to_copy.default, layouts=pointwise)
def to_copy(x: Any, *, dtype: Any = None, **_: Any) -> Any:
    if dtype is None:
        return x
    wanted = jax_dtype(dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(wanted, jnp.complexfloating):
        x = jnp.real(x)
    return x.astype(wanted)


@lowering(aten.to.dtype, aten.to.dtype_layout, layouts=pointwise)
def to_dtype(x: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
    return to_copy(x, dtype=dtype)


@lowering(aten.type_as.default)
def type_as(x: Any, like: Any) -> Any:
    return x.astype(like.dtype)


@lowering(
    aten.clone.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    layouts=pointwise,
)
def identity(x: Any, **_: Any) -> Any:
    return x


@lowering(aten.copy.default, layouts=pointwise)
def copy(x: Any, source: Any, *_: Any) -> Any:
    return jnp.broadcast_to(source.astype(x.dtype), x.shape)


@lowering(aten.item.default, aten._local_scalar_dense.default)
def item(x: Any) -> Any:
    return lax.stop_gradient(x.reshape(()))
