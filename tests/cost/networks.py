"""Small networks as graphs."""

import jax
import jax.numpy as jnp

from rannc_jax.ir import prepare
from rannc_jax.ir.example import make_example, subject
from rannc_jax.ir.graph import Graph


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def graph_of(fn, params, batch, **keywords) -> Graph:
    """Trace at two numbers of rows and build the graph."""
    who = subject(fn, is_loss=keywords.pop("is_loss", True))
    return prepare(who, make_example(who, params, batch, **keywords))


def mlp_params(width=64, depth=3):
    return [{"w": shape(width, width), "b": shape(width)} for _ in range(depth)]


def mlp_loss(params, batch):
    x = batch["x"]
    for i, layer in enumerate(params):
        with jax.named_scope(f"layer/{i}"):
            x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def mlp_batch(rows=4, width=64):
    return {"x": shape(rows, width), "y": shape(rows, width)}


def attention_params(width=64, vocabulary=128, depth=2):
    layer = {n: shape(width, width) for n in "qkvo"}
    layer |= {"up": shape(width, 4 * width), "down": shape(4 * width, width), "gain": shape(width)}
    return {"embedding": shape(vocabulary, width), "layers": [layer for _ in range(depth)]}


def attention_layer(layer, x, heads=4):
    def split(y):
        return y.reshape(*y.shape[:2], heads, -1)

    with jax.named_scope("attention"):
        q, k, v = (split(x @ layer[n]) for n in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(x.shape) @ layer["o"]
    with jax.named_scope("mlp"):
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * layer["gain"]
        return x + jax.nn.relu(normed @ layer["up"]) @ layer["down"]


def attention_loss(params, batch):
    with jax.named_scope("embedding"):
        x = params["embedding"][batch["tokens"]]
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer/{i}"):
            x = attention_layer(layer, x)
    with jax.named_scope("head"):
        logits = jax.nn.log_softmax(x @ params["embedding"].T)
        return -jnp.take_along_axis(logits, batch["tokens"][..., None], -1).mean()


def attention_batch(rows=4, length=32):
    return {"tokens": shape(rows, length, dtype=jnp.int32)}
