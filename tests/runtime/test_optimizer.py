"""Optimizers cut across stages do what optax does on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from rannc_jax.errors import PlanError
from rannc_jax.runtime import transfer
from rannc_jax.runtime.cut import Send, StageProgram
from rannc_jax.runtime.optimizer import cut_optimizer
from rannc_jax.runtime.shares import Shares
from rannc_jax.runtime.update import apply_cut, init_state
from tests.runtime.instrument import sub_mesh, watch_host_traffic

SHAPES = {
    "embed": (40, 30),
    "blocks": [{"kernel": (1200,), "bias": (7,)}, {"kernel": (3, 20, 20), "scale": ()}],
    "head": (33, 34),
}
OWNERS = {1: [0] * 6, 2: [1, 0, 0, 1, 0, 0], 3: [2, 0, 1, 0, 2, 1]}
MESHES = {1: [(0,)], 2: [(0, 1), (2,)], 3: [(4,), (1, 2, 3), (5, 6)]}
NUM_STEPS = 4


def tree(seed, dtype=jnp.float32):
    leaves, structure = jax.tree.flatten(SHAPES, is_leaf=lambda shape: isinstance(shape, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


def place_tree(values, owner, meshes):
    """Every leaf on its stage, in memory of its own."""
    leaves, structure = jax.tree.flatten(values)
    placed = [transfer.place([leaf], [None], meshes[s])[0] for leaf, s in zip(leaves, owner, strict=True)]
    return jax.tree.unflatten(structure, placed)


def one_device(optimizer, params, all_grads, losses):
    """Plain optax, as a user would write it."""
    extended = optax.with_extra_args_support(optimizer)

    @jax.jit
    def step(grads, state, params, loss):
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, state = extended.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for grads, loss in zip(all_grads, losses, strict=True):
        params, state = step(grads, state, params, loss)
    return params, state


def cut_over_stages(optimizer, params, all_grads, losses, num_stages):
    owner = OWNERS[num_stages]
    meshes = [sub_mesh(*devices) for devices in MESHES[num_stages]]
    cut = cut_optimizer(optimizer, params, owner, num_stages)
    params = place_tree(params, owner, meshes)
    state = init_state(cut, list(map(Shares, meshes)), params, transfer.move)
    for grads, loss in zip(all_grads, losses, strict=True):
        placed_grads = place_tree(grads, owner, meshes)
        (placed_loss,) = transfer.place([loss], [None], meshes[cut.hub])
        with watch_host_traffic() as seen:
            params, state = apply_cut(
                cut, list(map(Shares, meshes)), placed_grads, state, params, transfer.move, loss=placed_loss
            )
        assert seen.none
    for leaf, stage in zip(jax.tree.leaves(params), cut.param_owner, strict=True):
        assert leaf.sharding.is_equivalent_to(transfer.sub_mesh_sharding(None, meshes[stage]), leaf.ndim)
    for leaf, stage in zip(jax.tree.leaves(state), cut.state_owner, strict=True):
        assert leaf.sharding.is_equivalent_to(transfer.sub_mesh_sharding(None, meshes[stage]), leaf.ndim)
    return params, state


def assert_equal_trees(got, expected, rtol, atol=1e-8):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    flat = jax.tree_util.tree_flatten_with_path(got)[0]
    for (path, a), b in zip(flat, jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), jax.tree_util.keystr(path)
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def label(path, _):
    name = jax.tree_util.keystr(path)
    return "slow" if "bias" in name else "frozen" if "embed" in name else "fast"


def labels(params):
    return jax.tree_util.tree_map_with_path(label, params)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


clipped = functools.partial(optax.chain, optax.clip_by_global_norm(0.5))
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)

OPTIMIZERS = {
    "sgd": optax.sgd(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, mask=is_matrix),
    "adamw in bfloat16 state": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "novograd": optax.novograd(1e-2),
    "global norm": clipped(optax.adam(1e-2)),
    "global norm of the updates": optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0)),
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(1e-2)),
    "block rms": optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(1e-2)),
    "several optimizers": optax.multi_transform(
        {"slow": optax.sgd(1e-3), "fast": clipped(optax.adam(1e-2)), "frozen": optax.set_to_zero()}, labels
    ),
    "masked": optax.masked(optax.adam(1e-2), is_matrix),
    "accumulation": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "accumulation and global norm": optax.MultiSteps(clipped(optax.adam(1e-2)), 2).gradient_transformation(),
    "apply if finite": optax.apply_if_finite(clipped(optax.adam(1e-2)), 2),
    "accumulation inside apply if finite": optax.apply_if_finite(
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), 3
    ),
    "schedule": optax.adamw(schedule),
    "injected hyperparameters": optax.inject_hyperparams(optax.adamw)(
        learning_rate=schedule, weight_decay=1e-2
    ),
    "decayed weights": optax.chain(optax.add_decayed_weights(1e-2, mask=is_matrix), optax.sgd(1e-2)),
    "average of updates": optax.chain(optax.scale_by_adam(), optax.ema(0.9), optax.scale(-1e-2)),
    "noise": optax.noisy_sgd(1e-2, key=0),
    "typed key noise": optax.chain(
        optax.add_noise(0.01, 0.55, jax.random.key(1)), optax.clip_by_global_norm(1.0), optax.sgd(1e-2)
    ),
    "plateau": optax.chain(
        optax.adam(1e-2), contrib.reduce_on_plateau(patience=1, factor=0.5, accumulation_size=1)
    ),
    "schedule free": contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "distance over gradients": contrib.dog(1e-2),
    "prodigy": contrib.prodigy(1e-1),
    "accumulated distance over gradients": optax.MultiSteps(contrib.dog(1e-2), 2).gradient_transformation(),
    "polyak": optax.polyak_sgd(max_learning_rate=1e-2),
    "momo": contrib.momo(1e-2),
    "muon": contrib.muon(1e-2),
    "normalised": optax.chain(contrib.normalize(), optax.sgd(1e-2)),
}


@functools.cache
def reference(name):
    return one_device(OPTIMIZERS[name], tree(0), gradients(), losses())


def gradients():
    return [tree(100 + step) for step in range(NUM_STEPS)]


def losses():
    return [jnp.float32(2.0 + 0.1 * step) for step in range(NUM_STEPS)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_cut_optimizer_equals_optax_on_one_device(name):
    got = cut_over_stages(OPTIMIZERS[name], tree(0), gradients(), losses(), 3)
    assert_equal_trees(got, reference(name), rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "global norm", "accumulation and global norm", "lamb"])
def test_two_stages_of_two_replicas_and_one_equal_one_device(name):
    got = cut_over_stages(OPTIMIZERS[name], tree(0), gradients(), losses(), 2)
    assert_equal_trees(got, reference(name), rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "accumulation and global norm", "noise"])
def test_one_stage_is_one_program_and_equals_optax(name):
    cut = cut_optimizer(OPTIMIZERS[name], tree(0), OWNERS[1], 1)
    assert len(cut.update) == 1
    assert len(cut.init) == 1
    got = cut_over_stages(OPTIMIZERS[name], tree(0), gradients(), losses(), 1)
    assert_equal_trees(got, reference(name), rtol=1e-6)


@pytest.mark.parametrize("name", ["apply if finite", "accumulation inside apply if finite"])
def test_a_step_that_is_not_finite_anywhere_is_skipped_everywhere(name):
    bad = gradients()
    bad[1]["head"] = bad[1]["head"].at[3, 4].set(jnp.nan)
    bad[2]["blocks"][0]["bias"] = bad[2]["blocks"][0]["bias"].at[0].set(jnp.inf)
    got = cut_over_stages(OPTIMIZERS[name], tree(0), bad, losses(), 3)
    assert_equal_trees(got, one_device(OPTIMIZERS[name], tree(0), bad, losses()), rtol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got[0]))


def test_gradients_are_cast_to_the_parameters_dtype_as_differentiation_would_give_them():
    optimizer, params = clipped(optax.sgd(1e-2, momentum=0.9)), tree(0, jnp.bfloat16)
    got = cut_over_stages(optimizer, params, gradients(), losses(), 3)
    # One bfloat16 step: XLA keeps float32 between fused bfloat16 operations where it may.
    assert_equal_trees(got, one_device(optimizer, params, gradients(), losses()), rtol=2**-7, atol=1e-4)


def test_stages_meet_as_seldom_as_the_transformation_needs():
    def sends(name):
        ops = cut_optimizer(OPTIMIZERS[name], tree(0), OWNERS[3], 3).update
        return [(op.values[0].stage, op.target) for op in ops if isinstance(op, Send)]

    assert sends("sgd") == []
    assert sends("adam") == [(2, 0), (2, 1)]  # the step count, from the last stage to the others
    assert sends("global norm") == [(0, 2), (1, 2), (2, 0), (2, 1)]


def test_a_conditional_over_all_leaves_becomes_one_a_stage():
    ops = cut_optimizer(OPTIMIZERS["accumulation"], tree(0), OWNERS[3], 3).update
    last = {
        op.stage: str(jax.make_jaxpr(op.function)(*op.input_types))
        for op in ops
        if isinstance(op, StageProgram)
    }
    assert all(text.count("cond[") >= 1 for text in last.values())


def test_state_of_a_leaf_lives_on_the_leafs_stage_and_shared_state_on_the_last():
    cut = cut_optimizer(OPTIMIZERS["global norm"], tree(0), OWNERS[3], 3)
    assert cut.state_owner == (2, *OWNERS[3], *OWNERS[3])


def test_parameters_and_state_are_donated_unless_the_caller_wants_to_keep_them():
    owner, meshes = OWNERS[2], [sub_mesh(0, 1), sub_mesh(2)]
    cut = cut_optimizer(OPTIMIZERS["adam"], tree(0), owner, 2)
    params = place_tree(tree(0), owner, meshes)
    state = init_state(cut, list(map(Shares, meshes)), params, transfer.move)
    for donate in (False, True):
        grads = place_tree(tree(1), owner, meshes)
        apply_cut(cut, list(map(Shares, meshes)), grads, state, params, transfer.move, donate=donate)
        assert all(leaf.is_deleted() == donate for leaf in jax.tree.leaves((params, state)))


REFUSALS = {
    "a loop over all leaves": (
        optax.scale_by_lbfgs(),
        r"cannot be cut: its `scan` joins whole arrays of stages 0, 1, 2(.|\n)*where: .*lbfgs(.|\n)*try: ",
    ),
    "one long vector": (optax.flatten(optax.sgd(1e-2)), "`concatenate` joins whole arrays"),
    "a line search": (optax.lbfgs(), r"cannot be traced(.|\n)*value_fn(.|\n)*try: .*line search"),
    "wrapped parameters": (optax.lookahead(optax.sgd(1e-2), 3, 0.5), "cannot be traced"),
    "parameters of another shape": (
        optax.scale_by_distance_over_gradients(),
        r"returns other parameters than it takes(.|\n)*'scale'\]: got float32\[1\], expected float32\[\]",
    ),
    "state of another dtype": (
        optax.stateless(lambda updates, _: updates)._replace(
            init=lambda params: jnp.int32(0),
            update=lambda updates, state, params=None: (updates, state + 0.5),
        ),
        r"returns other state than it takes(.|\n)*state: got float32\[\], expected int32\[\]",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_cut_is_refused_with_the_place_and_a_way_out(what):
    optimizer, text = REFUSALS[what]
    with pytest.raises(PlanError, match=text):
        cut_optimizer(optimizer, tree(0), OWNERS[3], 3)
