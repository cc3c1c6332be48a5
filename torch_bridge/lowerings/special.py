"""Special functions: orthogonal polynomials by their recurrences, and incomplete gamma and zeta."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import promote, widened

aten = torch.ops.aten
# Next from (degree of the next, x, previous, the one before).
Recurrence = Callable[[Any, Any, Any, Any], Any]


def _polynomial(name: str, first: Callable[[Any], Any], recurrence: Recurrence, shift: bool = False) -> None:
    """P_0 = 1, P_1 = first(x), and on; a negative degree gives 0."""

    def lowered(x: Any, degree: Any) -> Any:
        x, degree = promote(x, degree)
        x, degree = jnp.broadcast_arrays(widened(x), widened(degree))
        point = 2 * x - 1 if shift else x
        whole = jnp.trunc(degree)
        highest = jnp.max(whole, initial=0.0)

        def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            n, before, now = state
            advanced = recurrence(n, point, now, before)
            going = n <= whole
            return n + 1, jnp.where(going, now, before), jnp.where(going, advanced, now)

        start = (jnp.asarray(2.0, x.dtype), jnp.ones_like(point), first(point))
        _, _, last = lax.while_loop(lambda state: state[0] <= highest, step, start)
        return jnp.where(whole < 0, 0, jnp.where(whole == 0, 1, last)).astype(x.dtype)

    packet = getattr(aten, f"special_{name}")
    lowering(packet.default, packet.n_scalar, packet.x_scalar)(lowered)


def _chebyshev(_n: Any, x: Any, now: Any, before: Any) -> Any:
    return 2 * x * now - before


for _shift, _prefix in ((False, ""), (True, "shifted_")):
    for _kind, _first in (
        ("t", lambda x: x),
        ("u", lambda x: 2 * x),
        ("v", lambda x: 2 * x - 1),
        ("w", lambda x: 2 * x + 1),
    ):
        _polynomial(f"{_prefix}chebyshev_polynomial_{_kind}", _first, _chebyshev, _shift)

_polynomial(
    "hermite_polynomial_h", lambda x: 2 * x, lambda n, x, now, before: 2 * (x * now - (n - 1) * before)
)
_polynomial("hermite_polynomial_he", lambda x: x, lambda n, x, now, before: x * now - (n - 1) * before)
_polynomial(
    "laguerre_polynomial_l",
    lambda x: 1 - x,
    lambda n, x, now, before: ((2 * n - 1 - x) * now - (n - 1) * before) / n,
)
_polynomial(
    "legendre_polynomial_p",
    lambda x: x,
    lambda n, x, now, before: ((2 * n - 1) * x * now - (n - 1) * before) / n,
)


@jax.custom_jvp
def zeta(s: Any, q: Any) -> Any:
    """Hurwitz zeta; JAX's loses its digits at negative q, so the terms below zero are summed here."""
    s, q = jnp.broadcast_arrays(s, q)
    below = jnp.maximum(jnp.ceil(-q), 0)
    most = jnp.max(below, initial=0)

    def add(state: tuple[Any, Any]) -> tuple[Any, Any]:
        k, total = state
        term = jnp.where(k < below, jnp.power(q + k, -s), 0)
        return k + 1, total + term

    start = (jnp.zeros((), q.dtype), jnp.zeros_like(q))
    _, total = lax.while_loop(lambda state: state[0] < most, add, start)
    return total + jsp.zeta(s, q + below)


@zeta.defjvp
def _zeta_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    """torch too has the derivative by q alone."""
    s, q = primals
    return zeta(s, q), -s * zeta(s + 1, q) * tangents[1]


@jax.custom_jvp
def _digamma(x: Any) -> Any:
    return jsp.digamma(x)


@_digamma.defjvp
def _digamma_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,) = primals
    return _digamma(x), zeta(jnp.full_like(x, 2), x) * tangents[0]


@lowering(aten.digamma.default, torch.ops.prims.digamma.default)
def digamma(x: Any) -> Any:
    x = widened(x)
    # JAX's has no poles.
    pole = jnp.where(x == 0, jnp.copysign(jnp.inf, -x), jnp.nan)
    return jnp.where((x <= 0) & (x == jnp.round(x)), pole, _digamma(x))


@lowering(aten.polygamma.default)
def polygamma(n: int, x: Any) -> Any:
    x = widened(x)
    if n == 0:
        return digamma(x)
    return (-1) ** (n + 1) * math.factorial(n) * zeta(jnp.asarray(n + 1.0, x.dtype), x)


def _of_two(op: Any, function: Callable[[Any, Any], Any]) -> None:
    def lowered(a: Any, b: Any) -> Any:
        a, b = promote(a, b)
        return function(widened(a), widened(b))

    lowering(op)(lowered)


_of_two(aten.igamma.default, jsp.gammainc)
_of_two(aten.igammac.default, jsp.gammaincc)
_of_two(aten.special_zeta.default, zeta)
_of_two(aten.special_zeta.other_scalar, zeta)
_of_two(aten.special_zeta.self_scalar, zeta)

lowering(aten.special_modified_bessel_i0.default)(lambda x: jsp.i0(widened(x)))
lowering(aten.special_modified_bessel_i1.default)(lambda x: jsp.i1(widened(x)))
lowering(aten.special_spherical_bessel_j0.default)(lambda x: jnp.sinc(widened(x) / jnp.pi))
