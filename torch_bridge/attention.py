"""Scaled dot-product attention as one node: `attention(query, key, value, bias, allowed, seeds, ...)`.

One custom_vjp, the same on every platform, so that a plan made anywhere speaks of the same node. Its
residuals are its inputs, the output and the logsumexp of each query (marked "rannc_residual"): the
probabilities, `[batch, heads, queries, keys]`, are made again in the backward. Where cuDNN can do it, its
kernels take over when the program is compiled for an NVIDIA GPU (see `cudnn`). Backward formulas:
FlashAttention, Dao et al. 2022, section 3.1 and appendix B. A query that may attend to nothing gives 0.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from torch_bridge import cudnn
from torch_bridge.random import row_keep_mask

RESIDUAL = "rannc_residual"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is fixed about an attention.

    Args:
        scale: factor of query-key products.
        causal: query i sees keys 0..i (aligned at the first key, as in torch).
        keep: probability of keeping an attention weight; 1.0 without dropout.
    """

    scale: float
    causal: bool = False
    keep: float = 1.0


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    allowed: jax.Array | None = None,
    seeds: jax.Array | None = None,
    settings: Settings,
) -> jax.Array:
    """softmax(scale * query @ key^T + bias) @ value, over the allowed keys.

    Args:
        query: `[batch, heads, queries, dim]`.
        key: `[batch, key_heads, keys, dim]`; key_heads divides heads (grouped-query attention).
        value: `[batch, key_heads, keys, value_dim]`.
        bias: broadcasts to `[batch, heads, queries, keys]`, float, added to the scaled products.
        allowed: the same shape, boolean; False hides a key from a query.
        seeds: `[batch, 2]` uint32 for dropout (see `random.row_seeds`), if `settings.keep` < 1.

    Returns:
        `[batch, heads, queries, value_dim]`, in the dtype of query.
    """
    return _attention(settings, *_equally_varying(query, key, value, bias, allowed, seeds))


def _equally_varying(*operands: Any) -> tuple[Any, ...]:
    """Inside shard_map: what the devices share becomes a copy on each, so that its gradients are summed."""
    axes = [_varying(x) for x in operands]
    every = frozenset().union(*axes)
    return tuple(
        x if x is None or own == every else lax.pcast(x, tuple(every - own), to="varying")
        for x, own in zip(operands, axes, strict=True)
    )


def _varying(x: Any) -> frozenset[Any]:
    """The mesh axes over which a value differs between devices, as shard_map tracks it."""
    kind = None if x is None else getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: Settings, query: Any, key: Any, value: Any, bias: Any, allowed: Any, seeds: Any
) -> Any:
    return _forward(settings, query, key, value, bias, allowed, seeds)[0]


def _attention_fwd(settings: Settings, *operands: Any) -> tuple[Any, Any]:
    output, logsumexp = _forward(settings, *operands)
    output = checkpoint_name(output, RESIDUAL)
    logsumexp = checkpoint_name(logsumexp, RESIDUAL)
    return output, (operands, output, logsumexp)


def _attention_bwd(settings: Settings, residuals: Any, cotangent: Any) -> tuple[Any, ...]:
    operands, output, logsumexp = residuals
    allowed, seeds = operands[4:]
    by_xla: Any = partial(_backward, settings)
    if cudnn.takes(settings, *operands):
        rest = (*operands[:5], output, logsumexp, cotangent)
        by_cudnn = partial(cudnn.backward, settings)
        gradients = _by_platform(by_cudnn, by_xla, *rest)
    else:
        gradients = by_xla(*operands[:5], output, logsumexp, cotangent, seeds)
    return (*gradients, _no_tangent(allowed), _no_tangent(seeds))


def _by_platform(fused: Any, plain: Any, *operands: Any) -> Any:
    """The fused form where the program is compiled for its platform, the plain one elsewhere."""
    return lax.platform_dependent(*operands, default=plain, **{cudnn.PLATFORM: fused})


def _backward(
    settings: Settings,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    allowed: Any,
    output: Any,
    logsumexp: Any,
    cotangent: Any,
    seeds: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Gradients of query, key, value and bias, by XLA."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = _grouped(query, groups), key, value
    out_bar = _grouped(cotangent, groups)
    weights = jnp.exp(_scores(settings, q, k, bias, allowed) - _grouped(logsumexp[..., None], groups))
    dropped = _dropout(settings, seeds, weights)
    value_bar = _contract("bhgqk,bhgqd->bhkd", dropped(weights).astype(value.dtype), out_bar)
    weights_bar = dropped(_contract("bhgqd,bhkd->bhgqk", out_bar, v))
    # sum over keys of weights * weights_bar, by way of the output: no [queries, keys] reduction.
    inner = jnp.sum(
        out_bar.astype(jnp.float32) * _grouped(output, groups).astype(jnp.float32), -1, keepdims=True
    )
    scores_bar = weights * (weights_bar - inner.astype(weights.dtype))
    bias_bar = None if bias is None else _reduced_to(_ungrouped(scores_bar), bias)
    products_bar = (scores_bar * settings.scale).astype(query.dtype)
    query_bar = _ungrouped(_contract("bhgqk,bhkd->bhgqd", products_bar, k))
    key_bar = _contract("bhgqk,bhgqd->bhkd", products_bar, q)
    return (
        query_bar.astype(query.dtype),
        key_bar.astype(key.dtype),
        value_bar.astype(value.dtype),
        bias_bar,
    )


_attention.defvjp(_attention_fwd, _attention_bwd)


def _forward(settings: Settings, *operands: Any) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp `[batch, heads, queries]`: the same two values whichever kernel makes them."""
    by_xla = partial(_forward_by_xla, settings)
    if not cudnn.takes(settings, *operands):
        return by_xla(*operands)
    return _by_platform(partial(cudnn.forward, settings), by_xla, *operands[:5])


def _forward_by_xla(
    settings: Settings, query: Any, key: Any, value: Any, bias: Any, allowed: Any, seeds: Any = None
) -> tuple[jax.Array, jax.Array]:
    groups = query.shape[1] // key.shape[1]
    scores = _scores(settings, _grouped(query, groups), key, bias, allowed)
    largest = jnp.max(scores, -1, keepdims=True, initial=-jnp.inf)
    largest = jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest))
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, -1, keepdims=True)
    # A query that sees no key: weights are all 0, and +inf makes them 0 again in the backward.
    logsumexp = jnp.where(total > 0, jnp.log(total) + largest, jnp.full_like(total, jnp.inf))
    weights = weights / jnp.where(total > 0, total, jnp.ones_like(total))
    dropped = _dropout(settings, seeds, weights)(weights).astype(value.dtype)
    output = _contract("bhgqk,bhkd->bhgqd", dropped, value).astype(query.dtype)
    return _ungrouped(output), _ungrouped(logsumexp)[..., 0]


def _scores(settings: Settings, query: Any, key: Any, bias: Any, allowed: Any) -> jax.Array:
    """`[batch, key_heads, groups, queries, keys]`, float32 or wider, -inf where hidden."""
    groups, (num_queries, num_keys) = query.shape[2], (query.shape[3], key.shape[2])
    scores = _contract("bhgqd,bhkd->bhgqk", query, key) * settings.scale
    if bias is not None:
        scores = scores + _grouped_mask(bias.astype(scores.dtype), groups)
    hidden = jnp.asarray(-jnp.inf, scores.dtype)
    if allowed is not None:
        scores = jnp.where(_grouped_mask(allowed, groups), scores, hidden)
    if settings.causal:
        past = lax.broadcasted_iota(np.int32, (num_queries, num_keys), 0) >= lax.broadcasted_iota(
            np.int32, (num_queries, num_keys), 1
        )
        scores = jnp.where(past, scores, hidden)
    return scores


def _dropout(settings: Settings, seeds: Any, like: jax.Array) -> Any:
    """A function that drops entries of `[batch, ...]` and scales the rest."""
    if settings.keep >= 1.0:
        return lambda x: x
    if settings.keep <= 0.0:
        return jnp.zeros_like
    kept = row_keep_mask(seeds, settings.keep, like.shape[1:])
    return lambda x: jnp.where(kept, x / settings.keep, jnp.zeros_like(x))


def _contract(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    wide = jnp.promote_types(a.dtype, np.float32)
    if a.dtype != b.dtype:
        b = b.astype(a.dtype)
    return jnp.einsum(equation, a, b, preferred_element_type=wide)


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    return x.reshape(x.shape[0], x.shape[1] // groups, groups, *x.shape[2:])


def _ungrouped(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _grouped_mask(mask: jax.Array, groups: int) -> jax.Array:
    """A mask that broadcasts over `[batch, heads, ...]`, for `[batch, key_heads, groups, ...]`."""
    return mask[:, :, None] if mask.shape[1] == 1 else _grouped(mask, groups)


def _reduced_to(x: jax.Array, like: jax.Array) -> jax.Array:
    """Sum over the dims in which `like` was broadcast."""
    dims = tuple(d for d, size in enumerate(like.shape) if size == 1 and x.shape[d] != 1)
    return jnp.sum(x, dims, keepdims=True).astype(like.dtype)


def _no_tangent(x: Any) -> Any:
    return None if x is None else np.zeros(x.shape, jax.dtypes.float0)
