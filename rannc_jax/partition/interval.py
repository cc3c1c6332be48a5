"""Prices of all runs of consecutive blocks of one order at once.

A run (begin, end) is the stage of blocks order[begin:end]. Costs are vectors over all runs, with the
numbers of `StageModel`, computed from prefix sums; the only estimate is the transfer into a stage, because
the stage before is not known yet: as many replicas, on the device just before. `Site` says which devices a
stage may lie on with the same price. What does not depend on the microbatches in flight is priced once.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rannc_jax.contract import Remat
from rannc_jax.cost.comm import Ring
from rannc_jax.cost.table import StateBytes
from rannc_jax.partition.mode import Mode, StageState, Work, for_replicas, stage_seconds
from rannc_jax.partition.rules import Rule, modes_under
from rannc_jax.partition.stage import Placement, StageModel

Matrix = NDArray[np.float64]
Runs = NDArray[np.float64]
"""A number for every run, [runs]."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the price of a stage depends on besides blocks and replicas.

    Args:
        kinds: indices of the kinds of its devices.
        ring: its replicas.
        enters_host: its last device lies on another host than the device before it.
        shares_host: it lies on several hosts, and not on all devices of the last one.
    """

    kinds: tuple[int, ...]
    ring: Ring
    enters_host: bool
    shares_host: bool


@dataclass(frozen=True, slots=True)
class Span:
    """Devices that stages are placed on, each beginning at a multiple of `unit` devices from `first` on."""

    first: int
    num_devices: int
    unit: int

    @property
    def num_units(self) -> int:
        return -(-self.num_devices // self.unit)


@dataclass(frozen=True, slots=True)
class Case:
    """What the prices of runs depend on besides devices and microbatches in flight.

    Args:
        replicas: of a stage, each with its rows of a microbatch.
        num_microbatches: of a step.
        trains: whether there is a backward.
        modes: to choose from.
        rules: what is fixed of the runs that hold some module.
    """

    replicas: int
    num_microbatches: int
    trains: bool
    modes: tuple[Mode, ...]
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class IntervalTable:
    """Matrices [sites, blocks + 1, blocks + 1]; infinite where there is no stage or it does not fit.

    Args:
        sum_s: what a stage adds to the time of one microbatch's way through the pipeline.
        busy_s: what it spends on each further microbatch (or its transfer if that is slower), its tail
            spread over them; the tail alone where there is one microbatch.
        fullness: peak over limit in the mode that needs least, fitting or not.
        site_of: the site by first unit of a stage.
    """

    sum_s: Matrix
    busy_s: Matrix
    fullness: Matrix
    site_of: NDArray[np.intp]


class IntervalCosts:
    """Matrices for one topological order."""

    def __init__(self, model: StageModel, order: Sequence[int]) -> None:
        self.model = model
        self.order = tuple(order)
        self.begin, self.end = np.triu_indices(len(order) + 1, 1)
        self.state = self._state()
        self.into = {trains: self._flows(trains) for trains in (False, True)}
        self.sites = functools.cache(self._sites)
        self.table = functools.cache(self._table)
        self._choices = functools.cache(self._choices_of)
        self._kept = functools.cache(self._kept_bytes)
        self._sums = functools.cache(self._kind_sums)

    def _sites(self, replicas: int, span: Span) -> tuple[list[Site], NDArray[np.intp]]:
        """Distinct sites of a stage of `replicas`, and the site by first unit."""
        firsts = range(0, span.num_devices - replicas + 1, span.unit)
        found = [self.site_of(span.first + first, replicas) for first in firsts]
        sites = list(dict.fromkeys(found))
        return sites, np.array([sites.index(site) for site in found], np.intp)

    def site_of(self, first: int, replicas: int) -> Site:
        """The site of a stage that begins at device `first`."""
        kinds, hosts = self.model.kind_of, self.model.hosts
        last, behind = hosts[first + replicas - 1], hosts[first + replicas : first + replicas + 1]
        return Site(
            kinds=tuple(sorted(set(kinds[first : first + replicas]))),
            ring=self.model.ring(Placement((), first, replicas)),
            enters_host=first > 0 and hosts[first - 1] != last,
            shares_host=hosts[first] != last and last in behind,
        )

    def _table(self, case: Case, span: Span, in_flight: int) -> IntervalTable:
        """Price all runs on every site; each in the fastest mode that fits."""
        sites, site_of = self.sites(case.replicas, span)
        size = len(self.order) + 1
        found = np.full((3, len(sites), size, size), np.inf)
        for index, site in enumerate(sites):
            found[:, index, self.begin, self.end] = self._choices(case, site).fastest(in_flight)
        return IntervalTable(*found, site_of=site_of)

    def _choices_of(self, case: Case, site: Site) -> "_Choices":
        """What runs cost on one site in each mode."""
        m = case.num_microbatches
        rows = self.model.rows // m // case.replicas
        modes = case.modes if case.rules else for_replicas(case.modes, case.replicas)
        sums = [self._sums(kind, rows) for kind in site.kinds]
        into_s, back_s = self._entry_seconds(site, rows, case.trains)
        leave_s = self._exit_seconds(site, rows, case.trains)
        buffers = self._buffers(rows, case.trains)
        step, total, busy, fixed, residual = [], [], [], [], []
        for mode in modes:
            forward_s, backward_s, tail_s = self._seconds(case, site, sums, mode)
            work_s = forward_s + backward_s
            step.append(m * work_s + tail_s)
            total.append(work_s + into_s + back_s + leave_s)
            spread_s = work_s + tail_s / busy_weight(m)
            slowest_s = np.maximum(np.maximum(into_s, back_s), leave_s)
            busy.append(np.maximum(spread_s, slowest_s) if m > 1 else tail_s)
            kept = self._kept(mode, case.replicas) + buffers
            fixed.append([kept + own.working_bytes[mode.remat] for own in sums])
            residual.append([own.residual_bytes[mode.remat] for own in sums])
        fixed = np.where(self._allowed(case, modes)[:, None], fixed, np.inf)
        limits = [[max(self.model.limits[kind], 1)] for kind in site.kinds]
        return _Choices(*map(np.array, (step, total, busy, fixed, residual, limits)))

    def _allowed(self, case: Case, modes: tuple[Mode, ...]) -> NDArray[np.bool_]:
        """Whether the rules for its blocks leave a mode to a run, [modes, runs]."""
        allowed = np.ones((len(modes), len(self.begin)), dtype=bool)
        for rule in case.rules:
            left = modes_under([rule], modes, case.replicas)
            forbidden = np.array([mode not in left for mode in modes])
            allowed &= ~(forbidden[:, None] & self._contains(rule.blocks))
        return allowed

    def _seconds(
        self, case: Case, site: Site, sums: "Sequence[_Sums]", mode: Mode
    ) -> tuple[Runs, Runs, Runs]:
        """Forward and backward of a microbatch, and the tail, by the rules of `StageModel`."""
        backward_s = np.max([s.backward_s[mode.remat] for s in sums], axis=0)
        return stage_seconds(
            mode,
            Work(
                forward_s=np.max([s.forward_s for s in sums], axis=0),
                backward_s=backward_s if case.trains else 0.0 * backward_s,
                once_s=np.max([s.once_s for s in sums], axis=0),
                trains=case.trains,
                state=self.state,
                slowest=min((self.model.kinds[kind] for kind in site.kinds), key=lambda k: k.bytes_per_s),
                pieces=self.end - self.begin,
                num_replicas=case.replicas,
            ),
            site.ring,
            self.model.tie_link,
        )

    def _kept_bytes(self, mode: Mode, replicas: int) -> Runs:
        """What a device of a run keeps all through the step, whatever the microbatches."""
        kept = self.state.under(mode, replicas)
        return kept.parameters + kept.gradients + kept.optimizer + kept.constants + kept.buffers

    def _buffers(self, rows: int, trains: bool) -> Runs:
        flows = self.into[trains]
        return np.floor((flows.in_row + flows.out_row) * rows + flows.in_fixed + flows.out_fixed)

    def _entry_seconds(self, site: Site, rows: int, trains: bool) -> tuple[Runs, Runs]:
        """Seconds that values take into a stage, and cotangents back out of it."""
        cluster = self.model.cluster
        link = cluster.inter_host if site.enters_host else cluster.intra_host
        one_way, both_ways = self.into[False], self.into[trains]
        there = one_way.in_row * rows + one_way.in_fixed
        back = both_ways.in_row * rows + both_ways.in_fixed - there
        into_s = np.where(there > 0, link.latency_s + there / link.bytes_per_s, 0.0)
        back_s = np.where(back > 0, link.latency_s + back / link.bytes_per_s, 0.0)
        return into_s, back_s

    def _exit_seconds(self, site: Site, rows: int, trains: bool) -> Runs:
        """Seconds to the next stage and back, where that may lie on the last of several hosts: it does not
        enter another one, and yet some of these replicas are on others."""
        if not site.shares_host:
            return np.zeros(self.begin.shape)
        link, flows = self.model.cluster.inter_host, self.into[trains]
        moved = flows.out_row * rows + flows.out_fixed
        return np.where(moved > 0, (1 + trains) * link.latency_s + moved / link.bytes_per_s, 0.0)

    def _state(self) -> StageState:
        """State of every run, ties counted once."""
        states = [self.model.blocks[block].state for block in self.order]
        names = ("parameters", "gradients", "optimizer", "constants", "prologue", "update_bytes")
        total = {name: self._sum([getattr(state, name) for state in states]) for name in names}
        total["borrowed"] = np.zeros(self.begin.shape)
        total["largest_parameters"] = self._most([state.parameters + state.prologue for state in states])
        total["largest_optimizer"] = self._most([state.optimizer for state in states])
        for tie in self.model.ties:
            owns, reads = self._contains(tie.blocks[:1]), self._contains(tie.blocks)
            copy = StateBytes(parameters=tie.state.parameters, gradients=tie.state.gradients)
            for name in names:
                whole, borrowed = getattr(tie.state, name), getattr(copy, name)
                total[name] = total[name] + np.where(owns, whole, np.where(reads, borrowed, 0))
            total["borrowed"] += np.where(reads & ~owns, tie.state.parameters, 0)
            parameters, optimizer = tie.state.parameters + tie.state.prologue, tie.state.optimizer
            for name, size, where in (
                ("largest_parameters", parameters, reads),
                ("largest_optimizer", optimizer, owns),
            ):
                total[name] = np.maximum(total[name], np.where(where, size, 0))
        return StageState(**total)

    def _contains(self, blocks: Collection[int]) -> NDArray[np.bool_]:
        """Whether a run holds any of `blocks`."""
        return self._sum([block in blocks for block in self.order]) > 0

    def _flows(self, trains: bool) -> "_Flows":
        """Bytes into and out of every run, by row and fixed; cotangents counted where `trains`."""
        at = {block: position for position, block in enumerate(self.order)}
        flows = _Flows(*(np.zeros(self.begin.shape) for _ in range(4)))
        for value in self.model.values:
            ways = 2 if trains and value.needs_grad else 1
            made = at[value.producer]
            last = max(at[consumer] for consumer in value.consumers)
            comes = (made < self.begin) & self._contains(value.consumers)
            goes = (self.begin <= made) & (made < self.end) & (self.end <= last)
            flows.in_row[comes] += ways * value.bytes_per_row
            flows.in_fixed[comes] += ways * value.fixed_bytes
            flows.out_row[goes] += ways * value.bytes_per_row
            flows.out_fixed[goes] += ways * value.fixed_bytes
        return flows

    def _kind_sums(self, kind: int, rows: int) -> "_Sums":
        prices = [self.model.block_price(block, rows, kind) for block in self.order]
        return _Sums(
            forward_s=self._sum([price.forward_s for price in prices]),
            once_s=self._sum([price.once_s for price in prices]),
            backward_s={r: self._sum([price.backward_s[r] for price in prices]) for r in Remat},
            residual_bytes={r: self._sum([price.residual_bytes[r] for price in prices]) for r in Remat},
            working_bytes={r: self._most([price.working_bytes[r] for price in prices]) for r in Remat},
        )

    def _sum(self, numbers: Sequence[float]) -> Runs:
        """Of the numbers of the blocks of every run."""
        sums = np.concatenate([[0.0], np.cumsum(np.asarray(numbers, dtype=np.float64))])
        return np.maximum(sums[self.end] - sums[self.begin], 0.0)

    def _most(self, numbers: Sequence[float]) -> Runs:
        """Of the numbers of the blocks of every run; runs lie by begin and then by end."""
        all_ = np.asarray(numbers, dtype=np.float64)
        return np.concatenate([np.maximum.accumulate(all_[begin:]) for begin in range(len(all_))])


def busy_weight(num_microbatches: int) -> int:
    """How often the busiest stage counts in the estimate of a step."""
    return max(num_microbatches - 1, 1)


@dataclass(frozen=True, slots=True)
class _Choices:
    """What runs cost in each mode: seconds [modes, runs]; bytes [modes, kinds, runs]; limits [kinds, 1].

    Microbatches in flight change only which modes fit, so one of these serves any number of them.
    """

    step_s: Matrix
    sum_s: Matrix
    busy_s: Matrix
    fixed_bytes: NDArray[np.float64]
    residual_bytes: NDArray[np.float64]
    limits: NDArray[np.float64]

    def fastest(self, in_flight: int) -> tuple[Runs, Runs, Runs]:
        """`IntervalTable`'s sum, busy seconds and fullness of every run; of equal modes the first."""
        full = ((self.fixed_bytes + in_flight * self.residual_bytes) / self.limits).max(axis=1)
        step_s = np.where(full <= 1.0, self.step_s, np.inf)
        mode, run = step_s.argmin(axis=0), np.arange(step_s.shape[1])
        fits = step_s[mode, run] < np.inf
        sum_s, busy_s = (np.where(fits, each[mode, run], np.inf) for each in (self.sum_s, self.busy_s))
        return sum_s, busy_s, full.min(axis=0)


@dataclass(frozen=True, slots=True)
class _Sums:
    forward_s: Runs
    once_s: Runs
    backward_s: dict[Remat, Runs]
    residual_bytes: dict[Remat, Runs]
    working_bytes: dict[Remat, Runs]


@dataclass(frozen=True, slots=True)
class _Flows:
    in_row: Runs
    in_fixed: Runs
    out_row: Runs
    out_fixed: Runs
