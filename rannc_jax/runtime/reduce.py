"""Sums over the replicas of a stage, and scalars from several stages in one place.

Gradients are accumulated locally: a stage with r replicas holds arrays `[r, *shape]` with dim 0 spread
over "data", each replica adding its own microbatch rows. Once a step one program a stage reduces all of
them, so the communication is paid once and XLA may join it. Sums are made in the accumulators' dtype,
float32 or wider.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rannc_jax.runtime.transfer import move, sub_mesh_sharding


def sum_replicas(
    stacked: Sequence[jax.Array], mesh: Mesh, divisor: jax.Array | None = None
) -> list[jax.Array]:
    """Sum accumulators over a stage's replicas, in one program.

    Args:
        stacked: arrays `[replicas, *shape]` with dim 0 spread over "data". They stay valid: an output has
            another shape, so their memory could not be reused.
        mesh: the stage's sub-mesh.
        divisor: scalar on `mesh`, such as the sum of weights; sums are divided by it.

    Returns:
        Arrays of shape `shape`, replicated on `mesh`.
    """
    return replica_sum(mesh)(list(stacked), divisor)


@functools.cache
def replica_sum(mesh: Mesh) -> Callable[[list[jax.Array], jax.Array | None], list[jax.Array]]:
    """The jitted program behind `sum_replicas`, the same object for every call."""

    def reduce(stacked: list[jax.Array], divisor: jax.Array | None) -> list[jax.Array]:
        sums = [jnp.sum(array, axis=0, dtype=array.dtype) for array in stacked]
        return sums if divisor is None else [total / divisor.astype(total.dtype) for total in sums]

    return jax.jit(reduce, out_shardings=sub_mesh_sharding(None, mesh))


def gather_scalars(values: Sequence[jax.Array], target: Mesh) -> jax.Array:
    """Scalars of one dtype from any sub-meshes as one vector `[len(values)]`, replicated on `target`.

    The order is the given one, so a sum over the vector does not depend on what arrives first.
    """
    return _stack(target)(move(values, [None] * len(values), target))


@functools.cache
def _stack(mesh: Mesh) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(lambda values: jnp.stack(values), out_shardings=sub_mesh_sharding(None, mesh))
