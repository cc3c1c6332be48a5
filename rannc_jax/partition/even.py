"""Plans that are not built stage by stage: even cuts, several chunks a rank, a backward in two halves.

Even cuts part the blocks into ranks x chunks runs of about equal time, the ranks with equal numbers of
replicas; they are what interleaved schedules run, and good company for the chains of the fast search. What a
split backward keeps in flight depends on the whole plan, so zero-bubble plans are the best plans with whole
backwards, run by another schedule.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rannc_jax.partition.candidate import Candidate, Evaluation, Evaluator
from rannc_jax.partition.constraints import NamedSchedule
from rannc_jax.partition.rules import each_value
from rannc_jax.partition.space import replica_counts
from rannc_jax.partition.stage import Placement

MOST_EVEN = 24
"""Schedules, microbatches and stages whose even cuts are priced on the clock, with one chunk a rank, and with
several. Both cuts of each: they differ little, so counted singly they would crowd out others."""
MOST_SPLIT = 12
"""Plans that are tried with a split backward."""


def even_cuts(evaluator: Evaluator) -> Iterator[Candidate]:
    """The most promising even cuts, by an estimate of their steps."""
    whole = [s for s in evaluator.space.schedules if s.num_chunks > 1 or not s.splits_backward]
    seconds_of = functools.cache(functools.partial(_seconds, evaluator))
    ends_of = functools.cache(lambda rows, num_stages: _even(seconds_of(rows), num_stages))
    for several in (False, True):
        schedules = [schedule for schedule in whole if (schedule.num_chunks > 1) is several]
        found = [cut for schedule in schedules for cut in _cuts(evaluator, schedule, seconds_of, ends_of)]
        found.sort(key=lambda cut: (cut.step_s, cut.num_stages, cut.num_microbatches))
        of_shape: dict[tuple[NamedSchedule, int, int], list[_Cut]] = {}
        for cut in found:
            of_shape.setdefault((cut.schedule, cut.num_microbatches, cut.num_stages), []).append(cut)
        for cuts in itertools.islice(of_shape.values(), MOST_EVEN):
            for cut in cuts:
                yield cut.candidate()


def split_backwards(evaluator: Evaluator, whole: Sequence[Evaluation]) -> Iterator[Candidate]:
    """Plans with whole backwards and one chunk a rank, best first, run by schedules that split them."""
    plans = dict.fromkeys(
        (found.candidate.num_microbatches, found.candidate.placements)
        for found in whole
        if found.candidate.schedule.num_chunks == 1
    )
    for schedule in evaluator.space.schedules:
        if schedule.splits_backward and schedule.num_chunks == 1:
            for m, placements in itertools.islice(plans, MOST_SPLIT):
                if schedule.runs(len(placements), m):
                    yield Candidate(schedule, m, placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A plan before it is priced."""

    step_s: float
    schedule: NamedSchedule
    num_microbatches: int
    num_replicas: int
    num_stages: int
    ends: tuple[int, ...]

    def candidate(self) -> Candidate:
        ranks = self.num_stages // self.schedule.num_chunks
        runs = itertools.pairwise((0, *self.ends))
        placements = tuple(
            Placement(tuple(range(begin, end)), stage % ranks * self.num_replicas, self.num_replicas)
            for stage, (begin, end) in enumerate(runs)
        )
        return Candidate(self.schedule, self.num_microbatches, placements)


def _cuts(
    evaluator: Evaluator,
    schedule: NamedSchedule,
    seconds_of: Callable[[int], NDArray[np.float64]],
    ends_of: Callable[[int, int], list[tuple[int, ...]]],
) -> Iterator[_Cut]:
    """For every number of ranks, microbatches and replicas the cuts into runs of about equal time.

    `seconds_of` rows are those of the blocks; `ends_of` rows and a number of stages are those of the runs.
    """
    model, space, chunks = evaluator.model, evaluator.space, schedule.num_chunks
    most = min(model.num_devices, model.num_blocks // chunks)
    for ranks, m in itertools.product(range(1 if chunks == 1 else 2, most + 1), space.num_microbatches):
        num_stages = ranks * chunks
        if space.num_stages not in (None, num_stages) or not schedule.runs(num_stages, m):
            continue
        for replicas in _replicas(evaluator, ranks, m):
            rows = model.rows // m // replicas
            for ends in ends_of(rows, num_stages) if space.boundaries is None else [space.boundaries[1:]]:
                if len(ends) != num_stages:
                    continue
                sums = np.diff(np.concatenate([[0.0], np.cumsum(seconds_of(rows))])[[0, *ends]])
                busiest_s = float(sums.reshape(chunks, ranks).sum(axis=0).max())
                yield _Cut(
                    step_s=m * busiest_s + (ranks - 1) * float(sums.max()),
                    schedule=schedule,
                    num_microbatches=m,
                    num_replicas=replicas,
                    num_stages=num_stages,
                    ends=tuple(ends),
                )


def _replicas(evaluator: Evaluator, ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """The most replicas that every rank may have, or the fixed number."""
    model, space = evaluator.model, evaluator.space
    fixed = set(each_value(space.constraints.replicas))
    if len(fixed) > 1:
        return ()
    counts = replica_counts(model, model.rows // num_microbatches, next(iter(fixed), None))
    return tuple(r for r in counts if r * ranks <= model.num_devices)[-1:]


def _seconds(evaluator: Evaluator, rows: int) -> NDArray[np.float64]:
    """Forward and cheapest backward of every block on the slowest kind of device."""
    model, trains = evaluator.model, evaluator.space.schedules[0].has_backward
    kinds = range(len(model.kinds))
    prices = [[model.block_price(block, rows, kind) for kind in kinds] for block in range(model.num_blocks)]
    return np.array(
        [max(p.forward_s + (min(p.backward_s.values()) if trains else 0.0) for p in each) for each in prices]
    )


def _even(seconds: NDArray[np.float64], parts: int) -> list[tuple[int, ...]]:
    """Ends of `parts` runs: as even as can be, and as even as can be with the longest as short as can be."""
    lengths = run_weights(seconds)
    _, shortest_s = best_ends(lengths, parts, np.maximum)
    even, _ = best_ends(lengths**2, parts, np.add)
    short, _ = best_ends(np.where(lengths <= shortest_s * (1 + 1e-9), lengths**2, np.inf), parts, np.add)
    return list(dict.fromkeys((even, short)))


def run_weights(weights: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Weight of every run [begin, end]; infinite where there is none."""
    total = np.concatenate([[0.0], np.cumsum(weights)])
    is_run = np.triu(np.ones((len(total), len(total)), dtype=bool), 1)
    return np.where(is_run, total[None, :] - total[:, None], np.inf)


def best_ends(costs: NDArray[np.float64], parts: int, combine: np.ufunc) -> tuple[tuple[int, ...], float]:
    """Ends of runs [begin, end] that cost least together, and that cost; O(parts x blocks^2)."""
    count = len(costs) - 1
    best = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    choices = []
    for _ in range(parts):
        found = combine(best[:, None], costs)
        choices.append(found.argmin(axis=0))
        best = found.min(axis=0)
    ends = [count]
    for choice in reversed(choices[1:]):
        ends.append(int(choice[ends[-1]]))
    return tuple(reversed(ends)), float(best[count])
