"""Leaves of the state that are stacked over layers of several stages.

The user's leaf has one shape, `[layers, ...]`; its slices live on the stages of their layers and are never
put together on a device unless someone asks for it. A `StackedArray` is that leaf: shape and dtype of the
whole, one array a layer. NumPy and `jnp.asarray` take it for the joined array; arithmetic with scalars and
with leaves of the same form goes slice by slice, on the devices of the slices (in their own memory, wherever
the slices lie). (JAX's own compiled functions take arrays only: `jnp.asarray(leaf)` first.)
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from rannc_jax.ir.leaves import Leaf, Slicing
from rannc_jax.runtime.transfer import in_own_memory

# Of the joined array: these bring the slices together, as jnp.asarray does.
_OF_THE_WHOLE = frozenset(
    "T all any at dot flatten item max mean min ravel reshape squeeze std sum tolist transpose var".split()
)


class StackedArray(NDArrayOperatorsMixin):
    """An array whose slices are arrays of their own, each on the devices of its stage.

    Args:
        parts: the slices, in order.
        slicing: how the whole array is sliced.
    """

    __slots__ = ("parts", "slicing")

    def __init__(self, parts: Sequence[jax.Array], slicing: Slicing) -> None:
        assert len(parts) == slicing.num_parts
        self.parts, self.slicing = tuple(parts), slicing

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the joined array."""
        shape = self.parts[0].shape
        for dim, length in reversed(list(zip(self.slicing.dims, self.slicing.lengths, strict=True))):
            shape = (*shape[:dim], length, *shape[dim:])
        return shape

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def is_deleted(self) -> bool:
        """Whether the memory of a slice was given to an update."""
        return any(part.is_deleted() for part in self.parts)

    def block_until_ready(self) -> "StackedArray":
        """Wait for all slices."""
        jax.block_until_ready(self.parts)
        return self

    def devices(self) -> set[jax.Device]:
        """All devices that hold a slice."""
        return set().union(*(part.devices() for part in self.parts))

    def astype(self, dtype: Any) -> "StackedArray":
        """The same values in another dtype, slice by slice."""
        return StackedArray([part.astype(dtype) for part in self._spread(self)], self.slicing)

    def with_values(self, whole: Any) -> "StackedArray":
        """The slices of an array of this shape, each on the devices of the slice that is here."""
        return StackedArray(self._spread(whole), self.slicing)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the slices lie apart: an array of all of them is a copy.")
        whole = self.slicing.join(jax.device_get(self.parts), lambda rows, dim: np.stack(rows, dim))
        return np.asarray(whole, dtype)

    def __jax_array__(self) -> jax.Array:
        """The joined array, on the devices of the first slice."""
        here = in_own_memory(self.parts[0].sharding)
        near = [jax.device_put(part, here) for part in self.parts]
        return self.slicing.join(near, lambda rows, dim: jnp.stack(rows, dim))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **keywords: Any) -> Any:
        function = getattr(jnp, ufunc.__name__, None)
        if method != "__call__" or keywords or function is None:
            return NotImplemented
        if any(np.ndim(x) and np.shape(x) != self.shape for x in inputs):  # broadcast against the whole
            return function(*(jnp.asarray(x) if isinstance(x, StackedArray) else x for x in inputs))
        columns = [self._spread(x) for x in inputs]
        return StackedArray([function(*row) for row in zip(*columns, strict=True)], self.slicing)

    def _spread(self, value: Any) -> list[Any]:
        """An operand for every slice, on its devices."""
        if not np.ndim(value):
            return [value] * len(self.parts)
        parts = parts_of(value, self.slicing)
        here = [in_own_memory(part.sharding) for part in self.parts]
        return [jax.device_put(x, sharding) for x, sharding in zip(parts, here, strict=True)]

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_WHOLE:
            return getattr(jnp.asarray(self), name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; jnp.asarray joins the slices")

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and self.slicing.dims == (0,):
            return self.parts[index]
        return jnp.asarray(self)[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"StackedArray({self.dtype}[{shape}], {len(self.parts)} slices)"


def part_of(value: Any, slicing: Slicing, index: Sequence[int]) -> Any:
    """One part of a leaf, which the user may have given as any array."""
    if isinstance(value, StackedArray):
        if value.slicing == slicing:
            return value.parts[int(np.ravel_multi_index(tuple(index), slicing.lengths))] if index else value
        value = jnp.asarray(value)
    if not slicing.dims:
        return value
    return slicing.part(value if isinstance(value, jax.Array) else np.asarray(value), index)


def parts_of(value: Any, slicing: Slicing) -> list[Any]:
    """All parts of a leaf, in order."""
    return [part_of(value, slicing, index) for index in slicing.indices()]


def flat_parts(tree: Any, slicings: Sequence[Slicing]) -> list[Any]:
    """The parts of all leaves of a tree, given how each leaf is sliced."""
    parts: list[Any] = []
    for leaf, slicing in zip(jax.tree.leaves(tree), slicings, strict=True):
        if slicing.dims or isinstance(leaf, StackedArray):
            parts += parts_of(leaf, slicing)
        else:  # nearly all leaves of nearly all models, every step
            parts.append(leaf)
    return parts


def packed(structure: Any, slicings: Sequence[Slicing], parts: Sequence[Any]) -> Any:
    """The user's tree of its parts."""
    left = iter(parts)
    leaves = []
    for slicing in slicings:
        mine = [next(left) for _ in range(slicing.num_parts)]
        leaves.append(StackedArray(mine, slicing) if slicing.dims else mine[0])
    return structure.unflatten(leaves)


def slicings_of(leaves: Sequence[Leaf]) -> tuple[Slicing, ...]:
    """How each leaf is sliced."""
    return tuple(leaf.slicing for leaf in leaves)
