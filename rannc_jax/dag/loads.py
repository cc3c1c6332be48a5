"""What a device is loaded with, for all pairs of ideals at once.

A device holds the difference of two ideals, a smaller and a larger one. It pays for a value if it makes
it and somebody else reads it, or if it reads it and somebody else made it. Whether it pays depends only
on which of the groups that touch the value each ideal holds (the value's state): it does not pay if the
two states are equal, or if the smaller ideal holds none of them and the larger all. Both are products of
indicators, so the payments of all pairs are one matrix product.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rannc_jax.dag.groups import Groups

Matrix = NDArray[np.float64]

_FEW = 2048  # ideals whose loads are all kept: 32 MiB


class LoadTable:
    """Loads between ideals, in blocks of columns.

    Args:
        groups: the problem.
        ideals: distinct masks; sorted here by size, so a smaller one comes first.
    """

    def __init__(self, groups: Groups, ideals: Sequence[int]) -> None:
        self.groups = groups
        self.ideals = sorted(ideals, key=lambda mask: (mask.bit_count(), mask))
        count = len(groups.members)
        self._holds = np.array([[mask >> g & 1 for g in range(count)] for mask in self.ideals], np.float32)
        wide = self._holds.astype(np.float64)
        self.work = wide @ np.asarray(groups.seconds)
        self._bytes = wide @ np.asarray(groups.bytes)
        self._before, self._after, self._all = self._states()
        self._whole = self._between(np.arange(len(ideals)), slice(None)) if len(ideals) <= _FEW else None

    def _states(self) -> tuple[Matrix, Matrix, float]:
        before, after = [], []
        for value in self.groups.values:
            touching = value.consumers | 1 << value.producer
            states = [mask & touching for mask in self.ideals]
            for state in dict.fromkeys(states):
                same = np.array([s == state for s in states], np.float64)
                before.append(same * value.seconds)
                after.append(same)
            before.append(np.array([s == 0 for s in states], np.float64) * value.seconds)
            after.append(np.array([s == touching for s in states], np.float64))
        shape = (len(before), len(self.ideals))
        total = sum(value.seconds for value in self.groups.values)
        return np.array(before).reshape(shape).T, np.array(after).reshape(shape).T, total

    def loads(self, rows: NDArray[np.intp], columns: slice) -> Matrix:
        """[rows, columns] of the device between ideals `row` and `column`; infinite where there is none."""
        return self._between(rows, columns) if self._whole is None else self._whole[rows, columns]

    def _between(self, rows: NDArray[np.intp], columns: slice) -> Matrix:
        work = self.work[None, columns] - self.work[rows, None]
        paid = self._all - self._before[rows] @ self._after[columns].T
        outside = self._holds[rows] @ (1 - self._holds[columns]).T  # groups of the smaller, not in the larger
        is_device = (outside == 0) & (rows[:, None] != np.arange(len(self.ideals))[None, columns])
        if self.groups.memory_bytes is not None:
            held = self._bytes[None, columns] - self._bytes[rows, None]
            # Sums of many sizes, subtracted: a device filled to the last byte must not fail by rounding.
            is_device &= held <= self.groups.memory_bytes * (1 + 1e-12)
        return np.where(is_device, np.maximum(work + paid, 0.0), np.inf)
