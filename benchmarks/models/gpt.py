"""GPT-2's architecture at GPT-3's 1.3 B size: pre-norm, causal, tied embedding."""

from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.models.case import Case
from benchmarks.models.layers import (
    attention,
    attention_shapes,
    cross_entropy,
    mlp,
    mlp_shapes,
    norm,
    norm_shapes,
    tokens,
    weight,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """Widths; the defaults have 1.3 B parameters."""

    layers: int = 24
    width: int = 2048
    heads: int = 16
    length: int = 1024
    vocabulary: int = 50_257
    dtype: str = "bfloat16"


def shapes(config: Gpt) -> dict[str, Any]:
    width = config.width
    layer = {
        "attention_norm": norm_shapes(width),
        "attention": attention_shapes(width),
        "mlp_norm": norm_shapes(width),
        "mlp": mlp_shapes(width, 4 * width),
    }
    return {
        "tokens": weight(config.vocabulary, width),
        "positions": weight(config.length, width),
        "layers": [layer] * config.layers,
        "norm": norm_shapes(width),
    }


def batch(config: Gpt, rows: int) -> dict[str, Any]:
    return {"tokens": tokens(rows, config.length), "labels": tokens(rows, config.length)}


def loss(params: dict[str, Any], batch: dict[str, jax.Array], config: Gpt) -> jax.Array:
    with jax.named_scope("embedding"):
        x = (params["tokens"][batch["tokens"]] + params["positions"]).astype(config.dtype)
    for index, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer/{index}"):
            with jax.named_scope("attention"):
                y = norm(layer["attention_norm"], x)
                x = x + attention(layer["attention"], y, config.heads, causal=True)
            with jax.named_scope("mlp"):
                x = x + mlp(layer["mlp"], norm(layer["mlp_norm"], x))
    with jax.named_scope("head"):
        logits = norm(params["norm"], x) @ params["tokens"].T.astype(x.dtype)
        return cross_entropy(logits, batch["labels"]).mean()


def case(name: str, config: Gpt, rows_per_device: int) -> Case:
    return Case(
        name=name,
        loss=lambda params, batch: loss(params, batch, config),
        params=shapes(config),
        batch=lambda rows: batch(config, rows),
        rows_per_device=rows_per_device,
    )
