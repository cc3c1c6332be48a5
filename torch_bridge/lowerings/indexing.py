"""Reading and writing by index: embedding, gather, scatter, advanced indexing.

torch promises nothing about an index out of bounds (it raises); here reads are clamped to the bounds
that JAX's default gives. Negative indices count from the end in `index` and `index_put` only.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.errors import BridgeError, message
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import constant, countable

aten = torch.ops.aten


@lowering(aten.embedding.default)
def embedding(
    weight: Any,
    index: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """The padding row gets no gradient; by frequency, a row's gradient is the mean of its uses."""
    del sparse
    rows = jnp.take(weight, index, axis=0, mode="clip")
    if scale_grad_by_freq:
        counts = jnp.zeros(weight.shape[0], weight.dtype).at[index].add(1)
        moving = rows / counts[index][..., None]
        rows = lax.stop_gradient(rows) + (moving - lax.stop_gradient(moving))
    if padding_idx < 0:
        return rows
    return jnp.where((index == padding_idx)[..., None], lax.stop_gradient(rows), rows)


@lowering(aten.embedding_renorm.default)
def embedding_renorm(weight: Any, index: Any, max_norm: float, norm_type: float) -> Any:
    """The table with the rows that are read made no longer than `max_norm`."""
    rows = weight[index]
    length = jnp.linalg.norm(
        rows.astype(jnp.promote_types(rows.dtype, np.float32)), norm_type, -1, keepdims=True
    )
    # torch's 1e-7 keeps a row that is divided by its length a little below the limit.
    shorter = (rows * (max_norm / (length + 1e-7))).astype(rows.dtype)
    return weight.at[index].set(jnp.where(length > max_norm, shorter, rows))


@lowering(aten.gather.default)
def gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    del sparse_grad
    if not x.ndim:
        return jnp.broadcast_to(x, index.shape)
    if not index.ndim:
        return gather(x, dim, index.reshape(1)).reshape(())
    dim %= x.ndim
    # Index may be smaller than x in the other dims; torch reads the leading part there.
    cut = tuple(slice(None) if d == dim else slice(0, size) for d, size in enumerate(index.shape))
    return jnp.take_along_axis(x[cut], index, dim, mode="clip")


@lowering(aten.take_along_dim.default)
def take_along_dim(x: Any, index: Any, dim: int | None = None) -> Any:
    return jnp.take_along_axis(x, index, dim)


@lowering(aten.index_select.default)
def index_select(x: Any, dim: int, index: Any) -> Any:
    if not x.ndim:
        return x
    return jnp.take(x, index.reshape(-1), axis=dim, mode="clip")


@lowering(aten.take.default)
def take(x: Any, index: Any) -> Any:
    return x.reshape(-1)[index]


def _where(indices: Sequence[Any]) -> tuple[Any, ...]:
    for index in indices:
        if index is not None and index.dtype == bool:
            raise BridgeError(
                message(
                    "indexing with a boolean mask has a shape that depends on data.",
                    hint="use torch.where(mask, x, fill), or multiply by the mask",
                )
            )
    return tuple(slice(None) if index is None else index for index in indices)


@lowering(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(x: Any, indices: Sequence[Any]) -> Any:
    return x[_where(indices)]


@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *_: Any) -> Any:
    values = values.astype(x.dtype)
    if accumulate:
        x, values = countable(x), countable(values)
    masks = [i for i in indices if i is not None and i.dtype == bool]
    if masks:
        return _masked_put(x, indices, values, accumulate)
    place = x.at[_where(indices)]
    return place.add(values) if accumulate else place.set(values)


def _masked_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    """`x[:, mask] = values`: the k-th true place takes the k-th value, or all take the only one."""
    first = next(i for i, index in enumerate(indices) if index is not None)
    if any(index is not None for index in indices[first + 1 :]):
        _where(indices)
    mask = indices[first]
    rest = x.shape[first + mask.ndim :]
    flat = x.reshape(*x.shape[:first], mask.size, *rest)
    axis = values.ndim - len(rest) - 1
    if axis >= 0 and values.shape[axis] > 1:
        order = jnp.cumsum(mask.reshape(-1)) - 1
        values = jnp.take(values, order, axis=axis, mode="clip")
    values = jnp.broadcast_to(values, flat.shape)
    chosen = mask.reshape(-1, *(1,) * len(rest))
    return jnp.where(chosen, flat + values if accumulate else values, flat).reshape(x.shape)


@lowering(aten.index_add.default)
def index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    if not x.ndim:
        return x + jnp.sum(source) * alpha
    where = (slice(None),) * (dim % x.ndim) + (index.reshape(-1),)
    x, source = countable(x), countable(source)
    return x.at[where].add(source if alpha == 1 else source * jnp.asarray(alpha, source.dtype))


@lowering(aten.index_copy.default)
def index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    if not x.ndim:
        return source.reshape(())
    return x.at[(slice(None),) * (dim % x.ndim) + (index.reshape(-1),)].set(source)


@lowering(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    if not x.ndim:
        return jnp.asarray(value, x.dtype)
    return x.at[(slice(None),) * (dim % x.ndim) + (index.reshape(-1),)].set(constant(value, x.dtype))


@lowering(aten.one_hot.default)
def one_hot(index: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise BridgeError(
            message("one_hot without num_classes has a shape that depends on data.", hint="pass num_classes")
        )
    return jax.nn.one_hot(index, num_classes, dtype=index.dtype)


@lowering(aten.bucketize.Tensor)
def bucketize(x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    del out_int32
    return jnp.searchsorted(boundaries, x, side="right" if right else "left")
