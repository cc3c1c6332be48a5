"""The fast search: a dynamic programme over one topological order of the blocks.

For one number of microbatches m and one schedule, a plan of consecutive stages takes about

    sum of (forward + backward + transfers)  +  (m - 1) x the busiest stage

(with one microbatch: + the longest tail), so a plan is good if both the sum and the busiest
stage are small. The programme finds the least sum
under a cap on the busiest stage, for a ladder of caps from the least possible one upwards: the useful
part of the Pareto front, not one label a cell. It keeps the number of stages apart, counted from the
last stage, because that is what the memory of 1F1B depends on. On large clusters stages begin at every
few devices only (a unit), and the first hosts of each kind are searched once more by themselves, with
smaller units (`spans`). Plans are estimates here; the caller prices them again on the clock.
O(caps x stages x blocks^2 x units x replica counts) in numpy.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rannc_jax.partition.candidate import Candidate
from rannc_jax.partition.constraints import NamedSchedule
from rannc_jax.partition.interval import Case, IntervalCosts, IntervalTable, Matrix, Span, busy_weight
from rannc_jax.partition.mode import Mode
from rannc_jax.partition.space import Space, replica_counts
from rannc_jax.partition.stage import Placement, StageModel

CAP_STEP = 1.04
"""Least ratio of the ladder of caps: the share of a step that may be lost between two rungs."""
MOST_CAPS = 10
MOST_BETWEEN = 1
"""Times that two more rungs are put between the best one and its neighbours."""
MOST_UNITS = 48
"""Places where a stage may begin; on larger clusters a unit is as many devices as that takes."""
FINER = 6
"""Of devices that are searched once more with smaller units, about the share that is taken each time."""
PATIENCE = 4
"""Layers in a row that may be too slow before more stages are given up."""


Pick = Callable[[IntervalTable], Matrix]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A plan and about how long its step takes."""

    step_s: float
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class _Layer:
    """Plans of one number of stages by [first unit, first block]: value, and how to go on.

    `replicas` of the first stage, or less than 0 where so many units stay idle; `next_block` begins the
    stage after.
    """

    value: Matrix
    next_block: NDArray[np.int32]
    replicas: NDArray[np.int32]


class ChainSearch:
    """All plans of consecutive stages of one order, one number of microbatches and one schedule."""

    def __init__(
        self,
        costs: IntervalCosts,
        space: Space,
        schedule: NamedSchedule,
        num_microbatches: int,
        span: Span,
    ) -> None:
        self.model: StageModel = costs.model
        self.span = span
        self.costs = costs
        self.space = space
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        self.weight = busy_weight(num_microbatches)
        hosts = self.model.hosts[span.first : span.first + span.num_devices : span.unit]
        self.host_starts = [u for u in range(1, span.num_units) if hosts[u] != hosts[u - 1]]
        self.closed = np.zeros(self.model.num_blocks + 1, dtype=bool)
        if space.boundaries is not None:
            self.closed[:] = True
            self.closed[list(space.boundaries)] = False
        self._least_busy_s = 0.0
        self._table = functools.cache(self._priced)
        self._tables_after = functools.cache(self._priced_after)

    def outlook(self) -> tuple[float, Candidate | None]:
        """A step that no plan of this case is estimated to beat, and a plan near it, which may not fit.

        One sweep that forgets the number of stages: each stage keeps as little in flight as the last
        one. Cheap, and exact where nothing depends on the number (GPipe, no constraint by stage).
        """
        least_busy_s = float(self._sweep(np.maximum, lambda table: table.busy_s).value[0, 0])
        least_sum_s = float(self._sweep(np.add, lambda table: table.sum_s).value[0, 0])
        self._least_busy_s = least_busy_s
        layer = self._sweep(np.add, functools.partial(_capped, cap=least_busy_s * CAP_STEP))
        outlook_s = least_sum_s + self.weight * least_busy_s
        if math.isinf(outlook_s) or math.isinf(layer.value[0, 0]):
            return outlook_s, None
        return outlook_s, self._candidate(itertools.repeat(layer))

    def estimates(self, beat_s: float = math.inf) -> Iterator[Estimate]:
        """Good plans, one for each rung and number of stages, as long as one may be near `beat_s`.

        To be called after `outlook`, where that was finite.
        """
        most_sum_s = beat_s - self.weight * self._least_busy_s
        layers = self._solve(np.add, lambda table: table.sum_s, most_sum_s=most_sum_s)
        rung = list(self._estimates(layers, most_sum_s))
        yield from rung
        found = min((estimate.step_s for estimate in rung), default=math.inf)
        least_sum_s = min((self._value(layers, k) for k in self._ends(layers)), default=math.inf)
        if math.isinf(least_sum_s):
            return
        most_stages = len(layers) - 1
        tight = self._solve(np.maximum, lambda table: table.busy_s, most_stages=most_stages)
        cap = min(self._value(tight, k) for k in self._ends(tight)) * (1 + 1e-9)
        most_cap = (min(found, beat_s) - least_sum_s) / self.weight
        ratio = (
            max(CAP_STEP, (most_cap / cap) ** (1 / MOST_CAPS)) if 0 < cap < most_cap < math.inf else CAP_STEP
        )
        caps, bests = [], []
        for _ in range(MOST_CAPS):
            rung = self._under(cap, beat_s - self.weight * cap / ratio, most_stages)
            yield from rung
            caps.append(cap)
            bests.append(min((estimate.step_s for estimate in rung), default=math.inf))
            found = min(found, bests[-1])
            if least_sum_s + self.weight * cap > min(found, beat_s):
                break
            cap *= ratio
        for _ in range(MOST_BETWEEN):
            at = bests.index(min(bests))
            below, above = caps[max(at - 1, 0)], caps[min(at + 1, len(caps) - 1)]
            for cap in (math.sqrt(below * caps[at]), math.sqrt(caps[at] * above)):
                if cap in caps or above / below < CAP_STEP:
                    continue
                rung = self._under(cap, beat_s - self.weight * below, most_stages)
                yield from rung
                place = bisect.bisect(caps, cap)
                caps.insert(place, cap)
                bests.insert(place, min((estimate.step_s for estimate in rung), default=math.inf))

    def _under(self, cap: float, most_sum_s: float, most_stages: int) -> list[Estimate]:
        """The plans of a rung."""
        pick = functools.partial(_capped, cap=cap)
        layers = self._solve(np.add, pick, most_sum_s=most_sum_s, most_stages=most_stages)
        return list(self._estimates(layers, most_sum_s))

    def smallest(self) -> list[Candidate]:
        """For each number of stages the plan whose fullest device is least full, whatever its speed."""
        layers = self._solve(np.maximum, lambda table: table.fullness)
        return [self._estimate(layers, num_stages).candidate for num_stages in self._ends(layers)]

    def _solve(
        self, combine: np.ufunc, pick: Pick, *, most_sum_s: float = math.inf, most_stages: int | None = None
    ) -> list[_Layer]:
        """Layers of 0, 1, ... stages; `combine` is np.add for sums, np.maximum for the busiest stage.

        Sums grow with the number of stages once any plan fits (fewer replicas each, more transfers), so
        a few layers above `most_sum_s` in a row end the search.
        """
        above = 0
        layers = [self._no_stage()]
        most = min(self.space.most_stages(self.model), self.span.num_devices)
        for after in range(most_stages or most):
            layers.append(self._layer(layers[-1].value, after, combine, pick))
            whole = self._value(layers, len(layers) - 1)
            above = above + 1 if most_sum_s < whole < math.inf else 0
            if above == PATIENCE or not np.isfinite(layers[-1].value).any():
                break
        return layers

    def _no_stage(self) -> _Layer:
        """Nothing is left to place after the last block, wherever that is."""
        shape = (self.span.num_units + 1, self.model.num_blocks + 1)
        value = np.full(shape, np.inf)
        value[:, -1] = 0.0
        return _Layer(value, np.zeros(shape, np.int32), np.zeros(shape, np.int32))

    def _sweep(self, combine: np.ufunc, pick: Pick) -> _Layer:
        """Plans of any number of stages, as a layer that continues in itself."""
        layer = self._no_stage()
        stages = range(self.space.num_stages or 1)
        modes = tuple(dict.fromkeys(mode for stage in stages for mode in self.space.modes_of(stage)))
        in_flight = self.schedule.in_flight(0, 1, self.num_microbatches)
        counts = sorted({count for stage in stages for count in self._replicas(stage)})
        tables = [self._table(count, in_flight, modes) for count in counts]
        priced = [(count, pick(table), table.site_of) for count, table in zip(counts, tables, strict=True)]
        for begin in np.flatnonzero(~self.closed[:-1])[::-1].tolist():
            for count, cost, site_of in priced:
                ahead = cost[site_of, begin, begin + 1 :]
                total = combine(ahead, layer.value[self._behind(count, site_of), begin + 1 :])
                least = total.min(axis=1)
                units = slice(0, len(site_of))
                better = least < layer.value[units, begin]
                layer.value[units, begin][better] = least[better]
                layer.next_block[units, begin][better] = total.argmin(axis=1)[better] + begin + 1
                layer.replicas[units, begin][better] = count
            self._skip_units(layer, slice(begin, begin + 1))
        return layer

    def _layer(self, later: Matrix, after: int, combine: np.ufunc, pick: Pick) -> _Layer:
        """Put one stage before the plans in `later`, which have `after` stages."""
        value = np.full_like(later, np.inf)
        next_block, replicas = np.zeros(later.shape, np.int32), np.zeros(later.shape, np.int32)
        for count, table in self._tables_after(after):
            behind = later[self._behind(count, table.site_of), None, :]
            total = combine(pick(table)[table.site_of], behind)
            least = total.min(axis=2)
            units = slice(0, len(least))
            better = least < value[units]
            np.copyto(value[units], least, where=better)
            np.copyto(next_block[units], total.argmin(axis=2), where=better, casting="unsafe")
            replicas[units][better] = count
        value[:, self.closed] = np.inf
        layer = _Layer(value, next_block, replicas)
        self._skip_units(layer, slice(None))
        return layer

    def _skip_units(self, layer: _Layer, blocks: slice) -> None:
        """Where hosts differ, a plan may be better on a later one: the rest of a host may stay idle. Not a
        part of it, or a stage that comes from another host would look as if it came from this one.
        """
        value, replicas = layer.value[:, blocks], layer.replicas[:, blocks]
        for first, start in reversed(list(itertools.pairwise([0, *self.host_starts]))):
            idle = np.arange(first, start)
            better = value[start] < value[idle]
            value[idle] = np.where(better, value[start], value[idle])
            replicas[idle] = np.where(better, (idle - start)[:, None], replicas[idle])

    def _width(self, replicas: int) -> int:
        """Units that a stage takes."""
        return -(-replicas // self.span.unit)

    def _behind(self, replicas: int, site_of: NDArray[np.intp]) -> slice:
        """The units right behind a stage that begins at each of its sites."""
        return slice(self._width(replicas), self._width(replicas) + len(site_of))

    def _replicas(self, stage: int) -> tuple[int, ...]:
        fixed = self.space.constraints.replicas_of(stage)
        counts = replica_counts(self.model, self.model.rows // self.num_microbatches, fixed)
        return tuple(count for count in counts if count <= self.span.num_devices)

    def _priced_after(self, after: int) -> list[tuple[int, IntervalTable]]:
        """Replicas and prices of a stage with `after` stages behind it."""
        stage = self.space.stage_before(after)
        in_flight = self.schedule.in_flight(0, after + 1, self.num_microbatches)
        modes = self.space.modes_of(stage)
        return [(count, self._table(count, in_flight, modes)) for count in self._replicas(stage)]

    def _priced(self, replicas: int, in_flight: int, modes: tuple[Mode, ...]) -> IntervalTable:
        case = Case(replicas, self.num_microbatches, self.schedule.has_backward, modes, self.space.rules)
        return self.costs.table(case, self.span, in_flight)

    def _ends(self, layers: list[_Layer]) -> list[int]:
        """Numbers of stages for which there is a whole plan."""
        wanted = self.space.num_stages
        counts = range(1, len(layers)) if wanted is None else [wanted] if wanted < len(layers) else []
        return [k for k in counts if math.isfinite(self._value(layers, k))]

    def _value(self, layers: list[_Layer], num_stages: int) -> float:
        return float(layers[num_stages].value[0, 0])

    def _estimates(self, layers: list[_Layer], most_sum_s: float) -> Iterator[Estimate]:
        for num_stages in self._ends(layers):
            if self._value(layers, num_stages) <= most_sum_s:
                yield self._estimate(layers, num_stages)

    def _estimate(self, layers: list[_Layer], num_stages: int) -> Estimate:
        """The plan of a whole value, and its sum and busiest stage together."""
        candidate = self._candidate(reversed(layers[1 : num_stages + 1]))
        position = {block: at for at, block in enumerate(self.costs.order)}
        sum_s = busiest_s = 0.0
        for stage, placed in enumerate(candidate.placements):
            table = dict(self._tables_after(num_stages - 1 - stage))[placed.num_replicas]
            begin = min(position[block] for block in placed.blocks)
            unit = (placed.first_device - self.span.first) // self.span.unit
            run = table.site_of[unit], begin, begin + len(placed.blocks)
            sum_s += float(table.sum_s[run])
            busiest_s = max(busiest_s, float(table.busy_s[run]))
        host_s = self.model.host_s(candidate.placements, self.num_microbatches, self.schedule.has_backward)
        step_s = max(sum_s + self.weight * busiest_s, host_s)
        return Estimate(step_s=step_s, candidate=candidate)

    def _candidate(self, layers: Iterable[_Layer]) -> Candidate:
        """Follow the choices from the first block and unit."""
        begin = unit = 0
        placements = []
        for layer in layers:
            while layer.replicas[unit, begin] < 0:
                unit -= int(layer.replicas[unit, begin])
            end, replicas = int(layer.next_block[unit, begin]), int(layer.replicas[unit, begin])
            blocks = tuple(sorted(self.costs.order[begin:end]))
            placements.append(Placement(blocks, self.span.first + unit * self.span.unit, replicas))
            begin, unit = end, unit + self._width(replicas)
            if begin == self.model.num_blocks:
                break
        return Candidate(self.schedule, self.num_microbatches, tuple(placements))


def spans(model: StageModel) -> list[Span]:
    """All devices; and where stages can only begin at every few of them, for each kind as many of its first
    hosts as let them begin more closely, down to every device."""
    hosts, total = model.hosts, model.num_devices
    found = [Span(0, total, unit_size(total))]
    starts = [d for d in range(total) if d == 0 or model.kind_of[d] != model.kind_of[d - 1]]
    for start in starts:
        count = total - start
        while unit_size(count) > 1:
            most = max(count // FINER, MOST_UNITS)
            ends = (d for d in range(start + most, start, -1) if hosts[d] != hosts[d - 1])
            count = next(ends, start + most) - start
            found.append(Span(start, count, unit_size(count)))
    return found


def unit_size(num_devices: int) -> int:
    """Devices in a unit: the least that leaves few enough units, a divisor of all devices if one is near.

    Example:
        >>> unit_size(8), unit_size(64), unit_size(1024), unit_size(1000)
        (1, 2, 32, 25)
    """
    least = -(-num_devices // MOST_UNITS)
    divisors = (size for size in range(least, 2 * least) if num_devices % size == 0)
    return next(divisors, least)


def _capped(table: IntervalTable, *, cap: float) -> Matrix:
    return np.where(table.busy_s <= cap, table.sum_s, np.inf)
