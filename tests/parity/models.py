"""Small networks as their users would write them: bare JAX, pure functions, named scopes.

Each is there for something that a pipeline can get wrong (see its comment). All have 24 rows, which
divide by 1, 2, 3 and 4 replicas and microbatches, and a dropout rate. Rows differ a lot in what counts:
in networks with labels, rows 6 to 11 (one microbatch of four) have no label at all.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rannc_jax import LossOut, Weighted

ROWS, LENGTH, VOCABULARY, WIDTH = 24, 6, 32, 16
DROPOUT = 0.25
IGNORED = -100


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A network with everything that a step and its reference need.

    Args:
        loss_fn: `(params, batch, **takes)`.
        takes: which of rng, model_state, frozen.
        weight: how much a part of the batch counts in the mean; None where losses are summed.
        coupled: rows see each other in the usual way, so the reference goes part by part.
        zero_gradient: paths of parameters whose true gradient is zero, with the reason.
    """

    loss_fn: Callable[..., Any]
    takes: tuple[str, ...]
    params: Any
    batch: Any
    model_state: Any = None
    frozen: Any = None
    weight: Callable[[Any], float] | None
    coupled: bool = False
    zero_gradient: dict[str, str] = field(default_factory=dict)

    @property
    def in_parts(self) -> bool:
        """Whether the numbers depend on how the batch is split."""
        return self.coupled or "rng" in self.takes


class Dropout:
    """Dropout with a fresh key at every call; nothing without a key."""

    def __init__(self, key: Any) -> None:
        self._key, self._calls = key, 0

    def __call__(self, x: jax.Array) -> jax.Array:
        if self._key is None:
            return x
        self._calls += 1
        kept = jax.random.bernoulli(jax.random.fold_in(self._key, self._calls), 1 - DROPOUT, x.shape)
        return jnp.where(kept, x / (1 - DROPOUT), 0)


def with_dropout(network: Callable[..., Any], dropout: bool, *keywords: str) -> dict[str, Any]:
    """`loss_fn` and `takes` of a network `(params, batch, drop, **keywords)`."""

    def loss_fn(params: Any, batch: Any, *, rng: Any = None, **given: Any) -> Any:
        return network(params, batch, Dropout(rng), **given)

    return {"loss_fn": loss_fn, "takes": (*keywords, *["rng"] * dropout)}


class Draw:
    """Random arrays in a fixed order."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * self._draw.standard_normal(shape), jnp.float32)

    def weight(self, *shape: int) -> jax.Array:
        """A matrix or convolution kernel that keeps the size of its input."""
        return self(*shape, scale=float(np.prod(shape[:-1])) ** -0.5)

    def dense(self, ins: int, outs: int) -> dict[str, jax.Array]:
        return {"w": self.weight(ins, outs), "b": self(outs, scale=0.1)}

    def integers(self, below: int, *shape: int) -> jax.Array:
        return jnp.asarray(self._draw.integers(0, below, shape), jnp.int32)

    def labels(self, below: int) -> jax.Array:
        """[rows, length], from no label a row to all of them."""
        labels = np.array(self.integers(below, ROWS, LENGTH))
        counts = self._draw.integers(1, LENGTH + 1, ROWS)
        counts[6:15] = 0  # microbatch 1 of 4, and half of microbatch 2
        labels[np.arange(LENGTH)[None, :] >= counts[:, None]] = IGNORED
        return jnp.asarray(labels)


def dense(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def conv(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """A convolution [rows, height, width, channels] that keeps height and width."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def negative_log_likelihood(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]


def num_labels(batch: Any) -> float:
    return float(jnp.sum(batch["labels"] != IGNORED))


def num_rows(batch: Any) -> float:
    return float(jax.tree.leaves(batch)[0].shape[0])


# The plainest network; relu layers, whose gradient at 0 must stay jax's.


def mlp(dropout: bool) -> Model:
    draw = Draw(0)
    params = [draw.dense(WIDTH, WIDTH) for _ in range(8)]

    def network(params: Any, batch: Any, drop: Dropout) -> jax.Array:
        x = batch["x"]
        for index, layer in enumerate(params):
            with jax.named_scope(f"layer{index}"):
                x = x + drop(jax.nn.relu(dense(layer, x)))
        return jnp.mean((x - batch["y"]) ** 2)

    batch = {"x": draw(ROWS, WIDTH), "y": draw(ROWS, WIDTH)}
    return Model(params=params, batch=batch, weight=num_rows, **with_dropout(network, dropout))


# Tied embeddings, causal attention, parameters with zero gradient (key biases).


def transformer(dropout: bool) -> Model:
    draw, num_layers = Draw(1), 3
    layers = []
    for _ in range(num_layers):
        layer: dict[str, Any] = {name: draw.dense(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
        layer |= {"up": draw.dense(WIDTH, 2 * WIDTH), "down": draw.dense(2 * WIDTH, WIDTH)}
        layer |= {"norm1": 1 + draw(WIDTH, scale=0.1), "norm2": 1 + draw(WIDTH, scale=0.1)}
        layers.append(layer)
    params = {
        "embedding": draw(VOCABULARY, WIDTH, scale=0.5),
        "positions": draw(LENGTH, WIDTH, scale=0.5),
        "layers": layers,
        "norm": 1 + draw(WIDTH, scale=0.1),
    }
    reason = "adds the same to every score of a query, which softmax ignores"
    return Model(
        params=params,
        batch={"tokens": draw.integers(VOCABULARY, ROWS, LENGTH + 1)},
        weight=num_rows,
        zero_gradient={f"['layers'][{i}]['k']['b']": reason for i in range(num_layers)},
        **with_dropout(_transformer, dropout),
    )


def _transformer(params: Any, batch: Any, drop: Dropout) -> jax.Array:
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    with jax.named_scope("embed"):
        x = drop(params["embedding"][tokens] + params["positions"])
    for index, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layers/{index}"):
            x = x + drop(_attention(layer, _norm(layer["norm1"], x), drop))
            hidden = jax.nn.gelu(dense(layer["up"], _norm(layer["norm2"], x)))
            x = x + drop(dense(layer["down"], hidden))
    with jax.named_scope("head"):
        logits = _norm(params["norm"], x) @ params["embedding"].T
        return jnp.mean(negative_log_likelihood(logits, labels))


def _attention(layer: Any, x: jax.Array, drop: Dropout) -> jax.Array:
    q, k, v = (dense(layer[name], x).reshape(*x.shape[:2], 2, WIDTH // 2) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (WIDTH // 2) ** 0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = drop(jax.nn.softmax(jnp.where(causal, scores, -1e9)))
    return dense(layer["o"], jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape))


def _norm(gain: jax.Array, x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5) * gain


# Values that skip several stages, one of them with three readers; max pooling over ties (zeros after relu).


def unet(dropout: bool) -> Model:
    draw = Draw(2)
    channels = {"down0": (3, 4), "down1": (4, 8), "middle": (8, 8), "up1": (20, 8), "up0": (12, 4)}
    params = {
        name: {"in": draw.weight(3, 3, ins, outs), "out": draw.weight(3, 3, outs, outs)}
        for name, (ins, outs) in channels.items()
    }

    def network(params: Any, batch: Any, drop: Dropout) -> jax.Array:
        def block(name: str, *inputs: jax.Array) -> jax.Array:
            with jax.named_scope(name):
                x = jax.nn.relu(conv(params[name]["in"], jnp.concatenate(inputs, axis=-1)))
                return drop(jax.nn.relu(conv(params[name]["out"], x)))

        full = block("down0", batch["image"])
        half = block("down1", _half(full))
        x = _double(block("middle", _half(half)))
        x = _double(block("up1", x, half, _half(full)))
        x = block("up0", x, full)
        with jax.named_scope("out"):
            return jnp.mean((x[..., :3] - full[..., 1:] - batch["target"]) ** 2)

    batch = {"image": draw(ROWS, 8, 8, 3), "target": draw(ROWS, 8, 8, 3)}
    return Model(params=params, batch=batch, weight=num_rows, **with_dropout(network, dropout))


def _half(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _double(x: jax.Array) -> jax.Array:
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


# Rows that see each other through batch statistics; state that threads through the microbatches.


def batch_norm(dropout: bool) -> Model:
    draw, num_classes = Draw(3), 5
    sizes = [(3, 4), (4, 8), (8, 8), (8, 8)]
    params = {
        "convs": [draw.weight(3, 3, *size) for size in sizes],
        "norms": [{"gain": 1 + draw(n, scale=0.1), "bias": draw(n, scale=0.1)} for _, n in sizes],
        "head": draw.dense(8, num_classes),
    }
    state = [{"mean": jnp.zeros(n), "var": jnp.ones(n), "count": jnp.int32(0)} for _, n in sizes]

    def network(params: Any, batch: Any, drop: Dropout, model_state: Any) -> LossOut:
        x, new = batch["image"], []
        for index, (kernel, norm) in enumerate(zip(params["convs"], params["norms"], strict=True)):
            with jax.named_scope(f"layer{index}"):
                x, written = _batch_norm(norm, model_state[index], conv(kernel, x))
                x = drop(jax.nn.relu(x))
                new.append(written)
        with jax.named_scope("head"):
            logits = dense(params["head"], jnp.mean(x, axis=(1, 2)))
            loss = jnp.mean(negative_log_likelihood(logits, batch["label"]))
        return LossOut(loss, model_state=new)

    return Model(
        params=params,
        batch={"image": draw(ROWS, 6, 6, 3), "label": draw.integers(num_classes, ROWS)},
        model_state=state,
        weight=num_rows,
        coupled=True,
        **with_dropout(network, dropout, "model_state"),
    )


def _batch_norm(norm: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    mean, var = jnp.mean(x, axis=(0, 1, 2)), jnp.var(x, axis=(0, 1, 2))
    written = {
        "mean": 0.9 * state["mean"] + 0.1 * mean,
        "var": 0.9 * state["var"] + 0.1 * var,
        "count": state["count"] + 1,
    }
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * norm["gain"] + norm["bias"], written


# Frozen leaves before, between and beside trained ones; a loss with a weight of the user's.


def frozen(dropout: bool) -> Model:
    draw = Draw(4)
    params = {"layers": [draw.dense(WIDTH, WIDTH) for _ in range(4)], "head": draw.dense(WIDTH, 7)}
    kept = {"embedding": draw(VOCABULARY, WIDTH), "layers": [draw.dense(WIDTH, WIDTH) for _ in range(4)]}

    def network(params: Any, batch: Any, drop: Dropout, frozen: Any) -> Weighted:
        x = frozen["embedding"][batch["tokens"]]
        for index, (layer, fixed) in enumerate(zip(params["layers"], frozen["layers"], strict=True)):
            with jax.named_scope(f"layer{index}"):
                x = x + drop(jnp.tanh(dense(fixed, jnp.tanh(dense(layer, x)))))
        with jax.named_scope("head"):
            counts = batch["labels"] != IGNORED
            terms = negative_log_likelihood(dense(params["head"], x), batch["labels"]) * counts
            weight = jnp.sum(counts).astype(jnp.float32)
            return Weighted(jnp.sum(terms) / jnp.maximum(weight, 1), weight)

    return Model(
        params=params,
        batch={"tokens": draw.integers(VOCABULARY, ROWS, LENGTH), "labels": draw.labels(7)},
        frozen=kept,
        weight=num_labels,
        **with_dropout(network, dropout, "frozen"),
    )


# sum(nll * mask) / sum(mask): recognised, and 0 / 0 in a microbatch without a label.


def masked(dropout: bool) -> Model:
    draw = Draw(5)
    params = {
        "embedding": draw(VOCABULARY, WIDTH),
        "layers": [draw.dense(WIDTH, WIDTH) for _ in range(4)],
        "head": draw.dense(WIDTH, 7),
    }

    def network(params: Any, batch: Any, drop: Dropout) -> jax.Array:
        with jax.named_scope("embed"):
            x = params["embedding"][batch["tokens"]]
        for index, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer{index}"):
                x = x + drop(jnp.tanh(dense(layer, x)))
        with jax.named_scope("head"):
            counts = (batch["labels"] != IGNORED).astype(jnp.float32)
            terms = negative_log_likelihood(dense(params["head"], x), batch["labels"])
            return jnp.sum(terms * counts) / jnp.sum(counts)

    batch = {"tokens": draw.integers(VOCABULARY, ROWS, LENGTH), "labels": draw.labels(7)}
    return Model(params=params, batch=batch, weight=num_labels, **with_dropout(network, dropout))


# Outputs besides the loss: rows, a mean, a count, a maximum; a loss that is a sum.


def auxiliary(dropout: bool) -> Model:
    draw = Draw(6)
    params = [draw.dense(WIDTH, WIDTH) for _ in range(5)]

    def network(params: Any, batch: Any, drop: Dropout) -> LossOut:
        x, hidden = batch["x"], []
        for index, layer in enumerate(params):
            with jax.named_scope(f"layer{index}"):
                x = drop(jnp.tanh(dense(layer, x)))
                hidden.append(jnp.mean(jnp.abs(x)))
        error = jnp.sum((x - batch["y"]) ** 2, axis=-1)
        aux = {
            "output": x,
            "error": error,
            "activity": hidden,
            "positive": jnp.sum(x > 0),
            "largest": jnp.max(error),
        }
        return LossOut(jnp.sum(error), aux=aux)

    batch = {"x": draw(ROWS, WIDTH), "y": draw(ROWS, WIDTH)}
    return Model(params=params, batch=batch, weight=None, **with_dropout(network, dropout))


MODELS = {build.__name__: build for build in (mlp, transformer, unet, batch_norm, frozen, masked, auxiliary)}


@functools.cache
def model(name: str, dropout: bool) -> Model:
    """A network by name; made once."""
    return MODELS[name](dropout)
