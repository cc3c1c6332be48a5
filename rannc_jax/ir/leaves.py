"""Inputs and outputs of a program, and the leaves of the user's trees that they are (parts of).

The user's tree has one leaf where the program has one input a layer. A `Slicing` says how the one becomes
the other, in both directions without a rounding; a `Leaf` says which inputs (or outputs) are one leaf.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rannc_jax.ir.roles import OutputKind, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """How an array is given in parts: sliced along `dims[0]`, its slices along `dims[1]`, and so on.

    Args:
        dims: each counted in what the dims before it have left; none for an array given whole.
        lengths: how many slices along each.
    """

    dims: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def num_parts(self) -> int:
        return math.prod(self.lengths)

    @property
    def slice_slicing(self) -> "Slicing":
        """How each slice along the first dim is given."""
        return Slicing(dims=self.dims[1:], lengths=self.lengths[1:])

    def indices(self) -> Iterator[tuple[int, ...]]:
        """The place of every part, in the order of the parts."""
        return itertools.product(*map(range, self.lengths))

    def part(self, array: Any, index: Sequence[int]) -> Any:
        """One part of an array."""
        for dim, i in zip(self.dims, index, strict=True):
            array = array[(slice(None),) * dim + (i,)]
        return array

    def part_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of every part of an array."""
        left = list(shape)
        for dim in self.dims:
            del left[dim]
        return tuple(left)

    def join(self, parts: Sequence[Any], stack: Callable[[Sequence[Any], int], Any]) -> Any:
        """The array of its parts; `stack(arrays, dim)` joins arrays along a new dim."""
        if not self.dims:
            (whole,) = parts
            return whole
        inner = self.slice_slicing
        size = inner.num_parts
        rows = [inner.join(parts[i : i + size], stack) for i in range(0, len(parts), size)]
        return stack(rows, self.dims[0])

    def then(self, dim: int, length: int) -> "Slicing":
        """The parts sliced once more."""
        return Slicing(dims=(*self.dims, dim), lengths=(*self.lengths, length))


WHOLE = Slicing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which part of a leaf an input or output is.

    Args:
        path: pytree path of the leaf.
        aval: of the whole leaf.
        slicing: how it is given in parts.
        index: the place of this one.
    """

    path: str
    aval: jax.ShapeDtypeStruct
    slicing: Slicing
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLeaf:
    """One input: where it sits in the user's arguments ("params['w']"), its role and abstract value.

    `batch_dim` is the dim that carries the batch rows, for leaves of the batch that have one. `part` says
    which slice of a stacked leaf this is, None for a leaf of its own.
    """

    path: str
    role: Role
    aval: jax.ShapeDtypeStruct
    batch_dim: int | None = None
    part: Part | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLeaf:
    """One output: its pytree path within its kind, what it is, and of what it is a slice."""

    path: str
    kind: OutputKind
    part: Part | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A leaf of the user's tree.

    Args:
        path: its pytree path.
        positions: of its parts among the inputs or outputs of the program, in order.
        slicing: how it is given in parts; `WHOLE` for most.
    """

    path: str
    positions: tuple[int, ...]
    slicing: Slicing = WHOLE

    def parts(self, array: Any) -> list[Any]:
        """The parts of an array of the leaf's shape."""
        return [self.slicing.part(array, index) for index in self.slicing.indices()]


def group_leaves(entries: Sequence[InputLeaf | OutputLeaf], positions: Sequence[int]) -> tuple[Leaf, ...]:
    """The user's leaves behind some inputs (or outputs) of a program.

    Args:
        entries: all inputs or all outputs.
        positions: the chosen ones, in order; the parts of a leaf follow each other.
    """
    leaves: list[Leaf] = []
    for _, group in itertools.groupby(positions, key=lambda k: leaf_path(entries[k]) or k):
        found = tuple(group)
        part = entries[found[0]].part
        slicing = WHOLE if part is None else part.slicing
        leaves.append(Leaf(path=leaf_path(entries[found[0]]), positions=found, slicing=slicing))
    return tuple(leaves)


def leaf_path(entry: InputLeaf | OutputLeaf) -> str:
    """The path of the user's leaf that an input or output is (a part of)."""
    return entry.path if entry.part is None else entry.part.path
