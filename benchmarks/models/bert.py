"""BERT with a masked language model's loss: the enlarged ones that RaNNC was shown on."""

from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.models.case import Case
from benchmarks.models.layers import (
    attention,
    attention_shapes,
    cross_entropy,
    dense,
    dense_shapes,
    mlp,
    mlp_shapes,
    norm,
    norm_shapes,
    tokens,
    weight,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bert:
    """Widths; layers are post-norm, as published."""

    layers: int = 24
    width: int = 2048
    heads: int = 16
    length: int = 512
    vocabulary: int = 30_522
    dtype: str = "bfloat16"


def shapes(config: Bert) -> dict[str, Any]:
    width = config.width
    layer = {
        "attention": attention_shapes(width),
        "attention_norm": norm_shapes(width),
        "mlp": mlp_shapes(width, 4 * width),
        "mlp_norm": norm_shapes(width),
    }
    return {
        "tokens": weight(config.vocabulary, width),
        "positions": weight(512, width),
        "segments": weight(2, width),
        "norm": norm_shapes(width),
        "layers": [layer] * config.layers,
        "transform": dense_shapes(width, width),
        "transform_norm": norm_shapes(width),
        "bias": weight(config.vocabulary),
    }


def batch(config: Bert, rows: int) -> dict[str, Any]:
    names = ("tokens", "segments", "labels")
    words = {name: tokens(rows, config.length) for name in names}
    return words | {"weights": weight(rows, config.length)}


def loss(params: dict[str, Any], batch: dict[str, jax.Array], config: Bert) -> jax.Array:
    with jax.named_scope("embedding"):
        x = params["tokens"][batch["tokens"]] + params["segments"][batch["segments"]]
        x = norm(params["norm"], x + params["positions"][: x.shape[1]]).astype(config.dtype)
    for index, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer/{index}"):
            with jax.named_scope("attention"):
                x = norm(layer["attention_norm"], x + attention(layer["attention"], x, config.heads))
            with jax.named_scope("mlp"):
                x = norm(layer["mlp_norm"], x + mlp(layer["mlp"], x))
    with jax.named_scope("head"):
        x = norm(params["transform_norm"], jax.nn.gelu(dense(params["transform"], x)))
        logits = x @ params["tokens"].T.astype(x.dtype) + params["bias"].astype(x.dtype)
        losses = cross_entropy(logits, batch["labels"]) * batch["weights"]
        return losses.sum() / batch["weights"].sum()


def case(name: str, config: Bert, rows_per_device: int) -> Case:
    return Case(
        name=name,
        loss=lambda params, batch: loss(params, batch, config),
        params=shapes(config),
        batch=lambda rows: batch(config, rows),
        rows_per_device=rows_per_device,
    )
