"""Prices of all runs of consecutive blocks of one order at once, as matrices.

Entry [i, j] is the stage of blocks order[i:j]. The numbers are those of `StageModel`, computed from
prefix sums; the only estimate is the transfer into a stage, because the stage before is not known yet:
as many replicas, on the device just before. `Site` says which devices a stage may lie on with the same
price.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True)
class Site:
    """What the price of a stage depends on besides blocks and replicas.

    Args:
        kinds: indices of the kinds of its devices.
        ring: its replicas.
        enters_host: the device before it lies on another host.
    """

    kinds: tuple[int, ...]
    ring: Ring
    enters_host: bool


@dataclass(frozen=True, slots=True)
class IntervalTable:
    """Matrices [blocks + 1, blocks + 1]; infinite where there is no stage or it does not fit.

    Args:
        sum_s: what a stage adds to the time of one microbatch's way through the pipeline.
        busy_s: what it spends on each further microbatch (or its transfer if that is slower), its tail
            spread over them; the tail alone where there is one microbatch.
        fullness: peak over limit in the mode that needs least, fitting or not.
    """

    sum_s: Matrix
    busy_s: Matrix
    fullness: Matrix


class IntervalCosts:
    """Matrices for one topological order."""

    def __init__(self, model: StageModel, order: Sequence[int]) -> None:
        self.model = model
        self.order = tuple(order)
        size = len(order) + 1
        self.is_stage = np.triu(np.ones((size, size), dtype=bool), 1)
        self.pieces = np.maximum(np.arange(size)[None, :] - np.arange(size)[:, None], 0)
        self.state = self._state()
        self.into = {trains: self._flows(trains) for trains in (False, True)}
        self.sites = functools.cache(self._sites)
        self._sums = functools.cache(self._kind_sums)

    def _sites(self, replicas: int, unit: int) -> tuple[list[Site], NDArray[np.intp]]:
        """Distinct sites of a stage of `replicas`, and the site by first unit of so many devices."""
        last = self.model.num_devices // unit * unit - -(-replicas // unit) * unit
        found = [self.site_of(first, replicas) for first in range(0, last + 1, unit)]
        sites = list(dict.fromkeys(found))
        return sites, np.array([sites.index(site) for site in found])

    def site_of(self, first: int, replicas: int) -> Site:
        """The site of a stage that begins at device `first`."""
        kinds, hosts = self.model.kind_of, self.model.hosts
        return Site(
            kinds=tuple(sorted(set(kinds[first : first + replicas]))),
            ring=self.model.ring(Placement((), first, replicas)),
            enters_host=first > 0 and hosts[first - 1] != hosts[first],
        )

    def table(
        self,
        site: Site,
        replicas: int,
        num_microbatches: int,
        in_flight: int,
        trains: bool,
        modes: tuple[Mode, ...],
    ) -> IntervalTable:
        """Price all runs on one site; each in the fastest of `modes` that fits."""
        model = self.model
        rows = model.rows // num_microbatches // replicas
        into_s, back_s = self._entry_seconds(site, rows, trains)
        size = self.is_stage.shape
        step, work, tail = (np.full(size, np.inf) for _ in range(3))
        fullness = np.full(size, np.inf)
        for mode in for_replicas(modes, replicas):
            full = self._fullness(site, replicas, rows, mode, in_flight, trains)
            fullness = np.minimum(fullness, full)
            forward_s, backward_s, tail_s = self._seconds(site, replicas, rows, mode, trains)
            step_s = num_microbatches * (forward_s + backward_s) + tail_s
            better = (full <= 1.0) & (step_s < step)
            for target, found in ((step, step_s), (work, forward_s + backward_s), (tail, tail_s)):
                np.copyto(target, found, where=better)
        sum_s = work + into_s + back_s
        busy_s = tail
        if num_microbatches > 1:
            spread_s = work + tail / busy_weight(num_microbatches)
            busy_s = np.maximum(spread_s, np.maximum(into_s, back_s))
        return IntervalTable(
            sum_s=np.where(self.is_stage, sum_s, np.inf),
            busy_s=np.where(self.is_stage, busy_s, np.inf),
            fullness=np.where(self.is_stage, fullness, np.inf),
        )

    def by_rules(
        self,
        price: Callable[[tuple[Mode, ...]], IntervalTable],
        modes: tuple[Mode, ...],
        replicas: int,
        rules: Sequence[Rule],
    ) -> IntervalTable:
        """Price every run in the modes that the rules for its blocks leave.

        `price` is `table` but for the modes; it is asked once for every set of modes that some run may take.
        """
        inside = np.stack([self._contains(sorted(rule.blocks)) for rule in rules])
        kinds, kind_of = np.unique(inside.reshape(len(rules), -1), axis=1, return_inverse=True)
        kind_of = kind_of.reshape(self.is_stage.shape)
        left = [modes_under(list(itertools.compress(rules, kind)), modes, replicas) for kind in kinds.T]
        result = IntervalTable(*(np.full(self.is_stage.shape, np.inf) for _ in range(3)))
        for allowed in dict.fromkeys(filter(None, left)):
            here = np.isin(kind_of, [kind for kind, modes_left in enumerate(left) if modes_left == allowed])
            table = price(allowed)
            for name in ("sum_s", "busy_s", "fullness"):
                np.copyto(getattr(result, name), getattr(table, name), where=here)
        return result

    def _seconds(
        self, site: Site, replicas: int, rows: int, mode: Mode, trains: bool
    ) -> tuple[Matrix, Matrix, Matrix]:
        """Forward and backward of a microbatch, and the tail, by the rules of `StageModel`."""
        sums = [self._sums(kind, rows) for kind in site.kinds]
        forward_s = np.max([s.forward_s for s in sums], axis=0)
        backward_s = np.max([s.backward_s[mode.remat] for s in sums], axis=0)
        return stage_seconds(
            mode,
            Work(
                forward_s=forward_s,
                backward_s=backward_s if trains else 0.0 * backward_s,
                once_s=np.max([s.once_s for s in sums], axis=0),
                trains=trains,
                state=self.state,
                slowest=min((self.model.kinds[kind] for kind in site.kinds), key=lambda k: k.bytes_per_s),
                pieces=self.pieces,
                num_replicas=replicas,
            ),
            site.ring,
            self.model.tie_link,
        )

    def _fullness(
        self, site: Site, replicas: int, rows: int, mode: Mode, in_flight: int, trains: bool
    ) -> Matrix:
        kept = self.state.under(mode, replicas)
        fixed = kept.parameters + kept.gradients + kept.optimizer + kept.constants + kept.buffers
        fixed = fixed + self._buffers(rows, trains)
        found = []
        for kind in site.kinds:
            sums = self._sums(kind, rows)
            peak = fixed + in_flight * sums.residual_bytes[mode.remat] + sums.working_bytes[mode.remat]
            found.append(peak / max(self.model.limits[kind], 1))
        return np.max(found, axis=0)

    def _buffers(self, rows: int, trains: bool) -> Matrix:
        flows = self.into[trains]
        return np.floor((flows.in_row + flows.out_row) * rows + flows.in_fixed + flows.out_fixed)

    def _entry_seconds(self, site: Site, rows: int, trains: bool) -> tuple[Matrix, Matrix]:
        """Seconds that values take into a stage, and cotangents back out of it."""
        cluster = self.model.cluster
        link = cluster.inter_host if site.enters_host else cluster.intra_host
        one_way, both_ways = self.into[False], self.into[trains]
        there = one_way.in_row * rows + one_way.in_fixed
        back = both_ways.in_row * rows + both_ways.in_fixed - there
        into_s = np.where(there > 0, link.latency_s + there / link.bytes_per_s, 0.0)
        back_s = np.where(back > 0, link.latency_s + back / link.bytes_per_s, 0.0)
        return into_s, back_s

    def _state(self) -> StageState:
        """State of every run, ties counted once."""
        states = [self.model.blocks[block].state for block in self.order]
        total: dict[str, Matrix] = {
            name: _between([getattr(state, name) for state in states])
            for name in ("parameters", "gradients", "optimizer", "constants", "prologue", "update_bytes")
        }
        total["borrowed"] = np.zeros(self.is_stage.shape)
        total["largest_parameters"] = _largest([state.parameters + state.prologue for state in states])
        total["largest_optimizer"] = _largest([state.optimizer for state in states])
        for tie in self.model.ties:
            owns, reads = self._contains(tie.blocks[:1]), self._contains(tie.blocks)
            copy = StateBytes(parameters=tie.state.parameters, gradients=tie.state.gradients)
            for name in ("parameters", "gradients", "optimizer", "constants", "prologue", "update_bytes"):
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

    def _contains(self, blocks: Sequence[int]) -> NDArray[np.bool_]:
        """Whether a run holds any of `blocks`."""
        marks = [float(block in blocks) for block in self.order]
        return _between(marks) > 0

    def _flows(self, trains: bool) -> "_Flows":
        """Bytes into and out of every run, by row and fixed; cotangents counted where `trains`."""
        size = len(self.order) + 1
        at = {block: position for position, block in enumerate(self.order)}
        begin, end = np.arange(size)[:, None], np.arange(size)[None, :]
        flows = _Flows(*(np.zeros((size, size)) for _ in range(4)))
        for value in self.model.values:
            ways = 2 if trains and value.needs_grad else 1
            made = at[value.producer]
            last = max(at[consumer] for consumer in value.consumers)
            comes = (made < begin) & self._contains(value.consumers)
            goes = (begin <= made) & (made < end) & (end <= last)
            flows.in_row[comes] += ways * value.bytes_per_row
            flows.in_fixed[comes] += ways * value.fixed_bytes
            flows.out_row[goes] += ways * value.bytes_per_row
            flows.out_fixed[goes] += ways * value.fixed_bytes
        return flows

    def _kind_sums(self, kind: int, rows: int) -> "_Sums":
        prices = [self.model.block_price(block, rows, kind) for block in self.order]
        return _Sums(
            forward_s=_between([price.forward_s for price in prices]),
            once_s=_between([price.once_s for price in prices]),
            backward_s={r: _between([price.backward_s[r] for price in prices]) for r in Remat},
            residual_bytes={r: _between([price.residual_bytes[r] for price in prices]) for r in Remat},
            working_bytes={r: _largest([price.working_bytes[r] for price in prices]) for r in Remat},
        )


def busy_weight(num_microbatches: int) -> int:
    """How often the busiest stage counts in the estimate of a step."""
    return max(num_microbatches - 1, 1)


@dataclass(frozen=True, slots=True)
class _Sums:
    forward_s: Matrix
    once_s: Matrix
    backward_s: dict[Remat, Matrix]
    residual_bytes: dict[Remat, Matrix]
    working_bytes: dict[Remat, Matrix]


@dataclass(frozen=True, slots=True)
class _Flows:
    in_row: Matrix
    in_fixed: Matrix
    out_row: Matrix
    out_fixed: Matrix


def _between(numbers: Sequence[float]) -> Matrix:
    """[i, j] = sum of numbers[i:j]; 0 where j <= i."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(numbers, dtype=np.float64))])
    return np.maximum(sums[None, :] - sums[:, None], 0.0)


def _largest(numbers: Sequence[float]) -> Matrix:
    """[i, j] = max of numbers[i:j]; 0 where j <= i."""
    size = len(numbers) + 1
    result = np.zeros((size, size))
    for begin in range(size - 1):
        result[begin, begin + 1 :] = np.maximum.accumulate(np.asarray(numbers[begin:], dtype=np.float64))
    return result
