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

from torch_bridge.lowerings.layouts import pointwise
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import floating, promote, widened

aten = torch.ops.aten


def _unary(op: Any, function: Callable[[Any], Any]) -> None:
    lowering(op.default, layouts=pointwise)(function)


def _unary_float(op: Any, function: Callable[[Any], Any]) -> None:
    """Integers become floats first."""

    def wrapped(x: Any) -> Any:
        return function(floating(x))

    lowering(op.default, layouts=pointwise)(wrapped)


def _unary_wide(op: Any, function: Callable[[Any], Any]) -> None:
    """Series and polynomials, whose rounding half precision would not survive."""

    def wrapped(x: Any) -> Any:
        return function(widened(x))

    lowering(op.default, layouts=pointwise)(wrapped)


def _binary(function: Callable[[Any, Any], Any], *overloads: Any) -> None:
    def wrapped(a: Any, b: Any) -> Any:
        return function(*promote(a, b))

    lowering(*overloads, layouts=pointwise)(wrapped)


@jax.custom_jvp
def _nextafter(a: Any, b: Any) -> Any:
    return jnp.nextafter(a, b)


@_nextafter.defjvp
def _nextafter_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    """One step away moves as a itself does; where there is no step, torch gives no gradient."""
    a, b = primals
    return _nextafter(a, b), jnp.where(a == b, 0, tangents[0])


for _op, _function in (
    (aten.abs, jnp.abs),
    (aten.neg, jnp.negative),
    (aten.sign, lambda x: x if x.dtype == bool else jnp.sign(x)),
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
    (aten.frac, lambda x: x - jnp.trunc(x)),
    (aten.detach, lax.stop_gradient),
):
    _unary(_op, _function)

lowering(aten.view_as_real.default)(lambda x: jnp.stack([jnp.real(x), jnp.imag(x)], -1))
lowering(aten.view_as_complex.default)(lambda x: lax.complex(x[..., 0], x[..., 1]))

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
    (aten.deg2rad, jnp.deg2rad),
    (aten.rad2deg, jnp.rad2deg),
):
    _unary_float(_op, _function)

for _op, _function in (
    (aten.erfinv, jsp.erfinv),
    (aten.lgamma, jsp.gammaln),
    (aten.i0, jsp.i0),
    (aten.special_i0e, jsp.i0e),
    (aten.special_i1, jsp.i1),
    (aten.special_i1e, jsp.i1e),
    (aten.special_ndtri, jsp.ndtri),
    (aten.special_log_ndtr, jsp.log_ndtr),
    (aten.special_entr, jsp.entr),
):
    _unary_wide(_op, _function)

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

    lowering(*overloads, layouts=pointwise)(wrapped)


_binary_float(jnp.arctan2, aten.atan2.default)

_binary_float(jnp.hypot, aten.hypot.default)


_binary_float(_nextafter, aten.nextafter.default)
_binary_float(jnp.copysign, aten.copysign.Tensor, aten.copysign.Scalar)

_binary_float(jsp.xlogy, aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)

_binary_float(jsp.xlog1py, aten.special_xlog1py.default)

_binary_float(jnp.logaddexp, aten.logaddexp.default)

_binary_float(jnp.logaddexp2, aten.logaddexp2.default)

_binary_float(jnp.heaviside, aten.heaviside.default)
