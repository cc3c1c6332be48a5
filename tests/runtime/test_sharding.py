"""Every way of keeping state in shares gives the step that one device gives."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import rannc_jax
from rannc_jax import LossOut, Sharding
from tests.door import assert_close

SHARDINGS = tuple(Sharding)
VOCABULARY, WIDTH, ROWS = 24, 8, 16


def params() -> dict[str, Any]:
    """A tied table, two layers with a bias that four devices cannot share, and a scale."""
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "table": jax.random.normal(keys[0], (VOCABULARY, WIDTH)) / 4,
        "in": {"w": jax.random.normal(keys[1], (WIDTH, 4 * WIDTH)) / 3, "b": jnp.zeros((4 * WIDTH,))},
        "out": {"w": jax.random.normal(keys[2], (4 * WIDTH, WIDTH)) / 6, "b": jnp.zeros((WIDTH,))},
        "odd": jax.random.normal(keys[3], (3,)) + 1,
        "scale": jnp.float32(0.5),
    }


def batch(rows: int = ROWS) -> dict[str, Any]:
    """Tokens with uneven masks."""
    keys = jax.random.split(jax.random.key(1), 3)
    return {
        "x": jax.random.randint(keys[0], (rows,), 0, VOCABULARY),
        "y": jax.random.randint(keys[1], (rows,), 0, VOCABULARY),
        "mask": jax.random.bernoulli(keys[2], 0.6, (rows,)).astype(jnp.float32).at[-1].set(1.0),
    }


def hidden(p: Any, tokens: Any, normed: Any) -> Any:
    x = p["table"][tokens]
    y = normed(jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) * p["scale"])
    return x + (y @ p["out"]["w"] + p["out"]["b"]) * jnp.mean(p["odd"])


def masked(p: Any, x: Any, batch: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ p["table"].T, batch["y"])
    return jnp.sum(losses * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def plain(p: Any, batch: Any, rng: Any) -> Any:
    """Separable: a tie, dropout and a weighted loss."""
    x = hidden(p, batch["x"], lambda y: y)
    x = jnp.where(jax.random.bernoulli(rng, 0.8, x.shape), x, 0)
    return masked(p, x, batch), {"rows": x}


def with_statistics(p: Any, batch: Any, model_state: Any) -> LossOut:
    """Coupled by batch normalisation: one program over all rows."""
    new = {}

    def normed(y: Any) -> Any:
        mean, var = jnp.mean(y, 0), jnp.var(y, 0)
        new["mean"] = 0.9 * model_state["mean"] + 0.1 * mean
        return (y - mean) * jax.lax.rsqrt(var + 1e-3)

    x = hidden(p, batch["x"], normed)
    return LossOut(loss=masked(p, x, batch), model_state=new)


NETWORKS = {"plain": plain, "statistics": with_statistics}
STATE = {"mean": jnp.zeros((4 * WIDTH,))}


def begin(network: str, sharding: Sharding, num_microbatches: int, replicas: Any, **more: Any) -> Any:
    """A step and its first state."""
    stages = len(replicas) if isinstance(replicas, tuple) else 1
    given = {"rng": jax.random.key(7)} if network == "plain" else {"model_state": STATE}
    more = {"optimizer": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)), **more}
    step = rannc_jax.auto_partition(
        NETWORKS[network],
        num_stages=stages,
        replicas=replicas,
        num_microbatches=num_microbatches,
        sharding=sharding,
        **more,
    )
    return step, step.init(params(), batch(), **given)


@functools.cache
def expected(network: str, num_microbatches: int) -> list[Any]:
    """What two steps on one device give: the first state, then states with the losses before them."""
    step, state = begin(network, Sharding.REPLICATED, num_microbatches, 1)
    reference = jax.jit(step.reference)
    found: list[Any] = [(step.gather(state), None)]
    for _ in range(2):
        found.append(step.gather(reference(found[-1][0], batch())))
    return found


def check(network: str, sharding: Sharding, num_microbatches: int, replicas: Any, **more: Any) -> Any:
    """Steps equal the reference: loss, aux, model state, and where parameters move."""
    step, state = begin(network, sharding, num_microbatches, replicas, **more)
    wanted = expected(network, num_microbatches)
    for (before, _), (after, out) in itertools.pairwise(wanted):
        state, got = step(state, batch())
        assert_close(got.loss, out.loss)
        assert_close(step.gather(got.aux), out.aux)
        assert_close(step.gather(state.model_state), after.model_state)
        moved = jax.tree.map(lambda x, y: x - y, step.gather(state.params), before.params)
        assert_close(moved, jax.tree.map(lambda x, y: x - y, after.params, before.params), 1e-3)
    return step, state


CASES = [
    ("plain", 4, 4),
    ("plain", 2, 1),
    ("statistics", 4, 4),
    ("plain", (2, 4), 4),
    ("statistics", (2, 2), 1),
]
ALL = [(network, k, m) for network in NETWORKS for k in (1, 2, 4) for m in (1, 4)]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("network", "replicas", "microbatches"), CASES)
def test_state_in_shares_changes_no_result(network, replicas, microbatches, sharding):
    check(network, sharding, microbatches, replicas)
