"""A decoder whose layers hold eight experts, of which every token goes to two.

Dispatch is dense, after GShard: one-hot masks [rows, length, experts, capacity] carry tokens to their
experts and back, so that all shapes are static. Capacities are those of a row: rows stay independent.
"""

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

SLACK = 1.25
"""Places an expert has, over what an even share would need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Widths; the defaults have 7 B parameters, of which 2 B work on a token."""

    layers: int = 24
    width: int = 2048
    hidden: int = 5632
    heads: int = 16
    experts: int = 8
    chosen: int = 2
    length: int = 1024
    vocabulary: int = 32_000
    dtype: str = "bfloat16"

    @property
    def capacity(self) -> int:
        return int(SLACK * self.chosen * self.length / self.experts)


def shapes(config: Moe) -> dict[str, Any]:
    width, hidden, experts = config.width, config.hidden, config.experts
    layer = {
        "attention_norm": norm_shapes(width, bias=False),
        "attention": attention_shapes(width, bias=False),
        "experts_norm": norm_shapes(width, bias=False),
        "router": dense_shapes(width, experts, bias=False),
        "gate": weight(experts, width, hidden),
        "up": weight(experts, width, hidden),
        "down": weight(experts, hidden, width),
    }
    return {
        "tokens": weight(config.vocabulary, width),
        "layers": [layer] * config.layers,
        "norm": norm_shapes(width, bias=False),
        "head": dense_shapes(width, config.vocabulary, bias=False),
    }


def batch(config: Moe, rows: int) -> dict[str, Any]:
    return {"tokens": tokens(rows, config.length), "labels": tokens(rows, config.length)}


def route(scores: jax.Array, config: Moe) -> tuple[jax.Array, jax.Array]:
    """Weights that carry tokens to places of experts, and how uneven the choice is.

    Args:
        scores: of the router, float32 [rows, length, experts].
        config: how many experts a token goes to, and how many tokens an expert takes.

    Returns:
        [rows, length, experts, capacity], and the balance loss of every row, [rows].
    """
    shares = jax.nn.softmax(scores)
    best, choice = jax.lax.top_k(shares, config.chosen)
    best = best / best.sum(-1, keepdims=True)
    picked = jax.nn.one_hot(choice, config.experts)  # [rows, length, chosen, experts]
    flat = picked.swapaxes(1, 2).reshape(picked.shape[0], -1, config.experts)  # first choices go first
    place = ((jnp.cumsum(flat, axis=1) - 1) * flat).sum(-1)
    place = place.reshape(picked.shape[0], config.chosen, -1).swapaxes(1, 2).astype(jnp.int32)
    seat = jax.nn.one_hot(place, config.capacity)  # zero where the expert is full
    carried = jnp.einsum("blk,blke,blkc->blec", best, picked, seat)
    balance = config.experts * (picked[:, :, 0].mean(1) * shares.mean(1)).sum(-1)
    return carried, balance


def experts(layer: dict[str, Any], x: jax.Array, config: Moe) -> tuple[jax.Array, jax.Array]:
    carried, balance = route(dense(layer["router"], x.astype(jnp.float32)), config)
    sent = jnp.einsum("blec,bld->becd", (carried > 0).astype(x.dtype), x)
    gate, up = (jnp.einsum("becd,edh->bech", sent, layer[n].astype(x.dtype)) for n in ("gate", "up"))
    made = jnp.einsum("bech,ehd->becd", jax.nn.silu(gate) * up, layer["down"].astype(x.dtype))
    return jnp.einsum("blec,becd->bld", carried.astype(x.dtype), made), balance


def loss(params: dict[str, Any], batch: dict[str, jax.Array], config: Moe) -> jax.Array:
    with jax.named_scope("embedding"):
        x = params["tokens"][batch["tokens"]].astype(config.dtype)
    uneven = 0.0
    for index, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer/{index}"):
            with jax.named_scope("attention"):
                y = norm(layer["attention_norm"], x)
                x = x + attention(layer["attention"], y, config.heads, causal=True)
            with jax.named_scope("experts"):
                y, balance = experts(layer, norm(layer["experts_norm"], x), config)
                x, uneven = x + y, uneven + balance
    with jax.named_scope("head"):
        logits = dense(params["head"], norm(params["norm"], x))
        rows = cross_entropy(logits, batch["labels"]).mean(-1) + 0.01 * uneven
        return rows.mean()


def case(name: str, config: Moe, rows_per_device: int) -> Case:
    return Case(
        name=name,
        loss=lambda params, batch: loss(params, batch, config),
        params=shapes(config),
        batch=lambda rows: batch(config, rows),
        rows_per_device=rows_per_device,
    )
