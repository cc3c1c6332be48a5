"""A small GPT in flax nnx, cut automatically on 8 fake CPU devices.

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python examples/gpt_nnx.py

`nnx.split` takes the parameters out of the model and `nnx.merge` puts them back inside the loss function,
which is then a pure function of parameters and batch: all that rannc_jax asks for.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rannc_jax

NUM_LAYERS, WIDTH, NUM_HEADS = 4, 128, 4
VOCABULARY, LENGTH, ROWS, NUM_STEPS = 256, 64, 16, 20


class Block(nnx.Module):
    """Attention and a feed-forward layer, each behind a norm and a residual connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.project = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [batch, seq, model] -> the same
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).reshape(batch, length, 3, NUM_HEADS, width // NUM_HEADS)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.reshape(batch, length, width))
        return x + self.narrow(nnx.gelu(self.widen(self.norm_2(x))))


class Gpt(nnx.Module):
    """Token and position embeddings, blocks, and an output layer tied to the token embedding."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(NUM_LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [batch, seq] -> [batch, seq, vocabulary]
        with jax.named_scope("embed"):
            x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for index, block in enumerate(self.blocks):
            with jax.named_scope(f"block{index}"):
                x = block(x)
        with jax.named_scope("head"):
            return self.tokens.attend(self.norm(x))


def make_batch(seed: int) -> np.ndarray:
    """Counting modulo a small number, from a random start: [rows, seq + 1]."""
    start = np.random.default_rng(seed).integers(0, 16, (ROWS, 1))
    return ((start + np.arange(LENGTH + 1)) % 16).astype(np.int32)


def main() -> None:
    graph, params = nnx.split(Gpt(nnx.Rngs(0)), nnx.Param)

    def loss_fn(params: nnx.State, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    step = rannc_jax.auto_partition(loss_fn, optimizer=optimizer, num_stages=2, num_microbatches=4)
    state = step.init(params, make_batch(0))
    print(step.plan, end="\n\n")

    for index in range(NUM_STEPS):
        state, metrics = step(state, make_batch(index))
        print(f"step {index + 1}/{NUM_STEPS}  loss {float(metrics.loss):.4f}")


if __name__ == "__main__":
    main()
