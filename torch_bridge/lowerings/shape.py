"""Operators that only rearrange: views, joins, splits, padding, rolling."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import jax_dtype, promoted

aten = torch.ops.aten


def clamped_slice(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """torch's slice bounds within a dim: negative ones count from the end, all are clamped."""
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    end = min(max(end + size if end < 0 else end, start), size)
    return start, end


@lowering(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_copy.default)
def reshape(x: Any, shape: Sequence[int]) -> Any:
    if x.size == 0:  # JAX cannot infer a dim of an empty array; it has no other size than 0
        shape = [0 if size == -1 else size for size in shape]
    return jnp.reshape(x, tuple(shape))


@lowering(aten.view_copy.default)
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


@lowering(aten.view_as.default, aten.reshape_as.default)
def view_as(x: Any, like: Any) -> Any:
    return jnp.reshape(x, like.shape)


@lowering(aten.expand.default, aten.expand_copy.default)
def expand(x: Any, shape: Sequence[int], *, implicit: bool = False) -> Any:
    del implicit
    lead = len(shape) - x.ndim
    full = tuple(x.shape[d - lead] if size == -1 else size for d, size in enumerate(shape))
    return jnp.broadcast_to(x, full)


@lowering(aten.expand_as.default)
def expand_as(x: Any, like: Any) -> Any:
    return jnp.broadcast_to(x, like.shape)


@lowering(aten.broadcast_to.default)
def broadcast_to(x: Any, shape: Sequence[int]) -> Any:
    return expand(x, shape)


@lowering(aten.permute.default, aten.permute_copy.default)
def permute(x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, dims)


@lowering(aten.transpose.int, aten.transpose_copy.int, aten.swapaxes.default, aten.swapdims.default)
def transpose(x: Any, a: int, b: int) -> Any:
    return jnp.swapaxes(x, a, b) if x.ndim else x


@lowering(aten.t.default, aten.numpy_T.default)
def t(x: Any) -> Any:
    return x.T


@lowering(aten.mT.default, aten.adjoint.default)
def matrix_transpose(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2)


@lowering(aten.movedim.intlist, aten.movedim.int)
def movedim(x: Any, source: Any, destination: Any) -> Any:
    return jnp.moveaxis(x, source, destination)


@lowering(aten.unsqueeze.default)
def unsqueeze(x: Any, dim: int) -> Any:
    return jnp.expand_dims(x, dim)


@lowering(aten.squeeze.default)
def squeeze(x: Any) -> Any:
    return jnp.squeeze(x)


@lowering(aten.squeeze.dim)
def squeeze_dim(x: Any, dim: int) -> Any:
    return squeeze_dims(x, (dim,))


@lowering(aten.squeeze.dims)
def squeeze_dims(x: Any, dims: Sequence[int]) -> Any:
    """Only dims of size 1 go."""
    if not x.ndim:
        return x
    return jnp.squeeze(x, tuple(d % x.ndim for d in dims if x.shape[d] == 1))


@lowering(aten.flatten.using_ints)
def flatten(x: Any, start: int = 0, end: int = -1) -> Any:
    if not x.ndim:
        return x.reshape(1)
    start, end = start % x.ndim, end % x.ndim
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


@lowering(aten.unflatten.int)
def unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Any:
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


@lowering(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_dim(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim %= x.ndim
    start, end = clamped_slice(x.shape[dim], start, end)
    return lax.slice_in_dim(x, start, end, step, dim)


@lowering(aten.narrow.default)
def narrow(x: Any, dim: int, start: int, length: int) -> Any:
    start = start % x.shape[dim] if start < 0 else start
    return lax.slice_in_dim(x, start, start + length, axis=dim)


@lowering(aten.select.int, aten.select_copy.int)
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


@lowering(aten.cat.default, aten.concat.default, aten.concatenate.default)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Old-style empty tensors of shape (0,) are skipped, as torch does."""
    dtype = promoted(tensors)
    kept = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    return jnp.concatenate([x.astype(dtype) for x in kept], dim)


@lowering(aten.stack.default)
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    dtype = promoted(tensors)
    return jnp.stack([x.astype(dtype) for x in tensors], dim)


@lowering(aten.split.Tensor, aten.split_copy.Tensor)
def split(x: Any, size: int, dim: int = 0) -> tuple[Any, ...]:
    length = x.shape[dim]
    if length == 0:
        return (x,)
    return tuple(
        lax.slice_in_dim(x, i, min(i + size, length), axis=dim % x.ndim) for i in range(0, length, size)
    )


@lowering(aten.split_with_sizes.default, aten.split_with_sizes_copy.default, aten.split.sizes)
def split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> tuple[Any, ...]:
    parts = []
    start = 0
    for size in sizes:
        parts.append(lax.slice_in_dim(x, start, start + size, axis=dim % x.ndim))
        start += size
    return tuple(parts)


@lowering(aten.chunk.default)
def chunk(x: Any, chunks: int, dim: int = 0) -> tuple[Any, ...]:
    return split(x, max(-(-x.shape[dim] // chunks), 1), dim)


@lowering(aten.unbind.int, aten.unbind_copy.int)
def unbind(x: Any, dim: int = 0) -> tuple[Any, ...]:
    dim %= x.ndim
    return tuple(lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim]))


@lowering(aten.repeat.default)
def repeat(x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x, repeats)


@lowering(aten.tile.default)
def tile(x: Any, dims: Sequence[int]) -> Any:
    return jnp.tile(x, dims)


@lowering(aten.repeat_interleave.self_int)
def repeat_interleave(x: Any, repeats: int, dim: int | None = None, **_: Any) -> Any:
    return jnp.repeat(x, repeats, axis=dim)


@lowering(aten.flip.default)
def flip(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dims))


@lowering(aten.roll.default)
def roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowering(aten.rot90.default)
def rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    return jnp.rot90(x, k, (dims[0], dims[1]))


@lowering(aten.constant_pad_nd.default)
def constant_pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """`pad` lists (before, after) from the last dim on; negative numbers cut off."""
    config = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        config[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


_PAD_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@lowering(aten.pad.default)
def pad(x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    if mode == "constant":
        return constant_pad(x, pad, 0 if value is None else value)
    return _mode_pad(x, pad, _PAD_MODES[mode])


def _mode_pad(x: Any, pad: Sequence[int], mode: str) -> Any:
    widths = [(0, 0)] * x.ndim
    cuts = [slice(None)] * x.ndim
    for i in range(len(pad) // 2):
        before, after = pad[2 * i], pad[2 * i + 1]
        dim = x.ndim - 1 - i
        widths[dim] = (max(before, 0), max(after, 0))
        length = widths[dim][0] + x.shape[dim] + widths[dim][1]
        cuts[dim] = slice(max(-before, 0), length + min(after, 0))
    # Cut last: what is padded mirrors the whole of x.
    return jnp.pad(x, widths, mode=mode)[tuple(cuts)]


@lowering(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(x: Any, pad: Sequence[int]) -> Any:
    return _mode_pad(x, pad, "reflect")


@lowering(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(x: Any, pad: Sequence[int]) -> Any:
    return _mode_pad(x, pad, "edge")


@lowering(aten.pixel_shuffle.default)
def pixel_shuffle(x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    n = len(lead)
    x = jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return x.reshape(*lead, channels // factor**2, height * factor, width * factor)


@lowering(aten.pixel_unshuffle.default)
def pixel_unshuffle(x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    n = len(lead)
    x = jnp.transpose(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return x.reshape(*lead, channels * factor**2, height // factor, width // factor)


@lowering(aten.unfold.default)
def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    """Windows along a dim; their content becomes the last dim."""
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


@lowering(aten.meshgrid.indexing)
def meshgrid(tensors: Sequence[Any], *, indexing: str = "ij") -> tuple[Any, ...]:
    return tuple(jnp.meshgrid(*map(jnp.atleast_1d, tensors), indexing=indexing))


@lowering(aten.meshgrid.default)
def meshgrid_ij(tensors: Sequence[Any]) -> tuple[Any, ...]:
    return meshgrid(tensors)


@lowering(aten.broadcast_tensors.default)
def broadcast_tensors(tensors: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(jnp.broadcast_arrays(*tensors))
