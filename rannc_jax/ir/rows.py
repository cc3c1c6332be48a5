"""Equations done differently where a program holds only some rows of a microbatch.

Random bits must be a function of the row, not of the replica that draws them, and rows that were added
to fill up a batch must not count. Both are hooks for `ir.evaluate`. The program is traced with the rows of
one replica; replica `part` of `parts` holds rows `[part * rows, (part + 1) * rows)` of the microbatch.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.extend.random import threefry2x32_p

from rannc_jax.ir.batch_info import RowLayout, RowMask
from rannc_jax.ir.evaluate import Hook, bind


def random_rows_hook(layout: RowLayout, local_rows: int, parts: int, part: Any) -> Hook:
    """Draw only the own rows of what the whole microbatch would draw, bit for bit.

    With partitionable threefry (JAX's default) element i of a draw depends on the key and i alone, so
    only the own rows are computed. Other generators, and `random_split`, draw in full and keep a part.

    Args:
        layout: where rows lie in the equation's output.
        local_rows: rows the program was traced with.
        parts: number of replicas.
        part: int32 scalar, this replica; may be traced.
    """

    def hook(eqn: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
        (keys,) = values
        rows = _Rows(layout, local_rows, parts, part)
        first = layout.dim - keys.ndim  # position in the shape that is drawn for every key
        shape = tuple(eqn.params["shape"])
        whole = (*shape[:first], shape[first] * parts, *shape[first + 1 :])
        if eqn.primitive.name == "random_bits" and _element_by_element(keys, whole):
            width = eqn.params["bit_width"]
            inner = RowLayout(first, layout.outer, layout.inner)
            rows = _Rows(inner, local_rows, parts, part)

            def draw(key: Any) -> Any:
                return _threefry_rows(key, width, shape, whole, rows)

            drawn = jax.vmap(draw)(keys.reshape(-1)) if keys.ndim else draw(keys)
            return [drawn.reshape(*keys.shape, *shape)]
        full = bind(eqn.replace(params={**eqn.params, "shape": whole}), values)[0]
        return [rows.own(full)]

    return hook


class _Rows:
    """The rows of one replica in a dim that holds [outer, parts * local, inner] elements."""

    def __init__(self, layout: RowLayout, local: int, parts: int, part: Any) -> None:
        self.dim, self.outer, self.inner = layout.dim, layout.outer, layout.inner
        self.local, self.parts, self.part = local, parts, part

    def own(self, full: Any) -> Any:
        """The part of a whole value."""
        before, after = full.shape[: self.dim], full.shape[self.dim + 1 :]
        split = full.reshape(*before, self.outer, self.parts * self.local, self.inner, *after)
        start = jnp.asarray(self.part, jnp.int32) * self.local
        cut = lax.dynamic_slice_in_dim(split, start, self.local, axis=self.dim + 1)
        return cut.reshape(*before, self.outer * self.local * self.inner, *after)

    def coordinates(self) -> Any:
        """Position in the whole dim of every element of the local one, uint32."""
        here = lax.iota(jnp.uint32, self.outer * self.local * self.inner)
        block = jnp.uint32(self.local * self.inner)
        outer, rest = here // block, here % block
        offset = jnp.asarray(self.part, jnp.uint32) * block
        return outer * (block * jnp.uint32(self.parts)) + offset + rest


def _element_by_element(keys: Any, shape: tuple[int, ...]) -> bool:
    """Do bits depend on the key and the position alone, with positions that fit 32 bits?"""
    threefry = str(keys.dtype) == "key<fry>"
    return threefry and bool(jax.config.jax_threefry_partitionable) and prod(shape) < 2**32


def _threefry_rows(key: Any, width: int, shape: tuple[int, ...], whole: tuple[int, ...], rows: _Rows) -> Any:
    """The bits that a draw of shape `whole` has at the own rows: threefry of the position, folded."""
    words = jax.random.key_data(key)
    position = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        line = rows.coordinates() if dim == rows.dim else lax.iota(jnp.uint32, size)
        stride = jnp.uint32(prod(whole[dim + 1 :]) % 2**32)
        position += lax.broadcast_in_dim(line * stride, shape, (dim,))
    high, low = threefry2x32_p.bind(words[0], words[1], jnp.zeros_like(position), position)
    if width == 64:
        return lax.shift_left(high.astype(jnp.uint64), jnp.uint64(32)) | low.astype(jnp.uint64)
    dtypes = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
    return (high ^ low).astype(dtypes[width])


def row_mask_hook(mask: RowMask, valid: Any, scale: Any = None) -> Hook:
    """Replace rows that are not valid by zeros before they are summed.

    Args:
        mask: the equation's operand and where its rows lie.
        valid: bool [rows].
        scale: factor on the rows that are kept: rows / valid rows, for a loss that divides by all rows.
    """

    def hook(eqn: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
        operand = values[mask.operand]
        layout = mask.layout
        line = jnp.broadcast_to(valid[None, :, None], (layout.outer, valid.shape[0], layout.inner)).reshape(
            -1
        )
        shape = [1] * operand.ndim
        shape[layout.dim] = line.shape[0]
        kept = operand if scale is None else operand * jnp.asarray(scale, operand.dtype)
        kept = jnp.where(line.reshape(shape), kept, jnp.zeros((), operand.dtype))
        return bind(eqn, [kept if i == mask.operand else v for i, v in enumerate(values)])

    return hook
