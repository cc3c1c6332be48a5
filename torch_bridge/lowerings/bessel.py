"""Bessel and Airy functions and erfcx, which JAX lacks, by Gauss-Legendre quadrature of their integrals.

The integrands are entire, so 64 nodes reach the rounding of float32 (DLMF 10.9 and 7.7.1 have the
integrals). Beyond x = 25 the functions that oscillate take Hankel's expansion (DLMF 10.17), since the
integrand would oscillate faster than the nodes. torch has no gradient for the Bessel functions.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import widened

aten = torch.ops.aten
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_FAR = 25.0
# exp(-40) is below what float32 keeps beside 1.
_NEGLIGIBLE = 40.0
_AIRY_FAR = 5.0
# Coefficients u_1 to u_5 of the Airy function's asymptotic series (DLMF 9.7.2).
_AIRY_U = [math.prod(range(2 * k + 1, 6 * k, 2)) / (216**k * math.factorial(k)) for k in range(1, 6)]


def _integral(integrand: Callable[[Any], Any], end: Any, dtype: Any) -> Any:
    """From 0 to `end`, which may differ by element."""
    end = jnp.asarray(end, dtype)[..., None]
    points = end * jnp.asarray((_POINTS + 1) / 2, dtype)
    return jnp.sum(integrand(points) * jnp.asarray(_WEIGHTS / 2, dtype) * end, -1)


def _hankel(x: Any, order: int) -> tuple[Any, Any]:
    """(J, Y) of a large x."""
    mu, z = 4 * order**2, 8 * x
    even = 1 - (mu - 1) * (mu - 9) / (2 * z**2) + (mu - 1) * (mu - 9) * (mu - 25) * (mu - 49) / (24 * z**4)
    odd = (mu - 1) / z - (mu - 1) * (mu - 9) * (mu - 25) / (6 * z**3)
    phase = x - (order / 2 + 0.25) * np.pi
    size = jnp.sqrt(2 / (np.pi * x))
    sine, cosine = jnp.sin(phase), jnp.cos(phase)
    return size * (even * cosine - odd * sine), size * (even * sine + odd * cosine)


def _first_kind(order: int) -> Callable[[Any], Any]:
    def lowered(x: Any) -> Any:
        x = widened(x)
        size = jnp.abs(x)
        near = jnp.minimum(size, _FAR)[..., None]
        inner = _integral(lambda t: jnp.cos(order * t - near * jnp.sin(t)), jnp.full(x.shape, np.pi), x.dtype)
        value = jnp.where(size > _FAR, _hankel(jnp.maximum(size, _FAR), order)[0], inner / np.pi)
        return value * jnp.sign(x) if order % 2 else value

    return lowered


def _second_kind(order: int) -> Callable[[Any], Any]:
    def lowered(x: Any) -> Any:
        """-inf at 0 and NaN below, as torch gives."""
        x = widened(x)
        safe = jnp.where(x > 0, x, 1)
        near = jnp.minimum(safe, _FAR)
        wide = near[..., None]
        turning = _integral(
            lambda t: jnp.sin(wide * jnp.sin(t) - order * t), jnp.full(x.shape, np.pi), x.dtype
        )
        falling = _integral(
            lambda t: (
                (jnp.exp(order * t) + (-1) ** order * jnp.exp(-order * t)) * jnp.exp(-wide * jnp.sinh(t))
            ),
            jnp.arcsinh(_NEGLIGIBLE / near),
            x.dtype,
        )
        value = jnp.where(safe > _FAR, _hankel(safe, order)[1], (turning - falling) / np.pi)
        return jnp.where(x > 0, value, jnp.where(x == 0, -jnp.inf, jnp.nan))

    return lowered


def _modified_second_kind(order: int, scaled: bool) -> Callable[[Any], Any]:
    def lowered(x: Any) -> Any:
        """inf at 0 and NaN below, as torch gives."""
        x = widened(x)
        safe = jnp.where(x > 0, x, 1)
        wide = safe[..., None]
        value = _integral(
            # cosh t - 1 without cancellation.
            lambda t: jnp.exp(-2 * wide * jnp.square(jnp.sinh(t / 2))) * jnp.cosh(order * t),
            2 * jnp.arcsinh(jnp.sqrt(_NEGLIGIBLE / (2 * safe))),
            x.dtype,
        )
        value = value if scaled else value * jnp.exp(-safe)
        return jnp.where(x > 0, value, jnp.where(x == 0, jnp.inf, jnp.nan))

    return lowered


lowering(aten.special_bessel_j0.default)(_first_kind(0))
lowering(aten.special_bessel_j1.default)(_first_kind(1))
lowering(aten.special_bessel_y0.default)(_second_kind(0))
lowering(aten.special_bessel_y1.default)(_second_kind(1))
lowering(aten.special_modified_bessel_k0.default)(_modified_second_kind(0, False))
lowering(aten.special_modified_bessel_k1.default)(_modified_second_kind(1, False))
lowering(aten.special_scaled_modified_bessel_k0.default)(_modified_second_kind(0, True))
lowering(aten.special_scaled_modified_bessel_k1.default)(_modified_second_kind(1, True))


@lowering(aten.special_airy_ai.default)
def airy_ai(x: Any) -> Any:
    """Along contours where the integrand falls; DLMF 9.5.4 near 0, 9.5.1 turned, 9.7.9 far to the left."""
    x = widened(x)
    right = jnp.maximum(x, 1.0)
    root = jnp.sqrt(right)[..., None]
    falling = _integral(
        lambda t: jnp.exp(-root * jnp.square(t)) * jnp.cos(t**3 / 3),
        jnp.sqrt(_NEGLIGIBLE / root[..., 0]),
        x.dtype,
    )
    falling = falling * jnp.exp(-2 / 3 * right**1.5) / np.pi
    middle = jnp.clip(x, -_AIRY_FAR, 1.0)
    wide = middle[..., None]
    turned = _integral(
        # exp(i pi / 6) times the integrand at t = s exp(i pi / 6).
        lambda s: jnp.exp(-(s**3) / 3 - wide * s / 2) * jnp.cos(np.pi / 6 + wide * s * (np.sqrt(3) / 2)),
        jnp.full(x.shape, 7.0),
        x.dtype,
    )
    left = jnp.maximum(-x, _AIRY_FAR)
    zeta = 2 / 3 * left**1.5
    even = 1 - _AIRY_U[1] / zeta**2 + _AIRY_U[3] / zeta**4
    odd = (_AIRY_U[0] - _AIRY_U[2] / zeta**2 + _AIRY_U[4] / zeta**4) / zeta
    phase = zeta - np.pi / 4
    waves = (jnp.cos(phase) * even + jnp.sin(phase) * odd) / (np.sqrt(np.pi) * left**0.25)
    return jnp.where(x > 1, falling, jnp.where(x < -_AIRY_FAR, waves, turned / np.pi))


@lowering(aten.special_erfcx.default)
def erfcx(x: Any) -> Any:
    """exp(x^2) erfc(x), finite where the factors are not."""
    x = widened(x)
    size = jnp.abs(x)
    wide = size[..., None]
    right = _integral(
        lambda t: jnp.exp(-jnp.square(t) - 2 * wide * t), _NEGLIGIBLE / (size + np.sqrt(_NEGLIGIBLE)), x.dtype
    ) * (2 / np.sqrt(np.pi))
    # Not of the positive ones, whose overflow would reach the gradient.
    left = 2 * jnp.exp(jnp.square(jnp.minimum(x, 0))) - right
    return jnp.where(x < 0, left, right)
