"""The best chain of ideals: a dynamic programme over (devices used, ideal).

With every ideal it is exact. Quadratic in the ideals, linear in the devices. Ideals from which the bound
cannot be kept any more are left out as they are met.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128


class Loads(Protocol):
    """Ideals, a smaller one before a larger, and the loads of the devices between them."""

    ideals: list[int]
    work: NDArray[np.float64]

    def loads(self, rows: NDArray[np.intp], columns: slice) -> NDArray[np.float64]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Cuts, and what they cost.

    Args:
        ideals: what the first one, two, ... devices hold; the last is everything.
        loads: of every device.
    """

    ideals: tuple[int, ...]
    loads: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(self.loads, default=0.0)

    @property
    def total(self) -> float:
        return sum(self.loads)


def best_chain(table: Loads, num_devices: int, *, cap: float, inclusive: bool, add_up: bool) -> Chain | None:
    """The chain with the smallest largest load, or, with `add_up`, the smallest sum of loads.

    Args:
        table: prices of ideals; holds the empty set and the whole.
        num_devices: at most so many devices.
        cap: no load may be above it, nor (unless `inclusive`) equal to it.
        inclusive: see cap.
        add_up: see above.
    """
    count = len(table.ideals)
    best = np.full((num_devices + 1, count), np.inf)
    best[0, 0] = 0.0
    came_from = np.zeros((num_devices + 1, count), np.intp)
    combine = np.add if add_up else np.maximum
    left_s = table.work[-1] - table.work
    for begin in range(1, count, _BLOCK):
        columns = slice(begin, min(begin + _BLOCK, count))
        rows = np.flatnonzero(
            np.isfinite(best[:, : columns.stop]).any(axis=0) | (np.arange(columns.stop) >= begin)
        )
        loads = table.loads(rows, columns)
        loads[(loads > cap) if inclusive else (loads >= cap)] = np.inf
        for used in range(1, num_devices + 1):
            costs = combine(best[used - 1, rows, None], loads)
            chosen = costs.argmin(axis=0)
            found = np.take_along_axis(costs, chosen[None], axis=0)[0]
            # What is left must fit the devices that are left.
            found[left_s[columns] > (num_devices - used) * cap * (1 + 1e-9)] = np.inf
            best[used, columns] = found
            came_from[used, columns] = rows[chosen]
    used = int(best[:, -1].argmin())
    if count > 1 and not np.isfinite(best[used, -1]):
        return None
    return _read_back(table, came_from, used, count - 1)


def _read_back(table: Loads, came_from: NDArray[np.intp], used: int, last: int) -> Chain:
    ideals: list[int] = []
    loads: list[float] = []
    while last:
        before = int(came_from[used, last])
        ideals.append(table.ideals[last])
        loads.append(float(table.loads(np.array([before]), slice(last, last + 1))[0, 0]))
        used, last = used - 1, before
    return Chain(ideals=tuple(reversed(ideals)), loads=tuple(reversed(loads)))
