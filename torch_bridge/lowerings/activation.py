"""Activations and softmax.

Gradients at kinks are those of torch: relu at 0 has gradient 0 (`jax.nn.relu` too, through custom_jvp).
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.layouts import along, in_space, pointwise
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import accumulation, floating, jax_dtype

aten = torch.ops.aten

lowering(aten.relu.default, layouts=pointwise)(jax.nn.relu)
lowering(aten.relu6.default, layouts=pointwise)(jax.nn.relu6)
lowering(aten.silu.default, layouts=pointwise)(jax.nn.silu)
lowering(aten.log_sigmoid.default, layouts=pointwise)(jax.nn.log_sigmoid)


@lowering(aten.gelu.default, layouts=pointwise)
def gelu(x: Any, *, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@lowering(aten.mish.default, layouts=pointwise)
def mish(x: Any) -> Any:
    return x * jnp.tanh(jax.nn.softplus(x))


@lowering(aten.softplus.default, layouts=pointwise)
def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = x * beta
    return jnp.where(
        scaled > threshold, x, jax.nn.softplus(jnp.where(scaled > threshold, threshold, scaled)) / beta
    )


@lowering(aten.softshrink.default, layouts=pointwise)
def softshrink(x: Any, lambd: float = 0.5) -> Any:
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, jnp.zeros_like(x)))


@lowering(aten.hardshrink.default, layouts=pointwise)
def hardshrink(x: Any, lambd: float = 0.5) -> Any:
    return jnp.where(jnp.abs(x) <= lambd, jnp.zeros_like(x), x)


@lowering(aten.elu.default, layouts=pointwise)
def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    negative = alpha * jnp.expm1(jnp.where(x > 0, jnp.zeros_like(x), x) * input_scale)
    return scale * jnp.where(x > 0, x, negative)


@lowering(aten.celu.default, layouts=pointwise)
def celu(x: Any, alpha: float = 1.0) -> Any:
    return elu(x, alpha, 1.0, 1.0 / alpha)


@lowering(aten.selu.default, layouts=pointwise)
def selu(x: Any) -> Any:
    # Constants of Klambauer et al. 2017.
    return elu(x, 1.6732632423543772, 1.0507009873554805)


@lowering(aten.leaky_relu.default, layouts=pointwise)
def leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    return jnp.where(x > 0, x, x * negative_slope)


@lowering(aten.prelu.default, layouts=in_space())
def prelu(x: Any, weight: Any, *, channels_last: bool = False) -> Any:
    """`weight` is one slope, or one a channel (dim 1)."""
    if weight.ndim == 1 and weight.size > 1 and not channels_last:
        weight = weight.reshape([-1 if d == 1 else 1 for d in range(x.ndim)])
    elif weight.ndim == 1 and weight.size == 1:
        weight = weight.reshape(())
    return prelu_kernel(x, weight)


@lowering(aten._prelu_kernel.default, layouts=pointwise)
def prelu_kernel(x: Any, weight: Any) -> Any:
    return jnp.where(x > 0, x, x * weight)


@lowering(aten.hardtanh.default, layouts=pointwise)
def hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """torch's gradient is 0 at both borders."""
    inside = (x > low) & (x < high)
    return jnp.where(inside, x, jnp.clip(lax.stop_gradient(x), low, high))


@lowering(aten.hardsigmoid.default, layouts=pointwise)
def hardsigmoid(x: Any) -> Any:
    return hardtanh(x / 6 + 0.5, 0.0, 1.0)


@lowering(aten.hardswish.default, layouts=pointwise)
def hardswish(x: Any) -> Any:
    return jnp.where(x <= -3, jnp.zeros_like(x), jnp.where(x < 3, x * (x / 6 + 0.5), x))


@lowering(aten.threshold.default, layouts=pointwise)
def threshold(x: Any, limit: float, value: float) -> Any:
    return jnp.where(x <= limit, jnp.asarray(value, x.dtype), x)


@lowering(aten.glu.default, layouts=along("dim"))
def glu(x: Any, dim: int = -1) -> Any:
    value, gate = jnp.split(x, 2, dim)
    return value * jax.nn.sigmoid(gate)


def _wide(x: Any, dtype: Any) -> tuple[Any, Any]:
    """(x in the accumulation dtype, dtype of the result)."""
    if dtype is not None:
        x = x.astype(jax_dtype(dtype))
    x = floating(x)
    return x.astype(accumulation(x.dtype)), x.dtype


@lowering(aten.softmax.int, aten._softmax.default, layouts=along("dim", last=True))
def softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    wide, result = _wide(x, None if isinstance(dtype, bool) else dtype)
    return jax.nn.softmax(wide, dim if x.ndim else None).astype(result)


@lowering(aten._safe_softmax.default, layouts=along("dim", last=True))
def safe_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    """A row of -inf gives zeros."""
    hidden = jnp.all(x == -jnp.inf, dim, keepdims=True)
    return jnp.where(hidden, 0, softmax(jnp.where(hidden, jnp.zeros_like(x), x), dim, dtype))


@lowering(aten.log_softmax.int, aten._log_softmax.default, layouts=along("dim", last=True))
def log_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    wide, result = _wide(x, None if isinstance(dtype, bool) else dtype)
    return jax.nn.log_softmax(wide, dim if x.ndim else None).astype(result)
