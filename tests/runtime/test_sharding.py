"""Every way of keeping state in shares gives the step that one device gives."""

import collections
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rannc_jax
from rannc_jax import LossOut, Sharding
from rannc_jax.runtime.placement import Update
from rannc_jax.runtime.stacked import flat_parts
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


FAST = [
    *(("plain", 4, 4, sharding) for sharding in SHARDINGS),
    ("statistics", 4, 4, Sharding.FSDP),
    ("plain", (2, 4), 4, Sharding.FSDP),
    ("plain", (2, 4), 4, (Sharding.ZERO1, Sharding.ZERO2)),
]
LAYOUTS = (1, 2, 4, (2, 2), (4, 2))
ALL = [case for case in itertools.product(NETWORKS, LAYOUTS, (1, 4), SHARDINGS) if case not in FAST]


@pytest.mark.parametrize(("network", "replicas", "microbatches", "sharding"), FAST)
def test_state_in_shares_changes_no_result(network, replicas, microbatches, sharding):
    check(network, sharding, microbatches, replicas)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "replicas", "microbatches", "sharding"), ALL)
def test_state_in_shares_changes_no_result_of_any_plan(network, replicas, microbatches, sharding):
    check(network, sharding, microbatches, replicas)


@functools.cache
def started(sharding: Sharding) -> Any:
    """A step of one microbatch on four devices, and its first state."""
    return begin("plain", sharding, 1, 4)


def bytes_by_device(tree: Any) -> set[int]:
    """The bytes of a tree that lie on each of its devices, without repetition."""
    found: collections.Counter[jax.Device] = collections.Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device] += shard.data.nbytes
    assert len(found) == 4
    return set(found.values())


def share(leaf: Any) -> int:
    """Bytes of a leaf on each of four devices: a quarter, where a dim divides by four."""
    return leaf.nbytes // (4 if any(size % 4 == 0 for size in leaf.shape) else 1)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_device_holds_the_bytes_that_the_plan_counts(sharding):
    step, state = started(sharding)
    held = step.plan.stages[0].memory_bytes
    pairs = (
        ("parameters", state.params, sharding.shards_parameters),
        ("optimizer", state.opt_state, sharding.shards_optimizer),
    )
    for kind, tree, shared in pairs:
        leaves = jax.tree.leaves(tree)
        assert bytes_by_device(tree) == {sum(share(x) if shared else x.nbytes for x in leaves)}
        # The plan shares leaves out evenly; those whose dims do not divide stay whole.
        sized = [x for x in leaves if x.size > 1]
        uneven = [x for x in sized if shared and share(x) == x.nbytes]
        counted = sum(share(x) if shared else x.nbytes for x in sized)
        assert abs(counted - sum(x.nbytes * 3 / 4 for x in uneven) - held[kind]) < 32


def compiled(step: Any, state: Any) -> str:
    """What XLA makes of a step of one stage."""
    engine, at = step._engine, step._placement
    prepared = engine.prepared(batch())
    leaves, key = step._arguments(engine, prepared, state, None)
    env = engine.given(prepared, leaves, batch(), key)
    params, others = ({k: x for k, x in env.items() if (k[0] == "param") is own} for own in (True, False))
    program = prepared.fused.step_program(tuple(params), tuple(others), Update(at, True))
    parts = flat_parts(state.opt_state, at.cut.state_slicing)
    return program.lower([*params.values()], parts, [*others.values()]).compile().as_text()


def collectives(text: str) -> dict[str, int]:
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return dict(collections.Counter(re.findall(rf" ({names})(?:-start)?\(", text)))


# Five leaves divide by four; the forward reads all of them, the backward the three that are multiplied by.
# One all-reduce is of the loss and of what stays whole, the other of the norm that clips gradients.
INTENDED = {
    Sharding.REPLICATED: {"all-reduce": 1},
    Sharding.ZERO1: {"all-reduce": 2, "reduce-scatter": 5, "all-gather": 5},
    Sharding.ZERO2: {"all-reduce": 2, "reduce-scatter": 5, "all-gather": 5},
    Sharding.FSDP: {"all-reduce": 2, "reduce-scatter": 5, "all-gather": 5 + 3},
}


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_step_has_the_collectives_of_its_mode(sharding):
    assert collectives(compiled(*started(sharding))) == INTENDED[sharding]


def test_with_one_stage_too_what_is_not_finite_leaves_the_state_as_it_was():
    step, state = begin("plain", Sharding.FSDP, 1, 4, check_finite=True)
    broken = {**batch(), "mask": jnp.full((ROWS,), jnp.nan)}
    with pytest.raises(rannc_jax.RuntimeFailure, match="not finite"):
        step(state, broken)
    _, out = step(state, batch())
    assert np.isfinite(out.loss)


def test_a_state_of_host_arrays_is_shared_out_again():
    step, state = started(Sharding.FSDP)
    host = step.gather(state)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(host.params))
    again = step._placement.settled(host)
    assert bytes_by_device(again.params) == bytes_by_device(state.params)
    assert_close(step.gather(again.params), host.params)
