"""Networks whose layers are a loop over stacked parameters, in the ways that people write them.

Small transformers: a token embedding, pre-norm layers of causal attention and an MLP, a tied readout.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

VOCABULARY, WIDTH, LENGTH, ROWS = 17, 16, 5, 8


def batch(rows: int = ROWS, seed: int = 0) -> dict[str, Any]:
    """Tokens and the tokens that follow."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (rows, LENGTH + 1), np.int32)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def next_token_loss(logits: Any, labels: Any) -> Any:
    """Mean cross entropy."""
    logs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], -1))


# --- plain lax.scan -----------------------------------------------------------------------------


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1), jnp.float32)


def stack(num_layers: int, width: int = WIDTH, seed: int = 0) -> dict[str, Any]:
    """Parameters of all layers, stacked."""
    rng, n, d = np.random.default_rng(seed), num_layers, width
    return {
        "scale": 1 + 0.1 * normal(rng, n, d),
        "qkv": normal(rng, n, d, 3 * d),
        "out": normal(rng, n, d, d),
        "mlp": {
            "up": normal(rng, n, d, 2 * d),
            "bias": 0.1 * normal(rng, n, 2 * d),
            "down": normal(rng, n, 2 * d, d),
        },
    }


def params(num_layers: int = 6, width: int = WIDTH) -> dict[str, Any]:
    """Parameters of `plain` and its kin."""
    rng = np.random.default_rng(1)
    return {"embed": normal(rng, VOCABULARY, width), "layers": stack(num_layers, width)}


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = q @ jnp.swapaxes(k, -1, -2) / np.float32(np.sqrt(q.shape[-1]))
    mask = jnp.tril(jnp.ones((q.shape[-2], q.shape[-2]), bool))
    return jax.nn.softmax(jnp.where(mask, scores, np.float32(-1e9)), axis=-1) @ v


def layer(p: Any, x: Any) -> Any:
    """One transformer layer on `[rows, length, width]`."""
    h = p["scale"] * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + np.float32(1e-5))
    with jax.named_scope("attention"):
        x = x + attention(*jnp.split(h @ p["qkv"], 3, -1)) @ p["out"]
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(x @ p["mlp"]["up"] + p["mlp"]["bias"]) @ p["mlp"]["down"]


def plain(body: Callable[[Any, Any], Any] = layer, **scan: Any) -> Callable[[Any, Any], Any]:
    """A loss whose layers are one `lax.scan`; `scan` are options of it."""

    def loss_fn(p: Any, b: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, q: (body(q, h), None), p["embed"][b["x"]], p["layers"], **scan)
        return next_token_loss(h @ p["embed"].T, b["y"])

    return loss_fn


# --- flax.linen nn.scan -------------------------------------------------------------------------


class Layer(nn.Module):
    """A pre-norm MLP layer in bfloat16 with float32 parameters."""

    width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        h = nn.LayerNorm(name="norm", dtype=self.dtype)(x)
        h = attention(*jnp.split(nn.Dense(3 * self.width, name="qkv", dtype=self.dtype)(h), 3, -1))
        x = x + nn.Dense(self.width, name="out", dtype=self.dtype)(h)
        h = nn.gelu(nn.Dense(4 * self.width, name="up", dtype=self.dtype)(x))
        return x + nn.Dense(self.width, name="down", dtype=self.dtype)(h), None


class Scanned(nn.Module):
    """A decoder whose layers are flax's `nn.scan`."""

    num_layers: int = 6
    width: int = WIDTH
    vocabulary: int = VOCABULARY
    axis: int = 0
    remat: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(self.vocabulary, self.width, name="embed", dtype=self.dtype)(tokens)
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False) if self.remat else Layer,
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=self.num_layers,
        )
        x, _ = layers(self.width, self.dtype, name="layers")(x, None)
        return nn.Dense(self.vocabulary, name="head", dtype=self.dtype)(x)


def linen(network: Scanned) -> tuple[Callable[[Any, Any], Any], Any]:
    """(loss, parameters) of a linen network."""

    def loss_fn(p: Any, b: Any) -> Any:
        return next_token_loss(network.apply(p, b["x"]).astype(jnp.float32), b["y"])

    return loss_fn, network.init(jax.random.key(0), batch()["x"])


# --- flax.nnx and equinox style -----------------------------------------------------------------


class NnxLayer(nnx.Module):
    """An MLP layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.gelu(self.up(x)))


class NnxNetwork(nnx.Module):
    """Layers made by `nnx.vmap`, run by `nnx.scan`."""

    def __init__(self, num_layers: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(r: nnx.Rngs) -> NnxLayer:
            return NnxLayer(r)

        self.layers = make(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: Any, one: NnxLayer) -> Any:
            return one(x)

        return self.head(run(self.embed(tokens), self.layers))


def nnx_network(num_layers: int = 6) -> tuple[Callable[[Any, Any], Any], Any]:
    """(loss, parameters) of an nnx network."""
    graph, state = nnx.split(NnxNetwork(num_layers, nnx.Rngs(0)))
    plain_state = nnx.to_pure_dict(state)

    def loss_fn(p: Any, b: Any) -> Any:
        values = nnx.State(jax.tree.map(lambda x: x, state))
        nnx.replace_by_pure_dict(values, p)
        return next_token_loss(nnx.merge(graph, values)(b["x"]), b["y"])

    return loss_fn, plain_state


def stacked_inside(p: Any, b: Any) -> Any:
    """A loss over a list of layers that are stacked where they are used, as equinox users do."""
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *p["layers"])
    body = jax.checkpoint(lambda h, q: (layer(q, h), None))
    h, _ = jax.lax.scan(body, p["embed"][b["x"]], layers)
    return next_token_loss(h @ p["embed"].T, b["y"])


def list_params(num_layers: int = 6) -> dict[str, Any]:
    """Parameters of `stacked_inside`."""
    whole = params(num_layers)
    layers = [jax.tree.map(lambda x, i=i: x[i], whole["layers"]) for i in range(num_layers)]
    return {**whole, "layers": layers}
