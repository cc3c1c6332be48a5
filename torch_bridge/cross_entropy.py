"""Row by row reductions over classes that every cross entropy is made of, as one node.

`row_sums` gives the logsumexp of each row, the logit of its target and, if wanted, the weighted sum of its
logits. Weights, masks and means over rows are left to the caller as plain operations on `[rows]`. What is
kept for the backward is the logits as they came, in their own dtype, and one number a row: the softmax is
made again there, in float32 inside one fused loop, and leaves it in the dtype of the logits.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from torch_bridge.attention import RESIDUAL
from torch_bridge.tensors import accumulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Where classes lie in the logits, and whether the (weighted) sum of all logits is wanted too."""

    dim: int
    with_total: bool = False


def row_sums(classes: Classes, logits: Any, target: Any, weight: Any = None) -> tuple[Any, Any, Any]:
    """(logsumexp, logit of the target, weighted sum of logits), each without the class dim.

    Args:
        classes: see `Classes`.
        logits: `[batch, classes, ...]`.
        target: class numbers, `[batch, ...]`; or a float factor of every logit, shaped like the logits, in
            which case the second result is the sum of factor * logit.
        weight: `[classes]`, of the third result; no gradient flows to it.

    Returns:
        Three arrays in float32 at least; the third is 0 unless `classes.with_total`.
    """
    weight = None if weight is None else lax.stop_gradient(weight)
    return _row_sums(classes, logits, target, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_sums(classes: Classes, logits: Any, target: Any, weight: Any) -> tuple[Any, Any, Any]:
    wide = logits.astype(accumulation(logits.dtype))
    factor = _factor(classes, wide, target)
    chosen = jnp.where(factor, wide, jnp.zeros_like(wide)) if factor.dtype == bool else factor * wide
    total = jnp.zeros((), wide.dtype)
    if classes.with_total:
        total = jnp.sum(wide if weight is None else wide * _along(classes, weight, wide), classes.dim)
    return jax.nn.logsumexp(wide, classes.dim), jnp.sum(chosen, classes.dim), total


def _forward(classes: Classes, logits: Any, target: Any, weight: Any) -> tuple[Any, Any]:
    sums: Any = _row_sums(classes, logits, target, weight)
    logsumexp = checkpoint_name(sums[0], RESIDUAL)
    return (logsumexp, *sums[1:]), (logits, target, weight, logsumexp)


def _backward(classes: Classes, residuals: Any, cotangents: Any) -> tuple[Any, Any, Any]:
    logits, target, weight, logsumexp = residuals
    wide = logits.astype(accumulation(logits.dtype))
    to_logsumexp, to_chosen = (jnp.expand_dims(c, classes.dim) for c in cotangents[:2])
    factor = _factor(classes, wide, target)
    gradient = jnp.exp(wide - jnp.expand_dims(logsumexp, classes.dim)) * to_logsumexp
    gradient += jnp.where(factor, to_chosen, 0) if factor.dtype == bool else factor * to_chosen
    if classes.with_total:
        each = jnp.expand_dims(cotangents[2], classes.dim)
        gradient += each if weight is None else each * _along(classes, weight, wide)
    if jnp.issubdtype(target.dtype, jnp.floating):
        to_target = (wide * to_chosen).astype(target.dtype)
    else:
        to_target = np.zeros(target.shape, jax.dtypes.float0)
    return gradient.astype(logits.dtype), to_target, None if weight is None else jnp.zeros_like(weight)


_row_sums.defvjp(_forward, _backward)


def _factor(classes: Classes, logits: Any, target: Any) -> Any:
    """What multiplies each logit: the target's own factors, or true at the target's class."""
    if jnp.issubdtype(target.dtype, jnp.floating):
        return target.astype(logits.dtype)
    numbers = lax.broadcasted_iota(target.dtype, logits.shape, classes.dim)
    return numbers == jnp.expand_dims(target, classes.dim)


def _along(classes: Classes, weight: Any, like: Any) -> Any:
    shape = [-1 if dim == classes.dim else 1 for dim in range(like.ndim)]
    return weight.reshape(shape).astype(like.dtype)
