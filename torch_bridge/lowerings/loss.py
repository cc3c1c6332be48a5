"""Losses. Reductions are plain: a masked mean is sum(values * mask) / sum(mask), nothing hidden.

`reduction` is torch's number: 0 none, 1 mean, 2 sum.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.cross_entropy import Classes, row_sums
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import accumulation, promote

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def reduced(values: Any, reduction: int) -> Any:
    if reduction == MEAN:
        return jnp.mean(values)
    return jnp.sum(values) if reduction == SUM else values


def _class_dim(x: Any) -> int:
    return 0 if x.ndim == 1 else 1


def _picked(values: Any, target: Any, dim: int) -> Any:
    """values[target] along dim: a masked sum, which fuses and needs no scatter on the way back."""
    classes = lax.broadcasted_iota(target.dtype, values.shape, dim)
    hit = classes == jnp.expand_dims(target, dim)
    return jnp.sum(jnp.where(hit, values, jnp.zeros_like(values)), dim)


@lowering(aten.cross_entropy_loss.default)
def cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Logits `[batch, classes, ...]`; target of class indices `[batch, ...]` or of probabilities."""
    classes = Classes(dim=_class_dim(x), with_total=label_smoothing > 0.0)
    if jnp.issubdtype(target.dtype, jnp.floating):
        return _soft_cross_entropy(x, target, weight, reduction, label_smoothing)
    valid = target != ignore_index
    target = jnp.where(valid, target, 0)
    normaliser, chosen, total = row_sums(classes, x, target, weight)
    # Selected, not multiplied away: where a row does not count, its logit of class 0 may be -inf.
    loss = jnp.where(valid, normaliser - chosen, jnp.zeros_like(chosen))
    importance = valid.astype(loss.dtype)
    if weight is not None:
        importance = importance * jnp.take(weight, target, axis=0, mode="clip")
    loss = loss * importance
    if label_smoothing:
        count = x.shape[classes.dim]
        uniform = (count if weight is None else jnp.sum(weight)) * normaliser - total
        uniform = jnp.where(valid, uniform, jnp.zeros_like(uniform))
        loss = (1 - label_smoothing) * loss + (label_smoothing / count) * uniform
    if reduction == MEAN:
        return jnp.sum(loss) / jnp.sum(importance)
    return jnp.sum(loss) if reduction == SUM else loss


def _soft_cross_entropy(x: Any, target: Any, weight: Any, reduction: int, smoothing: float) -> Any:
    dim = _class_dim(x)
    target = target.astype(accumulation(target.dtype)) if smoothing or weight is not None else target
    if smoothing:
        target = target * (1 - smoothing) + smoothing / x.shape[dim]
    if weight is not None:
        target = target * weight.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    normaliser, chosen, _ = row_sums(Classes(dim=dim), x, target)
    loss = normaliser * jnp.sum(target, dim, dtype=normaliser.dtype) - chosen
    if reduction == MEAN:
        return jnp.sum(loss) / max(math.prod(loss.shape), 1)
    return jnp.sum(loss) if reduction == SUM else loss


@lowering(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
def nll_loss(x: Any, target: Any, weight: Any = None, reduction: int = MEAN, ignore_index: int = -100) -> Any:
    return nll_loss_forward(x, target, weight, reduction, ignore_index)[0]


@lowering(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple[Any, Any]:
    """(loss, total weight)."""
    valid = target != ignore_index
    target = jnp.where(valid, target, 0)
    importance = valid.astype(x.dtype)
    if weight is not None:
        importance = importance * jnp.take(weight, target, axis=0, mode="clip")
    loss = -_picked(x, target, _class_dim(x)) * importance
    total = jnp.sum(importance)
    if reduction == MEAN:
        return jnp.sum(loss) / total, total
    return (jnp.sum(loss) if reduction == SUM else loss), total


@lowering(aten.mse_loss.default)
def mse_loss(x: Any, target: Any, reduction: int = MEAN) -> Any:
    x, target = promote(x, target)
    return reduced(jnp.square(x - target), reduction)


@lowering(aten.l1_loss.default)
def l1_loss(x: Any, target: Any, reduction: int = MEAN) -> Any:
    x, target = promote(x, target)
    return reduced(jnp.abs(x - target), reduction)


@lowering(aten.smooth_l1_loss.default)
def smooth_l1_loss(x: Any, target: Any, reduction: int = MEAN, beta: float = 1.0) -> Any:
    if beta == 0:
        return l1_loss(x, target, reduction)
    error = jnp.abs(x - target)
    return reduced(jnp.where(error < beta, jnp.square(error) * (0.5 / beta), error - 0.5 * beta), reduction)


@lowering(aten.huber_loss.default)
def huber_loss(x: Any, target: Any, reduction: int = MEAN, delta: float = 1.0) -> Any:
    error = jnp.abs(x - target)
    inside = 0.5 * jnp.square(error)
    return reduced(jnp.where(error <= delta, inside, delta * (error - 0.5 * delta)), reduction)


@lowering(aten.binary_cross_entropy.default)
def binary_cross_entropy(x: Any, target: Any, weight: Any = None, reduction: int = MEAN) -> Any:
    """Logarithms are cut off at -100, as torch does."""
    loss = -(target * jnp.maximum(jnp.log(x), -100) + (1 - target) * jnp.maximum(jnp.log1p(-x), -100))
    return reduced(loss if weight is None else loss * weight, reduction)


@lowering(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = MEAN
) -> Any:
    log_weight = 1.0 if pos_weight is None else 1 + (pos_weight - 1) * target
    loss = (1 - target) * x - log_weight * jax.nn.log_sigmoid(x)
    return reduced(loss if weight is None else loss * weight, reduction)


@lowering(aten.kl_div.default)
def kl_div(x: Any, target: Any, reduction: int = MEAN, *, log_target: bool = False) -> Any:
    if log_target:
        return reduced(jnp.exp(target) * (target - x), reduction)
    return reduced(jax.scipy.special.xlogy(target, target) - target * x, reduction)


@lowering(aten.soft_margin_loss.default)
def soft_margin_loss(x: Any, target: Any, reduction: int = MEAN) -> Any:
    return reduced(jnp.log1p(jnp.exp(-target * x)), reduction)


@lowering(aten.multilabel_margin_loss.default)
def multilabel_margin_loss(x: Any, target: Any, reduction: int = MEAN) -> Any:
    return multilabel_margin_loss_forward(x, target, reduction)[0]


@lowering(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(x: Any, target: Any, reduction: int) -> tuple[Any, Any]:
    """(loss, which classes are labels). Labels end at the first -1 of a row.

    torch's own decomposition counts the places behind that end as label 0.
    """
    rows, labels = jnp.atleast_2d(x), jnp.atleast_2d(target)
    classes = rows.shape[1]
    counted = jnp.cumsum(labels == -1, 1) == 0
    hits = (labels[:, :, None] == jnp.arange(classes)) & counted[:, :, None]
    is_label = jnp.any(hits, 1)
    of_label = jnp.sum(jnp.where(hits, rows[:, None], 0), 2, keepdims=True)
    margins = jax.nn.relu(1 - of_label + rows[:, None])
    wanted = counted[:, :, None] & ~is_label[:, None]
    loss = jnp.sum(jnp.where(wanted, margins, 0), (1, 2)) / classes
    loss = loss if x.ndim == 2 else loss[0]
    return reduced(loss, reduction), is_label.astype(x.dtype).reshape(target.shape)


@lowering(aten.poisson_nll_loss.default)
def poisson_nll_loss(x: Any, target: Any, log_input: bool, is_full: bool, eps: float, reduction: int) -> Any:
    loss = jnp.exp(x) - target * x if log_input else x - target * jnp.log(x + eps)
    if is_full:
        stirling = target * jnp.log(target) - target + 0.5 * jnp.log(2 * math.pi * target)
        loss = loss + jnp.where(target > 1, stirling, jnp.zeros_like(target))
    return reduced(loss, reduction)


@lowering(aten.margin_ranking_loss.default)
def margin_ranking_loss(a: Any, b: Any, target: Any, margin: float = 0.0, reduction: int = MEAN) -> Any:
    return reduced(jax.nn.relu(-target * (a - b) + margin), reduction)


@lowering(aten.hinge_embedding_loss.default)
def hinge_embedding_loss(x: Any, target: Any, margin: float = 1.0, reduction: int = MEAN) -> Any:
    """Targets are 1 (the distance itself) or -1 (what it lacks to the margin)."""
    far = jnp.where(target != 1, jax.nn.relu(margin - x), 0)
    return reduced(far + jnp.where(target != -1, x, 0), reduction)
