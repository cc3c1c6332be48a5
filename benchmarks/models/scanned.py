"""A decoder whose layers are one flax `nn.scan` over stacked parameters: what a deep model looks like
when its user cared about compile time."""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

from benchmarks.models.case import Case
from benchmarks.models.layers import cross_entropy, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """Widths; the defaults have 4.9 B parameters in 96 layers."""

    layers: int = 96
    width: int = 2048
    heads: int = 16
    length: int = 512
    vocabulary: int = 32_000
    dtype: str = "bfloat16"


class Layer(nn.Module):
    """Pre-norm attention and MLP; a scan's body: carries the activations, stacks nothing."""

    config: Scanned

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        config, width = self.config, self.config.width
        dense = functools.partial(nn.Dense, dtype=config.dtype)
        y = nn.LayerNorm(dtype=config.dtype)(x)
        query, key, value = (
            dense(width, name=name)(y).reshape(*y.shape[:2], config.heads, -1)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + dense(width, name="out")(mixed.reshape(x.shape))
        y = nn.gelu(dense(4 * width, name="up")(nn.LayerNorm(dtype=config.dtype)(x)))
        return x + dense(width, name="down")(y), None


class Network(nn.Module):
    """From tokens [rows, length] to logits [rows, length, vocabulary]."""

    config: Scanned

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        config = self.config
        embedding = nn.Embed(config.vocabulary, config.width, dtype=config.dtype, name="tokens")
        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=config.layers
        )
        x, _ = layers(config, name="layers")(embedding(words), None)
        return embedding.attend(nn.LayerNorm(dtype=config.dtype, name="norm")(x))


def batch(config: Scanned, rows: int) -> dict[str, Any]:
    return {"tokens": tokens(rows, config.length), "labels": tokens(rows, config.length)}


def case(name: str, config: Scanned, rows_per_device: int) -> Case:
    network = Network(config)
    shapes = jax.eval_shape(network.init, jax.random.key(0), batch(config, 2)["tokens"])

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = network.apply({"params": params}, batch["tokens"])
        return cross_entropy(logits, batch["labels"]).mean()

    return Case(
        name=name,
        loss=loss,
        params=shapes["params"],
        batch=lambda rows: batch(config, rows),
        rows_per_device=rows_per_device,
    )
