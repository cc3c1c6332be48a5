"""Optimizer state in host memory: the same results, and never more than two groups of it on a device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rannc_jax
from rannc_jax.contract import Sharding
from rannc_jax.errors import PlanError
from rannc_jax.ir.leaves import Slicing
from rannc_jax.runtime import offload, transfer
from rannc_jax.runtime.optimizer import cut_optimizer
from rannc_jax.runtime.places import find_places, joined
from rannc_jax.runtime.shares import Shares
from rannc_jax.runtime.stacked import StackedArray
from rannc_jax.runtime.step import Options
from rannc_jax.runtime.update import apply_cut, init_state
from tests.door import assert_close
from tests.runtime.instrument import sub_mesh, watch_host_traffic
from tests.runtime.test_optimizer import (
    OPTIMIZERS,
    gradients,
    losses,
    one_device,
    place_tree,
    reference,
    tree,
)
from tests.runtime.test_sharding import batch, begin, check

# Of the flat tree: stages 0 (two devices) and 1, and the groups of the one or the other.
OWNERS = {1: (0,) * 6, 2: (0, 0, 0, 1, 0, 1)}
GROUPS = {1: tuple(range(6)), 2: (None, None, None, "a", None, "b")}


def offloaded(name, num_stages, sharding=Sharding.REPLICATED, all_grads=None):
    """The last parameters and state."""
    owner, meshes = OWNERS[num_stages], [sub_mesh(0, 1), sub_mesh(2)][:num_stages]
    shares = [Shares(mesh, sharding) for mesh in meshes]
    cut = cut_optimizer(OPTIMIZERS[name], tree(0), owner, num_stages, groups=GROUPS[num_stages])
    params = place_tree(tree(0), owner, meshes)
    state = init_state(cut, shares, params, transfer.move)
    for grads, loss in zip(all_grads or gradients(), losses(), strict=True):
        placed = place_tree(grads, owner, meshes)
        (placed_loss,) = transfer.place([loss], [None], meshes[cut.hub])
        with watch_host_traffic() as seen:
            params, state = apply_cut(cut, shares, placed, state, params, transfer.move, loss=placed_loss)
        assert not seen.materialised
    for leaf, place in zip(jax.tree.leaves(state), cut.state_place, strict=True):
        rest = cut.shares_of(shares)[place].at_rest(leaf.shape)
        assert leaf.sharding.is_equivalent_to(rest, leaf.ndim)
        assert (rest.memory_kind == "pinned_host") == cut.places[place].offload
    return params, state


def assert_near(got, expected, most=1e-6):
    """Leaf by leaf, relative to the leaf's norm."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), jax.tree_util.keystr(path)
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= most * np.linalg.norm(b), jax.tree_util.keystr(path)


FAST = ("accumulation and global norm",)


@pytest.mark.parametrize("name", FAST)
def test_an_update_in_groups_equals_one_device(name):
    assert_near(offloaded(name, 1, Sharding.ZERO1), reference(name))


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", OWNERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_transformation_in_groups_equals_one_device(name, num_stages):
    assert_near(offloaded(name, num_stages), reference(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apply if finite", "accumulation inside apply if finite"])
def test_a_step_that_is_not_finite_in_one_group_is_skipped_in_all(name):
    bad = gradients()
    bad[1]["head"] = bad[1]["head"].at[3, 4].set(jnp.nan)
    assert_near(offloaded(name, 1, all_grads=bad), one_device(OPTIMIZERS[name], tree(0), bad, losses()))


def test_what_joins_whole_leaves_is_refused_though_one_stage_could_run_it():
    flat = optax.flatten(optax.adam(1e-2))
    cut_optimizer(flat, tree(0), OWNERS[1], 1)
    with pytest.raises(PlanError, match=r"cannot be offloaded(.|\n)*operands(.|\n)*try: offload=False"):
        cut_optimizer(flat, tree(0), OWNERS[1], 1, groups=GROUPS[1])


def test_small_groups_are_joined_up_to_the_largest_and_stages_take_turns():
    places, at = find_places((0, 0, 0, 1, 0, 1), ("a", "b", "a", "c", "d", "e"), 3)
    assert [place.label for place in places] == [
        *("stage0", "stage1", "stage0_group0", "stage1_group0"),
        *("stage0_group1", "stage1_group1", "stage0_group2", "stage2"),
    ]
    assert at == (2, 4, 2, 3, 6, 5)
    left, new = joined(places, {2: 10, 4: 4, 6: 6, 3: 1, 5: 2, 7: 99})
    assert [place.label for place in left[2:]] == [
        *("stage0_group0", "stage1_group0", "stage0_group1", "stage1_group1", "stage2"),
    ]
    assert [new[place] for place in at] == [2, 4, 2, 3, 4, 5]


class Traffic:
    """What is fetched, put back and waited for, in order."""

    def __init__(self, monkeypatch):
        self.fetched, self.put, self.flying, self.most = [], [], [], 0
        self._patch(monkeypatch, "to_device", self._fetch)
        self._patch(monkeypatch, "to_host", self._put)
        wait = jax.block_until_ready
        monkeypatch.setattr(offload.jax, "block_until_ready", lambda tree: wait(self._wait(tree)))

    def _patch(self, monkeypatch, name, note):
        copy = getattr(offload, name)
        monkeypatch.setattr(offload, name, lambda arrays, shares: note(copy(arrays, shares)))

    def _fetch(self, arrays):
        if arrays:
            self.fetched.append(sum(x.nbytes for x in arrays))
            self.flying.append(None)
            self.most = max(self.most, len(self.flying))
        return arrays

    def _put(self, arrays):
        if arrays:
            self.put.append(sum(x.nbytes for x in arrays))
            self.flying[self.flying.index(None)] = [id(x) for x in arrays]
        return arrays

    def _wait(self, tree):
        waited = {id(x) for x in jax.tree.leaves(tree)}
        self.flying = [group for group in self.flying if group is None or not waited.issuperset(group)]
        return tree


@pytest.fixture(scope="module")
def one_stage():
    """A step of one stage whose state is offloaded, and its first state, which it keeps."""
    return begin("plain", Sharding.REPLICATED, 1, 1, offload=True, donate=False)


def test_an_offloaded_step_has_two_groups_at_most_on_the_device_as_planned(one_stage, monkeypatch):
    step, state = one_stage
    traffic = Traffic(monkeypatch)
    step.update(state, jax.tree.map(jnp.ones_like, state.params))
    num_bytes = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    assert sum(traffic.fetched) == sum(traffic.put) == num_bytes
    assert len(traffic.fetched) > 2
    assert traffic.most == 2
    assert 2 * max(traffic.fetched) == step.plan.stages[0].memory_bytes["transfers"]
    assert step.plan.stages[0].memory_bytes["optimizer"] == 0


def kinds(state):
    """The memories in which moments lie."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state[1][0].mu)}


def test_states_of_host_arrays_or_of_plans_without_offload_are_put_where_they_belong(one_stage):
    step, state = one_stage
    at, host = step._placement, step.gather(state)
    resident, first = begin("plain", Sharding.REPLICATED, 1, 1)
    for given, there in ((host, at), (first, at), (host, resident._placement), (state, resident._placement)):
        placed = there.settled(given)
        assert kinds(placed) == {"pinned_host" if there is at else "device"}
        assert_close(step.gather(placed.opt_state), step.gather(given.opt_state), 0)


@pytest.mark.parametrize("donate", [False, True])
def test_the_old_state_is_kept_or_taken_over_on_the_host_too(one_stage, donate, monkeypatch):
    step, state = one_stage
    state = step._placement.settled(step.gather(state))
    monkeypatch.setattr(step, "_options", Options(donate=donate))
    assert kinds(state) == {"pinned_host"}
    new, _ = step(state, batch())
    assert kinds(new) == {"pinned_host"}
    assert {leaf.is_deleted() for leaf in jax.tree.leaves(state.opt_state[1][0].mu)} == {donate}
    if donate:
        with pytest.raises(rannc_jax.RuntimeFailure, match="took over its memory"):
            step(state, batch())
    else:
        again, _ = step(state, batch())
        assert_close(step.gather(again.opt_state), step.gather(new.opt_state), 0)


def test_stacked_leaves_on_the_host_are_computed_with_on_the_devices():
    mesh, slicing = sub_mesh(0), Slicing(dims=(0,), lengths=(2,))
    rest = Shares(mesh, offload=True).at_rest((3,))
    leaf = StackedArray([jax.device_put(np.full(3, k, np.float32), rest) for k in (1, 2)], slicing)
    for result in (leaf * 2, leaf + leaf, leaf.astype(jnp.bfloat16)):
        assert all(part.sharding.memory_kind == "device" for part in result.parts)
    assert jnp.asarray(leaf).sharding.memory_kind == "device"
    np.testing.assert_array_equal(np.asarray(leaf + leaf), [[2] * 3, [4] * 3])


PLANS = (
    ("plain", 4, 4, Sharding.FSDP, True),
    ("statistics", 4, 1, Sharding.ZERO2, True),
    ("plain", (2, 4), 4, (Sharding.ZERO1, Sharding.REPLICATED), (True, False)),
    ("plain", (1, 1, 1), 4, Sharding.REPLICATED, (False, True, True)),
)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "replicas", "microbatches", "sharding", "offload"), PLANS)
def test_offload_changes_no_result_of_other_plans(network, replicas, microbatches, sharding, offload):
    check(network, sharding, microbatches, replicas, offload=offload)


def test_the_planner_offloads_only_where_nothing_else_fits():
    def loss(layers, rows):
        for weight in layers:
            rows = jnp.tanh(rows @ weight)
        return jnp.mean(rows**2)

    def plan(**limits):
        shapes = (
            [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 4,
            jax.ShapeDtypeStruct((8, 128), jnp.float32),
        )
        return rannc_jax.make_plan(
            loss, *shapes, optimizer=optax.adam(1e-3), num_stages=1, replicas=1, memory_margin=0.0, **limits
        )

    needed = plan(offload=False, remat="recompute", num_microbatches=8).stages[0].peak_bytes
    assert not plan(memory_limit_bytes=needed).stages[0].offload
    tight = plan(memory_limit_bytes=needed - 64 * 1024)
    assert tight.stages[0].offload
    rannc_jax.parallelize(loss, tight, optimizer=optax.adam(1e-3))
