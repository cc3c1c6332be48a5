"""Moving values between sub-meshes: exact, for every pair of counts, and never through the host."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rannc_jax.ir.batch import RowLayout
from rannc_jax.runtime import transfer
from tests.runtime.instrument import sub_mesh, watch_host_traffic

COUNTS = range(1, 9)


def spread(value, layout, mesh):
    """The value on a mesh, by JAX's own means."""
    return jax.device_put(value, transfer.sub_mesh_sharding(layout, mesh))


def check(moved, value, layout, mesh):
    assert moved.sharding.is_equivalent_to(transfer.sub_mesh_sharding(layout, mesh), moved.ndim)
    assert moved.dtype == value.dtype
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        moved, value = jax.random.key_data(moved), jax.random.key_data(value)
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(value))


@pytest.mark.parametrize(
    ("source", "target"), [((0, 1), (1, 2)), ((0, 1), (1, 0)), ((0, 1, 2), (2,)), ((3,), (3, 1))]
)
def test_sub_meshes_may_share_devices_and_the_source_may_be_deleted(source, target):
    value, layout = np.arange(24.0, dtype=np.float32).reshape(2, 12), RowLayout(dim=1, inner=2)
    sources = [spread(value, layout, sub_mesh(*source)), spread(value, None, sub_mesh(*source))]
    moved = transfer.move(sources, [layout, None], sub_mesh(*target))
    for array in sources:
        array.delete()
    check(moved[0], value, layout, sub_mesh(*target))
    check(moved[1], value, None, sub_mesh(*target))


def test_a_value_that_lies_as_asked_is_returned_itself():
    layout = RowLayout(dim=0)
    value = spread(jnp.arange(4), layout, sub_mesh(0, 1))
    assert transfer.move([value], [layout], sub_mesh(0, 1))[0] is value


VALUES = {
    "bfloat16 rows in the second dim": (lambda: jnp.arange(48, dtype=jnp.bfloat16).reshape(2, 12, 2), 1),
    "booleans": (lambda: jnp.arange(12) % 3 == 0, 0),
    "typed keys": (lambda: jax.random.split(jax.random.key(0), 12), 0),
    "no rows at all": (lambda: jnp.zeros((0, 3)), 0),
    "rows of nothing": (lambda: jnp.zeros((12, 0)), 0),
    "a scalar": (lambda: jnp.float32(2.5), None),
    "a scalar key": (lambda: jax.random.key(3), None),
    "a replicated matrix": (lambda: jnp.arange(6.0).reshape(2, 3), None),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_every_kind_can_be_moved(kind):
    make, dim = VALUES[kind]
    value, layout = make(), None if dim is None else RowLayout(dim=dim)
    meshes = [sub_mesh(*devices) for devices in [(0,), (1, 2), (3, 4, 5), (4, 5, 6, 7)]]
    for source, target in itertools.product(meshes, meshes):
        (moved,) = transfer.move([spread(value, layout, source)], [layout], target)
        check(moved, value, layout, target)


def test_rows_can_be_gathered_from_and_spread_to_replicated_values():
    value, layout, source, target = jnp.arange(12), RowLayout(dim=0), sub_mesh(0, 1, 2), sub_mesh(3, 4)
    (spread_out,) = transfer.move([spread(value, None, source)], [layout], target)
    check(spread_out, value, layout, target)


def test_one_call_moves_values_from_several_sub_meshes_with_one_device_put():
    layout, target = RowLayout(dim=0), sub_mesh(5, 6, 7)
    values = [jnp.arange(12), jnp.arange(24.0).reshape(12, 2), jnp.float32(1)]
    sources = [
        spread(values[0], layout, sub_mesh(0, 1, 2, 3)),
        spread(values[1], layout, sub_mesh(2, 3, 4)),
        spread(values[2], None, sub_mesh(0, 1)),
    ]
    with watch_host_traffic() as seen:
        moved = transfer.move(sources, [layout, layout, None], target)
    assert seen.device_puts == 1
    for array, value, where in zip(moved, values, [layout, layout, None], strict=True):
        check(array, value, where, target)


def move_rows(move, source, target):
    """Move integer rows from some first devices to some last ones; what the instrument saw."""
    layout, target_mesh = RowLayout(dim=0), sub_mesh(*range(8 - target, 8))
    value = jnp.arange(math.lcm(source, target) * 3, dtype=jnp.int32).reshape(-1, 3)
    given = spread(value, layout, sub_mesh(*range(source)))
    with watch_host_traffic() as seen:
        (moved,) = jax.block_until_ready(move([given], [layout], target_mesh))
    check(moved, value, layout, target_mesh)
    return seen


@pytest.mark.parametrize("source", COUNTS)
def test_integer_rows_arrive_exactly_at_any_count_and_never_pass_the_host(source):
    for target in COUNTS:
        seen = move_rows(transfer.move, source, target)
        assert seen.none, f"{source} to {target} replicas: {seen}"


def test_the_instrument_sees_that_a_plain_device_put_passes_the_host():
    def plain(values, layouts, target):
        return jax.device_put(values, [transfer.sub_mesh_sharding(layout, target) for layout in layouts])

    assert move_rows(plain, 4, 4).none
    seen = move_rows(plain, 4, 2)
    assert seen.reshards
    assert seen.materialised


@pytest.mark.parametrize("devices", [(0,), (2, 3), (1, 2, 3)])
def test_host_values_are_placed_and_stay_the_callers_own(devices):
    rows, scalar, mesh = np.arange(12.0, dtype=np.float32), 3, sub_mesh(*devices)
    placed = transfer.place([rows, rows, scalar], [RowLayout(dim=0), None, None], mesh)
    jax.block_until_ready(placed)
    rows[:] = -1
    check(placed[0], np.arange(12.0, dtype=np.float32), RowLayout(dim=0), mesh)
    check(placed[1], np.arange(12.0, dtype=np.float32), None, mesh)
    check(placed[2], jnp.int32(3), None, mesh)


@pytest.mark.parametrize("devices", [(0,), (2, 3), (1, 2, 3)])
def test_device_values_are_placed_without_the_host_and_stay_the_callers_own(devices):
    value, layout, mesh = jnp.arange(12), RowLayout(dim=0), sub_mesh(*devices)
    given = [value, spread(value, layout, mesh), spread(value, None, mesh)]
    with watch_host_traffic() as seen:
        placed = transfer.place(given, [layout, layout, None], mesh)
    assert seen.none
    for array in placed:
        array.delete()
    for array in given:
        np.testing.assert_array_equal(np.asarray(array), np.arange(12))


def test_arrays_spread_in_other_ways_are_placed_too():
    odd = jax.device_put(
        jnp.arange(12).reshape(2, 6), NamedSharding(sub_mesh(0, 1), PartitionSpec(None, "data"))
    )
    (placed,) = transfer.place([odd], [None], sub_mesh(2, 3))
    check(placed, jnp.arange(12).reshape(2, 6), None, sub_mesh(2, 3))
