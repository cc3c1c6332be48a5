"""Networks with all that users write: whatever they hold, the cut step equals JAX's own gradients."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rannc_jax
from rannc_jax import Remat, TraceError
from tests.door import WIDTH, assert_close, check_gradients, layers, loss_fn, net, rows, train

SHAPES = [{"num_stages": 3}, {"num_stages": 3, "replicas": (2, 1, 4), "schedule": "zb-h1"}]


def mean_square(h, batch):
    return jnp.mean((h - batch["y"]) ** 2)


@pytest.mark.parametrize("settings", SHAPES)
def test_skip_connections_over_several_stages(settings):
    def fn(params, batch):
        first = jnp.tanh(batch["x"] @ params[0]["w"])
        h = net(params[1:4], first)
        return mean_square(h + 0.5 * first, batch)

    check_gradients(fn, layers(), rows(), **settings)


@pytest.mark.parametrize("settings", SHAPES)
def test_a_value_that_every_stage_reads(settings):
    def fn(params, batch):
        context = jnp.tanh(batch["x"] @ params[0]["w"])
        h = context
        for index, layer in enumerate(params[1:]):
            with jax.named_scope(f"layer{index}"):
                h = jnp.tanh(h @ layer["w"] + layer["b"]) * context
        return mean_square(h, batch)

    step, _ = check_gradients(fn, layers(6), rows(), **settings, cuts=("layer1", "layer3"))
    assert any(len(crossing.targets) == 2 for crossing in step.plan.crossings)


@pytest.mark.parametrize("settings", SHAPES)
def test_integers_and_booleans_cross_stages(settings):
    def fn(params, batch):
        h = net(params[:2], batch["x"])
        chosen, positive = jnp.argmax(h @ params[2]["w"], -1), h > 0
        h = net(params[2:4], h)
        h = h + params[5]["w"][chosen]
        return mean_square(jnp.where(positive, h, net(params[4:], h)), batch)

    check_gradients(fn, layers(6), rows(), **settings)


@pytest.mark.parametrize("settings", SHAPES)
def test_parameters_that_three_stages_read_live_once(settings):
    def fn(params, batch):
        h = batch["x"]
        for index, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer{index}"):
                h = jnp.tanh(h @ layer["w"] @ params["shared"])
        return mean_square(h @ params["shared"].T, batch)

    params = {"layers": layers(6), "shared": jnp.eye(WIDTH) + 0.1}
    step, state = check_gradients(fn, params, rows(), **settings, cuts=("layer2", "layer4"))
    assert [tie.path for tie in step.plan.ties] == ["params['shared']"]
    assert len(step.plan.ties[0].readers) >= 2
    assert_steps_agree(fn, step, state, params, rows(), optax.sgd(0.1))


def assert_steps_agree(fn, step, state, params, batch, optimizer):
    """Three steps give the parameters that the optimizer gives on one device."""
    opt_state = optimizer.init(params)
    for _ in range(3):
        updates, opt_state = optimizer.update(jax.grad(fn)(params, batch), opt_state, params)
        params = optax.apply_updates(params, updates)
        state, _ = step(state, batch)
    assert_close(step.gather(state.params), step.gather(params), 1e-4)


def test_parameters_nobody_reads_still_decay():
    params, optimizer = {"layers": layers(), "unread": jnp.ones((3,))}, optax.adamw(1e-2, weight_decay=0.1)

    def fn(params, batch):
        return loss_fn(params["layers"], batch)

    step, state = train(fn, params, rows(), optimizer=optimizer)
    assert_steps_agree(fn, step, state, params, rows(), optimizer)


@pytest.mark.parametrize("settings", [{}, {"replicas": (2, 1)}])
def test_bfloat16_parameters_get_bfloat16_gradients_summed_in_float32(settings):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), layers())
    batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), rows())
    step, state = train(loss_fn, params, batch, **settings)
    out, grads = step.value_and_grad(state, batch)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    loss, expected = jax.value_and_grad(loss_fn)(wide, jax.tree.map(lambda x: x.astype(jnp.float32), batch))
    assert all(g.dtype == jnp.bfloat16 for g in jax.tree.leaves(grads))
    grads = jax.tree.map(lambda g: g.astype(np.float32), step.gather(grads))
    assert abs(float(out.loss) - float(loss)) < 0.02 * float(loss)
    assert_close(grads, expected, 0.05)


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("settings", [{}, {"replicas": (2, 1)}])
def test_work_on_parameters_alone_is_transposed_exactly(remat, settings):
    def fn(params, batch):
        h = batch["x"]
        for layer in params:
            v = layer["w"]
            w = layer["b"] * v / jnp.sqrt(jnp.sum(v**2, axis=0))
            h = jnp.tanh(h @ w.T)
        return mean_square(h, batch)

    check_gradients(fn, layers(), rows(), remat=remat, **settings)


@pytest.mark.parametrize("count", [8, 6])
def test_double_precision_stays_double(count):
    with jax.enable_x64(True):
        params, batch = (jax.tree.map(lambda x: x.astype(jnp.float64), t) for t in (layers(), rows(count)))
        step, state = train(loss_fn, params, batch, num_microbatches=count // 2, optimizer=optax.adam(1e-2))
        out, grads = step.value_and_grad(state, batch)
        loss, expected = jax.value_and_grad(loss_fn)(params, batch)
        assert_close(out.loss, loss, 1e-14)
        assert_close(step.gather(grads), expected, 1e-13)
        state, _ = step(state, batch)
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(state.params))


def test_casts_of_parameters_do_not_round_their_gradients():
    def fn(params, batch):
        h = batch["x"].astype(jnp.bfloat16)
        for layer in params:
            h = jnp.tanh(h @ layer["w"].astype(jnp.bfloat16))
        return jnp.mean((h.astype(jnp.float32) - batch["y"]) ** 2)

    params, batch = layers(), rows(64)
    step, state = train(fn, params, batch, num_microbatches=16)
    _, grads = step.value_and_grad(state, batch)
    expected = jax.grad(fn)(params, batch)
    for got, want in zip(jax.tree.leaves(step.gather(grads)), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)


def test_parameters_used_only_through_views():
    def fn(params, batch):
        h = batch["x"]
        for half in (params["stacked"][0], params["stacked"][1], params["flat"].reshape(WIDTH, WIDTH).T):
            h = jnp.tanh(h @ half)
        return mean_square(h * params["one"][None, :], batch)

    ws = [layer["w"] for layer in layers()]
    params = {"stacked": jnp.stack(ws[:2]), "flat": ws[2].ravel(), "one": jnp.ones(WIDTH)}
    check_gradients(fn, params, rows())


@pytest.mark.parametrize("remat", list(Remat))
def test_a_scan_over_stacked_layers(remat):
    def fn(params, batch):
        def body(h, layer):
            return h + jnp.tanh(h @ layer["w"] + layer["b"]), jnp.mean(h)

        h, means = jax.lax.scan(body, jnp.tanh(batch["x"] @ params["in"]), params["layers"])
        return mean_square(h @ params["out"], batch) + 0.1 * jnp.sum(means)

    ls = layers()
    params = {
        "in": ls[0]["w"],
        "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *layers(3, seed=2)),
        "out": ls[1]["w"],
    }
    check_gradients(fn, params, rows(), remat=remat)


@pytest.mark.parametrize("remat", list(Remat))
def test_the_users_own_checkpoints_and_custom_rules_stay_whole(remat):
    @jax.custom_vjp
    def doubled_back(x):
        return jnp.sin(x)

    doubled_back.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))

    @jax.custom_jvp
    def other_slope(x):
        return jnp.tanh(x)

    other_slope.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), 3 * tangents[0]))

    def fn(params, batch):
        h = batch["x"]
        h = jax.checkpoint(lambda h, layer: jnp.tanh(h @ layer["w"]))(h, params[0])
        h = doubled_back(h @ params[1]["w"])
        h = other_slope(h @ params[2]["w"])
        return mean_square(jax.nn.relu(h @ params[3]["w"]), batch)

    check_gradients(fn, layers(), rows(), remat=remat)


def test_the_slope_of_relu_at_zero_is_the_users():
    def fn(params, batch):
        h = jax.nn.relu(batch["x"] * params[0]["b"])
        return jnp.sum(h * params[1]["b"]) + jnp.sum(jnp.abs(batch["x"] * params[2]["b"]))

    batch = {"x": jnp.zeros((8, WIDTH))}
    batch["x"] = batch["x"].at[0].set(1.0)
    check_gradients(fn, layers(), batch, num_stages=1)


@pytest.mark.parametrize("settings", [{}, {"replicas": (2, 1)}])
def test_conditions_and_loops(settings):
    def fn(params, batch):
        h = net(params[:1], batch["x"])
        h = jax.lax.cond(batch["deep"], lambda h: net(params[1:3], h), lambda h: h * 2, h)
        h = jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ params[3]["w"]), h)
        return mean_square(h, batch)

    for deep in (True, False):
        check_gradients(fn, layers(), {**rows(), "deep": jnp.bool_(deep)}, **settings)


def test_while_loops_run_forward_only():
    def apply(params, x):
        h = net(params[:2], x)
        h = jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ params[2]["w"])), (0, h)
        )[1]
        return net(params[3:], h)

    params, x = layers(), rows()["x"]
    infer = rannc_jax.auto_partition(apply, num_stages=2, num_microbatches=2)
    with pytest.warns(UserWarning, match="no known number of turns"):
        state = infer.init(params, x)
    assert_close(infer(state, x), apply(params, x))


def test_vmap_over_a_key_for_every_row():
    def fn(params, batch, *, rng):
        keys = jax.random.split(rng, batch["x"].shape[0])
        noise = jax.vmap(lambda key, x: jax.random.normal(key, x.shape))(keys, batch["x"])
        return mean_square(net(params, batch["x"] + noise), batch)

    params, batch = layers(), rows()
    step, state = train(fn, params, batch, replicas=(2, 1), init={"rng": jax.random.key(0)})
    expected, reference = step.reference(state, batch)
    state, out = step(state, batch)
    assert_close(out.loss, reference.loss)
    assert_close(step.gather(state.params), step.gather(expected.params))


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 4)])
def test_dropout_does_not_depend_on_the_cut(replicas):
    def fn(params, batch, *, rng):
        h = batch["x"]
        for i, layer in enumerate(params):
            keep = jax.random.bernoulli(jax.random.fold_in(rng, i), 0.8, h.shape)
            h = h + jnp.where(keep, jnp.tanh(h @ layer["w"]), 0)
        return mean_square(h, batch), h

    params, batch = layers(), rows()
    step, state = train(fn, params, batch, replicas=replicas, init={"rng": jax.random.key(0)})
    expected, reference = step.reference(state, batch)
    state, out = step(state, batch)
    assert_close(out, reference)
    assert_close(step.gather(state.params), step.gather(expected.params))


def test_numpy_batches_of_wide_numbers_are_narrowed_as_jax_does():
    def fn(params, batch):
        return mean_square(net(params[1:], params[0]["w"][batch["ids"]] + batch["x"]), batch)

    batch = {"ids": np.arange(8) % WIDTH, **jax.tree.map(lambda x: np.asarray(x, np.float64), rows())}
    assert batch["ids"].dtype == np.int64
    step, state = train(fn, layers(), batch)
    out, _ = step.value_and_grad(state, batch)
    assert_close(out.loss, fn(layers(), jax.tree.map(jnp.asarray, batch)))


def test_large_closure_constants_become_inputs():
    table = jnp.sin(jnp.arange(8 * 100 * WIDTH, dtype=jnp.float32)).reshape(800, WIDTH)

    def fn(params, batch):
        h = net(params[:2], batch["x"] + table[batch["ids"]])
        return mean_square(net(params[2:], h + table[batch["ids"] + 1]), batch)

    batch = {**rows(), "ids": np.arange(8)}
    check_gradients(fn, layers(), batch)


def test_numpy_closure_constants_too():
    table = np.sin(np.arange(800 * WIDTH, dtype=np.float32)).reshape(800, WIDTH)

    def fn(params, batch):
        return mean_square(net(params, batch["x"] + jnp.asarray(table)[batch["ids"]]), batch)

    check_gradients(fn, layers(), {**rows(), "ids": np.arange(8)})


def test_unordered_debug_prints_come_once_a_microbatch(capfd):
    def fn(params, batch):
        h = net(params[:2], batch["x"])
        jax.debug.print("seen {}", jnp.int32(h.shape[0]))
        return mean_square(net(params[2:], h), batch)

    step, state = train(fn, layers(), rows())
    step(state, rows())
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen 4") == 2


def test_ordered_effects_and_collectives_are_refused_with_the_line():
    def ordered(params, batch):
        jax.debug.print("{}", batch["x"][0, 0], ordered=True)
        return loss_fn(params, batch)

    def called_back(params, batch):
        x = jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(1))
        return loss_fn(params, batch) * x

    for fn, name in ((ordered, "debug"), (called_back, "io_callback")):
        with pytest.raises(TraceError, match="cannot be part of a function that is cut") as error:
            train(fn, layers(), rows())
        assert name in str(error.value)
        assert "test_networks.py" in str(error.value)


@pytest.mark.parametrize("effect", ["print", "callback"])
def test_effects_inside_loops_are_seen(effect):
    def fn(params, batch):
        def body(h, layer):
            if effect == "print":
                jax.debug.print("{}", h[0, 0], ordered=True)
            else:
                one = jax.ShapeDtypeStruct((), jnp.float32)
                h = h * jax.experimental.io_callback(lambda: np.float32(1), one)
            return jnp.tanh(h @ layer), None

        h, _ = jax.lax.scan(body, batch["x"], params)
        return mean_square(h, batch)

    with pytest.raises(TraceError, match="cannot be part"):
        train(fn, jnp.stack([layer["w"] for layer in layers()]), rows())


# --- odd graphs -------------------------------------------------------------------------------------


def test_a_loss_that_ignores_the_batch_has_nothing_to_cut():
    with pytest.raises(TraceError, match="there is nothing to cut"):
        train(lambda p, b: sum(jnp.sum(layer["w"] ** 2) for layer in p), layers(), rows())


def test_a_loss_that_ignores_the_parameters():
    check_gradients(
        lambda p, b: jnp.mean(jnp.sin(b["x"] @ b["x"].T @ b["y"])), layers(), rows(), num_microbatches=1
    )


def test_some_parameters_are_integers_or_unread():
    def fn(params, batch):
        return loss_fn(params["layers"], {**batch, "x": batch["x"] * params["steps"]})

    params = {"layers": layers(), "steps": jnp.float32(2), "unread": jnp.zeros((2, 0))}
    check_gradients(fn, params, rows())


def test_one_equation():
    check_gradients(lambda p, b: jnp.sum(b * p), jnp.float32(2), jnp.arange(8.0), num_stages=1)


def test_two_towers_that_meet_in_the_loss_only():
    def fn(params, batch):
        return mean_square(net(params[:2], batch["x"]), batch) + jnp.mean(net(params[2:], batch["y"]) ** 2)

    for settings in SHAPES:
        check_gradients(fn, layers(), rows(), **settings)


@pytest.mark.parametrize("replicas", [1, (2, 1)])
def test_outputs_that_are_inputs_or_constants(replicas):
    def fn(params, batch):
        aux = {"x": batch["x"], "w": params[0]["w"], "one": jnp.float32(1), "half": 0.5}
        return loss_fn(params, batch), aux

    params, batch = layers(), rows()
    step, state = train(fn, params, batch, replicas=replicas)
    out, _ = step.value_and_grad(state, batch)
    assert_close(
        out.aux, {"x": batch["x"], "w": params[0]["w"], "one": jnp.float32(1), "half": jnp.float32(0.5)}
    )


def test_arrays_of_size_zero():
    def fn(params, batch):
        h = net(params["layers"], batch["x"])
        h = jnp.concatenate([h, batch["none"] @ params["none"]], -1)
        return mean_square(h, batch)

    params = {"layers": layers(), "none": jnp.zeros((3, 0))}
    batch = {**rows(), "none": jnp.ones((8, 3))}
    check_gradients(fn, params, batch)


def test_a_network_of_three_hundred_layers_is_cut_in_reasonable_time():
    params = {"w": jnp.stack([layer["w"] for layer in layers(300)])}

    def fn(params, batch):
        h = batch["x"]
        for i in range(300):
            h = jnp.tanh(h @ params["w"][i])
        return mean_square(h, batch)

    start_s = time.process_time()
    plan = rannc_jax.make_plan(fn, params, rows(), optimizer=optax.sgd(0.1), num_stages=4, num_microbatches=2)
    assert time.process_time() - start_s < 30  # 4 on a desk
    assert plan.num_stages == 4


def test_functions_of_many_kinds():
    class Model:
        def __call__(self, params, batch):
            return loss_fn(params, batch)

        def method(self, params, batch):
            return loss_fn(params, batch)

    scaled = functools.partial(lambda scale, p, b: scale * loss_fn(p, b), 2.0)
    for fn in (Model(), Model().method, jax.jit(loss_fn), scaled):
        check_gradients(fn, layers(), rows())
