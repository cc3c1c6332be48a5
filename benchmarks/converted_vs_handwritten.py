"""A converted PyTorch model beside the same model written by hand in JAX: what does conversion cost?

    PYTHONPATH=. python benchmarks/converted_vs_handwritten.py [--json out.json] [--rounds 15] [--size small]

Both are jitted losses with gradients of the same numbers, checked to be equal first, run in turns in one
process. The hand-written models are what one would write in JAX: weights as `[in, out]`, channels last,
`jax.nn.dot_product_attention`, optax's cross entropy. Printed: the median over rounds of the ratio of the
two times measured side by side, in wall-clock seconds and in seconds of processor time of this process
(on a machine that others use too, the steadier of the two; on a GPU it says nothing).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from jax import lax
from torch import nn

import torch_bridge

TARGET = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the two models are."""

    rows: int
    length: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    image: int
    channels: tuple[int, ...]
    images: int


SIZES = {
    "tiny": Size(rows=2, length=32, layers=1, width=64, heads=4, vocabulary=512, image=16,
                 channels=(16, 32), images=2),
    "small": Size(rows=4, length=128, layers=4, width=256, heads=8, vocabulary=8192, image=32,
                  channels=(32, 64, 128), images=16),
    "large": Size(rows=16, length=1024, layers=12, width=768, heads=12, vocabulary=50257, image=224,
                  channels=(64, 128, 256, 512), images=64),
}  # fmt: skip


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, -1)
        query, key, value = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT-2 with tied embeddings, and its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * weight + bias


def gpt_by_hand(size: Size) -> Callable[..., jax.Array]:
    def dense(p: Any, name: str, x: jax.Array) -> jax.Array:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def loss(p: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = p["tokens.weight"][ids] + p["places.weight"][: ids.shape[1]]
        for i in range(size.layers):
            name = f"blocks.{i}"
            hidden = norm(x, p[f"{name}.norm1.weight"], p[f"{name}.norm1.bias"])
            parts = jnp.split(dense(p, f"{name}.qkv", hidden), 3, -1)
            query, key, value = (part.reshape(*x.shape[:2], size.heads, -1) for part in parts)
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
            x = x + dense(p, f"{name}.out", mixed.reshape(x.shape))
            hidden = norm(x, p[f"{name}.norm2.weight"], p[f"{name}.norm2.bias"])
            x = x + dense(p, f"{name}.down", jax.nn.gelu(dense(p, f"{name}.up", hidden)))
        x = norm(x, p["norm.weight"], p["norm.bias"])
        logits = jnp.einsum("btd,vd->btv", x, p["tokens.weight"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.short(x))


class ResNet(nn.Module):
    """Residual blocks with batch normalisation, and the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size.channels[0], 3, 1, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(size.channels[0])
        pairs = zip((size.channels[0], *size.channels), size.channels, strict=False)
        self.blocks = nn.ModuleList(Residual(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(pairs))
        self.head = nn.Linear(size.channels[-1], 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet_by_hand(size: Size) -> Callable[..., Any]:
    """Channels last; returns the loss and the new running statistics."""

    def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        edge = kernel.shape[0] // 2
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), [(edge, edge)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(p: Any, state: Any, x: jax.Array, labels: jax.Array) -> Any:
        new = {}

        def batch_norm(x: jax.Array, name: str) -> jax.Array:
            mean = jnp.mean(x, (0, 1, 2))
            variance = jnp.mean(jnp.square(x - mean), (0, 1, 2))
            count = x.size // x.shape[-1]
            unbiased = variance * count / (count - 1)
            for key, value in (("running_mean", mean), ("running_var", unbiased)):
                new[f"{name}.{key}"] = 0.9 * state[f"{name}.{key}"] + 0.1 * lax.stop_gradient(value)
            new[f"{name}.num_batches_tracked"] = state[f"{name}.num_batches_tracked"] + 1
            return (x - mean) * (lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"]) + p[f"{name}.bias"]

        x = jax.nn.relu(batch_norm(conv(x, p["stem.weight"]), "stem_norm"))
        for i in range(len(size.channels)):
            name, stride = f"blocks.{i}", 1 if i == 0 else 2
            hidden = conv(x, p[f"{name}.conv1.weight"], stride)
            hidden = jax.nn.relu(batch_norm(hidden, f"{name}.norm1"))
            hidden = batch_norm(conv(hidden, p[f"{name}.conv2.weight"]), f"{name}.norm2")
            x = jax.nn.relu(hidden + conv(x, p[f"{name}.short.weight"], stride))
        logits = jnp.mean(x, (1, 2)) @ p["head.weight"] + p["head.bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

    return loss


def own_layout(name: str, value: jax.Array) -> jax.Array:
    """A parameter of torch in the layout one would choose in JAX."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    return value.T if value.ndim == 2 and name.split(".")[0] not in ("tokens", "places") else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Two jitted functions of no arguments, and the largest relative difference of their gradients."""

    name: str
    converted: Callable[[], Any]
    by_hand: Callable[[], Any]
    difference: float


def contest(
    name: str, converted: Any, by_hand: Any, params: Any, own: Any, batch: Any, own_batch: Any
) -> Contest:
    """Batches are arguments: turning converted images to another layout is a part of every step."""
    ours, theirs = jax.jit(converted), jax.jit(by_hand)
    (_, grads), (_, own_grads) = ours(params, batch), theirs(own, own_batch)
    turned = {key: own_layout(key, value) for key, value in grads.items()}
    scale = max(float(jnp.linalg.norm(v)) for v in own_grads.values())
    difference = max(float(jnp.linalg.norm(turned[k] - v)) / scale for k, v in own_grads.items())
    return Contest(
        name=name,
        converted=lambda: ours(params, batch),
        by_hand=lambda: theirs(own, own_batch),
        difference=difference,
    )


def gpt_contest(size: Size) -> Contest:
    torch.manual_seed(0)
    ids = torch.randint(0, size.vocabulary, (size.rows, size.length))
    labels = torch.randint(0, size.vocabulary, (size.rows, size.length))
    module = torch_bridge.convert(GPT(size), (ids, labels))
    own = {name: own_layout(name, value) for name, value in module.params.items()}
    hand, batch = gpt_by_hand(size), module.batch
    return contest(
        "GPT",
        lambda p, batch: jax.value_and_grad(module.loss_fn)(p, batch),
        lambda p, batch: jax.value_and_grad(hand)(p, *batch),
        module.params,
        own,
        batch,
        batch,
    )


def resnet_contest(size: Size) -> Contest:
    torch.manual_seed(0)
    images, labels = torch.randn(size.images, 3, size.image, size.image), torch.arange(size.images) % 10
    module = torch_bridge.convert(ResNet(size).train(), (images, labels))
    own = {name: own_layout(name, value) for name, value in module.params.items()}
    hand, batch = resnet_by_hand(size), module.batch
    last = (batch[0].transpose(0, 2, 3, 1), batch[1])

    def converted(p: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            out = module.loss_fn(p, batch, model_state=module.model_state)
            return out.loss, out.model_state

        return jax.value_and_grad(loss, has_aux=True)(p)

    def by_hand(p: Any, batch: Any) -> Any:
        return jax.value_and_grad(hand, has_aux=True)(p, module.model_state, *batch)

    return contest("ResNet", converted, by_hand, module.params, own, batch, last)


def timed(function: Callable[[], Any], calls: int) -> np.ndarray:
    """Seconds of a call: (wall clock, processor)."""
    start = np.array([time.perf_counter(), time.process_time()])
    for _ in range(calls):
        jax.block_until_ready(function())
    return (np.array([time.perf_counter(), time.process_time()]) - start) / calls


def measure(rivals: Contest, rounds: int) -> dict[str, Any]:
    once = min(timed(rivals.by_hand, 1)[0] for _ in range(2))
    calls = max(1, round(0.2 / once))
    ratios, seconds = [], []
    for round_ in range(rounds):
        pair = [rivals.converted, rivals.by_hand]
        found = [timed(f, calls) for f in (pair if round_ % 2 else pair[::-1])]
        ours, theirs = found if round_ % 2 else found[::-1]
        ratios.append(ours / theirs)
        seconds.append((ours[0], theirs[0]))
    return {
        "model": rivals.name,
        "converted_ms": statistics.median(s[0] for s in seconds) * 1e3,
        "by_hand_ms": statistics.median(s[1] for s in seconds) * 1e3,
        "wall_ratio": statistics.median(float(r[0]) for r in ratios),
        "processor_ratio": statistics.median(float(r[1]) for r in ratios),
        "gradient_difference": rivals.difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", choices=SIZES, default="small")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, torch {torch.__version__}, {jax.devices()[0].device_kind}")
    rows = []
    for make in (gpt_contest, resnet_contest):
        row = measure(make(SIZES[options.size]), options.rounds)
        rows.append(row)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
