"""Loads along one topological order, where a device holds consecutive groups.

For graphs whose ideals are too many: an order passes through only as many as it has groups, and what a
device between two of its places pays follows from where each value is made and read: a cumulative sum of
a few entries an edge, so orders of tens of thousands of groups are priced
at some thousand places in well under a second.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rannc_jax.dag.groups import Groups, bits

Matrix = NDArray[np.float64]


class Line:
    """The ideals of one order at chosen places; priced like a `LoadTable`.

    Args:
        groups: the problem.
        order: all groups, in a topological order.
        places: how many of the first groups each ideal holds, ascending, 0 and all among them.
    """

    def __init__(self, groups: Groups, order: Sequence[int], places: Sequence[int]) -> None:
        self.places = np.asarray(places)
        self.ideals = _prefixes(order, places)
        self.work = _at(self.places, np.asarray(groups.seconds)[list(order)])
        sizes = _at(self.places, np.asarray(groups.bytes)[list(order)])
        self._whole = np.maximum(self.work[None, :] - self.work[:, None] + self._paid(groups, order), 0.0)
        is_device = np.triu(np.ones_like(self._whole, bool), 1)
        if groups.memory_bytes is not None:
            is_device &= sizes[None, :] - sizes[:, None] <= groups.memory_bytes * (1 + 1e-12)
        self._whole[~is_device] = np.inf

    def loads(self, rows: NDArray[np.intp], columns: slice) -> Matrix:
        """[rows, columns] of the device between two places; infinite where there is none."""
        return self._whole[rows, columns]

    def _paid(self, groups: Groups, order: Sequence[int]) -> Matrix:
        """[places, places]: values that the device holds a maker or reader of, and not all of them."""
        where = np.empty(len(order), np.intp)
        where[list(order)] = np.arange(len(order))
        paid = np.zeros((len(self.places) + 1, len(self.places) + 1))
        for value in groups.values:
            touching = np.sort(where[list(bits(value.consumers | 1 << value.producer))])
            ends = self._first_above(touching)
            # A device holds some if it begins behind one of them, or at 0, and ends behind the next.
            begins = np.concatenate([[0], ends[:-1]])
            np.add.at(paid, (begins, ends), value.seconds)
            np.add.at(paid, (ends, ends), -value.seconds)
            # It holds all if it begins before the first and ends behind the last.
            paid[0, ends[-1]] -= value.seconds
            paid[ends[0], ends[-1]] += value.seconds
        return np.cumsum(np.cumsum(paid, axis=0), axis=1)[:-1, :-1]

    def _first_above(self, position: NDArray[np.intp]) -> NDArray[np.intp]:
        """The first place that holds a position (0 for the first group)."""
        return np.searchsorted(self.places, position, side="right")


def _at(places: NDArray[np.intp], amounts: Matrix) -> Matrix:
    """What the first groups have together, at each place."""
    return np.concatenate([[0.0], np.cumsum(amounts)])[places]


def _prefixes(order: Sequence[int], places: Sequence[int]) -> list[int]:
    ideals, ideal, done = [], 0, 0
    for place in places:
        for group in order[done:place]:
            ideal |= 1 << group
        done = place
        ideals.append(ideal)
    return ideals


def spread_places(work: Sequence[float], most: int, near: Sequence[int]) -> list[int]:
    """Places to price: all if they are few, else such that little work lies between two, and all around some.

    Args:
        work: of each group, in order.
        most: about so many places.
        near: places whose surroundings are wanted in full.
    """
    count = len(work)
    if count < most:
        return list(range(count + 1))
    total = np.concatenate([[0.0], np.cumsum(work)])
    steps = np.searchsorted(total, np.linspace(0.0, total[-1], most // 2))
    width = max(1, most // (4 * max(1, len(near))))
    around = [p for place in near for p in range(place - width, place + width + 1)]
    evenly = np.linspace(0, count, most // 4).astype(int)
    return sorted({0, count, *(p for p in (*steps.tolist(), *evenly.tolist(), *around) if 0 < p < count)})
