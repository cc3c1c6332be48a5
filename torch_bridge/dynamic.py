"""One export with symbolic batch dims (`Dim.DYNAMIC`), for modules whose two exports differ in structure.

Sizes become nodes of the graph that compute Python integers. It costs about twice as much as an export at
fixed sizes, and torch states for which numbers of rows the program holds: a range, and conditions such as
"the number of rows is even". Others are exported on their own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import Dim

from torch_bridge.shapes import BatchDims


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """For which numbers of rows a program holds.

    Args:
        least, most: the range.
        conditions: Python expressions in the tensors of the call, `L['tensors'][i]`, as torch writes them.
        shapes: of these tensors, at the export.
        dims: which dim of each carries the rows.
    """

    least: int
    most: int
    conditions: tuple[str, ...] = field(repr=False)
    shapes: tuple[tuple[int, ...], ...]
    dims: BatchDims

    def at(self, rows: int) -> bool:
        """Whether the program holds. A condition that cannot be read is taken as broken."""
        if not self.least <= rows <= self.most:
            return False
        tensors = [_Sized(shape, dim, rows) for shape, dim in zip(self.shapes, self.dims, strict=True)]
        names = {"L": {"tensors": tensors}, "math": math, "torch": torch}
        try:
            return all(eval(condition, dict(names)) for condition in self.conditions)
        except Exception:
            return False


class _Sized:
    """A tensor as conditions see it: something with a size."""

    def __init__(self, shape: tuple[int, ...], dim: int | None, rows: int) -> None:
        self.shape = tuple(rows if d == dim else size for d, size in enumerate(shape))

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape)))

    def storage_offset(self) -> int:
        return 0


def rows_to_show(tensors: Sequence[torch.Tensor], rows: int) -> int:
    """A number of rows that is none of the other sizes, nor so small that half of it is 1.

    Where sizes meet, torch takes them for the same one.
    """
    taken = {size for tensor in tensors for size in tensor.shape}
    return rows if rows >= _ENOUGH else next((p for p in _PRIMES if p not in taken), rows)


_ENOUGH = 4
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37)


def symbolic(dims: BatchDims) -> Any:
    """`dynamic_shapes` for a forward that takes `*tensors` with these batch dims."""
    return (tuple(None if dim is None else {dim: Dim.DYNAMIC} for dim in dims),)


def validity(
    program: torch.export.ExportedProgram, tensors: Sequence[torch.Tensor], dims: BatchDims
) -> Validity:
    """What torch says about the rows for which an export with symbolic sizes holds."""
    ranges = list(program.range_constraints.values())
    least = max([0, *(int(r.lower) for r in ranges if _is_int(r.lower))])
    most = min([2**31 - 1, *(int(r.upper) for r in ranges if _is_int(r.upper))])
    # Newer torch checks these when the program is called; there is no public way to read them.
    conditions = getattr(program, "_guards_code", None) or ()
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    return Validity(least=least, most=most, conditions=tuple(conditions), shapes=shapes, dims=dims)


def _is_int(bound: Any) -> bool:
    try:
        return abs(int(bound)) < 2**62
    except (OverflowError, TypeError, ValueError, AttributeError):
        return False
