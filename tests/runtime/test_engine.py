"""Batches of other sizes than planned, and what a step moves, keeps and frees."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rannc_jax
from rannc_jax import LossOut, Remat, TraceError, Weighted
from rannc_jax.runtime import engine as engines
from rannc_jax.runtime import executor
from rannc_jax.runtime.ops import OpKind
from rannc_jax.runtime.stage import Spread
from rannc_jax.runtime.transfer import sub_mesh_sharding
from tests.door import WIDTH, assert_close, layers, loss_fn, net, rows, train
from tests.runtime.instrument import watch_host_traffic


def padded(step, batch):
    return step._engine.prepared(batch).layout.padded


# --- other batches than planned -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven():
    """Two microbatches over a stage of two replicas and one of one."""
    return train(loss_fn, layers(), rows(8), replicas=(2, 1))


@pytest.mark.parametrize("count", [16, 6, 7, 5, 1])
def test_batches_of_other_sizes_are_exact(uneven, count):
    step, state = uneven
    batch = rows(count, seed=5)
    out, grads = step.value_and_grad(state, batch)
    loss, expected = jax.value_and_grad(loss_fn)(layers(), batch)
    assert_close(out.loss, loss)
    assert_close(step.gather(grads), expected)
    layout = step._engine.prepared(batch).layout
    assert layout.padded == (count != 16)  # 6 rows, too: two microbatches of 3 do not halve
    assert layout.spread is Spread.PER_REPLICA


def summed(params, batch):
    return jnp.sum((net(params, batch["x"]) - batch["y"]) ** 2)


def penalised(params, batch):
    return loss_fn(params, batch) + 0.1 * sum(jnp.sum(layer["w"] ** 2) for layer in params)


def masked(params, batch):
    errors = jnp.sum((net(params, batch["x"]) - batch["y"]) ** 2, -1)
    mask = batch["x"][:, 0] > 0
    return jnp.sum(errors * mask) / jnp.maximum(jnp.sum(mask), 1)


def weighted(params, batch):
    errors = jnp.sum((net(params, batch["x"]) - batch["y"]) ** 2, -1)
    weight = jnp.sum(batch["x"][:, 0] > 0).astype(jnp.float32)
    return Weighted(jnp.sum(jnp.where(batch["x"][:, 0] > 0, errors, 0)) / weight, weight)


def scalar(fn):
    return lambda params, batch: getattr(fn(params, batch), "loss", fn(params, batch))


@pytest.mark.parametrize("fn", [summed, penalised, masked, weighted])
def test_padding_is_exact_for_every_form_of_loss(fn):
    step, state = train(fn, layers(), rows(8), replicas=(2, 1))
    batch = rows(7, seed=5)
    out, grads = step.value_and_grad(state, batch)
    loss, expected = jax.value_and_grad(scalar(fn))(layers(), batch)
    assert padded(step, batch)
    assert_close(out.loss, loss)
    assert_close(step.gather(grads), expected)


def test_padding_leaves_no_trace_in_outputs_and_gradients_to_the_batch():
    def fn(params, batch):
        h = net(params, batch["x"])
        return jnp.mean((h - batch["y"]) ** 2), {
            "h": h,
            "ids": batch["ids"] + 1,
            "norm": jnp.sum(params[0]["w"]),
        }

    def batch_of(count):
        return {**rows(count, seed=5), "ids": np.arange(count)}

    step, state = train(fn, layers(), batch_of(8), replicas=(2, 1))
    batch = batch_of(7)
    out, (_, to_batch) = step.value_and_grad(state, batch, wrt_batch=("x",))
    assert padded(step, batch)
    assert_close(out.aux, jax.tree.map(jnp.asarray, fn(layers(), batch)[1]))
    expected = jax.grad(lambda x: fn(layers(), {**batch, "x": x})[0])(batch["x"])
    assert_close(step.gather(to_batch["x"]), expected)


def test_evaluation_pads_too():
    step, state = train(loss_fn, layers(), rows(8), replicas=(2, 1))
    evaluate = step.evaluate(lambda p, x: net(p, x))
    for count in (8, 7, 1):
        x = rows(count, seed=3)["x"]
        assert_close(evaluate(state, x), net(layers(), x))


def test_rows_that_see_each_other_are_not_padded():
    def fn(params, batch):
        h = net(params, batch["x"])
        h = (h - jnp.mean(h, 0)) / jnp.sqrt(jnp.var(h, 0) + 1e-5)
        return jnp.mean((h * params[0]["b"] - batch["y"]) ** 2)

    step, state = train(fn, layers(), rows(8))
    with pytest.raises(TraceError, match="7 rows do not divide into 2 microbatches") as error:
        step(state, rows(7))
    assert "batch statistics" in str(error.value)


@pytest.mark.parametrize("count", [7, 3])
def test_rows_that_neither_divide_nor_pad_run_on_one_replica_of_every_stage(count):
    def fn(params, batch):
        h = net(params, batch["x"])
        return jnp.mean((h - batch["y"]) ** 2), {"largest": jnp.max(h, 0)}

    step, state = train(fn, layers(), rows(8), replicas=(2, 1), num_microbatches=1)
    batch = rows(count, seed=4)
    out, grads = step.value_and_grad(state, batch)
    (loss, aux), expected = jax.value_and_grad(fn, has_aux=True)(layers(), batch)
    assert_close(out.loss, loss)
    assert_close(out.aux, aux)
    assert_close(step.gather(grads), expected)
    assert [mesh.size for mesh in step._engine.prepared(batch).layout.meshes] == [1, 1]
    state, _ = step(state, batch)
    assert_close(step.value_and_grad(state, rows(8))[0].loss, fn(step.gather(state.params), rows(8))[0])


def test_a_loss_is_evaluated_over_any_number_of_rows():
    step, state = train(loss_fn, layers(), rows(8), replicas=(2, 1))
    evaluate = step.evaluate(loss_fn)
    for count in (8, 6, 7):
        assert_close(evaluate(state, rows(count)), loss_fn(layers(), rows(count)))


def test_sequences_of_other_lengths():
    def fn(params, batch):
        h = net(params, batch["x"])  # [rows, length, width]
        return jnp.mean((h - batch["y"]) ** 2)

    def batch_of(count, length):
        x = jax.random.normal(jax.random.key(length), (count, length, WIDTH))
        return {"x": x, "y": x**2}

    step, state = train(fn, layers(), batch_of(4, 6), replicas=(2, 1))
    for shape in ((4, 9), (6, 3)):
        batch = batch_of(*shape)
        assert_close(step.value_and_grad(state, batch)[0].loss, fn(layers(), batch))


def test_many_shapes_are_warned_of_once(monkeypatch):
    monkeypatch.setattr(engines, "_SHAPES_BEFORE_WARNING", 2)
    step, state = train(loss_fn, layers(), rows(8))
    step.value_and_grad(state, rows(4))
    with pytest.warns(UserWarning, match="different shapes") as warned:
        step.value_and_grad(state, rows(2))
    assert len(warned) == 1
    assert "Pad batches" in str(warned[0].message)
    assert "test_engine.py" in warned[0].filename
    step.value_and_grad(state, rows(2))


# --- traffic ------------------------------------------------------------------------------------------


def threaded(params, batch, *, rng, model_state, frozen):
    keep = jax.random.bernoulli(rng, 0.9, batch["x"].shape)
    first = jnp.tanh(batch["x"] * keep @ params[0]["w"]) * frozen
    h = net(params[1:], first) + first
    new = {"n": model_state["n"] + 1}
    return LossOut(loss=jnp.mean((h @ params[0]["w"].T - batch["y"]) ** 2), aux={"h": h}, model_state=new)


THREADED = {"rng": jax.random.key(0), "model_state": {"n": jnp.int32(0)}, "frozen": jnp.ones(WIDTH)}


def a_step_watched(state, step, batch):
    with watch_host_traffic() as seen:
        new, _ = step(state, batch)
    return new, seen


@pytest.fixture(scope="module")
def busy():
    """Skips, ties, random numbers, model state, a frozen leaf, a global norm; uneven replicas."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    step, state = train(
        threaded, layers(6), rows(8), num_stages=3, replicas=(2, 1, 4), optimizer=optimizer, init=THREADED,
        donate=False,
    )  # fmt: skip
    step(state, rows(8))
    return step, state


def test_no_value_passes_through_the_host(busy):
    step, state = busy
    _, seen = a_step_watched(state, step, rows(8))
    assert seen.device_puts > 0
    assert seen.none, (seen.materialised, seen.reshards)


def test_the_instrument_sees_plain_device_puts(busy, monkeypatch):
    step, state = busy

    def plain(values, layouts, target):
        return [
            jax.device_put(x, sub_mesh_sharding(layout, target))
            for x, layout in zip(values, layouts, strict=True)
        ]

    monkeypatch.setattr(executor, "move", plain)
    _, seen = a_step_watched(state, step, rows(8))
    assert seen.reshards


# --- memory -------------------------------------------------------------------------------------------


def linear(params, batch):
    h = batch["x"]
    for layer in params:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    return jnp.mean((h - batch["y"]) ** 2)


def transposed(params, batch):
    h = batch["x"]
    for layer in params:
        h = jnp.tanh(h @ layer["w"].T)
    return jnp.mean((h - batch["y"]) ** 2)


def cast(params, batch):
    h = batch["x"].astype(jnp.bfloat16)
    for layer in params:
        h = jnp.tanh(h @ layer["w"].astype(jnp.bfloat16) + layer["b"].astype(jnp.bfloat16))
    return jnp.mean((h - batch["y"]) ** 2).astype(jnp.float32)


def normed(params, batch):
    h = batch["x"]
    for layer in params:
        w = layer["b"] * layer["w"] / jnp.linalg.norm(layer["w"], axis=0)
        h = jnp.tanh(h @ w.T)
    return jnp.mean((h - batch["y"]) ** 2)


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("fn", [linear, transposed, cast, normed])
def test_no_residual_is_a_weight(fn, remat):
    width = 24  # no other value has a weight's shape
    step, _ = train(fn, layers(4, width), rows(8, width), remat=remat, replicas=(2, 1))
    residuals = [r.shape for code in step._placement.home.table.code for r in code.diff.residuals]
    assert not [shape for shape in residuals if shape in ((width, width), (width * width,))]
    given_out = [v for code in step._placement.home.table.code for v in code.shape.part.outputs]
    assert all(v >= len(step._placement.home.graph.program.inputs) for v in given_out)


def test_values_are_freed_at_their_last_use():
    step, state = train(loss_fn, layers(), rows(8), num_stages=3, num_microbatches=4, schedule="1f1b")
    step.value_and_grad(state, rows(8))
    prepared = step._placement.home
    most = 0
    defined = set(step._engine._given_keys(prepared))
    last = {
        key: i
        for i, op in enumerate(prepared.ops)
        if op.kind is not OpKind.FREE
        for key in (*op.inputs, *op.outputs)
    }
    for position, op in enumerate(prepared.ops):
        gone = op.inputs if op.kind is OpKind.FREE else op.donates
        defined -= set(gone)
        defined |= set(op.outputs)
        overdue = [
            k for k in defined if last.get(k, 10**9) < position - 1 and k not in prepared.lowered.wanted
        ]
        assert not overdue, overdue
        most = max(most, sum(key[0] == "res" for key in defined))
    in_flight = sum(len(code.diff.residuals) * (3 - s) for s, code in enumerate(prepared.table.code))
    assert 0 < most <= in_flight


def test_live_arrays_follow_the_list_of_operations():
    step, state = train(loss_fn, layers(3), rows(8), num_microbatches=2)
    batch = rows(8)
    step.value_and_grad(state, batch)
    engine, prepared = step._engine, step._placement.home
    others = ("param", "part_weight", "step_key", "even", "valid")  # the state's, or kept for the next step
    alive = {key for key in engine._given_keys(prepared) if key[0] not in others}
    expected, counts = [], []
    for op in prepared.ops:
        expected.append(len(alive))
        alive -= set(op.inputs) if op.kind is OpKind.FREE else set(op.donates)
        alive |= set(op.outputs)

    def watch(op):
        counts.append(len(jax.live_arrays()))

    gc.collect()
    engine.run(prepared, dict(enumerate(jax.tree.leaves(state.params))), batch, watch=watch)
    surplus = np.array(counts) - np.array(expected)
    assert surplus.min() == surplus.max(), surplus


def test_a_step_leaves_nothing_behind():
    step, state = train(loss_fn, layers(), rows(8))
    batch = rows(8)
    state, out = step(state, batch)
    state, out = step(state, batch)
    jax.block_until_ready(state)
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(3):
        state, out = step(state, batch)
    jax.block_until_ready((state, out))
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_parameters_lie_on_their_stages_only():
    step, state = train(loss_fn, layers(), rows(8), replicas=(2, 1), cuts=(2,), optimizer=optax.adam(1e-2))
    devices = [leaf.devices() for leaf in jax.tree.leaves(state.params)]
    assert {len(d) for d in devices} == {1, 2}
    for tree in (state.opt_state[0].mu, state.opt_state[0].nu):
        assert [leaf.devices() for leaf in jax.tree.leaves(tree)] == devices
    assert isinstance(step, rannc_jax.Step)
