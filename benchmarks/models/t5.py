"""T5: an encoder and a decoder that reads it in every layer, relative positions, no biases."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.case import Case
from benchmarks.models.layers import (
    attention,
    attention_shapes,
    cross_entropy,
    dense,
    dense_shapes,
    norm,
    norm_shapes,
    tokens,
    weight,
)

BUCKETS, FARTHEST = 32, 128
"""Relative distances are put into logarithmic buckets (Raffel et al., 2020)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class T5:
    """Widths; the defaults are T5-3B."""

    layers: int = 24
    width: int = 1024
    hidden: int = 16_384
    heads: int = 32
    head_width: int = 128
    length: int = 512
    vocabulary: int = 32_128
    dtype: str = "bfloat16"


def shapes(config: T5) -> dict[str, Any]:
    width, inner = config.width, config.heads * config.head_width
    encoder = {
        "attention_norm": norm_shapes(width, bias=False),
        "attention": attention_shapes(width, inner, bias=False),
        "mlp_norm": norm_shapes(width, bias=False),
        "up": dense_shapes(width, config.hidden, bias=False),
        "down": dense_shapes(config.hidden, width, bias=False),
    }
    decoder = encoder | {
        "memory_norm": norm_shapes(width, bias=False),
        "memory": attention_shapes(width, inner, bias=False),
    }

    def stack(layer: dict[str, Any]) -> dict[str, Any]:
        return {
            "distances": weight(BUCKETS, config.heads),
            "layers": [layer] * config.layers,
            "norm": norm_shapes(width, bias=False),
        }

    return {
        "tokens": weight(config.vocabulary, width),
        "encoder": stack(encoder),
        "decoder": stack(decoder),
    }


def batch(config: T5, rows: int) -> dict[str, Any]:
    return {name: tokens(rows, config.length) for name in ("source", "target", "labels")}


def distance_bias(table: jax.Array, length: int, *, causal: bool) -> jax.Array:
    """A learned bias of every (head, query, key); float32 [1, heads, length, length]."""
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    buckets = BUCKETS if causal else BUCKETS // 2
    side = 0 if causal else jnp.where(distance > 0, buckets, 0)
    distance = jnp.maximum(-distance, 0) if causal else jnp.abs(distance)
    exact = buckets // 2
    growth = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(FARTHEST / exact)
    far = jnp.minimum(exact + (growth * (buckets - exact)).astype(jnp.int32), buckets - 1)
    bucket = side + jnp.where(distance < exact, distance, far)
    return table[bucket].transpose(2, 0, 1)[None]


def stack(params: dict[str, Any], x: jax.Array, config: T5, memory: jax.Array | None = None) -> jax.Array:
    """All layers of the encoder, or of the decoder where there is a `memory` to read."""
    causal = memory is not None
    with jax.named_scope("distances"):
        bias = distance_bias(params["distances"], x.shape[1], causal=causal).astype(x.dtype)
    for index, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer/{index}"):
            with jax.named_scope("attention"):
                y = norm(layer["attention_norm"], x)
                x = x + attention(layer["attention"], y, config.heads, bias=bias, causal=causal)
            if memory is not None:
                with jax.named_scope("memory"):
                    y = norm(layer["memory_norm"], x)
                    x = x + attention(layer["memory"], y, config.heads, memory=memory)
            with jax.named_scope("mlp"):
                y = jax.nn.relu(dense(layer["up"], norm(layer["mlp_norm"], x)))
                x = x + dense(layer["down"], y)
    return norm(params["norm"], x)


def loss(params: dict[str, Any], batch: dict[str, jax.Array], config: T5) -> jax.Array:
    with jax.named_scope("encoder"):
        source = params["tokens"][batch["source"]].astype(config.dtype)
        memory = stack(params["encoder"], source, config)
    with jax.named_scope("decoder"):
        target = params["tokens"][batch["target"]].astype(config.dtype)
        x = stack(params["decoder"], target, config, memory)
    with jax.named_scope("head"):
        logits = (x * config.width**-0.5) @ params["tokens"].T.astype(x.dtype)
        return cross_entropy(logits, batch["labels"]).mean()


def case(name: str, config: T5, rows_per_device: int) -> Case:
    return Case(
        name=name,
        loss=lambda params, batch: loss(params, batch, config),
        params=shapes(config),
        batch=lambda rows: batch(config, rows),
        rows_per_device=rows_per_device,
    )
