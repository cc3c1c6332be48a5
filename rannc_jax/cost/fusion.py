"""Which operations XLA runs as one kernel, and which values therefore reach memory.

A kernel is a set of operations with one root; bytes are counted at its edges only. Elementwise work
fuses into its consumers (and is repeated in a few of them where that moves fewer bytes); reductions
fuse what feeds them; products, convolutions, gathers, sorts and loops stand alone. Views are no work.
The rules depend on the wiring and on the sizes of the first trace only, so both traces fuse alike.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from rannc_jax.cost import primitives
from rannc_jax.cost.flops import Fusion, Work
from rannc_jax.cost.operations import NO_VALUE, Operation, Twins

MAX_COPIES = 4
"""An elementwise operation is repeated in at most this many kernels (XLA:GPU's priority fusion does
the same through its cost model; more copies never moved fewer bytes in the networks tried)."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Operations that run together: `root` (an operation index) and everything fused into it."""

    root: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fused:
    """Kernels of a group of operations, in order of their roots.

    Args:
        kernels: see `Kernel`.
        sources: value id -> the value it is a view of.
    """

    kernels: tuple[Kernel, ...]
    sources: dict[int, int]

    def source(self, value: int) -> int:
        """The value that holds the bytes of `value`."""
        return self.sources.get(value, value)


def fuse(twins: Twins, group: Sequence[int], escaping: Collection[int]) -> Fused:
    """Form kernels.

    Args:
        twins: the opened program.
        group: operation indices, ascending.
        escaping: value ids that somebody outside the group reads.

    Complexity: linear in the reads of the group.
    """
    return _Fuser(twins, group, set(escaping)).run()


def edge_bytes(
    fused: Fused, kernel: Kernel, ops: Sequence[Operation], works: Sequence[Work], nbytes: np.ndarray
) -> tuple[int, int]:
    """Bytes that a kernel reads and writes in one of the two traces."""
    made = {v for index in kernel.members for v in ops[index].writes}
    read: dict[int, int] = {}
    for index in kernel.members:
        if works[index].fusion is Fusion.VIEW:
            continue
        for value, size in zip(ops[index].reads, works[index].reads, strict=False):
            value = fused.source(value)
            if value != NO_VALUE and value not in made:
                read[value] = read.get(value, 0) + size
    total = sum(min(size, int(nbytes[value])) for value, size in read.items())
    return total, sum(works[kernel.root].writes)


class _Fuser:
    def __init__(self, twins: Twins, group: Sequence[int], escaping: set[int]) -> None:
        self.ops = twins.first.operations
        self.works = twins.works[0]
        self.group = group
        self.sources: dict[int, int] = {}
        self.members: dict[int, list[int]] = {}  # root -> members
        self.kernels_of: dict[int, tuple[int, ...]] = {}  # operation -> roots
        self._resolve_views()
        self.escaping = {self.sources.get(v, v) for v in escaping}
        self.consumers: dict[int, list[int]] = {}
        for index in group:
            if not self._is_view(index):
                for value in {self.sources.get(v, v) for v in self.ops[index].reads}:
                    self.consumers.setdefault(value, []).append(index)

    def run(self) -> Fused:
        for index in reversed(self.group):
            if not self._is_view(index):
                self._place(index)
        kernels = (Kernel(root, tuple(reversed(self.members[root]))) for root in sorted(self.members))
        return Fused(tuple(kernels), self.sources)

    def _is_view(self, index: int) -> bool:
        return self.works[index].fusion is Fusion.VIEW

    def _resolve_views(self) -> None:
        for index in self.group:
            if self._is_view(index):
                op = self.ops[index]
                for source, value in zip(op.reads, op.writes, strict=False):
                    self.sources[value] = self.sources.get(source, source)

    def _place(self, index: int) -> None:
        op, work = self.ops[index], self.works[index]
        readers = [c for value in op.writes for c in self.consumers.get(value, ())]
        escapes = any(value in self.escaping for value in op.writes)
        if not readers and not escapes:
            return  # dead within this group
        stored = escapes or any(self.works[c].fusion is Fusion.WHOLE for c in readers)
        if work.fusion is Fusion.LOOP and not stored:
            roots = {root for c in readers for root in self.kernels_of.get(c, ())}
            if roots and (len(roots) == 1 or self._repeats(op, work, len(roots))):
                self.kernels_of[index] = tuple(sorted(roots))
                for root in roots:
                    self.members[root].append(index)
                return
        self.members[index] = [index]
        self.kernels_of[index] = (index,)

    def _repeats(self, op: Operation, work: Work, copies: int) -> bool:
        """Whether doing the work in every reader moves fewer bytes than storing the result once."""
        if copies > MAX_COPIES or op.name in primitives.RANDOM:
            return False
        read, written = sum(work.reads), sum(work.writes)
        return copies * read <= read + (1 + copies) * written
