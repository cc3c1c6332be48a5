"""A latent-diffusion U-Net in flax linen: residual blocks, attention to itself and to a text, long skips."""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.case import Case
from benchmarks.models.layers import weight

TEXT_LENGTH, TEXT_WIDTH = 77, 768


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet:
    """Widths; the defaults have 1.0 B parameters."""

    width: int = 352
    growth: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2
    heads: int = 8
    side: int = 64
    channels: int = 4
    dtype: str = "bfloat16"


class Residual(nn.Module):
    """Two convolutions around a skip, told the time by a shift."""

    width: int
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), dtype=self.dtype)
        y = conv(self.width)(nn.silu(nn.GroupNorm(dtype=self.dtype)(x)))
        y = y + nn.Dense(self.width, dtype=self.dtype)(nn.silu(time))[:, None, None]
        y = conv(self.width)(nn.silu(nn.GroupNorm(dtype=self.dtype)(y)))
        return y + (
            x if x.shape == y.shape else nn.Conv(self.width, (1, 1), dtype=self.dtype, name="skip")(x)
        )


class Attention(nn.Module):
    """Of [rows, length, width] to itself, or to a memory."""

    heads: int
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        dense = functools.partial(nn.Dense, dtype=self.dtype, use_bias=False)
        source, width = x if memory is None else memory, x.shape[-1]
        query, key, value = (
            dense(width, name=name)(y).reshape(*y.shape[:2], self.heads, -1)
            for name, y in (("query", x), ("key", source), ("value", source))
        )
        mixed = jax.nn.dot_product_attention(query, key, value)
        return nn.Dense(width, dtype=self.dtype, name="out")(mixed.reshape(x.shape))


class Transformer(nn.Module):
    """Self-attention, attention to the text, and a gated MLP over the pixels of an image."""

    heads: int
    dtype: str

    @nn.compact
    def __call__(self, image: jax.Array, text: jax.Array) -> jax.Array:
        width = image.shape[-1]
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        x = dense(width, name="into")(nn.GroupNorm(dtype=self.dtype)(image))
        x = x.reshape(x.shape[0], -1, width)
        x = x + Attention(self.heads, self.dtype, name="self")(norm()(x))
        x = x + Attention(self.heads, self.dtype, name="text")(norm()(x), text)
        up, gate = jnp.split(dense(8 * width, name="up")(norm()(x)), 2, axis=-1)
        x = x + dense(width, name="down")(up * nn.gelu(gate))
        return image + dense(width, name="back")(x).reshape(image.shape)


class Network(nn.Module):
    """Predicts the noise in latents [rows, side, side, channels]."""

    config: UNet

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array, text: jax.Array) -> jax.Array:
        config, dtype = self.config, self.config.dtype
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), dtype=dtype)
        time = self.clock(time)
        widths = [config.width * grown for grown in config.growth]
        last = len(widths) - 1
        x = conv(config.width, name="into")(x.astype(dtype))
        text, skips = text.astype(dtype), [x]
        for level, width in enumerate(widths):
            for index in range(config.blocks):
                x = Residual(width, dtype, name=f"down{level}_residual{index}")(x, time)
                if level < last:
                    x = Transformer(config.heads, dtype, name=f"down{level}_transformer{index}")(x, text)
                skips.append(x)
            if level < last:
                x = conv(width, strides=(2, 2), name=f"down{level}_half")(x)
                skips.append(x)
        x = Residual(widths[-1], dtype, name="middle_residual0")(x, time)
        x = Transformer(config.heads, dtype, name="middle_transformer")(x, text)
        x = Residual(widths[-1], dtype, name="middle_residual1")(x, time)
        for level, width in reversed(list(enumerate(widths))):
            for index in range(config.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                x = Residual(width, dtype, name=f"up{level}_residual{index}")(x, time)
                if level < last:
                    x = Transformer(config.heads, dtype, name=f"up{level}_transformer{index}")(x, text)
            if level > 0:
                x = x.repeat(2, axis=1).repeat(2, axis=2)
                x = conv(width, name=f"up{level}_double")(x)
        return conv(config.channels, name="out")(nn.silu(nn.GroupNorm(dtype=dtype, name="out_norm")(x)))

    def clock(self, time: jax.Array) -> jax.Array:
        """Sines and cosines of a time of every row, mixed."""
        width, dtype = self.config.width, self.config.dtype
        angles = time[:, None] * jnp.exp(-9.2 * jnp.arange(width // 2) / (width // 2))
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(dtype)
        hidden = nn.silu(nn.Dense(4 * width, dtype=dtype, name="clock_in")(waves))
        return nn.Dense(4 * width, dtype=dtype, name="clock_out")(hidden)


def batch(config: UNet, rows: int) -> dict[str, Any]:
    image = weight(rows, config.side, config.side, config.channels)
    text = weight(rows, TEXT_LENGTH, TEXT_WIDTH)
    return {"noisy": image, "noise": image, "time": weight(rows), "text": text}


def case(name: str, config: UNet, rows_per_device: int) -> Case:
    network = Network(config)
    example = batch(config, 2)
    init = functools.partial(network.init, jax.random.key(0))
    shapes = jax.eval_shape(init, *(example[key] for key in ("noisy", "time", "text")))

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        guess = network.apply({"params": params}, batch["noisy"], batch["time"], batch["text"])
        return ((guess - batch["noise"]) ** 2).mean()

    return Case(
        name=name,
        loss=loss,
        params=shapes["params"],
        batch=lambda rows: batch(config, rows),
        rows_per_device=rows_per_device,
    )
