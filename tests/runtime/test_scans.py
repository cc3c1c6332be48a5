"""Networks with scanned layers in stages: one device's numbers, a stage's share, the user's trees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rannc_jax
from rannc_jax import LossOut
from rannc_jax.ir.leaves import Slicing
from rannc_jax.runtime.stacked import StackedArray
from tests import scan_networks as networks
from tests.parity.measure import compare
from tests.parity.oracle import Outcome
from tests.parity.play import CLUSTER, NUM_STEPS, optimizer_of, run
from tests.scan_networks import layer, normal

BATCH = networks.batch()


def start(fn, params, num_stages, optimizer, batch=BATCH, **more):
    step = rannc_jax.auto_partition(
        fn,
        optimizer=optimizer,
        mesh=CLUSTER,
        num_stages=num_stages,
        num_microbatches=2,
        replicas=(1,) * num_stages,
        **{k: v for k, v in more.items() if k in ("cuts", "donate")},
    )
    given = {k: v for k, v in more.items() if k in ("rng", "frozen", "model_state")}
    return step, step.init(params, batch, **given)


def one_device(fn, params, optimizer, batch=BATCH) -> Outcome:
    value_and_grad, state, losses = jax.jit(jax.value_and_grad(fn)), optimizer.init(params), []
    loss, grads = value_and_grad(params, batch)
    for _ in range(NUM_STEPS):
        each_loss, each_grads = value_and_grad(params, batch)
        updates, state = jax.jit(optimizer.update)(each_grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(each_loss)
    found = {"loss": loss, "grads": grads, "losses": tuple(losses), "params": params}
    host = jax.tree.map(np.asarray, found)
    return Outcome(**host, aux=None, first_state=None, model_state=None)


def bytes_by_device(tree) -> dict[int, int]:
    found: dict[int, int] = {}
    for leaf in jax.tree.leaves(tree):
        for part in leaf.parts if isinstance(leaf, StackedArray) else [leaf]:
            for shard in part.addressable_shards:
                found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    return found


NETWORKS = {
    "plain": lambda: (networks.plain(jax.checkpoint(layer)), networks.params()),
    "reversed": lambda: (networks.plain(reverse=True, unroll=2), networks.params()),
    "linen": lambda: networks.linen(networks.Scanned(remat=True)),
    "linen along 1": lambda: networks.linen(networks.Scanned(axis=1)),
    "nnx": networks.nnx_network,
    "list": lambda: (networks.stacked_inside, networks.list_params()),
}
CASES = [
    ("plain", 2, "sgd"),
    ("linen", 3, "adam"),
    ("nnx", 3, "adam"),
    pytest.param("list", 2, "adam", marks=pytest.mark.slow),
    pytest.param("plain", 3, "adam", marks=pytest.mark.slow),
    pytest.param("reversed", 2, "adam", marks=pytest.mark.slow),
    pytest.param("linen along 1", 2, "sgd", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "num_stages", "optimizer"), CASES)
def test_two_steps_in_stages_equal_one_device(name, num_stages, optimizer):
    fn, params = NETWORKS[name]()
    step, state = start(fn, params, num_stages, optimizer_of(optimizer))
    got = run(step, state, BATCH)
    expected = one_device(fn, params, optimizer_of(optimizer))
    comparison = compare(got, expected, params, optimizer)
    assert not comparison.problems
    assert jax.tree.map(jnp.shape, got.params) == jax.tree.map(jnp.shape, params)


def test_a_stage_holds_its_own_slices_and_no_others():
    params = networks.params(6)
    step, state = start(
        networks.plain(jax.checkpoint(layer)), params, 3, optimizer_of("adam"), cuts=["layers/2", "layers/4"]
    )
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
    assert bytes_by_device(state.params["layers"]) == dict.fromkeys(range(3), total // 3)
    moments = state.opt_state[1][0]
    assert bytes_by_device(moments.mu["layers"]) == dict.fromkeys(range(3), total // 3)
    planned = [stage.memory_bytes["parameters"] for stage in step.plan.stages]
    embed = params["embed"].nbytes
    assert planned == [total // 3 + embed, total // 3, total // 3 + embed]
    assert step.plan.blocks[step.plan.stages[1].blocks[0]].path.startswith("layers/2")
    assert [tie.path for tie in step.plan.ties] == ["params['embed']"]


def test_trees_have_the_users_shapes_and_bits():
    params = networks.params(5)
    optimizer = optimizer_of("adam")
    step, state = start(networks.plain(), params, 2, optimizer)
    for got, wanted in ((state.params, params), (state.opt_state, optimizer.init(params))):
        assert jax.tree.structure(got) == jax.tree.structure(wanted)
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)
        for a, b in zip(jax.tree.leaves(step.gather(got)), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    _, grads = step.value_and_grad(state, BATCH)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)


def test_a_gathered_state_goes_on_bit_by_bit():
    params = networks.params(4)
    step, state = start(networks.plain(jax.checkpoint(layer)), params, 2, optimizer_of("adam"), donate=False)
    state, _ = step(state, BATCH)
    saved = step.gather(state)
    expected, _ = step(state, BATCH)
    got, _ = step(saved, BATCH)
    for a, b in zip(jax.tree.leaves(step.gather(got)), jax.tree.leaves(step.gather(expected)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_update_of_ones_own_goes_slice_by_slice():
    params = networks.params(4)
    fn = networks.plain(jax.checkpoint(layer))
    step, state = start(fn, params, 2, optax.identity())
    out, grads = step.value_and_grad(state, BATCH)
    mine = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
    assert isinstance(mine["layers"]["out"], StackedArray)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(fn)(params, BATCH))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)
    lower, _ = step.value_and_grad(state.replace(params=mine), BATCH)
    assert float(lower.loss) < float(out.loss)


def test_a_saved_plan_of_a_scan_runs_in_another_step(tmp_path):
    params = networks.params(4)
    fn = networks.plain(jax.checkpoint(layer))
    step, state = start(fn, params, 2, optimizer_of("adam"))
    expected, out = step(state, BATCH)
    step.plan.save(tmp_path / "plan.json")
    plan = rannc_jax.Plan.load(tmp_path / "plan.json")
    again = rannc_jax.parallelize(fn, plan, optimizer=optimizer_of("adam"))
    got, same = again(again.init(params, BATCH), BATCH)
    assert float(same.loss) == float(out.loss)
    for a, b in zip(jax.tree.leaves(step.gather(got)), jax.tree.leaves(step.gather(expected)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_made_from_a_key_are_made_where_they_live():
    def fn(p, b, rng):
        return networks.plain(jax.checkpoint(layer))(p, b)

    def make(key):
        shapes, structure = jax.tree.flatten(jax.eval_shape(lambda: networks.params(4)))
        keys = jax.random.split(key, len(shapes))
        return structure.unflatten(
            [0.2 * jax.random.normal(k, s.shape) for k, s in zip(keys, shapes, strict=True)]
        )

    step, state = start(fn, make, 2, optimizer_of("sgd"), rng=jax.random.key(0))
    expected = make(jax.random.fold_in(jax.random.key(0), 0))
    for a, b in zip(jax.tree.leaves(step.gather(state.params)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert len(bytes_by_device(state.params["layers"])) == 2


def test_other_functions_of_the_same_parameters():
    params = networks.params(4)
    step, state = start(networks.plain(jax.checkpoint(layer)), params, 2, optimizer_of("sgd"))

    def logits(p, b):
        h, _ = jax.lax.scan(lambda h, q: (layer(q, h), None), p["embed"][b["x"]], p["layers"])
        return h @ p["embed"].T

    def sizes(p, b):  # reads the stack whole: no loop over layers
        return jnp.broadcast_to(jnp.cumsum(p["layers"]["scale"], 0)[-1], (b["x"].shape[0], networks.WIDTH))

    for fn in (logits, sizes):
        np.testing.assert_allclose(step.evaluate(fn)(state, BATCH), fn(params, BATCH), rtol=1e-4, atol=1e-5)
    reference, _ = step.reference(state, BATCH)
    assert jax.tree.map(jnp.shape, reference.params) == jax.tree.map(jnp.shape, params)


def test_frozen_stacks_and_written_state_live_with_their_layers():
    rng = np.random.default_rng(0)
    params, frozen = {"w": normal(rng, 4, 8, 8)}, {"base": normal(rng, 4, 8, 8)}
    state0 = {"seen": jnp.zeros((4, 8))}
    batch = {"x": normal(rng, 8, 8)}

    def fn(p, b, frozen, model_state):
        def body(h, xs):
            w, base, seen = xs
            h = jnp.tanh(h @ (w + base))
            return h, 0.9 * seen + 0.1 * jax.lax.stop_gradient(jnp.mean(h, 0))

        h, seen = jax.lax.scan(body, b["x"], (p["w"], frozen["base"], model_state["seen"]))
        return LossOut(loss=jnp.mean(h * h), model_state={"seen": seen})

    given = {"frozen": frozen, "model_state": state0}
    step, state = start(fn, params, 2, optax.sgd(0.1), batch=batch, **given)
    assert isinstance(state.model_state["seen"], StackedArray)
    assert len(bytes_by_device(state.frozen)) == 2
    expected, out = step.reference(state, batch)
    got, metrics = step(state, batch)
    np.testing.assert_allclose(metrics.loss, out.loss, rtol=1e-5)
    for name in ("params", "model_state"):
        pairs = zip(
            jax.tree.leaves(getattr(got, name)), jax.tree.leaves(getattr(expected, name)), strict=True
        )
        for a, b in pairs:
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def test_dropout_keys_split_per_layer_equal_the_reference():
    def fn(p, b, rng):
        def body(h, xs):
            q, key = xs
            return jnp.where(jax.random.bernoulli(key, 0.8, h.shape), layer(q, h) / 0.8, 0), None

        keys = jax.random.split(rng, 4)
        h, _ = jax.lax.scan(body, p["embed"][b["x"]], (p["layers"], keys))
        return networks.next_token_loss(h @ p["embed"].T, b["y"])

    step, state = start(fn, networks.params(4), 2, optimizer_of("sgd"), rng=jax.random.key(5))
    expected, out = step.reference(state, BATCH)
    got, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics.loss, out.loss, rtol=1e-5)
    pairs = zip(jax.tree.leaves(got.params), jax.tree.leaves(expected.params), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


# --- the leaf itself ----------------------------------------------------------------------------


def stacked_leaf():
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    slicing = Slicing(dims=(1,), lengths=(3,))
    parts = [jax.device_put(whole[:, i], jax.devices()[i]) for i in range(3)]
    return whole, StackedArray(parts, slicing)


def test_a_stacked_leaf_is_taken_for_the_joined_array():
    whole, leaf = stacked_leaf()
    assert (leaf.shape, leaf.dtype, leaf.ndim, leaf.size, leaf.nbytes) == ((2, 3, 4), whole.dtype, 3, 24, 96)
    np.testing.assert_array_equal(np.asarray(leaf), whole)
    np.testing.assert_array_equal(np.sum(leaf, 1), whole.sum(1))
    np.testing.assert_array_equal(jnp.asarray(leaf), whole)
    np.testing.assert_array_equal(leaf[:, 1], whole[:, 1])
    np.testing.assert_array_equal(leaf.mean(), whole.mean())
    np.testing.assert_array_equal(leaf + whole[0, 0], whole + whole[0, 0])
    assert jax.tree.leaves({"a": leaf}) == [leaf]
    assert repr(leaf) == "StackedArray(float32[2, 3, 4], 3 slices)"
    with pytest.raises(AttributeError, match=r"jnp\.asarray joins the slices"):
        leaf.no_such_thing


def test_arithmetic_of_stacked_leaves_stays_where_the_slices_live():
    whole, leaf = stacked_leaf()
    for got, wanted in (
        (2 * leaf - leaf / 3, 2 * whole - whole / 3),
        (-(leaf**2), -(whole**2)),
        (leaf * whole, whole * whole),
        (np.float32(3) * leaf, 3 * whole),
        (leaf > 5, whole > 5),
        (leaf.astype(jnp.int32), whole.astype(np.int32)),
    ):
        assert isinstance(got, StackedArray)
        assert [part.devices() for part in got.parts] == [part.devices() for part in leaf.parts]
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-6)
