"""torch's primitive operators, where its own decompositions of rarer operators end."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings import registry
from torch_bridge.lowerings.reduction import variance
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import jax_dtype, promote

prims = torch.ops.prims
aten = torch.ops.aten

# prim -> the aten overload that means the same.
_SAME = {
    "default": """abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erf_inv exp exp2 expm1
        floor isfinite lgamma log log10 log1p log2 neg reciprocal round rsqrt sign signbit sin sinh sqrt tan
        tanh trunc atan2 gcd hypot logical_and maximum minimum nextafter""",
    "Tensor": """add sub mul div remainder fmod eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor""",
}
_RENAMED = {"erf_inv": "erfinv"}


def _alias(prim: str, function: Callable[..., Any]) -> None:
    lowering(getattr(prims, prim).default)(function)


for _overload, _names in _SAME.items():
    for _name in _names.split():
        _packet = getattr(aten, _RENAMED.get(_name, _name))
        _found = registry.find(getattr(_packet, _overload))
        if hasattr(prims, _name) and _found is not None:
            _alias(_name, _found.function)


@lowering(prims.pow.default)
def power(a: Any, b: Any) -> Any:
    return jnp.power(*promote(a, b))


@lowering(prims.div.default)
def div(a: Any, b: Any) -> Any:
    """Integers divide towards zero."""
    a, b = promote(a, b)
    if jnp.issubdtype(a.dtype, jnp.integer):
        return lax.div(*jnp.broadcast_arrays(a, b))
    return a / b


@lowering(prims.bitwise_not.default)
def bitwise_not(x: Any) -> Any:
    return jnp.bitwise_not(x)


@lowering(prims.where.default)
def where(condition: Any, a: Any, b: Any) -> Any:
    return jnp.where(condition, *promote(a, b))


@lowering(prims.convert_element_type.default)
def convert_element_type(x: Any, dtype: Any) -> Any:
    return x.astype(jax_dtype(dtype))


@lowering(prims.broadcast_in_dim.default)
def broadcast_in_dim(x: Any, shape: Sequence[int], dims: Sequence[int]) -> Any:
    return lax.broadcast_in_dim(x, tuple(shape), tuple(dims))


@lowering(prims.iota.default)
def iota(length: int, *, start: int, step: int, dtype: Any, **_: Any) -> Any:
    return (start + step * jnp.arange(length)).astype(jax_dtype(dtype))


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x: Any, dims: Any, *_: Any, **__: Any) -> Any:
        return function(x, tuple(range(x.ndim)) if dims is None else tuple(dims))

    return reduce


for _name, _function in (("sum", jnp.sum), ("prod", jnp.prod), ("amax", jnp.max), ("amin", jnp.min)):
    _alias(_name, _reduction(_function))


@lowering(prims.var.default)
def var(x: Any, dims: Any, correction: float | None = 1, **_: Any) -> Any:
    return variance(x, dims, correction, False)


@lowering(prims.reshape.default)
def reshape(x: Any, shape: Sequence[int]) -> Any:
    return jnp.reshape(x, tuple(shape))


@lowering(prims.transpose.default)
def transpose(x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, tuple(dims))


@lowering(prims.squeeze.default)
def squeeze(x: Any, dims: Sequence[int]) -> Any:
    return jnp.squeeze(x, tuple(dims))


@lowering(prims.view_of.default, prims.clone.default)
def same(x: Any, **_: Any) -> Any:
    return x


@lowering(prims.cat.default)
def cat(tensors: Sequence[Any], dim: int) -> Any:
    return jnp.concatenate(tensors, dim)


@lowering(prims.rev.default)
def rev(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dims))


@lowering(prims.conj_physical.default)
def conj_physical(x: Any) -> Any:
    return jnp.conj(x)
