"""Optimizers over leaves that are stacked over layers of several stages do what optax does on one device."""

import jax
import jax.numpy as jnp
import pytest

from rannc_jax.errors import PlanError
from rannc_jax.ir.leaves import WHOLE, Slicing
from rannc_jax.runtime import transfer
from rannc_jax.runtime.optimizer import cut_optimizer
from rannc_jax.runtime.shares import Shares
from rannc_jax.runtime.stacked import flat_parts, packed
from rannc_jax.runtime.update import apply_cut, init_state
from tests.runtime.instrument import sub_mesh, watch_host_traffic
from tests.runtime.test_optimizer import OPTIMIZERS, assert_equal_trees, one_device

SHAPES = {
    "embed": (40, 30),
    "layers": {"kernel": (4, 12, 20), "bias": (4, 7), "nested": (2, 2, 40, 30)},
    "head": {"kernel": (20, 3, 40)},
}
STACK = Slicing(dims=(0,), lengths=(4,))
NESTED = Slicing(dims=(0, 0), lengths=(2, 2))
MIDDLE = Slicing(dims=(1,), lengths=(3,))
SLICINGS = (WHOLE, MIDDLE, STACK, STACK, NESTED)  # in the order of the flat tree
OWNERS = (0, *(2, 1, 0), *(0, 0, 1, 2), *(0, 0, 1, 2), *(0, 1, 1, 2))
MESHES = ((4,), (1, 2, 3), (5, 6))
NUM_STEPS = 3


def tree(seed, shapes=SHAPES):
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return structure.unflatten([jax.random.normal(k, shape) for k, shape in zip(keys, leaves, strict=True)])


def placed(values, meshes, slicings=SLICINGS, owners=OWNERS):
    parts = zip(flat_parts(values, slicings), owners, strict=True)
    arrays = [transfer.place([part], [None], meshes[stage])[0] for part, stage in parts]
    return packed(jax.tree.structure(values), slicings, arrays)


def over_stages(optimizer, params, all_grads, losses, slicings=SLICINGS, owners=OWNERS):
    meshes = [sub_mesh(*devices) for devices in MESHES]
    cut = cut_optimizer(optimizer, params, owners, len(meshes), slicings=slicings)
    params = placed(params, meshes, slicings, owners)
    state = init_state(cut, list(map(Shares, meshes)), params, transfer.move)
    for grads, loss in zip(all_grads, losses, strict=True):
        here = placed(grads, meshes, slicings, owners)
        (loss,) = transfer.place([loss], [None], meshes[cut.hub])
        with watch_host_traffic() as seen:
            params, state = apply_cut(
                cut, list(map(Shares, meshes)), here, state, params, transfer.move, loss=loss
            )
        assert seen.none
    return params, state


def work():
    losses = [jnp.float32(1.0 / (k + 1)) for k in range(NUM_STEPS)]
    return tree(0), [tree(k + 1) for k in range(NUM_STEPS)], losses


# Products of whole flattened leaves: such a leaf must live on one stage.
REFUSED = ("prodigy", "momo")
FAST = ("adamw", "lamb", "adafactor", "global norm", "accumulation and global norm", "noise", "muon")
EQUAL = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in OPTIMIZERS
    if name not in REFUSED
]


@pytest.mark.parametrize("name", EQUAL)
def test_slices_are_updated_as_the_stack_would_be(name):
    params, grads, losses = work()
    got = over_stages(OPTIMIZERS[name], params, grads, losses)
    expected = one_device(OPTIMIZERS[name], params, grads, losses)
    assert_equal_trees(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_at_a_whole_stack_is_refused(name):
    with pytest.raises(PlanError, match=r"cannot be cut(.|\n)*try: .*slices of a stacked leaf"):
        cut_optimizer(OPTIMIZERS[name], tree(0), OWNERS, 3, slicings=SLICINGS)


def test_a_stack_on_one_stage_may_be_looked_at_whole():
    params, grads, losses = work()
    got = over_stages(OPTIMIZERS["prodigy"], params, grads, losses, owners=(1,) * len(OWNERS))
    assert_equal_trees(got, one_device(OPTIMIZERS["prodigy"], params, grads, losses), rtol=1e-5, atol=1e-6)


def test_moments_live_with_their_slices():
    cut = cut_optimizer(OPTIMIZERS["adam"], tree(0), OWNERS, 3, slicings=SLICINGS)
    assert cut.state_slicing == (WHOLE, *SLICINGS, *SLICINGS)
    assert cut.state_owner == (2, *OWNERS, *OWNERS)
