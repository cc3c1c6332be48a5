"""One export with symbolic batch dims (`Dim.DYNAMIC`), for modules whose two exports differ in structure.

Sizes become nodes of the graph that compute Python integers. It costs about twice as much as an export at
fixed sizes, and torch states for which numbers of rows the program holds: a range, and conditions such as
"the number of rows is even". Others are exported on their own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import Dim

from torch_bridge.errors import BridgeError, message
from torch_bridge.program import Graph
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


def rows_to_show(
    tensors: Sequence[torch.Tensor], dims: BatchDims, held: Iterable[torch.Tensor], rows: int
) -> int:
    """A number of rows that is no other size of the call or of what the module holds, nor very small.

    Where sizes meet, torch takes them for the same one; and a size that torch has fixed at this number
    gives itself away (`refuse_fixed_rows`).
    """
    taken = {size for tensor in held for size in tensor.shape}
    for tensor, dim in zip(tensors, dims, strict=True):
        taken |= {size for d, size in enumerate(tensor.shape) if d != dim}
    suits = rows >= _ENOUGH and rows not in taken
    return rows if suits else next((p for p in _PRIMES if p not in taken), rows)


_ENOUGH = 4  # half of it is not 1, which torch treats as special
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def refuse_fixed_rows(graph: Graph, rows: int) -> None:
    """See that no tensor of a program with symbolic sizes has a dim fixed at the example's rows.

    torch puts a number in the place of a symbol where it writes through a view, and does not say so.

    Raises:
        BridgeError: for the first such tensor; the program does not hold for other numbers of rows.
    """
    for node in graph.nodes:
        if node.shape is not None and rows in node.shape:
            raise BridgeError(message(f"torch fixes the rows in {node.operator}.", f"at {node.source}"))


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
