"""The cross entropy of a linear layer's outputs, some rows at a time, so that no full logits are kept.

torch's operator computes the gradients in its forward and returns them beside the loss for its own
backward. JAX differentiates the loss itself, recomputing the logits of each chunk; the places of those
gradients hold zeros. The operators exist from torch 2.13 on, once torch has imported their module.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_bridge.lowerings.loss import NONE, cross_entropy
from torch_bridge.lowerings.matmul import linear
from torch_bridge.lowerings.registry import lowering_by_name


def _losses(
    x: Any, weight: Any, target: Any, bias: Any, class_weight: Any, ignore_index: int, chunk: int
) -> Any:
    """One loss a row of x `[rows, in]`, weight `[classes, in]`, target `[rows]`."""
    rows = x.shape[0]

    @jax.checkpoint
    def of_chunk(x: Any, target: Any) -> Any:
        return cross_entropy(linear(x, weight, bias), target, class_weight, NONE, ignore_index)

    if rows <= chunk:
        return of_chunk(x, target)
    count = -(-rows // chunk)
    missing = count * chunk - rows
    x = jnp.pad(x, ((0, missing), (0, 0))).reshape(count, chunk, -1)
    target = jnp.pad(target, (0, missing), constant_values=ignore_index).reshape(count, chunk)
    return lax.map(lambda part: of_chunk(*part), (x, target)).reshape(-1)[:rows]


def _total_weight(target: Any, class_weight: Any, ignore_index: int, dtype: Any) -> Any:
    counted = (target != ignore_index).astype(dtype)
    if class_weight is None:
        return jnp.sum(counted)
    return jnp.sum(counted * jnp.take(class_weight, jnp.where(counted > 0, target, 0), axis=0, mode="clip"))


def linear_cross_entropy(
    x: Any,
    weight: Any,
    target: Any,
    bias: Any,
    class_weight: Any,
    reduction: str,
    ignore_index: int,
    _label_smoothing: float,
    chunk: int,
    *_: Any,
) -> tuple[Any, ...]:
    losses = _losses(x, weight, target, bias, class_weight, ignore_index, chunk)
    if reduction == "mean":
        loss = jnp.sum(losses) / _total_weight(target, class_weight, ignore_index, losses.dtype)
    else:
        loss = jnp.sum(losses) if reduction == "sum" else losses
    gradients = (jnp.zeros_like(x), jnp.zeros_like(weight), jnp.zeros(weight.shape[:-1], x.dtype))
    return loss.astype(x.dtype), *gradients


def _without_reduction(
    x: Any, weight: Any, target: Any, bias: Any, class_weight: Any, ignore_index: int, chunk: int, *_: Any
) -> Any:
    return _losses(x, weight, target, bias, class_weight, ignore_index, chunk).astype(x.dtype)


lowering_by_name("torch_nn::_linear_cross_entropy_batch_chunked")(linear_cross_entropy)
lowering_by_name("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")(_without_reduction)
