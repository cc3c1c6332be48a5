"""Fake quantisation: values rounded to the steps of an integer dtype, in floating point.

Rounding passes the gradient on where a value lies inside the range, and none to scales and zero points.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


@jax.custom_jvp
def _quantised(x: Any, scale: Any, zero: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """(values at whole steps, which of them were inside the range)."""
    steps = zero + jnp.round(x * (1 / scale))
    inside = (steps >= low) & (steps <= high)
    return ((jnp.clip(steps, low, high) - zero) * scale).astype(x.dtype), inside


@_quantised.defjvp
def _quantised_jvp(primals: Any, tangents: Any) -> Any:
    value, inside = _quantised(*primals)
    moved = jnp.where(inside, tangents[0], jnp.zeros_like(tangents[0]))
    return (value, inside), (moved, jnp.zeros(inside.shape, jax.dtypes.float0))


def _round(x: Any, scale: Any, zero: Any, low: int, high: int) -> tuple[Any, Any]:
    parts = [jnp.asarray(part, jnp.float32) for part in (scale, zero)]
    return _quantised(x, *(lax.stop_gradient(part) for part in parts), float(low), float(high))


def _along(parameter: Any, x: Any, axis: int) -> Any:
    """One number a channel, so that it broadcasts."""
    return parameter.reshape([-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim)])


@lowering(aten.fake_quantize_per_tensor_affine_cachemask.default)
def per_tensor(x: Any, scale: float, zero_point: int, quant_min: int, quant_max: int) -> tuple[Any, Any]:
    return _round(x, scale, zero_point, quant_min, quant_max)


@lowering(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def per_tensor_by_tensors(
    x: Any, scale: Any, zero_point: Any, fake_quant_enabled: Any, quant_min: int, quant_max: int
) -> tuple[Any, Any]:
    """Where it is not enabled, values and gradients pass."""
    value, inside = _round(x, scale.reshape(()), zero_point.reshape(()), quant_min, quant_max)
    enabled = fake_quant_enabled.reshape(()) != 0
    return jnp.where(enabled, value, x), inside | ~enabled


@lowering(aten.fake_quantize_per_channel_affine_cachemask.default)
def per_channel(
    x: Any, scale: Any, zero_point: Any, axis: int, quant_min: int, quant_max: int
) -> tuple[Any, Any]:
    return _round(x, _along(scale, x, axis), _along(zero_point, x, axis), quant_min, quant_max)
