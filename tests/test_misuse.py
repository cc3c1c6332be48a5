"""What people do by mistake, at the front door, and what they are told; and what must just work there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rannc_jax
from rannc_jax import MeshError, PlanError, RuntimeFailure, TraceError
from tests.door import assert_close

WEIGHTS = {name: jax.random.normal(jax.random.key(i), (4, 4)) for i, name in enumerate("ab")}


def batch_of(rows: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((rows, 4)).astype(np.float32) for _ in range(2))
    return {"x": x, "y": y, "w": np.arange(rows, dtype=np.float32) + 1}


BATCH = batch_of(12)


def error_of(params, batch):
    return jnp.sum((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2, -1)


def loss_fn(params, batch):
    return jnp.mean(error_of(params, batch))


def ratio_and_mean(params, batch):
    e = error_of(params, batch)
    return jnp.sum(e * batch["w"]) / jnp.sum(batch["w"]) + jnp.mean(e)


def trained(fn=loss_fn, optimizer=None, **settings):
    step = rannc_jax.auto_partition(fn, optimizer=optimizer or optax.sgd(0.1), **settings)
    return step, step.init(WEIGHTS, BATCH)


def test_a_mean_of_means_is_that_of_microbatches_and_not_of_replicas():
    expected = jax.value_and_grad(ratio_and_mean)(WEIGHTS, BATCH)
    step, state = trained(ratio_and_mean, num_stages=1, replicas=2, num_microbatches=1)
    out, grads = step.value_and_grad(state, BATCH)
    assert step.plan.loss == "mean_of_means"
    assert_close((out.loss, grads), expected)


def test_a_value_that_only_an_output_reads_elsewhere_gets_no_cotangent():
    def fn(params, batch):
        h = jnp.tanh(batch["x"] @ params["a"])
        z = jnp.tanh(h @ params["b"])
        aux = {"right": jnp.mean(z > 0), "sums": jnp.sum(h, -1), "z": z, "most": jnp.max(z)}
        return jnp.mean((z - batch["y"]) ** 2), aux

    expected = jax.value_and_grad(fn, has_aux=True)(WEIGHTS, BATCH)
    step, state = trained(fn, replicas=(1, 2, 1), num_microbatches=1)
    out, grads = step.value_and_grad(state, BATCH)
    assert_close((out.loss, grads), (expected[0][0], expected[1]))
    assert_close(out.aux["sums"], expected[0][1]["sums"])


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-2, mask={"a": True, "b": False}),
        optax.multi_transform({"x": optax.adam(1e-2), "y": optax.set_to_zero()}, {"a": "x", "b": "y"}),
    ],
    ids=["mask", "labels"],
)
def test_masks_and_labels_have_the_users_structure(optimizer):
    step, state = trained(optimizer=optimizer, donate=False)
    new, _ = step(state, BATCH)
    grads = jax.grad(loss_fn)(WEIGHTS, BATCH)
    updates, _ = optimizer.update(grads, optimizer.init(WEIGHTS), WEIGHTS)
    assert_close(step.gather(new.params), optax.apply_updates(WEIGHTS, updates))


def test_evaluations_with_and_without_a_key_do_not_share_programs():
    def noisy(params, batch, *, rng=None):
        out = batch["x"] @ params["a"]
        return out if rng is None else out + jax.random.normal(rng, out.shape)

    step, state = trained()
    evaluate = step.evaluate(noisy)
    plain = np.asarray(evaluate(state, BATCH))
    noise = np.asarray(evaluate(state, BATCH, rng=jax.random.key(1)))
    np.testing.assert_allclose(plain, BATCH["x"] @ np.asarray(WEIGHTS["a"]), rtol=1e-5, atol=1e-6)
    assert np.abs(noise - plain).max() > 0.1


def test_batches_of_kindred_dtypes_are_cast():
    step, state = trained(ratio_and_mean, donate=False)
    expected = float(step(state, BATCH)[1].loss)
    assert float(step(state, {**BATCH, "w": np.arange(12) + 1})[1].loss) == pytest.approx(expected)
    with pytest.raises(TraceError, match=r"batch\['w'\] has another dtype"):
        step(state, {**BATCH, "w": BATCH["w"].astype(np.complex64)})


def test_a_state_that_was_given_away_is_refused():
    step, state = trained()
    new, out = step(state, BATCH)
    with pytest.raises(RuntimeFailure, match="was given to an earlier step"):
        step(state, BATCH)
    with pytest.raises(TraceError, match="the first argument of a step is its state"):
        step(out, BATCH)
    step(new, BATCH)


def test_edited_states_are_checked():
    step, state = trained(donate=False)
    with pytest.raises(TraceError, match=r"state\.params has another structure"):
        step(state.replace(params={"a": WEIGHTS["a"]}), BATCH)
    with pytest.raises(TraceError, match=r"state\.params\['b'\] has another shape or dtype"):
        step(state.replace(params={**WEIGHTS, "b": WEIGHTS["b"][:2]}), BATCH)


def test_wrong_arguments_are_named():
    with pytest.raises(PlanError, match="is no optimizer"):
        rannc_jax.auto_partition(loss_fn, optimizer="adam")
    with pytest.raises(MeshError, match="is no mesh"):
        rannc_jax.auto_partition(loss_fn, optimizer=optax.sgd(0.1), mesh=3)
    with pytest.raises(TraceError, match="is no function"):
        rannc_jax.auto_partition(3, optimizer=optax.sgd(0.1))
    step = rannc_jax.auto_partition(loss_fn, optimizer=optax.sgd(0.1))
    with pytest.raises(TraceError, match="one batch, got 1 more"):
        step.init(WEIGHTS, BATCH, BATCH)
    with pytest.raises(TraceError, match="the batch has no rows"):
        step.init(WEIGHTS, batch_of(0))
    shapes = jax.eval_shape(lambda: WEIGHTS)
    with pytest.raises(TraceError, match="init needs arrays"):
        step.init(shapes, BATCH)


@pytest.mark.filterwarnings("ignore:a while loop has no known number of turns")
def test_a_gradient_through_a_loop_without_a_bound_is_refused_while_planning():
    def fn(params, batch):
        def turn(carry):
            return carry[0] + 1, jnp.tanh(carry[1] @ params["w"])

        return jnp.mean(jax.lax.while_loop(lambda carry: carry[0] < 3, turn, (0, batch["x"]))[1] ** 2)

    params, batch = {"w": jnp.eye(4)}, {"x": jnp.ones((8, 4))}
    with pytest.raises(TraceError, match=r"goes through a while_loop(.|\n)*test_misuse.py"):
        rannc_jax.make_plan(fn, params, batch, optimizer=optax.sgd(0.1))

    def stopped(params, batch):
        return jnp.mean((fn(jax.lax.stop_gradient(params), batch) - params["w"]) ** 2)

    rannc_jax.make_plan(stopped, params, batch, optimizer=optax.sgd(0.1))


def test_a_plan_is_checked_against_the_mesh_it_shall_run_on():
    plan = rannc_jax.make_plan(loss_fn, WEIGHTS, BATCH, optimizer=optax.sgd(0.1), num_stages=1, replicas=2)
    mesh = {"version": 1, "devices": [{"kind": "cpu", "count_per_host": 1}]}
    with pytest.raises(MeshError, match="the plan uses device 1, the mesh has 1"):
        rannc_jax.parallelize(loss_fn, plan, optimizer=optax.sgd(0.1), mesh=mesh)


def test_rows_that_do_not_lie_together_are_refused():
    def fn(params, batch):
        rows = (batch["x"] @ params["a"]).T.reshape(-1)  # [4, rows] merged, rows inside
        return loss_fn(params, batch), rows

    with pytest.raises(TraceError, match="the rows of aux do not lie together"):
        trained(fn, num_stages=1, replicas=2, num_microbatches=1)


@pytest.mark.torch
def test_torch_tensors_are_taken_as_they_are():
    import torch

    step, state = trained(donate=False)
    tensors = {name: torch.from_numpy(array) for name, array in BATCH.items()}
    assert float(step(state, tensors)[1].loss) == float(step(state, BATCH)[1].loss)
