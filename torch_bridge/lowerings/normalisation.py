"""Normalisation. Statistics in float32 at least; batch statistics are plain reductions over the batch.

Batch normalisation in training returns the new running statistics, which carry no gradient.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

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


@lowering(aten.group_norm.default)
def group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """x `[batch, channels, ...]`."""
    grouped = x.reshape(x.shape[0], num_groups, -1)
    mean, variance = _moments(grouped, (2,))
    out = _normalised(grouped, mean, lax.rsqrt(variance + eps), None, None).reshape(x.shape)
    channels = (1, -1) + (1,) * (x.ndim - 2)
    if weight is not None:
        out = out * weight.reshape(channels)
    if bias is not None:
        out = out + bias.reshape(channels)
    return out


@lowering(aten.native_group_norm.default)
def native_group_norm(
    x: Any, weight: Any, bias: Any, rows: int, _channels: int, _size: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    mean, variance = _moments(x.reshape(rows, group, -1), (2,))
    return group_norm(x, group, weight, bias, eps), mean[..., 0], lax.rsqrt(variance + eps)[..., 0]


def _per_channel(x: Any, ndim: int) -> Any:
    return None if x is None else x.reshape((1, -1) + (1,) * (ndim - 2))


def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any, Any, Any]:
    """(normalised, mean, inverse deviation, new running mean, new running variance)."""
    dims = tuple(d for d in range(x.ndim) if d != 1)
    if training:
        mean, variance = _moments(x, dims)
    else:
        wide = accumulation(x.dtype)
        mean, variance = (_per_channel(s, x.ndim).astype(wide) for s in (running_mean, running_var))
    inverse = lax.rsqrt(variance + eps)
    out = _normalised(x, mean, inverse, _per_channel(weight, x.ndim), _per_channel(bias, x.ndim))
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


@lowering(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_functional(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, mean, var, training, momentum, eps)


@lowering(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_no_stats(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


@lowering(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_no_training(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, mean, var, False, momentum, eps)[:3]


@lowering(aten.native_batch_norm.default)
def native_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, mean, var, training, momentum, eps)[:3]


@lowering(aten.batch_norm.default)
def batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, *_: Any
) -> Any:
    return _batch_norm(x, weight, bias, mean, var, training, momentum, eps)[0]
