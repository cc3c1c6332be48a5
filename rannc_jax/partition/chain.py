"""The fast search: a dynamic programme over one topological order of the blocks.

For one number of microbatches m and one schedule, a plan of consecutive stages takes about

    sum of (forward + backward + transfers)  +  (m - 1) x the busiest stage

so a plan is good if both the sum and the busiest stage are small. The programme finds the least sum
under a cap on the busiest stage, for a ladder of caps from the least possible one upwards: the useful
part of the Pareto front, not one label a cell. It keeps the number of stages apart, counted from the
last stage, because that is what the memory of 1F1B depends on. Plans are estimates here; the caller
prices them again on the clock. O(caps x stages x blocks^2 x devices x replica counts) in numpy.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rannc_jax.contract import Remat
from rannc_jax.partition.candidate import Candidate
from rannc_jax.partition.constraints import Constraints, NamedSchedule
from rannc_jax.partition.interval import IntervalCosts, IntervalTable, Matrix, Site
from rannc_jax.partition.space import Space, replica_counts
from rannc_jax.partition.stage import Placement, StageModel

CAP_STEP = 1.04
"""Ratio of the ladder of caps: the share of a step that may be lost between two rungs."""
MOST_CAPS = 10
SKIP_DEVICE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A plan and about how long its step takes."""

    step_s: float
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class _Layer:
    """Plans of one number of stages by (first block, first device): value, and how to go on.

    `replicas` of the first stage, or SKIP_DEVICE where the device stays idle; `next_block` begins the
    stage after.
    """

    value: Matrix
    next_block: NDArray[np.int16]
    replicas: NDArray[np.int16]


class ChainSearch:
    """All plans of consecutive stages of one order, one number of microbatches and one schedule."""

    def __init__(
        self,
        costs: IntervalCosts,
        constraints: Constraints,
        space: Space,
        schedule: NamedSchedule,
        num_microbatches: int,
    ) -> None:
        self.model: StageModel = costs.model
        self.costs = costs
        self.constraints = constraints
        self.space = space
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        self.waves = num_microbatches - 1
        self.closed = np.zeros(self.model.num_blocks + 1, dtype=bool)
        if space.boundaries is not None:
            self.closed[:] = True
            self.closed[list(space.boundaries)] = False
        self._tables: dict[tuple[Site, int, int, tuple[Remat, ...]], IntervalTable] = {}

    def estimates(self, beat_s: float = math.inf) -> Iterator[Estimate]:
        """Good plans, one for each rung and number of stages, as long as one may be near `beat_s`."""
        free = self._solve(np.add, lambda table: table.sum_s)
        least_sum_s = min((self._value(free, k) for k in self._ends(free)), default=math.inf)
        if math.isinf(least_sum_s):
            return
        found = math.inf
        for estimate in self._estimates(free):
            found = min(found, estimate.step_s)
            yield estimate
        if self.waves == 0:
            return
        tight = self._solve(np.maximum, lambda table: table.busy_s)
        cap = min(self._value(tight, k) for k in self._ends(tight)) * (1 + 1e-9)
        for _ in range(MOST_CAPS):
            if least_sum_s + self.waves * cap / CAP_STEP > min(found, beat_s):
                return
            for estimate in self._estimates(self._solve(np.add, functools.partial(_capped, cap=cap))):
                found = min(found, estimate.step_s)
                yield estimate
            cap *= CAP_STEP

    def smallest(self) -> list[Candidate]:
        """For each number of stages the plan whose fullest device is least full, whatever its speed."""
        layers = self._solve(np.maximum, lambda table: table.fullness)
        return [self._estimate(layers, num_stages).candidate for num_stages in self._ends(layers)]

    def _solve(self, combine: np.ufunc, pick: Callable[[IntervalTable], Matrix]) -> list[_Layer]:
        """Layers of 0, 1, ... stages; `combine` is np.add for sums, np.maximum for the busiest stage."""
        shape = (self.model.num_blocks + 1, self.model.num_devices + 1)
        value = np.full(shape, np.inf)
        value[-1] = 0.0
        nothing = np.zeros(shape, np.int16)
        layers = [_Layer(value, nothing, nothing)]
        for after in range(self.space.most_stages(self.model)):
            layers.append(self._layer(layers[-1].value, after, combine, pick))
            if not np.isfinite(layers[-1].value).any():
                break
        return layers

    def _layer(
        self, later: Matrix, after: int, combine: np.ufunc, pick: Callable[[IntervalTable], Matrix]
    ) -> _Layer:
        """Put one stage before the plans in `later`, which have `after` stages."""
        layer = _Layer(
            np.full_like(later, np.inf), np.zeros(later.shape, np.int16), np.zeros(later.shape, np.int16)
        )
        by_device = np.ascontiguousarray(later.T)
        for replicas in self._replicas(after):
            for site, devices in self.costs.sites(replicas).items():
                cost = pick(self._table(site, replicas, after))
                total = combine(cost[:, None, :], by_device[None, devices + replicas, :])
                best = total.argmin(axis=2)
                least = np.take_along_axis(total, best[:, :, None], axis=2)[:, :, 0]
                blocks, columns = np.nonzero(least < layer.value[:, devices])
                where = blocks, devices[columns]
                layer.value[where] = least[blocks, columns]
                layer.next_block[where] = best[blocks, columns]
                layer.replicas[where] = replicas
        if not self.model.is_uniform:
            for device in range(self.model.num_devices - 1, -1, -1):
                idle = layer.value[:, device + 1] < layer.value[:, device]
                layer.value[idle, device] = layer.value[idle, device + 1]
                layer.replicas[idle, device] = SKIP_DEVICE
        return layer

    def _stage(self, after: int) -> int:
        """The stage with `after` stages behind it; constraints by stage come with a fixed number."""
        return 0 if self.space.num_stages is None else self.space.num_stages - 1 - after

    def _replicas(self, after: int) -> tuple[int, ...]:
        fixed = self.constraints.replicas_of(self._stage(after))
        return replica_counts(self.model, self.model.rows // self.num_microbatches, fixed)

    def _table(self, site: Site, replicas: int, after: int) -> IntervalTable:
        """Prices of a stage with `after` stages behind it, where the user's cuts allow one."""
        in_flight = self.schedule.in_flight(0, after + 1, self.num_microbatches)
        remats = self.constraints.remats_of(self._stage(after))
        key = (site, replicas, in_flight, remats)
        if key not in self._tables:
            table = self.costs.table(
                site, replicas, self.num_microbatches, in_flight, self.schedule.has_backward, remats
            )
            for matrix in (table.sum_s, table.busy_s, table.fullness):
                matrix[self.closed, :] = np.inf
                matrix[:, self.closed] = np.inf
            self._tables[key] = table
        return self._tables[key]

    def _ends(self, layers: list[_Layer]) -> list[int]:
        """Numbers of stages for which there is a whole plan."""
        wanted = self.space.num_stages
        counts = range(1, len(layers)) if wanted is None else [wanted] if wanted < len(layers) else []
        return [k for k in counts if math.isfinite(self._value(layers, k))]

    def _value(self, layers: list[_Layer], num_stages: int) -> float:
        return float(layers[num_stages].value[0, 0])

    def _estimates(self, layers: list[_Layer]) -> Iterator[Estimate]:
        for num_stages in self._ends(layers):
            yield self._estimate(layers, num_stages)

    def _estimate(self, layers: list[_Layer], num_stages: int) -> Estimate:
        """Follow the choices from the first block and device."""
        begin = device = 0
        placements, sum_s, busiest_s = [], 0.0, 0.0
        for after in range(num_stages - 1, -1, -1):
            layer = layers[after + 1]
            while layer.replicas[begin, device] == SKIP_DEVICE:
                device += 1
            end, replicas = int(layer.next_block[begin, device]), int(layer.replicas[begin, device])
            table = self._table(self.costs.site_of(device, replicas), replicas, after)
            sum_s += float(table.sum_s[begin, end])
            busiest_s = max(busiest_s, float(table.busy_s[begin, end]))
            placements.append(Placement(tuple(sorted(self.costs.order[begin:end])), device, replicas))
            begin, device = end, device + replicas
        candidate = Candidate(self.schedule, self.num_microbatches, tuple(placements))
        return Estimate(step_s=sum_s + self.waves * busiest_s, candidate=candidate)


def _capped(table: IntervalTable, *, cap: float) -> Matrix:
    return np.where(table.busy_s <= cap, table.sum_s, np.inf)
