"""The contract of a step: what a loss function may take and return, and what comes back."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rannc_jax
from rannc_jax import LossOut, TraceError, Weighted
from tests.door import WIDTH, assert_close, check_gradients, layers, loss_fn, net, rows, train


def with_aux(params, batch):
    h = net(params, batch["x"])
    return jnp.mean((h - batch["y"]) ** 2), {"h": h}


def weighted(params, batch):
    errors = jnp.sum((net(params, batch["x"]) - batch["y"]) ** 2, -1)
    weight = jnp.sum(batch["mask"])
    return Weighted(jnp.sum(errors * batch["mask"]) / weight, weight)


def as_loss_out(params, batch):
    loss, aux = with_aux(params, batch)
    return LossOut(loss=loss, aux=aux)


def as_another_packages_type(params, batch):
    loss, aux = with_aux(params, batch)
    return types.SimpleNamespace(loss=loss, aux=aux, model_state=None)


# --- what the function returns -------------------------------------------------------------------


@pytest.mark.parametrize("fn", [with_aux, as_loss_out, as_another_packages_type])
def test_a_loss_may_come_with_outputs(fn):
    params, batch = layers(), rows()
    step, state = train(fn, params, batch)
    (loss, aux), expected = jax.value_and_grad(with_aux, has_aux=True)(params, batch)
    out, grads = step.value_and_grad(state, batch)
    assert isinstance(out, LossOut)
    assert_close(out.loss, loss)
    assert_close(step.gather(grads), expected)
    assert_close(out.aux, aux)
    _, out = step(state, batch)
    assert_close(out.loss, loss)


def test_a_weight_makes_uneven_microbatches_combine_into_the_mean_of_the_whole_batch():
    params, batch = layers(), {**rows(), "mask": jnp.array([1, 1, 1, 1, 1, 0, 0, 0], jnp.float32)}
    step, state = train(weighted, params, batch)
    out, grads = step.value_and_grad(state, batch)
    loss, expected = jax.value_and_grad(lambda p: weighted(p, batch).loss)(params)
    assert_close(out.loss, loss)
    assert_close(step.gather(grads), expected)
    assert float(out.weight) == 5


@pytest.mark.parametrize("replicas", [1, (2, 1)])
def test_a_microbatch_of_weight_zero_leaves_no_trace(replicas):
    params = layers()
    half = rows(4)
    batch = {**rows(8), "mask": jnp.array([1, 1, 0, 1, 0, 0, 0, 0], jnp.float32)}
    batch["x"], batch["y"] = (batch[k].at[:4].set(half[k]) for k in "xy")
    step, state = train(weighted, params, batch, replicas=replicas)
    out, grads = step.value_and_grad(state, batch)
    alone = {**half, "mask": batch["mask"][:4]}
    loss, expected = jax.value_and_grad(lambda p: weighted(p, alone).loss)(params)
    assert_close(out.loss, loss)
    assert_close(step.gather(grads), expected)


def test_a_masked_mean_is_recognised_and_weighted_without_help():
    def fn(params, batch):
        errors = jnp.sum((net(params, batch["x"]) - batch["y"]) ** 2, -1)
        return jnp.sum(errors * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1)

    batch = {**rows(), "mask": jnp.array([1, 1, 1, 1, 0, 0, 0, 0], jnp.float32)}
    step, _ = check_gradients(fn, layers(), batch)
    assert step.plan.loss == "weighted"


def test_a_sum_stays_a_sum():
    step, _ = check_gradients(
        lambda p, b: jnp.sum((net(p, b["x"]) - b["y"]) ** 2), layers(), rows(), replicas=(2, 1)
    )
    assert step.plan.loss == "sum"


@pytest.mark.parametrize("replicas", [1, (1, 2)])
def test_a_regularised_loss_counts_its_penalty_once(replicas):
    def fn(params, batch):
        return loss_fn(params, batch) + 0.1 * sum(jnp.sum(layer["w"] ** 2) for layer in params)

    check_gradients(fn, layers(), rows(), replicas=replicas)


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(TraceError, match=r"not a floating scalar") as error:
        train(lambda p, b: net(p, b["x"]), layers(), rows())
    assert "got float32[8, 8], expected float[]" in str(error.value)
    assert "return loss.mean()" in str(error.value)


# --- outputs besides the loss ---------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, (2, 1), (1, 4)])
def test_outputs_are_concatenated_averaged_or_stacked(replicas):
    def fn(params, batch):
        h = net(params, batch["x"])
        aux = {
            "rows": h,
            "columns": h.T,
            "labels": jnp.argmax(h, -1),
            "right": h > 0,
            "mean": jnp.mean(h),
            "norm": jnp.sum(params[0]["w"] ** 2),
            "vector": jnp.mean(h, 0),
            "count": jnp.int32(3),
            "flag": jnp.bool_(True),
            "python": (1, 2.5, True),
            "nothing": None,
            "empty": {},
        }
        return jnp.mean((h - batch["y"]) ** 2), aux

    params, batch = layers(), rows()
    step, state = train(fn, params, batch, replicas=replicas)
    aux = step.gather(step.value_and_grad(state, batch)[0].aux)
    expected = fn(params, batch)[1]
    for name in ("rows", "columns", "labels", "right", "mean", "norm", "vector"):
        assert_close(aux[name], expected[name])
    np.testing.assert_array_equal(aux["count"], [3, 3])
    np.testing.assert_array_equal(aux["flag"], [True, True])
    np.testing.assert_array_equal(aux["python"][0], [1, 1])
    assert float(aux["python"][1]) == 2.5
    np.testing.assert_array_equal(aux["python"][2], [True, True])
    assert aux["nothing"] is None
    assert aux["empty"] == {}


def test_batch_free_floats_are_averaged_by_the_weights_of_the_loss():
    def fn(params, batch):
        out = weighted(params, batch)
        return LossOut(loss=out.loss, weight=out.weight, aux={"again": out.loss, "weight": out.weight})

    params, batch = layers(), {**rows(), "mask": jnp.array([1, 1, 1, 1, 1, 0, 0, 0], jnp.float32)}
    step, state = train(fn, params, batch)
    out, _ = step.value_and_grad(state, batch)
    assert_close(out.aux["again"], weighted(params, batch).loss)
    assert_close(out.aux["weight"], jnp.float32((4 * 4 + 1 * 1) / 5))


# --- what the function takes ----------------------------------------------------------------------


def takes_everything(params, batch, *, rng, model_state, frozen):
    keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    h = net(params, batch["x"] * frozen["scale"] * keep) - model_state["shift"]
    new = {"shift": model_state["shift"] + jnp.mean(h), "count": model_state["count"] + 1}
    return LossOut(loss=jnp.mean((h - batch["y"]) ** 2), aux=keep, model_state=new)


EVERYTHING = {
    "rng": jax.random.key(7),
    "model_state": {"shift": jnp.float32(0.5), "count": jnp.int32(0)},
    "frozen": {"scale": jnp.full((WIDTH,), 2.0)},
}


def test_keywords_are_read_from_the_signature_and_threaded_through():
    params, batch = layers(), rows()
    step, state = train(takes_everything, params, batch, init=EVERYTHING)
    for _ in range(2):
        expected, reference = step.reference(state, batch)
        state, out = step(state, batch)
        assert_close(out.loss, reference.loss)
        np.testing.assert_array_equal(out.aux, reference.aux)
        assert_close(step.gather(state.params), step.gather(expected.params))
        assert_close(step.gather(state.model_state), step.gather(expected.model_state))
    assert int(state.step) == 2
    assert int(state.model_state["count"]) == 4
    assert_close(step.gather(state.frozen), EVERYTHING["frozen"])


def test_keys_are_those_of_the_contract():
    params, batch = layers(), rows()
    step, state = train(takes_everything, params, batch, init=EVERYTHING)
    step_key = jax.random.fold_in(jax.random.fold_in(EVERYTHING["rng"], 1), 0)
    halves = [jax.random.bernoulli(jax.random.fold_in(step_key, i), 0.5, (4, WIDTH)) for i in range(2)]
    out, _ = step.value_and_grad(state, batch)
    np.testing.assert_array_equal(out.aux, np.concatenate(halves))


def test_a_key_given_to_a_step_replaces_the_steps_own_and_is_not_counted():
    params, batch = layers(), rows()
    step, state = train(takes_everything, params, batch, init=EVERYTHING, donate=False)
    key = jax.random.key(99)
    one, first = step(state, batch, rng=key)
    halves = [jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (4, WIDTH)) for i in range(2)]
    np.testing.assert_array_equal(first.aux, np.concatenate(halves))
    assert int(one.step) == 0
    _, second = step(one, batch, rng=key)
    np.testing.assert_array_equal(second.aux, first.aux)


def test_raw_keys_do_as_well_as_typed_ones():
    params, batch = layers(), rows()
    given = {**EVERYTHING, "rng": jax.random.PRNGKey(7)}
    step, state = train(takes_everything, params, batch, init=given)
    typed, typed_state = train(takes_everything, params, batch, init=EVERYTHING)
    out, _ = step.value_and_grad(state, batch)
    expected, _ = typed.value_and_grad(typed_state, batch)
    np.testing.assert_array_equal(out.aux, expected.aux)
    assert_close(out.loss, expected.loss)


def test_takes_says_what_the_signature_does_not():
    def fn(params, batch, **kwargs):
        return loss_fn(params, {**batch, "x": batch["x"] * kwargs["frozen"]})

    params, batch, frozen = layers(), rows(), jnp.float32(0.5)
    step, state = train(fn, params, batch, takes=("frozen",), init={"frozen": frozen})
    out, _ = step.value_and_grad(state, batch)
    assert_close(out.loss, fn(params, batch, frozen=frozen))
    with pytest.raises(TraceError, match=r"takes=.*weights"):
        train(fn, params, batch, takes=("weights",))


@pytest.mark.parametrize("name", ["rng", "model_state", "frozen"])
def test_what_is_taken_and_not_given_is_named(name):
    given = {k: v for k, v in EVERYTHING.items() if k != name}
    with pytest.raises(TraceError, match=f"takes {name}, but none was given"):
        train(takes_everything, layers(), rows(), init=given)


def test_model_state_that_is_taken_must_be_returned():
    def fn(params, batch, *, model_state):
        return loss_fn(params, batch) + model_state

    with pytest.raises(TraceError, match="takes model_state but returns none"):
        train(fn, layers(), rows(), init={"model_state": jnp.float32(0)})


def test_model_state_keeps_its_shapes_and_dtypes():
    def fn(params, batch, *, model_state):
        return LossOut(loss=loss_fn(params, batch), model_state=model_state[None])

    with pytest.raises(TraceError, match="differs from the one it takes"):
        train(fn, layers(), rows(), init={"model_state": jnp.float32(0)})


def test_model_state_that_nothing_writes_stays_as_it_is():
    def fn(params, batch, *, model_state):
        h = net(params, batch["x"] * model_state["scale"])
        return LossOut(loss=jnp.mean((h - batch["y"]) ** 2), model_state=model_state)

    model_state = {"scale": jnp.full((WIDTH,), 0.5), "unread": jnp.arange(3)}
    step, state = train(fn, layers(), rows(), init={"model_state": model_state})
    new, _ = step(state, rows())
    assert_close(step.gather(new.model_state), step.gather(model_state))


# --- gradients to the batch -------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, (2, 1)])
def test_gradients_to_batch_leaves(replicas):
    def fn(params, batch):
        h = net(params, batch["x"] * batch["scale"])
        return jnp.mean((h - batch["y"]) ** 2)

    params, batch = layers(), {**rows(), "scale": jnp.float32(1.5)}
    step, state = train(fn, params, batch, replicas=replicas)
    out, (grads, found) = step.value_and_grad(state, batch, wrt_batch=("x", "y", "scale"))
    loss, (expected, to_batch) = jax.value_and_grad(fn, argnums=(0, 1))(params, batch)
    assert_close(out.loss, loss)
    assert_close(step.gather(grads), expected)
    assert_close(step.gather(found), to_batch)


def test_wrt_batch_names_leaves_that_are_there_and_floating():
    params, batch = layers(), {**rows(), "ids": np.zeros((8,), np.int32)}
    step, state = train(loss_fn, params, batch)
    with pytest.raises(TraceError, match=r"'z', which is no batch leaf") as error:
        step.value_and_grad(state, batch, wrt_batch=("z",))
    assert "['x']" in str(error.value)
    with pytest.raises(TraceError, match="which has no gradient"):
        step.value_and_grad(state, batch, wrt_batch=("ids",))


def test_own_updates_replace_the_parameters_of_the_state():
    params, batch = layers(), rows()
    step, state = train(loss_fn, params, batch, optimizer=optax.identity())
    _, grads = step.value_and_grad(state, batch)
    new = state.replace(params=jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads))
    plain = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params, batch))
    assert_close(step.gather(new.params), step.gather(plain))
    assert_close(step.value_and_grad(new, batch)[0].loss, loss_fn(plain, batch))


# --- the state ------------------------------------------------------------------------------------


def test_an_update_of_its_own_takes_gradients_that_were_added_up_and_scaled():
    params, batches = layers(), [rows(seed=k) for k in range(2)]
    step, state = train(loss_fn, params, batches[0])
    grads = [step.value_and_grad(state, batch)[1] for batch in batches]
    new = step.update(state, jax.tree.map(lambda a, b: (a + b) / 2, *grads))
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *batches)
    whole, state = train(loss_fn, params, both)
    expected, _ = whole(state, both)
    assert_close(step.gather(new.params), whole.gather(expected.params))
    with pytest.raises(TraceError, match="grads has another structure"):
        step.update(new, {"w": 1.0})


def test_gradients_of_another_loss_are_cut_by_where_parameters_live():
    def product(params, batch):
        out = net(params, batch["in"]["x"])
        return LossOut(loss=jnp.sum(out * batch["cotangent"]), aux=out)

    params, batch = layers(), rows()
    step, state = train(loss_fn, params, batch)
    other = {"in": {"x": batch["x"]}, "cotangent": batch["y"]}
    out, (grads, inputs) = step.differentiate(product)(state, other, wrt_batch=["['in']['x']"])

    def of_inputs(params, x):
        return product(params, {**other, "in": {"x": x}}).loss

    loss, expected = jax.value_and_grad(of_inputs, argnums=(0, 1))(params, batch["x"])
    assert_close(out.loss, loss)
    assert_close(out.aux, net(params, batch["x"]))
    assert_close((step.gather(grads), inputs["['in']['x']"]), expected)


def test_steps_train_as_one_device_does():
    params, optimizer = layers(), optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    step, state = train(loss_fn, params, rows(), optimizer=optimizer, replicas=(2, 1))
    opt_state = optimizer.init(params)
    for seed in range(4):
        batch = rows(seed=seed)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, out = step(state, batch)
        assert_close(out.loss, loss)
    assert_close(step.gather(state.params), step.gather(params), 1e-4)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(opt_state)


def test_initialising_by_a_function_gives_its_numbers():
    key, batch = jax.random.key(3), rows()

    def make(key):
        return jax.tree.map(lambda p: p + jax.random.normal(key, p.shape), layers())

    step = rannc_jax.auto_partition(loss_fn, optimizer=optax.sgd(0.1), num_stages=2)
    state = step.init(make, batch, rng=key)
    assert_close(step.gather(state.params), step.gather(make(jax.random.fold_in(key, 0))))


def test_initialising_by_a_function_needs_a_key():
    step = rannc_jax.auto_partition(loss_fn, optimizer=optax.sgd(0.1), num_stages=2)
    with pytest.raises(TraceError, match="rng="):
        step.init(lambda key: layers(), rows())


def test_initialising_twice_gives_two_states_that_do_not_share():
    params, batch = layers(), rows()
    step, first = train(loss_fn, params, batch)
    second = step.init(params, batch)
    first, one = step(first, batch)
    second, two = step(second, batch)
    assert_close(one.loss, two.loss)
    assert_close(step.gather(first.params), step.gather(second.params))
    assert_close(step.gather(params), step.gather(layers()))  # the user's arrays are still his


def test_shapes_of_a_batch_are_enough_to_initialise():
    batch = rows()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    step, state = train(loss_fn, layers(), shapes)
    assert_close(step(state, batch)[1].loss, loss_fn(layers(), batch))


def test_donated_states_are_gone_and_others_stay():
    batch = rows()
    step, state = train(loss_fn, layers(), batch, donate=False)
    new, _ = step(state, batch)
    again, _ = step(state, batch)
    assert_close(step.gather(new.params), step.gather(again.params))
    step, state = train(loss_fn, layers(), batch)
    step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_a_number_that_is_not_finite_stops_the_update_and_leaves_the_state():
    batch = rows()
    step, state = train(loss_fn, layers(), batch, check_finite=True)
    bad = {**batch, "x": batch["x"].at[0, 0].set(jnp.nan)}
    with pytest.raises(rannc_jax.RuntimeFailure, match="not finite: the loss"):
        step(state, bad)
    assert_close(step.gather(state.params), step.gather(layers()))
    _, out = step(state, batch)
    assert_close(out.loss, loss_fn(layers(), batch))


def test_an_exception_leaves_the_state_intact():
    batch = rows()
    step, state = train(loss_fn, layers(), batch)
    with pytest.raises(TraceError, match="another structure"):
        step(state, {"x": batch["x"]})
    _, out = step(state, batch)
    assert_close(out.loss, loss_fn(layers(), batch))


def test_a_state_belongs_to_a_step_that_was_initialised():
    _, state = train(loss_fn, layers(), rows())
    fresh = rannc_jax.auto_partition(loss_fn, optimizer=optax.sgd(0.1))
    with pytest.raises(rannc_jax.PlanError, match=r"no state yet"):
        fresh(state, rows())
    with pytest.raises(rannc_jax.PlanError, match="no plan yet"):
        fresh.plan


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.vmap(f, in_axes=(None, 0))])
def test_a_step_under_a_transformation_names_the_reference(wrap):
    step, state = train(loss_fn, layers(), rows())
    with pytest.raises(TraceError, match="cannot be traced by jit, grad or vmap") as error:
        wrap(step)(state, rows())
    assert "step.reference" in str(error.value)


def test_arrays_of_the_host_may_replace_those_of_a_state():
    batch, optimizer = rows(), optax.adam(1e-2)
    step, state = train(loss_fn, layers(), batch, optimizer=optimizer, replicas=(2, 1), donate=False)
    saved = step.gather(state)
    restored = state.replace(params=saved.params, opt_state=saved.opt_state)
    new, out = step(restored, batch)
    expected, same = step(state, batch)
    assert_close(out.loss, same.loss)
    assert_close(step.gather(new.params), step.gather(expected.params), 0)
    assert_close(step.evaluate(loss_fn)(restored, batch), loss_fn(layers(), batch))


# --- evaluation -----------------------------------------------------------------------------------


def test_another_function_of_the_same_parameters_is_cut_by_where_they_live():
    params, batch = layers(), rows()
    step, state = train(loss_fn, params, batch, replicas=(2, 1))
    evaluate = step.evaluate(
        lambda p, x: {"h": net(p, x), "first": net(p[:1], x), "mean": jnp.mean(net(p, x))}
    )
    out = evaluate(state, batch["x"])
    assert_close(out["h"], net(params, batch["x"]))
    assert_close(out["first"], net(params[:1], batch["x"]))
    assert_close(out["mean"], jnp.mean(net(params, batch["x"])))
    state, _ = step(state, batch)
    again = evaluate(state, batch["x"][:4])
    assert_close(again["h"], net(step.gather(state.params), batch["x"][:4]))


def test_evaluation_takes_keywords_and_a_loss_may_be_evaluated():
    def fn(params, batch, *, model_state, frozen):
        h = net(params, batch["x"] * frozen["scale"]) - model_state["shift"]
        return {"loss": jnp.mean((h - batch["y"]) ** 2), "h": h}

    params, batch = layers(), rows()
    step, state = train(takes_everything, params, batch, init=EVERYTHING)
    out = step.evaluate(fn)(state, batch)
    kept = {k: v for k, v in EVERYTHING.items() if k != "rng"}
    assert_close(out, jax.tree.map(jnp.asarray, fn(params, batch, **kept)))


def test_evaluation_draws_with_the_key_it_is_given():
    def fn(params, batch, *, rng):
        return net(params, batch["x"] * jax.random.bernoulli(rng, 0.5, batch["x"].shape))

    params, batch = layers(), rows()
    step, state = train(takes_everything, params, batch, init=EVERYTHING, num_microbatches=1)
    key = jax.random.key(5)
    out = step.evaluate(fn)(state, batch, rng=key)
    assert_close(out, fn(params, batch, rng=jax.random.fold_in(key, 0)))


def test_two_evaluations_do_not_mix_and_batch_dims_are_their_own():
    params, batch = layers(), rows()
    step, state = train(loss_fn, params, batch, batch_dims={"x": 0, "y": 0})
    one, other = step.evaluate(lambda p, x: net(p, x)), step.evaluate(lambda p, x: net(p[:2], x))
    flipped = step.evaluate(lambda p, x: net(p, x.T), batch_dims=1)
    assert_close(one(state, batch["x"]), net(params, batch["x"]))
    assert_close(other(state, batch["x"]), net(params[:2], batch["x"]))
    assert_close(flipped(state, batch["x"][:4].T), net(params, batch["x"][:4]))


def test_evaluation_of_a_function_with_other_parameters_is_refused():
    step, state = train(loss_fn, layers(), rows())
    with pytest.raises((TraceError, TypeError, KeyError)):
        step.evaluate(lambda p, b: b["x"] @ p["other"])(state, rows())


# --- without an optimizer ---------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, (2, 1)])
def test_inference_takes_positional_arguments_and_any_outputs(replicas):
    def apply(params, x, scale, ids):
        h = net(params, x) * scale
        return {"h": h, "ids": ids + 1, "mean": jnp.mean(h), "table": params[0]["b"] * 2, "none": None}

    params, x = layers(), rows()["x"]
    infer = rannc_jax.auto_partition(apply, num_stages=2, num_microbatches=2, replicas=replicas)
    arguments = (x, jnp.float32(2), np.arange(8))
    state = infer.init(params, *arguments)
    assert state.opt_state is None
    out = infer(state, *arguments)
    expected = apply(params, *map(jnp.asarray, arguments))
    assert_close(out, jax.tree.map(jnp.asarray, expected))
    with pytest.raises(TraceError, match="no loss"):
        infer.value_and_grad(state, x)


def test_inference_with_a_key():
    def apply(params, x, *, rng):
        return net(params, x * jax.random.bernoulli(rng, 0.5, x.shape))

    params, x = layers(), rows()["x"]
    infer = rannc_jax.auto_partition(apply, num_stages=2, num_microbatches=1)
    state = infer.init(params, x, rng=jax.random.key(0))
    out: Any = infer(state, x, rng=jax.random.key(5))
    assert_close(out, apply(params, x, rng=jax.random.fold_in(jax.random.key(5), 0)))


def test_the_reference_may_be_jitted_on_a_gathered_state():
    step, state = train(loss_fn, layers(), rows(), num_stages=2, num_microbatches=2, donate=False)
    plain, out = step.reference(state, rows())
    jitted, same = jax.jit(step.reference)(step.gather(state), rows())
    assert_close((jitted.params, same.loss), (plain.params, out.loss))
