"""Attention: torch's operator in the layout and words of `torch_bridge.attention`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.attention import Settings, attention
from torch_bridge.lowerings.registry import lowering
from torch_bridge.random import row_seeds

aten = torch.ops.aten


def _drops(
    _query: Any, _key: Any, _value: Any, _mask: Any = None, dropout_p: float = 0.0, *_: Any, **kwargs: Any
) -> bool:
    return kwargs.get("dropout_p", dropout_p) > 0.0


@lowering(aten.scaled_dot_product_attention.default, random=_drops)
def scaled_dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    rng: Any = None,
) -> jax.Array:
    """`[..., heads, queries, dim]`, any leading dims."""
    del enable_gqa  # heads tell
    lead = jnp.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_four_dims(x, lead) for x in (query, key, value))
    masks: dict[str, jax.Array] = {}
    if attn_mask is not None:
        mask = _mask_dims(attn_mask, lead)
        masks = {"allowed": mask} if mask.dtype == bool else {"bias": mask}
    settings = Settings(
        scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else scale,
        causal=is_causal,
        keep=1.0 - dropout_p,
    )
    seeds = None if rng is None else row_seeds(rng, q.shape[0])
    out = attention(q, k, v, **masks, seeds=seeds, settings=settings)
    if query.ndim == 2:
        return out[0, 0]
    return out.reshape(*lead, *out.shape[1:])


def _four_dims(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """`[batch, heads, length, dim]`; all leading dims become the batch."""
    if x.ndim < 3:
        x = x[None]
    x = jnp.broadcast_to(x, (*lead, *x.shape[-3:]))
    return x.reshape(math.prod(lead), *x.shape[-3:])


def _mask_dims(mask: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    while mask.ndim < 3:
        mask = mask[None]
    own = mask.shape[:-3]
    if math.prod(own) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    mask = jnp.broadcast_to(mask, (*lead, *mask.shape[-3:]))
    return mask.reshape(math.prod(lead), *mask.shape[-3:])
