"""Pointwise operators: arithmetic, comparison, logic, bits, and the functions of one number.

Binary ones compute in the dtype that torch's promotion gives, which is not always JAX's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import floating, jax_dtype, promote

aten = torch.ops.aten


def _unary(op: Any, function: Callable[[Any], Any]) -> None:
    lowering(op.default)(function)


def _unary_float(op: Any, function: Callable[[Any], Any]) -> None:
    """Integers become floats first."""

    def wrapped(x: Any) -> Any:
        return function(floating(x))

    lowering(op.default)(wrapped)


def _binary(function: Callable[[Any, Any], Any], *overloads: Any) -> None:
    def wrapped(a: Any, b: Any) -> Any:
        return function(*promote(a, b))

    lowering(*overloads)(wrapped)


for _op, _function in (
    (aten.abs, jnp.abs),
    (aten.neg, jnp.negative),
    (aten.sign, jnp.sign),
    (aten.sgn, jnp.sign),
    (aten.ceil, jnp.ceil),
    (aten.floor, jnp.floor),
    (aten.trunc, jnp.trunc),
    (aten.fix, jnp.trunc),
    (aten.round, jnp.round),
    (aten.square, jnp.square),
    (aten.positive, lambda x: x),
    (aten.isnan, jnp.isnan),
    (aten.isinf, jnp.isinf),
    (aten.isfinite, jnp.isfinite),
    (aten.isposinf, jnp.isposinf),
    (aten.isneginf, jnp.isneginf),
    (aten.signbit, jnp.signbit),
    (aten.logical_not, jnp.logical_not),
    (aten.bitwise_not, jnp.bitwise_not),
    (aten.real, jnp.real),
    (aten.imag, jnp.imag),
    (aten.conj, jnp.conj),
    (aten._conj, jnp.conj),
    (aten.conj_physical, jnp.conj),
    (aten._conj_physical, jnp.conj),
    (aten.resolve_conj, lambda x: x),
    (aten.resolve_neg, lambda x: x),
    (aten._neg_view, jnp.negative),
    (aten.view_as_real, lambda x: jnp.stack([jnp.real(x), jnp.imag(x)], -1)),
    (aten.view_as_complex, lambda x: lax.complex(x[..., 0], x[..., 1])),
    (aten.frac, lambda x: x - jnp.trunc(x)),
    (aten.detach, lax.stop_gradient),
):
    _unary(_op, _function)

for _op, _function in (
    (aten.exp, jnp.exp),
    (aten.exp2, jnp.exp2),
    (aten.expm1, jnp.expm1),
    (aten.log, jnp.log),
    (aten.log2, jnp.log2),
    (aten.log10, jnp.log10),
    (aten.log1p, jnp.log1p),
    (aten.sqrt, jnp.sqrt),
    (aten.rsqrt, lax.rsqrt),
    (aten.reciprocal, jnp.reciprocal),
    (aten.sin, jnp.sin),
    (aten.cos, jnp.cos),
    (aten.tan, jnp.tan),
    (aten.asin, jnp.arcsin),
    (aten.acos, jnp.arccos),
    (aten.atan, jnp.arctan),
    (aten.sinh, jnp.sinh),
    (aten.cosh, jnp.cosh),
    (aten.tanh, jnp.tanh),
    (aten.asinh, jnp.arcsinh),
    (aten.acosh, jnp.arccosh),
    (aten.atanh, jnp.arctanh),
    (aten.sinc, jnp.sinc),
    (aten.sigmoid, jax.nn.sigmoid),
    (aten.erf, jsp.erf),
    (aten.erfc, jsp.erfc),
    (aten.erfinv, jsp.erfinv),
    (aten.lgamma, jsp.gammaln),
    (aten.i0, jsp.i0),
    (aten.special_i0e, jsp.i0e),
    (aten.special_i1, jsp.i1),
    (aten.special_i1e, jsp.i1e),
    (aten.special_ndtri, jsp.ndtri),
    (aten.special_log_ndtr, jsp.log_ndtr),
    (aten.special_entr, jsp.entr),
    (aten.deg2rad, jnp.deg2rad),
    (aten.rad2deg, jnp.rad2deg),
):
    _unary_float(_op, _function)

_binary(jnp.multiply, aten.mul.Tensor, aten.mul.Scalar)
_binary(jnp.true_divide, aten.true_divide.Tensor)
_binary(lambda a, b: a // b, aten.floor_divide.default, aten.floor_divide.Scalar)
_binary(jnp.remainder, aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
_binary(jnp.fmod, aten.fmod.Tensor, aten.fmod.Scalar)
_binary(jnp.maximum, aten.maximum.default)
_binary(jnp.minimum, aten.minimum.default)
_binary(jnp.fmax, aten.fmax.default)
_binary(jnp.fmin, aten.fmin.default)
_binary(jnp.equal, aten.eq.Tensor, aten.eq.Scalar)
_binary(jnp.not_equal, aten.ne.Tensor, aten.ne.Scalar)
_binary(jnp.less, aten.lt.Tensor, aten.lt.Scalar)
_binary(jnp.less_equal, aten.le.Tensor, aten.le.Scalar)
_binary(jnp.greater, aten.gt.Tensor, aten.gt.Scalar)
_binary(jnp.greater_equal, aten.ge.Tensor, aten.ge.Scalar)
_binary(jnp.logical_and, aten.logical_and.default)
_binary(jnp.logical_or, aten.logical_or.default)
_binary(jnp.logical_xor, aten.logical_xor.default)
_binary(
    jnp.bitwise_and,
    aten.bitwise_and.Tensor,
    aten.bitwise_and.Scalar,
    aten.__and__.Tensor,
    aten.__and__.Scalar,
)
_binary(
    jnp.bitwise_or, aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.__or__.Tensor, aten.__or__.Scalar
)
_binary(
    jnp.bitwise_xor,
    aten.bitwise_xor.Tensor,
    aten.bitwise_xor.Scalar,
    aten.__xor__.Tensor,
    aten.__xor__.Scalar,
)
_binary(
    jnp.left_shift,
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
)
_binary(
    jnp.right_shift,
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
)
_binary(jnp.gcd, aten.gcd.default)
_binary(jnp.lcm, aten.lcm.default)


def _binary_float(function: Callable[[Any, Any], Any], *overloads: Any) -> None:
    def wrapped(a: Any, b: Any) -> Any:
        a, b = promote(a, b)
        return function(floating(a), floating(b))

    lowering(*overloads)(wrapped)


_binary_float(jnp.arctan2, aten.atan2.default)
_binary_float(jnp.hypot, aten.hypot.default)
_binary_float(jnp.nextafter, aten.nextafter.default)
_binary_float(jnp.copysign, aten.copysign.Tensor, aten.copysign.Scalar)
_binary_float(jsp.xlogy, aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
_binary_float(jsp.xlog1py, aten.special_xlog1py.default)
_binary_float(jnp.logaddexp, aten.logaddexp.default)
_binary_float(jnp.logaddexp2, aten.logaddexp2.default)
_binary_float(jnp.heaviside, aten.heaviside.default)


@lowering(aten.add.Tensor, aten.add.Scalar)
def add(a: Any, b: Any, alpha: Any = 1) -> Any:
    a, b = promote(a, b)
    if a.dtype == bool:
        return a | b if alpha else a
    return a + b if alpha == 1 else a + jnp.asarray(alpha, b.dtype) * b


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def sub(a: Any, b: Any, alpha: Any = 1) -> Any:
    a, b = promote(a, b)
    return a - b if alpha == 1 else a - jnp.asarray(alpha, b.dtype) * b


@lowering(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(a: Any, b: Any, alpha: Any = 1) -> Any:
    return sub(b, a, alpha)


@lowering(aten.div.Tensor, aten.div.Scalar)
def div(a: Any, b: Any) -> Any:
    a, b = promote(a, b)
    return floating(a) / floating(b)


@lowering(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(a: Any, b: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode is None:
        return div(a, b)
    a, b = promote(a, b)
    if rounding_mode == "floor":
        return a // b
    if jnp.issubdtype(a.dtype, jnp.integer):
        return lax.div(*jnp.broadcast_arrays(a, b))
    return jnp.trunc(a / b)


@lowering(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(a: Any, b: Any) -> Any:
    return jnp.power(*promote(a, b))


@lowering(aten.pow.Tensor_Scalar)
def power_scalar(a: Any, exponent: Any) -> Any:
    whole = isinstance(exponent, int) or (isinstance(exponent, float) and exponent.is_integer())
    if whole and jnp.issubdtype(a.dtype, jnp.inexact) and abs(exponent) < 2**31:
        return lax.integer_pow(a, int(exponent))
    a, exponent = promote(a, exponent)
    return jnp.power(a, exponent)


@lowering(aten.float_power.Tensor_Scalar, aten.float_power.Tensor_Tensor, aten.float_power.Scalar)
def float_power(a: Any, b: Any) -> Any:
    a, b = promote(a, b)
    wide = jax_dtype(torch.float64)
    return jnp.power(a.astype(wide), b.astype(wide))


@lowering(aten.clamp.default, aten.clip.default, aten.clamp.Tensor, aten.clip.Tensor)
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


@lowering(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(x: Any, low: Any) -> Any:
    return clamp(x, low)


@lowering(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(x: Any, high: Any) -> Any:
    return clamp(x, None, high)


@lowering(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(condition: Any, a: Any, b: Any) -> Any:
    return jnp.where(condition.astype(bool), *promote(a, b))


@lowering(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@lowering(aten.addcmul.default)
def addcmul(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    x, a, b = promote(x, a, b)
    product = a * b
    return x + (product if value == 1 else jnp.asarray(value, x.dtype) * product)


@lowering(aten.addcdiv.default)
def addcdiv(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    x, a, b = promote(x, a, b)
    quotient = floating(a) / floating(b)
    return x + (quotient if value == 1 else jnp.asarray(value, quotient.dtype) * quotient)


@lowering(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(a: Any, b: Any, weight: Any) -> Any:
    return a + jnp.asarray(weight, a.dtype) * (b - a)


@lowering(aten.nan_to_num.default)
def nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@lowering(aten.round.decimals)
def round_decimals(x: Any, *, decimals: int) -> Any:
    factor = 10.0**decimals
    return jnp.round(x * factor) / factor


@lowering(aten.logit.default, aten.special_logit.default)
def logit(x: Any, eps: float | None = None) -> Any:
    x = floating(x)
    if eps is not None:
        x = clamp(x, eps, 1.0 - eps)
    return jnp.log(x / (1 - x))


@lowering(aten.angle.default)
def angle(x: Any) -> Any:
    return jnp.angle(floating(x))


@lowering(aten.frexp.Tensor)
def frexp(x: Any) -> Any:
    return jnp.frexp(x)


@lowering(aten.complex.default)
def complex_of(real: Any, imag: Any) -> Any:
    return lax.complex(real, imag)


@lowering(aten.polar.default)
def polar(length: Any, phase: Any) -> Any:
    return lax.complex(length * jnp.cos(phase), length * jnp.sin(phase))


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
