"""Normalisation. Statistics in float32 at least; batch statistics are plain reductions over the batch.

Batch normalisation in training returns the new running statistics, which carry no gradient.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.layouts import in_space
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import accumulation

aten = torch.ops.aten


def _moments(x: Any, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """Mean and biased variance over dims, kept, in the accumulation dtype."""
    x = x.astype(accumulation(x.dtype))
    mean = jnp.mean(x, dims, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), dims, keepdims=True)


def _normalised(x: Any, mean: Any, inverse: Any, weight: Any, bias: Any) -> Any:
    out = (x.astype(mean.dtype) - mean) * inverse
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.astype(x.dtype)


@lowering(aten.native_layer_norm.default)
def native_layer_norm(
    x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Any, Any, Any]:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    mean, variance = _moments(x, dims)
    inverse = lax.rsqrt(variance + eps)
    return _normalised(x, mean, inverse, weight, bias), mean, inverse


@lowering(aten.layer_norm.default)
def layer_norm(
    x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    return native_layer_norm(x, shape, weight, bias, eps)[0]


@lowering(aten.rms_norm.default)
def rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    wide = x.astype(accumulation(x.dtype))
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    # Without eps torch takes the epsilon of the dtype it computes in.
    eps = float(jnp.finfo(wide.dtype).eps) if eps is None else eps
    out = wide * lax.rsqrt(jnp.mean(jnp.square(wide), dims, keepdims=True) + eps)
    return (out if weight is None else out * weight).astype(x.dtype)


@lowering(aten.group_norm.default, layouts=in_space())
def group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
    channels_last: bool = False,
) -> Any:
    """x `[batch, channels, *space]`, or `[batch, *space, channels]`."""
    return _group_norm(x, num_groups, weight, bias, eps, channels_last)[0]


def _group_norm(
    x: Any, num_groups: int, weight: Any, bias: Any, eps: float, channels_last: bool
) -> tuple[Any, Any, Any]:
    """(normalised, mean, inverse deviation), the latter two `[batch, groups]`."""
    rows = x.shape[0]
    shape = (rows, -1, num_groups, x.shape[-1] // num_groups) if channels_last else (rows, num_groups, -1)
    grouped = x.reshape(shape)
    mean, variance = _moments(grouped, (1, 3) if channels_last else (2,))
    inverse = lax.rsqrt(variance + eps)
    out = _normalised(grouped, mean, inverse, None, None).reshape(x.shape)
    if weight is not None:
        out = out * _per_channel(weight, x.ndim, channels_last)
    if bias is not None:
        out = out + _per_channel(bias, x.ndim, channels_last)
    return out, mean.reshape(rows, num_groups), inverse.reshape(rows, num_groups)


@lowering(aten.native_group_norm.default, layouts=in_space())
def native_group_norm(
    x: Any,
    weight: Any,
    bias: Any,
    _rows: int,
    _channels: int,
    _size: int,
    group: int,
    eps: float,
    *,
    channels_last: bool = False,
) -> tuple[Any, Any, Any]:
    return _group_norm(x, group, weight, bias, eps, channels_last)


def _per_channel(x: Any, ndim: int, channels_last: bool) -> Any:
    return x if x is None or channels_last else x.reshape((1, -1) + (1,) * (ndim - 2))


def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    channels_last: bool,
) -> tuple[Any, Any, Any, Any, Any]:
    """(normalised, mean, inverse deviation, new running mean, new running variance)."""
    channel = x.ndim - 1 if channels_last else 1
    dims = tuple(d for d in range(x.ndim) if d != channel)
    per_channel = partial(_per_channel, ndim=x.ndim, channels_last=channels_last)
    if training:
        mean, variance = _moments(x, dims)
    else:
        wide = accumulation(x.dtype)
        mean, variance = (per_channel(s).astype(wide) for s in (running_mean, running_var))
    inverse = lax.rsqrt(variance + eps)
    # Of one number a channel, the product first: one pass over x fewer, there and in the gradient.
    scale = inverse if weight is None else inverse * per_channel(weight)
    out = _normalised(x, mean, scale, None, per_channel(bias))
    if training and running_mean is not None:
        count = math.prod(x.shape[d] for d in dims)
        unbiased = variance * (count / max(count - 1, 1))
        running_mean = _moved(running_mean, mean, momentum)
        running_var = _moved(running_var, unbiased, momentum)
    if not training:
        return out, jnp.zeros((0,), x.dtype), jnp.zeros((0,), x.dtype), running_mean, running_var
    return out, mean.reshape(-1), inverse.reshape(-1), running_mean, running_var


def _moved(running: Any, statistic: Any, momentum: float) -> Any:
    new = lax.stop_gradient(statistic).reshape(running.shape).astype(running.dtype)
    return running * (1 - momentum) + new * momentum


@lowering(aten._native_batch_norm_legit_functional.default, layouts=in_space())
def native_batch_norm_functional(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *,
    channels_last: bool = False,
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, mean, var, training, momentum, eps, channels_last)


@lowering(aten._native_batch_norm_legit.no_stats, layouts=in_space())
def native_batch_norm_no_stats(
    x: Any,
    weight: Any,
    bias: Any,
    training: bool,
    momentum: float,
    eps: float,
    *,
    channels_last: bool = False,
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, None, None, training, momentum, eps, channels_last)[:3]


@lowering(aten._native_batch_norm_legit_no_training.default, layouts=in_space())
def native_batch_norm_no_training(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    momentum: float,
    eps: float,
    *,
    channels_last: bool = False,
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, mean, var, False, momentum, eps, channels_last)[:3]


@lowering(aten.native_batch_norm.default, layouts=in_space())
def native_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *,
    channels_last: bool = False,
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, mean, var, training, momentum, eps, channels_last)[:3]


@lowering(aten.batch_norm.default, layouts=in_space())
def batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
    channels_last: bool = False,
) -> Any:
    return _batch_norm(x, weight, bias, mean, var, training, momentum, eps, channels_last)[0]
