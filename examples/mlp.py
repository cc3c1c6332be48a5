"""A bare JAX function, cut into a pipeline of 4 stages on 8 fake CPU devices.

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python examples/mlp.py

The function is what it would be on one device. What is left to the planner: where to cut, how many
replicas and microbatches, which schedule, what to recompute.
"""

import jax
import jax.numpy as jnp
import optax

import rannc_jax

NUM_LAYERS, WIDTH, ROWS, NUM_STEPS = 12, 256, 64, 20


def init(key: jax.Array) -> list[dict[str, jax.Array]]:
    """Weights [in, out] and biases [out] of every layer."""
    keys = jax.random.split(key, NUM_LAYERS)
    return [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, "b": jnp.zeros(WIDTH)} for k in keys]


def loss_fn(params: list[dict[str, jax.Array]], batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"]  # [rows, width]
    for index, layer in enumerate(params):
        with jax.named_scope(f"layer{index}"):  # only so that the plan has names to print
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def make_batch(key: jax.Array) -> dict[str, jax.Array]:
    x = jax.random.normal(key, (ROWS, WIDTH))
    return {"x": x, "y": jnp.flip(x, axis=-1)}


def main() -> None:
    key = jax.random.key(0)
    batches = [make_batch(k) for k in jax.random.split(key, NUM_STEPS)]

    step = rannc_jax.auto_partition(loss_fn, optimizer=optax.adam(1e-3), num_stages=4)
    state = step.init(init(key), batches[0])
    print(step.plan, end="\n\n")

    for index, batch in enumerate(batches):
        state, metrics = step(state, batch)
        print(f"step {index + 1}/{NUM_STEPS}  loss {float(metrics.loss):.4f}")


if __name__ == "__main__":
    main()
