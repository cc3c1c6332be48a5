"""Views: operators that show the elements of one array in another shape, and write into such views."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.layouts import along, broadcasting, permuting, pointwise, reading_order
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import jax_dtype

aten = torch.ops.aten


def clamped_slice(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """torch's slice bounds within a dim: negative ones count from the end, all are clamped."""
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    end = min(max(end + size if end < 0 else end, start), size)
    return start, end


@lowering(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
    layouts=reading_order,
)
def reshape(x: Any, shape: Sequence[int]) -> Any:
    if x.size == 0:  # JAX cannot infer a dim of an empty array; it has no other size than 0
        shape = [0 if size == -1 else size for size in shape]
    return jnp.reshape(x, tuple(shape))


@lowering(aten.view_copy.default, layouts=reading_order)
def view_copy(x: Any, shape: Sequence[int]) -> Any:
    return reshape(x, shape)


@lowering(aten.view.dtype)
def view_dtype(x: Any, dtype: Any) -> Any:
    wanted = jax_dtype(dtype)
    ratio = wanted.itemsize // x.dtype.itemsize
    if ratio > 1:
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, ratio), wanted)
    out = lax.bitcast_convert_type(x, wanted)
    return out.reshape(*x.shape[:-1], -1) if out.ndim > x.ndim else out


@lowering(aten.resize.default)
def resize(x: Any, size: Sequence[int], **_: Any) -> Any:
    """The elements in reading order; what torch leaves unset is zero here."""
    count = math.prod(size)
    flat = x.reshape(-1)[:count]
    return jnp.pad(flat, (0, count - flat.size)).reshape(tuple(size))


@lowering(aten.resize_as.default)
def resize_as(x: Any, like: Any, **_: Any) -> Any:
    return resize(x, like.shape)


@lowering(aten.view_as.default, aten.reshape_as.default)
def view_as(x: Any, like: Any) -> Any:
    return jnp.reshape(x, like.shape)


@lowering(aten.expand.default, aten.expand_copy.default, layouts=broadcasting)
def expand(x: Any, shape: Sequence[int], *, implicit: bool = False) -> Any:
    del implicit
    lead = len(shape) - x.ndim
    full = tuple(x.shape[d - lead] if size == -1 else size for d, size in enumerate(shape))
    return jnp.broadcast_to(x, full)


@lowering(aten.expand_as.default, layouts=pointwise)
def expand_as(x: Any, like: Any) -> Any:
    return jnp.broadcast_to(x, like.shape)


@lowering(aten.broadcast_to.default, layouts=broadcasting)
def broadcast_to(x: Any, shape: Sequence[int]) -> Any:
    return expand(x, shape)


@lowering(aten.permute.default, aten.permute_copy.default, layouts=permuting)
def permute(x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, dims)


@lowering(
    aten.transpose.int,
    aten.transpose_copy.int,
    aten.swapaxes.default,
    aten.swapdims.default,
    layouts=permuting,
)
def transpose(x: Any, a: int, b: int) -> Any:
    return jnp.swapaxes(x, a, b) if x.ndim else x


@lowering(aten.t.default, aten.numpy_T.default)
def t(x: Any) -> Any:
    return x.T


@lowering(aten.mT.default, aten.adjoint.default, layouts=permuting)
def matrix_transpose(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2)


@lowering(aten.movedim.intlist, aten.movedim.int, layouts=permuting)
def movedim(x: Any, source: Any, destination: Any) -> Any:
    return jnp.moveaxis(x, source, destination)


@lowering(aten.unsqueeze.default, layouts=reading_order)
def unsqueeze(x: Any, dim: int) -> Any:
    return jnp.expand_dims(x, dim)


@lowering(aten.squeeze.default, layouts=reading_order)
def squeeze(x: Any) -> Any:
    return jnp.squeeze(x)


@lowering(aten.squeeze.dim, layouts=reading_order)
def squeeze_dim(x: Any, dim: int) -> Any:
    return squeeze_dims(x, (dim,))


@lowering(aten.squeeze.dims, layouts=reading_order)
def squeeze_dims(x: Any, dims: Sequence[int]) -> Any:
    """Only dims of size 1 go."""
    if not x.ndim:
        return x
    return jnp.squeeze(x, tuple(d % x.ndim for d in dims if x.shape[d] == 1))


@lowering(aten.flatten.using_ints, layouts=reading_order)
def flatten(x: Any, start: int = 0, end: int = -1) -> Any:
    if not x.ndim:
        return x.reshape(1)
    start, end = start % x.ndim, end % x.ndim
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


@lowering(aten.unflatten.int, layouts=reading_order)
def unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Any:
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


@lowering(aten.slice.Tensor, aten.slice_copy.Tensor, layouts=along("dim"))
def slice_dim(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim %= x.ndim
    start, end = clamped_slice(x.shape[dim], start, end)
    return lax.slice_in_dim(x, start, end, step, dim)


@lowering(aten.narrow.default, layouts=along("dim"))
def narrow(x: Any, dim: int, start: int, length: int) -> Any:
    start = start % x.shape[dim] if start < 0 else start
    return lax.slice_in_dim(x, start, start + length, axis=dim)


@lowering(aten.select.int, aten.select_copy.int, layouts=along("dim"))
def select(x: Any, dim: int, index: int) -> Any:
    return lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


@lowering(aten.slice_scatter.default)
def slice_scatter(
    x: Any, source: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    dim %= x.ndim
    start, end = clamped_slice(x.shape[dim], start, end)
    where = (slice(None),) * dim + (slice(start, end, step),)
    return x.at[where].set(source.astype(x.dtype))


@lowering(aten.select_scatter.default)
def select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    where = (slice(None),) * (dim % x.ndim) + (index,)
    return x.at[where].set(source.astype(x.dtype))


@lowering(aten.unfold.default)
def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    """Windows along a dim; their content becomes the last dim."""
    if not x.ndim:
        return x.reshape(1)[:size]
    dim %= x.ndim
    count = (x.shape[dim] - size) // step + 1
    index = jnp.arange(count)[:, None] * step + jnp.arange(size)[None, :]
    return jnp.moveaxis(jnp.take(x, index, axis=dim), dim + 1, -1)


@lowering(aten.tril.default)
def tril(x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lowering(aten.triu.default)
def triu(x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@lowering(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


@lowering(aten.diag_embed.default)
def diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    size = x.shape[-1] + abs(offset)
    rows = jnp.arange(x.shape[-1]) + max(-offset, 0)
    cols = jnp.arange(x.shape[-1]) + max(offset, 0)
    out = jnp.zeros((*x.shape[:-1], size, size), x.dtype).at[..., rows, cols].set(x)
    return jnp.moveaxis(out, (-2, -1), (dim1, dim2))
