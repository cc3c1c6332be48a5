"""Operators that join, cut, repeat and turn arrays."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.layouts import along, joining
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import promoted

aten = torch.ops.aten


@lowering(aten.cat.default, aten.concat.default, aten.concatenate.default, layouts=joining)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Old-style empty tensors of shape (0,) are skipped, as torch does."""
    dtype = promoted(tensors)
    kept = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    return jnp.concatenate([x.astype(dtype) for x in kept], dim)


@lowering(aten.stack.default)
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    dtype = promoted(tensors)
    return jnp.stack([x.astype(dtype) for x in tensors], dim)


@lowering(aten.split.Tensor, aten.split_copy.Tensor, layouts=along("dim"))
def split(x: Any, size: int, dim: int = 0) -> tuple[Any, ...]:
    length = x.shape[dim]
    if length == 0:
        return (x,)
    return tuple(
        lax.slice_in_dim(x, i, min(i + size, length), axis=dim % x.ndim) for i in range(0, length, size)
    )


@lowering(
    aten.split_with_sizes.default, aten.split_with_sizes_copy.default, aten.split.sizes, layouts=along("dim")
)
def split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> tuple[Any, ...]:
    parts = []
    start = 0
    for size in sizes:
        parts.append(lax.slice_in_dim(x, start, start + size, axis=dim % x.ndim))
        start += size
    return tuple(parts)


@lowering(aten.chunk.default, layouts=along("dim"))
def chunk(x: Any, chunks: int, dim: int = 0) -> tuple[Any, ...]:
    return split(x, max(-(-x.shape[dim] // chunks), 1), dim)


@lowering(aten.unbind.int, aten.unbind_copy.int, layouts=along("dim"))
def unbind(x: Any, dim: int = 0) -> tuple[Any, ...]:
    dim %= x.ndim
    return tuple(lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim]))


@lowering(aten.repeat.default)
def repeat(x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x, repeats)


@lowering(aten.tile.default)
def tile(x: Any, dims: Sequence[int]) -> Any:
    return jnp.tile(x, dims)


@lowering(aten.repeat_interleave.Tensor)
def places_repeated(repeats: Any, *, output_size: int) -> Any:
    """Each place as often as it says; there are `output_size` in all."""
    return jnp.repeat(jnp.arange(repeats.shape[0]), repeats, total_repeat_length=output_size)


@lowering(aten.repeat_interleave.self_int)
def repeat_interleave(x: Any, repeats: int, dim: int | None = None, **_: Any) -> Any:
    return jnp.repeat(x, repeats, axis=dim)


@lowering(aten.flip.default, layouts=along("dims"))
def flip(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dims))


@lowering(aten.roll.default)
def roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowering(aten.rot90.default)
def rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    return jnp.rot90(x, k, (dims[0], dims[1]))


@lowering(aten.meshgrid.indexing)
def meshgrid(tensors: Sequence[Any], *, indexing: str = "ij") -> tuple[Any, ...]:
    return tuple(jnp.meshgrid(*map(jnp.atleast_1d, tensors), indexing=indexing))


@lowering(aten.meshgrid.default)
def meshgrid_ij(tensors: Sequence[Any]) -> tuple[Any, ...]:
    return meshgrid(tensors)


@lowering(aten.broadcast_tensors.default)
def broadcast_tensors(tensors: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(jnp.broadcast_arrays(*tensors))
