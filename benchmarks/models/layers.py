"""Layers that the transformers here share, as pure functions of (parameters, activations).

Parameters are float32; products run in `dtype`, norms, softmax and losses in float32.
"""

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]
Shape = jax.ShapeDtypeStruct


def weight(*dims: int) -> Shape:
    return Shape(dims, jnp.float32)


def tokens(*dims: int) -> Shape:
    return Shape(dims, jnp.int32)


def dense_shapes(inputs: int, outputs: int, *, bias: bool = True) -> dict[str, Shape]:
    kernel = {"kernel": weight(inputs, outputs)}
    return kernel | {"bias": weight(outputs)} if bias else kernel


def dense(params: Params, x: jax.Array) -> jax.Array:
    y = x @ params["kernel"].astype(x.dtype)
    return y + params["bias"].astype(x.dtype) if "bias" in params else y


def norm_shapes(width: int, *, bias: bool = True) -> dict[str, Shape]:
    return {"scale": weight(width)} | ({"bias": weight(width)} if bias else {})


def norm(params: Params, x: jax.Array) -> jax.Array:
    """Layer norm, or RMS norm where there is no bias."""
    y = x.astype(jnp.float32)
    if "bias" in params:
        y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * params["scale"]
    return (y + params["bias"] if "bias" in params else y).astype(x.dtype)


def attention_shapes(width: int, inner: int | None = None, *, bias: bool = True) -> dict[str, dict]:
    inner = inner or width
    into = {name: dense_shapes(width, inner, bias=bias) for name in ("query", "key", "value")}
    return into | {"out": dense_shapes(inner, width, bias=bias)}


def attention(
    params: dict[str, Params],
    x: jax.Array,
    heads: int,
    *,
    memory: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
) -> jax.Array:
    """Multi-head attention of `x` [batch, length, width] to itself, or to `memory`."""
    source = x if memory is None else memory
    query, key, value = (
        dense(params[name], y).reshape(*y.shape[:2], heads, -1)
        for name, y in (("query", x), ("key", source), ("value", source))
    )
    mixed = jax.nn.dot_product_attention(query, key, value, bias=bias, is_causal=causal)
    return dense(params["out"], mixed.reshape(*x.shape[:2], -1))


def mlp_shapes(width: int, hidden: int) -> dict[str, dict]:
    return {"up": dense_shapes(width, hidden), "down": dense_shapes(hidden, width)}


def mlp(params: dict[str, Params], x: jax.Array) -> jax.Array:
    return dense(params["down"], jax.nn.gelu(dense(params["up"], x)))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Of every label, in float32."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
