"""Six networks of different kinds, with shapes for arguments: what `predicted_memory` compiles.

Five are bare JAX as users write it; the sixth is an unchanged PyTorch module. They are small enough to
compile in seconds and large enough that arrays, not rounding, decide.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from rannc_jax import LossOut

ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Model:
    """A loss with shapes for everything it takes, and how many stages to cut it into."""

    fn: Any
    params: Any = None
    batch: Any = None
    given: dict[str, Any] = field(default_factory=dict)
    num_stages: int


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def tokens(length: int) -> jax.ShapeDtypeStruct:
    return shape(ROWS, length, dtype=jnp.int32)


def dense(inner: int, outer: int) -> dict[str, Any]:
    return {"w": shape(inner, outer), "b": shape(outer)}


def apply(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def norm(gain: jax.Array, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain


def attend(layer: Any, x: jax.Array, mask: jax.Array, heads: int = 4) -> jax.Array:
    q, k, v = (apply(layer[n], x).reshape(*x.shape[:2], heads, -1) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return apply(layer["o"], jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape))


def transformer_layer(width: int) -> dict[str, Any]:
    layer: dict[str, Any] = {name: dense(width, width) for name in "qkvo"}
    return layer | {
        "up": dense(width, 4 * width),
        "down": dense(4 * width, width),
        "first": shape(width),
        "second": shape(width),
    }


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen[..., 0]


# --- GPT: causal, tied embedding ----------------------------------------------------------------


def gpt_loss(params: Any, batch: Any) -> jax.Array:
    ids = batch["tokens"]
    length = ids.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))
    x = params["tokens"][ids] + params["positions"]
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer/{i}"):
            x = x + attend(layer, norm(layer["first"], x), mask)
            x = x + apply(layer["down"], jax.nn.gelu(apply(layer["up"], norm(layer["second"], x))))
    logits = norm(params["gain"], x) @ params["tokens"].T
    return cross_entropy(logits[:, :-1], ids[:, 1:]).mean()


def gpt(width: int = 128, depth: int = 4, length: int = 64, vocabulary: int = 512) -> Model:
    params = {
        "tokens": shape(vocabulary, width),
        "positions": shape(length, width),
        "layers": [transformer_layer(width) for _ in range(depth)],
        "gain": shape(width),
    }
    return Model(fn=gpt_loss, params=params, batch={"tokens": tokens(length)}, num_stages=2)


# --- BERT: padding masks, weighted loss over labelled positions ---------------------------------


def bert_loss(params: Any, batch: Any) -> jax.Array:
    mask = batch["mask"][:, None, None, :] > 0
    x = params["tokens"][batch["tokens"]] + params["kinds"][batch["kinds"]] + params["positions"]
    x = norm(params["gain"], x)
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer/{i}"):
            x = norm(layer["first"], x + attend(layer, x, mask))
            x = norm(layer["second"], x + apply(layer["down"], jax.nn.gelu(apply(layer["up"], x))))
    losses = cross_entropy(apply(params["head"], x), jnp.maximum(batch["labels"], 0))
    counts = batch["labels"] >= 0
    return jnp.where(counts, losses, 0).sum() / counts.sum()


def bert(width: int = 128, depth: int = 4, length: int = 64, vocabulary: int = 512) -> Model:
    params = {
        "tokens": shape(vocabulary, width),
        "kinds": shape(2, width),
        "positions": shape(length, width),
        "layers": [transformer_layer(width) for _ in range(depth)],
        "gain": shape(width),
        "head": dense(width, vocabulary),
    }
    batch = {name: tokens(length) for name in ("tokens", "kinds", "mask", "labels")}
    return Model(fn=bert_loss, params=params, batch=batch, num_stages=3)


# --- ResNet: convolutions, batch normalisation with running statistics --------------------------


def convolve(kernel: jax.Array, x: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(layer: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    new = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * layer["gain"] + layer["shift"], new


def resnet_loss(params: Any, batch: Any, *, model_state: Any) -> LossOut:
    x, states = convolve(params["stem"], batch["image"]), []
    for i, (layer, state) in enumerate(zip(params["layers"], model_state, strict=True)):
        with jax.named_scope(f"block/{i}"):
            stride = layer["first"].shape[3] // layer["first"].shape[2]
            y, one = batch_norm(layer["norm1"], state[0], convolve(layer["first"], x, stride))
            y, two = batch_norm(layer["norm2"], state[1], convolve(layer["second"], jax.nn.relu(y)))
            x = jax.nn.relu(y + (convolve(layer["short"], x, stride) if stride > 1 else x))
            states.append((one, two))
    logits = apply(params["head"], x.mean((1, 2)))
    return LossOut(cross_entropy(logits, batch["label"]).mean(), model_state=states)


def resnet(width: int = 16, image: int = 32, blocks: int = 6) -> Model:
    layers, states, channels = [], [], width
    for i in range(blocks):
        wide = channels * 2 if i in (2, 4) else channels
        layer = {
            "first": shape(3, 3, channels, wide),
            "second": shape(3, 3, wide, wide),
            "norm1": {"gain": shape(wide), "shift": shape(wide)},
            "norm2": {"gain": shape(wide), "shift": shape(wide)},
        }
        layers.append(layer | ({"short": shape(1, 1, channels, wide)} if wide > channels else {}))
        states.append(tuple({"mean": shape(wide), "var": shape(wide)} for _ in range(2)))
        channels = wide
    params = {"stem": shape(3, 3, 3, width), "layers": layers, "head": dense(channels, 10)}
    batch = {"image": shape(ROWS, image, image, 3), "label": shape(ROWS, dtype=jnp.int32)}
    return Model(fn=resnet_loss, params=params, batch=batch, given={"model_state": states}, num_stages=3)


# --- U-Net: skips over the whole depth ----------------------------------------------------------


def unet_loss(params: Any, batch: Any) -> jax.Array:
    x, skips = batch["image"], []
    for i, kernel in enumerate(params["down"]):
        with jax.named_scope(f"down/{i}"):
            x = jax.nn.silu(convolve(kernel, x))
            skips.append(x)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    for i, kernel in enumerate(params["up"]):
        with jax.named_scope(f"up/{i}"):
            x = jax.image.resize(x, (*(x.shape[0], 2 * x.shape[1], 2 * x.shape[2]), x.shape[3]), "nearest")
            x = jax.nn.silu(convolve(kernel, jnp.concatenate([x, skips.pop()], -1)))
    return ((convolve(params["head"], x) - batch["target"]) ** 2).mean()


def unet(width: int = 16, image: int = 32, depth: int = 3) -> Model:
    sizes = [width * 2**i for i in range(depth)]
    down = [shape(3, 3, a, b) for a, b in zip([3, *sizes[:-1]], sizes, strict=True)]
    up = [
        shape(3, 3, below + size, size)
        for below, size in zip([sizes[-1], *sizes[:0:-1]], sizes[::-1], strict=True)
    ]
    params = {"down": down, "up": up, "head": shape(1, 1, width, 3)}
    batch = {name: shape(ROWS, image, image, 3) for name in ("image", "target")}
    return Model(fn=unet_loss, params=params, batch=batch, num_stages=2)


# --- MoE: every expert on every token, weighted by a top-2 gate ---------------------------------


def moe_loss(params: Any, batch: Any, *, rng: Any) -> jax.Array:
    x = params["tokens"][batch["tokens"]]
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer/{i}"):
            kept = jax.random.bernoulli(jax.random.fold_in(rng, i), 0.9, x.shape)
            y = jnp.where(kept, norm(layer["gain"], x) / 0.9, 0.0)
            gates, chosen = jax.lax.top_k(jax.nn.softmax(y @ layer["gate"]), 2)
            spread = (jax.nn.one_hot(chosen, layer["gate"].shape[1]) * gates[..., None]).sum(-2)
            inner = jax.nn.silu(jnp.einsum("btd,edf->btef", y, layer["up"]))
            x = x + jnp.einsum("btef,efd,bte->btd", inner, layer["down"], spread)
    return cross_entropy(x @ params["head"], batch["tokens"]).mean()


def moe(width: int = 64, experts: int = 8, depth: int = 3, length: int = 32, vocabulary: int = 256) -> Model:
    layer = {
        "gain": shape(width),
        "gate": shape(width, experts),
        "up": shape(experts, width, 2 * width),
        "down": shape(experts, 2 * width, width),
    }
    params = {"tokens": shape(vocabulary, width), "head": shape(width, vocabulary), "layers": [layer] * depth}
    key = jax.eval_shape(lambda: jax.random.key(0))
    return Model(
        fn=moe_loss, params=params, batch={"tokens": tokens(length)}, given={"rng": key}, num_stages=2
    )


# --- a ViT in PyTorch ---------------------------------------------------------------------------


def vit(width: int = 64, depth: int = 4, image: int = 32) -> Model:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    import torch_bridge

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=4 * width,
        image_size=image,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    module = ViTForImageClassification(config).train()
    batch = {
        "pixel_values": torch.zeros(ROWS, 3, image, image),
        "labels": torch.zeros(ROWS, dtype=torch.long),
    }
    return Model(fn=torch_bridge.convert(module, kwargs=batch), num_stages=4)


MODELS: dict[str, Callable[[], Model]] = {
    "gpt": gpt,
    "bert": bert,
    "resnet": resnet,
    "unet": unet,
    "moe": moe,
    "vit": vit,
}
