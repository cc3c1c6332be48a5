"""ResNet with bottleneck blocks and widened filters, in flax linen; batch statistics are model_state."""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

from benchmarks.models.case import Case
from benchmarks.models.layers import cross_entropy, tokens, weight
from rannc_jax import LossOut


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNet:
    """Blocks by level; the defaults are ResNet152 with filters eight times as wide, 3.7 B parameters."""

    levels: tuple[int, ...] = (3, 8, 36, 3)
    widen: int = 8
    side: int = 224
    classes: int = 1000
    dtype: str = "bfloat16"


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a skip; the stride is that of the 3x3 (v1.5)."""

    width: int
    stride: int
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), (self.stride, self.stride))(y)))
        y = norm()(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            strides = (self.stride, self.stride)
            x = norm(name="skip_norm")(conv(4 * self.width, (1, 1), strides, name="skip")(x))
        return nn.relu(x + y)


class Network(nn.Module):
    """From images [rows, side, side, 3] to logits [rows, classes]."""

    config: ResNet

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, width = self.config, 64 * self.config.widen
        x = nn.Conv(width, (7, 7), (2, 2), use_bias=False, dtype=config.dtype, name="stem")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=config.dtype, name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for level, count in enumerate(config.levels):
            for index in range(count):
                stride = 2 if level > 0 and index == 0 else 1
                name = f"level{level}_block{index}"
                x = Bottleneck(width * 2**level, stride, config.dtype, name=name)(x)
        return nn.Dense(config.classes, dtype=config.dtype, name="head")(x.mean((1, 2)))


def batch(config: ResNet, rows: int) -> dict[str, Any]:
    return {"image": weight(rows, config.side, config.side, 3), "label": tokens(rows)}


def loss(params: Any, batch: dict[str, jax.Array], model_state: Any, network: Network) -> LossOut:
    variables = {"params": params, "batch_stats": model_state}
    logits, new = network.apply(variables, batch["image"], mutable=["batch_stats"])
    return LossOut(loss=cross_entropy(logits, batch["label"]).mean(), model_state=new["batch_stats"])


def case(name: str, config: ResNet, rows_per_device: int) -> Case:
    network = Network(config)
    images = batch(config, 2)["image"]
    shapes = jax.eval_shape(network.init, jax.random.key(0), images)

    def network_loss(params: Any, batch: dict[str, jax.Array], *, model_state: Any) -> LossOut:
        return loss(params, batch, model_state, network)

    return Case(
        name=name,
        loss=network_loss,
        params=shapes["params"],
        batch=lambda rows: batch(config, rows),
        rows_per_device=rows_per_device,
        model_state=shapes["batch_stats"],
    )
