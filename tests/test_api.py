"""The front door: what users may say, what they get to read when it cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import rannc_jax
from rannc_jax import MeshError, Plan, PlanError, Remat, TraceError
from tests.door import assert_close, check_gradients, layers, loss_fn, net, rows, train

SGD = optax.sgd(0.1)


def contrastive(params, batch):
    h = net(params, batch["x"])
    h = h / jnp.linalg.norm(h, axis=-1, keepdims=True)
    with jax.named_scope("in_batch_negatives"):
        scores = h @ h.T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)))


def plan_of(fn, params, batch, **settings):
    settings = {"optimizer": SGD, "num_stages": 2, "num_microbatches": 2, **settings}
    return rannc_jax.make_plan(fn, params, batch, **settings)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


# --- plans ------------------------------------------------------------------------------------------


def test_a_plan_needs_shapes_only_and_says_what_it_decided():
    plan = plan_of(loss_fn, shapes(layers()), shapes(rows()), replicas=(2, 1), schedule="1f1b")
    assert (plan.num_stages, plan.num_microbatches, plan.schedule) == (2, 2, "1f1b")
    assert [stage.num_replicas for stage in plan.stages] == [2, 1]
    assert "2" in str(plan)


def test_a_saved_plan_trains_to_the_same_numbers(tmp_path):
    params, batch = layers(), rows()
    step, state = train(loss_fn, params, batch, replicas=(2, 1), optimizer=optax.adam(1e-2))
    step.plan.save(tmp_path / "plan.json")
    loaded = rannc_jax.parallelize(loss_fn, Plan.load(tmp_path / "plan.json"), optimizer=optax.adam(1e-2))
    other = loaded.init(params, batch)
    assert loaded.plan == step.plan
    for _ in range(2):
        state, out = step(state, batch)
        other, again = loaded(other, batch)
        np.testing.assert_array_equal(out.loss, again.loss)
    assert_close(loaded.gather(other.params), step.gather(state.params), 0)


def test_a_plan_for_another_model_is_refused():
    plan = plan_of(loss_fn, layers(), rows())
    for params, batch, fn, match in (
        (layers(6), rows(), loss_fn, "made for another model"),
        (layers(4, 16), rows(8, 16), loss_fn, "made for another model"),
        (layers(), {**rows(), "more": jnp.zeros(8)}, loss_fn, "made for another model"),
        (layers(), rows(), lambda p, b: loss_fn(p[::-1], b), "belongs to another model"),
    ):
        step = rannc_jax.parallelize(fn, plan, optimizer=SGD)
        with pytest.raises(PlanError, match=match) as error:
            step.init(params, batch)
        assert "new plan" in str(error.value)


def test_a_plan_is_found_again_in_a_program_that_other_equations_make():
    def rewritten(params, batch):
        h = net(params, batch["x"])
        return jnp.mean(jnp.square(h - batch["y"]) * 1.0)

    plan = plan_of(loss_fn, layers(), rows())
    step = rannc_jax.parallelize(rewritten, plan, optimizer=SGD)
    with pytest.warns(UserWarning, match="the cuts were found again") as warned:
        state = step.init(layers(), rows())
    assert len(warned) == 1
    out, grads = step.value_and_grad(state, rows())
    loss, expected = jax.value_and_grad(loss_fn)(layers(), rows())
    assert_close(out.loss, loss)
    assert_close(step.gather(grads), expected)
    step.value_and_grad(state, rows(4))  # no second warning: warnings are errors here


def test_plan_and_optimizer_go_together():
    plan = plan_of(loss_fn, layers(), rows())
    with pytest.raises(PlanError, match="do not go together"):
        rannc_jax.parallelize(loss_fn, plan)
    with pytest.raises(PlanError, match="do not go together"):
        rannc_jax.parallelize(net, plan_of(net, layers(), rows()["x"], optimizer=None), optimizer=SGD)


def test_plans_for_inference_take_several_arguments():
    def apply(params, x, scale):
        return net(params, x) * scale

    plan = rannc_jax.make_plan(apply, layers(), (rows()["x"], jnp.float32(2)), num_stages=2)
    infer = rannc_jax.parallelize(apply, plan)
    state = infer.init(layers(), rows()["x"], jnp.float32(2))
    assert_close(infer(state, rows()["x"], jnp.float32(2)), apply(layers(), rows()["x"], 2))


def test_a_plan_for_more_devices_than_there_are_is_refused():
    cluster = local(16)
    plan = plan_of(loss_fn, layers(), rows(16), mesh=cluster, num_stages=2, replicas=8, num_microbatches=1)
    step = rannc_jax.parallelize(loss_fn, plan, optimizer=SGD)
    with pytest.raises(MeshError, match="16") as error:
        step.init(layers(), rows(16))
    assert "8" in str(error.value)


def local(count):
    return rannc_jax.load_cluster(
        {
            "version": 1,
            "devices": [{"kind": "cpu", "count_per_host": count}],
            "links": {"intra_host": {"gib_per_s": 4.0, "latency_us": 20.0}},
        }
    )


# --- meshes and settings ------------------------------------------------------------------------------


def test_meshes_come_in_four_forms(tmp_path):
    path = tmp_path / "mesh.toml"
    path.write_text(
        'version = 1\n[[devices]]\nkind = "cpu"\ncount_per_host = 8\n'
        "[links.intra_host]\ngib_per_s = 4.0\nlatency_us = 20.0\n[axes]\nstage = 2\n"
    )
    grid = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data"))
    for mesh, num_stages in ((path, 2), (str(path), 2), (grid, 2), (local(3), None), (None, None)):
        step = rannc_jax.auto_partition(loss_fn, optimizer=SGD, mesh=mesh)
        state = step.init(layers(), rows())
        assert num_stages in (None, step.plan.num_stages)
        _, out = step(state, rows())
        assert_close(out.loss, loss_fn(layers(), rows()))
    assert [s.num_replicas for s in train(loss_fn, layers(), rows(), mesh=grid)[0].plan.stages] == [2, 2]


def test_devices_of_a_mesh_are_those_that_are_used():
    mesh = Mesh(np.array(jax.devices()[4:6]), ("lent",))
    _, state = train(loss_fn, layers(), rows(), mesh=mesh)
    used = {d for leaf in jax.tree.leaves(state.params) for d in leaf.devices()}
    assert used == set(jax.devices()[4:6])


def test_meshes_with_other_axes_are_refused():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("stage", "model"))
    with pytest.raises(MeshError, match="axes that the planner does not use: model"):
        rannc_jax.auto_partition(loss_fn, optimizer=SGD, mesh=mesh)


def test_unknown_settings_are_named_with_those_there_are():
    with pytest.raises(PlanError, match="unknown settings: num_stage") as error:
        rannc_jax.auto_partition(loss_fn, optimizer=SGD, num_stage=2)
    assert "num_stages" in str(error.value)
    for maker in (
        lambda: rannc_jax.make_plan(loss_fn, layers(), rows(), optimizer=SGD, nope=1),
        lambda: rannc_jax.auto_partition(loss_fn, optimizer=SGD, nope=1),
        lambda: rannc_jax.parallelize(loss_fn, plan_of(loss_fn, layers(), rows()), optimizer=SGD, nope=1),
    ):
        with pytest.raises(PlanError, match="unknown settings: nope"):
            maker()


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16"}, {"batch_stats": "replica"}, {"verify": True}, {"loss_scale": 2.0}]
)
def test_what_is_not_built_says_so(settings):
    with pytest.raises(PlanError, match="is not built yet"):
        rannc_jax.auto_partition(loss_fn, optimizer=SGD, **settings)


def test_constraints_hold():
    step, _ = train(
        loss_fn, layers(), rows(), num_stages=3, num_microbatches=4, replicas=(1, 2, 2),
        remat=(Remat.SAVE_ALL, Remat.RECOMPUTE, Remat.SAVE_MATMULS), schedule="gpipe",
    )  # fmt: skip
    plan = step.plan
    assert (plan.num_stages, plan.num_microbatches, plan.schedule) == (3, 4, "gpipe")
    assert [s.num_replicas for s in plan.stages] == [1, 2, 2]
    assert [s.remat for s in plan.stages] == [Remat.SAVE_ALL, Remat.RECOMPUTE, Remat.SAVE_MATMULS]


def test_options_of_running_have_no_place_in_a_plan_and_constraints_none_behind_one():
    plan = plan_of(loss_fn, layers(), rows())
    with pytest.raises(PlanError, match="unknown settings: num_stages") as error:
        rannc_jax.parallelize(loss_fn, plan, optimizer=SGD, num_stages=3)
    assert "constraints belong to make_plan" in str(error.value)
    with pytest.raises(PlanError, match="unknown settings: donate"):
        rannc_jax.make_plan(loss_fn, layers(), rows(), optimizer=SGD, donate=False)


def test_a_model_may_bring_everything_along():
    class Model:
        loss_fn = staticmethod(loss_fn)
        params, frozen, model_state, batch, batch_dims = layers(), None, None, rows(), None

    step = rannc_jax.auto_partition(Model(), optimizer=SGD, num_stages=2)
    state = step.init()
    _, out = step(state, rows())
    assert_close(out.loss, loss_fn(layers(), rows()))
    assert rannc_jax.make_plan(Model(), optimizer=SGD, num_stages=2).num_stages == 2


def test_init_needs_params_and_a_batch():
    with pytest.raises(TraceError, match="init needs params and a batch"):
        rannc_jax.auto_partition(loss_fn, optimizer=SGD).init(layers())


# --- what these print ---------------------------------------------------------------------------------


def test_a_memory_limit_that_nothing_fits():
    with pytest.raises(PlanError, match="no plan fits") as error:
        plan_of(loss_fn, layers(4, 64), rows(64, 64), memory_limit_bytes=10_000)
    assert "smallest peak" in str(error.value)
    assert "try:" in str(error.value)


def test_ten_rows_in_four_microbatches_where_rows_are_independent():
    step, _ = check_gradients(loss_fn, layers(), rows(10), num_microbatches=4)
    note = "num_microbatches=4 does not divide 10 rows: 2 microbatches of 5"
    assert any(note in said for said in step.plan.notes)
    assert note in str(step.plan)


def test_ten_rows_in_four_microbatches_where_rows_are_coupled():
    with pytest.raises(TraceError, match="10 rows") as error:
        plan_of(contrastive, layers(), rows(10), num_microbatches=4, allow_coupled=True)
    assert "num_microbatches=2" in str(error.value)


def test_in_batch_negatives_are_not_split():
    with pytest.raises(TraceError, match="cannot be split into 4 microbatches") as error:
        plan_of(contrastive, layers(), rows(), num_microbatches=4)
    for part in ("in_batch_negatives", "test_api.py", "allow_coupled=True", "separable"):
        assert part in str(error.value)
    step, _ = check_gradients(contrastive, layers(), rows(), num_microbatches="auto", replicas=(2, 1))
    assert step.plan.num_microbatches == 1
    assert any("the batch stays whole" in note for note in step.plan.notes)


def test_coupled_rows_may_be_split_if_one_says_so():
    step, state = train(contrastive, layers(), rows(), allow_coupled=True)
    out, grads = step.value_and_grad(state, rows())

    def halves(params):
        parts = [jax.tree.map(lambda x, i=i: x[i : i + 4], rows()) for i in (0, 4)]
        return sum(contrastive(params, part) for part in parts) / 2

    loss, expected = jax.value_and_grad(halves)(layers())
    assert_close(out.loss, loss)
    assert_close(step.gather(grads), expected)
    assert any("allow_coupled" in note for note in step.plan.notes)


def test_leaves_that_disagree():
    with pytest.raises(TraceError, match="disagree about the number of rows") as error:
        plan_of(loss_fn, layers(), {"x": jnp.zeros((8, 8)), "y": jnp.zeros((6, 8))})
    assert "batch['y']: (6, 8), dim 0 has 6 rows" in str(error.value)
    step, state = train(loss_fn, layers(), rows())
    with pytest.raises(TraceError, match="disagree about the number of rows"):
        step(state, {"x": jnp.zeros((8, 8)), "y": jnp.zeros((6, 8))})


def test_batch_dims_say_where_rows_lie():
    def fn(params, batch):
        return loss_fn(params, {"x": batch["x"].T + batch["table"][0], "y": batch["y"]})

    batch = {**rows(), "table": jnp.ones((5, 8))}
    batch["x"] = batch["x"].T
    check_gradients(fn, layers(), batch, batch_dims={"x": 1, "y": 0, "table": None}, replicas=(2, 1))
