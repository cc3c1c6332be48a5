"""Sums over replicas: right, replicated, and by one reduction instead of gathered stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rannc_jax.ir.batch import RowLayout
from rannc_jax.runtime import reduce, transfer
from tests.runtime.instrument import sub_mesh, watch_host_traffic

STACK = RowLayout(dim=0)


def stacks(replicas, mesh):
    key = jax.random.key(0)
    values = [jax.random.normal(key, (replicas, 5, 3)), jax.random.normal(key, (replicas,))]
    return values, transfer.place(values, [STACK, STACK], mesh)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_accumulators_are_summed_over_replicas_and_divided(replicas):
    mesh = sub_mesh(*range(2, 2 + replicas))
    values, placed = stacks(replicas, mesh)
    (divisor,) = transfer.place([4.0], [None], mesh)
    with watch_host_traffic() as seen:
        plain, divided = reduce.sum_replicas(placed, mesh), reduce.sum_replicas(placed, mesh, divisor)
    assert seen.none
    for value, total, mean in zip(values, plain, divided, strict=True):
        expected = np.sum(np.asarray(value), axis=0)
        np.testing.assert_allclose(total, expected, rtol=1e-6)
        np.testing.assert_allclose(mean, expected / 4, rtol=1e-6)
        assert total.dtype == jnp.float32
        assert total.sharding.is_equivalent_to(transfer.sub_mesh_sharding(None, mesh), total.ndim)


def test_the_sum_is_one_program_that_reduces_and_never_gathers():
    mesh = sub_mesh(0, 1, 2, 3)
    _, placed = stacks(4, mesh)
    text = reduce.replica_sum(mesh).lower(placed, None).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text


def test_scalars_of_several_stages_come_together_in_order():
    meshes = [sub_mesh(0), sub_mesh(1, 2), sub_mesh(3, 4, 5)]
    values = [transfer.place([float(stage)], [None], mesh)[0] for stage, mesh in enumerate(meshes)]
    with watch_host_traffic() as seen:
        gathered = reduce.gather_scalars(values, meshes[1])
    assert seen.none
    assert seen.device_puts == 1
    np.testing.assert_array_equal(gathered, [0.0, 1.0, 2.0])
    assert gathered.sharding.is_equivalent_to(transfer.sub_mesh_sharding(None, meshes[1]), 1)
