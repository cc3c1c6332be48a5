"""Reductions over runs of elements: segments, and bags of embeddings."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.scatter import product_at
from torch_bridge.tensors import accumulation

aten = torch.ops.aten


@lowering(aten.segment_reduce.default)
def segment_reduce(
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Any:
    """Dims before `axis` are a batch, each with segments of its own; an empty segment gives `initial`."""
    del indices, unsafe, axis  # the shape of lengths or offsets says the axis
    if offsets is None:
        offsets = jnp.pad(jnp.cumsum(lengths, -1), [(0, 0)] * (lengths.ndim - 1) + [(1, 0)])
    lead = offsets.ndim - 1

    def one(data: Any, offsets: Any) -> Any:
        return _reduced(data, offsets, reduce, initial)

    for _ in range(lead):
        one = jax.vmap(one)
    return one(data, offsets)


def _reduced(data: Any, offsets: Any, reduce: str, initial: Any) -> Any:
    """data `[elements, ...]`, offsets `[segments + 1]`."""
    count = offsets.shape[0] - 1
    place = jnp.arange(data.shape[0])
    inside = (place >= offsets[0]) & (place < offsets[-1])
    segment = jnp.where(inside, jnp.searchsorted(offsets, place, side="right") - 1, count)
    neutral = {"sum": 0, "mean": 0, "prod": 1, "max": -jnp.inf, "min": jnp.inf}[reduce]
    start = jnp.full((count, *data.shape[1:]), neutral if initial is None else initial, data.dtype)
    if reduce == "prod":
        inside = inside.reshape(-1, *(1,) * (data.ndim - 1))
        return product_at(start, (jnp.minimum(segment, count - 1),), jnp.where(inside, data, 1))
    if reduce in ("max", "min"):
        extreme = getattr(jax.ops, f"segment_{reduce}")(data, segment, count)
        keeps = start > extreme if reduce == "max" else start < extreme
        return jnp.where(keeps, start, extreme)
    total = start + jax.ops.segment_sum(data, segment, count)
    if reduce == "sum":
        return total
    sizes = jnp.diff(offsets).reshape(-1, *(1,) * (data.ndim - 1)).astype(data.dtype)
    empty = start if initial is not None else math.nan
    return jnp.where(sizes > 0, total / jnp.maximum(sizes, 1), empty)


@lowering(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Any,
    index: Any,
    offsets: Any,
    _scale: bool = False,
    mode: int = 0,
    _sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, ...]:
    """(bags, ...): sum, mean or max (mode 0, 1, 2) of the rows between offsets."""
    starts = offsets[:-1] if include_last_offset else offsets
    num_bags = starts.shape[0]
    bag = jnp.searchsorted(starts, jnp.arange(index.shape[0]), side="right") - 1
    valid = index != padding_idx if padding_idx >= 0 else jnp.ones(index.shape, bool)
    rows = weight[index].astype(accumulation(weight.dtype))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counts = jax.ops.segment_sum(valid.astype(rows.dtype), bag, num_bags)
    if mode == 2:
        rows = jnp.where(valid[:, None], rows, -jnp.inf)
        out = jnp.where((counts > 0)[:, None], jax.ops.segment_max(rows, bag, num_bags), 0)
    else:
        out = jax.ops.segment_sum(jnp.where(valid[:, None], rows, 0), bag, num_bags)
        out = out / jnp.maximum(counts, 1)[:, None] if mode == 1 else out
    return out, bag, counts, counts
