"""A plan of one stage against the step that a JAX expert writes by hand.

    python -m benchmarks.fused_step --width 512 --replicas 2 --microbatches 4

The network is a small GPT. By hand: `value_and_grad` and the optax update in one `jax.jit`, arrays with
NamedShardings, state donated; microbatches by `lax.scan` over gradients in float32. Both steps run in turns;
printed are the medians and their ratio.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rannc_jax

VOCABULARY = 2048


def make_params(key: Any, width: int, layers: int) -> Any:
    """Weights of a GPT without biases."""
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    keys = iter(jax.random.split(key, layers * len(shapes) + 1))

    def weight(shape: tuple[int, int]) -> Any:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    blocks = [{name: weight(shape) for name, shape in shapes.items()} for _ in range(layers)]
    return {"embed": weight((VOCABULARY, width)), "layers": blocks}


def loss_fn(params: Any, batch: Any) -> Any:
    """Mean cross-entropy of the next token, computed in bfloat16 on a GPU."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    x = params["embed"][batch["ids"]].astype(dtype)
    for layer in params["layers"]:
        w = jax.tree.map(lambda p: p.astype(dtype), layer)
        h = x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)
        q, k, v = (a.reshape(*x.shape[:2], -1, 64) for a in jnp.split(h @ w["qkv"], 3, -1))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    logits = (x @ params["embed"].astype(dtype).T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def ours(params: Any, batch: Any, options: argparse.Namespace) -> Callable[[], Any]:
    """One call is one step of a plan."""
    step = rannc_jax.auto_partition(
        loss_fn,
        optimizer=optax.adamw(1e-4),
        num_stages=1,
        replicas=options.replicas,
        num_microbatches=options.microbatches,
        sharding="replicated",
        remat="save_all",
    )
    state = step.init(params, batch)

    def run() -> Any:
        nonlocal state
        state, out = step(state, batch)
        return out.loss, state.params

    return run


def by_hand(params: Any, batch: Any, options: argparse.Namespace) -> Callable[[], Any]:
    """One call is one step of plain JAX."""
    mesh = Mesh(np.array(jax.devices()[: options.replicas]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(None, "data"))
    optimizer = optax.adamw(1e-4)
    parts = options.microbatches

    def step(params: Any, state: Any, batch: Any) -> Any:
        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, part)), None

        if parts == 1:
            total = jax.value_and_grad(loss_fn)(params, jax.tree.map(lambda x: x[0], batch))
        else:
            total, _ = jax.lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, params)), batch)
        loss, grads = jax.tree.map(lambda x: x / parts, total)
        updates, state = optimizer.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=whole)
    params = jax.device_put(params, whole)
    state = jax.jit(optimizer.init, out_shardings=whole)(params)

    def run() -> Any:
        nonlocal params, state
        split = jax.tree.map(lambda x: np.asarray(x).reshape(parts, -1, *x.shape[1:]), batch)
        loss, params, state = compiled(params, state, jax.device_put(split, rows))
        return loss, params

    return run


def main() -> None:
    """Print medians and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (("width", 256), ("layers", 4), ("length", 64), ("rows", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("replicas", 1), ("microbatches", 1), ("repeats", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    params = jax.device_get(make_params(jax.random.key(0), options.width, options.layers))
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (options.rows, options.length + 1), dtype=np.int32)
    batch = {"ids": ids[:, :-1], "labels": ids[:, 1:]}
    steps = {"plan of one stage": ours(params, batch, options), "by hand": by_hand(params, batch, options)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.repeats + 2):
        for name, run in steps.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if turn >= 2:
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, median in medians.items():
        print(f"{name:18} {1e3 * median:8.2f} ms")
    mine, hand = medians.values()
    print(f"ratio {mine / hand:.3f}")


if __name__ == "__main__":
    main()
