"""How a stage's lasting values lie on its replicas: whole on each, or each with a share (ZeRO, FSDP).

A share is an equal part along one dim (`contract.shard_dim`), said by the same `RowLayout` as the rows of a
batch: transfers, placing and gathering know no difference.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rannc_jax.contract import Sharding, shard_dim
from rannc_jax.ir.batch import RowLayout
from rannc_jax.runtime.transfer import DATA_AXIS, HOST_KIND, has_host_memory, sub_mesh_sharding

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the values of one stage lie, by what they are. None is whole on every replica.

    Args:
        mesh: the stage's devices.
        sharding: the stage's mode.
        offload: the optimizer state lies in host memory between updates.
    """

    mesh: Mesh
    sharding: Sharding = Sharding.REPLICATED
    offload: bool = False

    def parameter(self, shape: Shape) -> RowLayout | None:
        """Parameters between their uses, and what the prologue makes of them."""
        return self._share(shape, self.sharding.shards_parameters)

    def sums(self, shape: Shape) -> RowLayout | None:
        """Gradients while microbatches are added up; whole ones may differ between replicas."""
        return self._share(shape, self.sharding.shards_gradients)

    def update(self, shape: Shape) -> RowLayout | None:
        """Reduced gradients, optimizer state, and all that an update computes with."""
        return self._share(shape, self.sharding.shards_optimizer)

    def at_rest(self, shape: Shape) -> NamedSharding:
        """Optimizer state between updates."""
        here = self.on_mesh(self.update(shape))
        return _on_host(here) if self.offload and has_host_memory(self.mesh) else here

    def on_mesh(self, layout: RowLayout | None) -> NamedSharding:
        """A layout as JAX says it."""
        return sub_mesh_sharding(layout, self.mesh)

    def _share(self, shape: Shape, shards: bool) -> RowLayout | None:
        dim = shard_dim(shape, self.mesh.size) if shards else None
        return None if dim is None else RowLayout(dim)


@functools.cache
def _on_host(sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(HOST_KIND)


def gathered(x: Any, mesh: Mesh) -> Any:
    """Inside a program: the value whole on every replica."""
    return jax.lax.with_sharding_constraint(x, sub_mesh_sharding(None, mesh))


def reduced(parts: Sequence[Any], layouts: Sequence[RowLayout | None], mesh: Mesh) -> tuple[Any, ...]:
    """Inside a program: the sums over replicas, whole or as shares.

    Args:
        parts: [replicas, ...] each, one slice a replica.
        layouts: of the results.
        mesh: the replicas.
    """

    def run(*local: Any) -> tuple[Any, ...]:
        whole = [x[0] for x, layout in zip(local, layouts, strict=True) if layout is None]
        summed = iter(jax.lax.psum(whole, DATA_AXIS))
        return tuple(
            next(summed)
            if layout is None
            else jax.lax.psum_scatter(x[0], DATA_AXIS, scatter_dimension=layout.dim, tiled=True)
            for x, layout in zip(local, layouts, strict=True)
        )

    outs = tuple(sub_mesh_sharding(layout, mesh).spec for layout in layouts)
    ins = tuple(PartitionSpec(DATA_AXIS) for _ in parts)
    return jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(*parts)
