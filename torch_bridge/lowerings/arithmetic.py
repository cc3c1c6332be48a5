"""Pointwise operators with rules of their own: scaled sums, rounding division, powers, bounds, choices.

Gradients at borders and at zero are those of torch.
"""

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.layouts import pointwise
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import constant, floating, jax_dtype, promote

aten = torch.ops.aten


@lowering(aten.add.Tensor, aten.add.Scalar, layouts=pointwise)
def add(a: Any, b: Any, alpha: Any = 1) -> Any:
    a, b = promote(a, b)
    if a.dtype == bool:
        return a | b if alpha else a
    return a + b if alpha == 1 else a + jnp.asarray(alpha, b.dtype) * b


@lowering(aten.sub.Tensor, aten.sub.Scalar, layouts=pointwise)
def sub(a: Any, b: Any, alpha: Any = 1) -> Any:
    a, b = promote(a, b)
    return a - b if alpha == 1 else a - jnp.asarray(alpha, b.dtype) * b


@lowering(aten.rsub.Tensor, aten.rsub.Scalar, layouts=pointwise)
def rsub(a: Any, b: Any, alpha: Any = 1) -> Any:
    return sub(b, a, alpha)


@lowering(aten.div.Tensor, aten.div.Scalar, layouts=pointwise)
def div(a: Any, b: Any) -> Any:
    a, b = promote(a, b)
    return floating(a) / floating(b)


@lowering(aten.div.Tensor_mode, aten.div.Scalar_mode, layouts=pointwise)
def div_mode(a: Any, b: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode is None:
        return div(a, b)
    a, b = promote(a, b)
    if rounding_mode == "floor":
        return a // b
    if jnp.issubdtype(a.dtype, jnp.integer):
        return lax.div(*jnp.broadcast_arrays(a, b))
    return jnp.trunc(a / b)


@lowering(aten.pow.Tensor_Tensor, aten.pow.Scalar, layouts=pointwise)
def power(a: Any, b: Any) -> Any:
    a, b = promote(a, b)
    if jnp.issubdtype(a.dtype, jnp.signedinteger):
        return _whole_power(a, b)
    return jnp.power(a, b)


def _whole_power(a: Any, b: Any) -> Any:
    """Rounded towards zero where the exponent is negative: only 1 and -1 are left."""
    power = jnp.power(a, jnp.maximum(b, 0))
    unit = jnp.where(b % 2 == 0, jnp.abs(a), a)
    return jnp.where(b >= 0, power, jnp.where(jnp.abs(a) == 1, unit, 0))


@lowering(aten.pow.Tensor_Scalar, layouts=pointwise)
def power_scalar(a: Any, exponent: Any) -> Any:
    whole = isinstance(exponent, int) or (isinstance(exponent, float) and exponent.is_integer())
    if whole and jnp.issubdtype(a.dtype, jnp.inexact) and abs(exponent) < 2**31:
        return lax.integer_pow(a, int(exponent))
    a, exponent = promote(a, exponent)
    return jnp.power(a, exponent)


@lowering(
    aten.float_power.Tensor_Scalar, aten.float_power.Tensor_Tensor, aten.float_power.Scalar, layouts=pointwise
)
def float_power(a: Any, b: Any) -> Any:
    a, b = promote(a, b)
    wide = jax_dtype(torch.float64)
    return jnp.power(a.astype(wide), b.astype(wide))


@lowering(aten.clamp.default, aten.clip.default, aten.clamp.Tensor, aten.clip.Tensor, layouts=pointwise)
def clamp(x: Any, low: Any = None, high: Any = None, **named: Any) -> Any:
    """torch's gradient is 1 at the borders; NaN bounds and values stay NaN."""
    low, high = named.get("min", low), named.get("max", high)
    bounds = [b for b in (low, high) if b is not None]
    x = promote(x, *bounds)[0]
    bound = [None if b is None else jnp.asarray(b, x.dtype) for b in (low, high)]
    if bound[0] is not None:
        x = jnp.where(x < bound[0], bound[0], x)
    if bound[1] is not None:
        x = jnp.where(x > bound[1], bound[1], x)
    return x


@lowering(aten.clamp_min.default, aten.clamp_min.Tensor, layouts=pointwise)
def clamp_min(x: Any, low: Any) -> Any:
    return clamp(x, low)


@lowering(aten.clamp_max.default, aten.clamp_max.Tensor, layouts=pointwise)
def clamp_max(x: Any, high: Any) -> Any:
    return clamp(x, None, high)


@lowering(
    aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar, layouts=pointwise
)
def where(condition: Any, a: Any, b: Any) -> Any:
    return jnp.where(condition.astype(bool), *promote(a, b))


@lowering(aten.masked_fill.Scalar, aten.masked_fill.Tensor, layouts=pointwise)
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, constant(value, x.dtype), x)


@lowering(aten.addcmul.default, layouts=pointwise)
def addcmul(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    x, a, b = promote(x, a, b)
    product = a * b
    return x + (product if value == 1 else jnp.asarray(value, x.dtype) * product)


@lowering(aten.addcdiv.default, layouts=pointwise)
def addcdiv(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    x, a, b = promote(x, a, b)
    quotient = floating(a) / floating(b)
    return x + (quotient if value == 1 else jnp.asarray(value, quotient.dtype) * quotient)


@lowering(aten.lerp.Scalar, aten.lerp.Tensor, layouts=pointwise)
def lerp(a: Any, b: Any, weight: Any) -> Any:
    return a + jnp.asarray(weight, a.dtype) * (b - a)


@lowering(aten.nan_to_num.default, layouts=pointwise)
def nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@lowering(aten.round.decimals, layouts=pointwise)
def round_decimals(x: Any, *, decimals: int) -> Any:
    factor = 10.0**decimals
    return jnp.round(x * factor) / factor


@lowering(aten.logit.default, aten.special_logit.default, layouts=pointwise)
def logit(x: Any, eps: float | None = None) -> Any:
    x = floating(x)
    if eps is not None:
        x = clamp(x, eps, 1.0 - eps)
    return jnp.log(x / (1 - x))


@lowering(aten.angle.default, layouts=pointwise)
def angle(x: Any) -> Any:
    return jnp.angle(floating(x))


@lowering(aten.frexp.Tensor, layouts=pointwise)
def frexp(x: Any) -> Any:
    return jnp.frexp(x)


@lowering(aten.complex.default, layouts=pointwise)
def complex_of(real: Any, imag: Any) -> Any:
    return lax.complex(real, imag)


@lowering(aten.polar.default, layouts=pointwise)
def polar(length: Any, phase: Any) -> Any:
    return lax.complex(length * jnp.cos(phase), length * jnp.sin(phase))
