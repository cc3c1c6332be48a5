"""A plan made under one JAX trains under another, and gives the same numbers.

    python -m tests.lanes.plan_across_versions make DIRECTORY     # under one version
    python -m tests.lanes.plan_across_versions train DIRECTORY    # under another

`make` saves a plan and the losses that it trained to; `train` loads the plan and must find the cuts
again and reach the same losses.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rannc_jax

NUM_STEPS = 3
TOLERANCE = 1e-5  # relative, on the loss


def loss_fn(params: dict, batch: dict) -> rannc_jax.Weighted:
    """A small tied-embedding transformer with a masked loss."""
    with jax.named_scope("embed"):
        x = params["embedding"][batch["tokens"]]
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer{i}"):
            q, k, v = jnp.split(normalised(x) @ layer["qkv"].astype(jnp.bfloat16).astype(x.dtype), 3, axis=-1)
            x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4, axis=-1) @ v @ layer["out"]
            x = x + jax.nn.gelu(normalised(x) @ layer["up"]) @ layer["down"]
    with jax.named_scope("head"):
        logits = normalised(x) @ params["embedding"].T
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    total = jnp.sum(batch["mask"])
    return rannc_jax.Weighted(jnp.sum(nll * batch["mask"]) / total, total)


def normalised(x: jax.Array) -> jax.Array:
    """Layer norm without parameters."""
    return (x - jnp.mean(x, axis=-1, keepdims=True)) / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)


def arguments() -> tuple[dict, dict]:
    """Parameters and a batch, the same numbers under every version."""
    generator, width = np.random.default_rng(0), 16

    def matrix(*shape: int) -> np.ndarray:
        return (0.1 * generator.standard_normal(shape)).astype(np.float32)

    layers = [
        {
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width),
        }
        for _ in range(4)
    ]
    batch = {
        "tokens": generator.integers(0, 50, (8, 12)).astype(np.int32),
        "mask": (generator.random((8, 12)) < 0.5).astype(np.float32),
    }
    return {"embedding": matrix(50, width), "layers": layers}, batch


def train(plan: rannc_jax.Plan) -> list[float]:
    """Losses of a few steps under a plan."""
    params, batch = arguments()
    step = rannc_jax.parallelize(loss_fn, plan, optimizer=optax.adam(1e-3))
    state, losses = step.init(params, batch), []
    for _ in range(NUM_STEPS):
        state, out = step(state, batch)
        losses.append(float(out.loss))
    return losses


def main(command: str, folder: Path) -> int:
    """Run one half."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    if command == "make":
        params, batch = arguments()
        plan = rannc_jax.make_plan(
            loss_fn,
            params,
            batch,
            optimizer=optax.adam(1e-3),
            num_stages=3,
            num_microbatches=4,
            replicas=(1, 2, 1),
            remat=rannc_jax.Remat.SAVE_MATMULS,
        )
        plan.save(folder / "plan.json")
        (folder / "losses.json").write_text(json.dumps(train(plan)))
        print(f"made under jax {jax.__version__}")
        return 0
    plan = rannc_jax.Plan.load(folder / "plan.json")
    expected = json.loads((folder / "losses.json").read_text())
    losses = train(plan)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    versions = f"made under jax {plan.versions['jax']}, trained under {jax.__version__}"
    print(f"{versions}: losses differ by {worst:.1e}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
