"""Plans for schedules that are no chains: a backward in two halves, several chunks a rank.

What such a plan keeps in flight depends on the whole of it, so it is not built stage by stage. Zero-bubble
plans are the best chains run by another schedule. Interleaved plans cut the blocks into ranks x chunks runs
of about equal time, the ranks with equal numbers of replicas, and are priced in the order of an estimate.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rannc_jax.partition.candidate import Candidate, Evaluation, Evaluator
from rannc_jax.partition.constraints import NamedSchedule
from rannc_jax.partition.order import orders
from rannc_jax.partition.space import replica_counts
from rannc_jax.partition.stage import Placement, StageModel

MOST_SPLIT = 12
"""Chains that are tried with a split backward."""
MOST_CHUNKED = 16
"""Interleaved plans that are priced on the clock."""


def derived(evaluator: Evaluator, chains: Sequence[Evaluation]) -> Iterator[Candidate]:
    """Candidates of the schedules that are no chains, the most promising ones.

    Args:
        evaluator: its space says what is allowed.
        chains: priced plans, best first.
    """
    for schedule in evaluator.space.schedules:
        if schedule.splits_backward and schedule.num_chunks == 1:
            plans = dict.fromkeys((c.candidate.num_microbatches, c.candidate.placements) for c in chains)
            for m, placements in itertools.islice(plans, MOST_SPLIT):
                if schedule.runs(len(placements), m):
                    yield Candidate(schedule, m, placements)
    several = [schedule for schedule in evaluator.space.schedules if schedule.num_chunks > 1]
    chunked = [estimate for schedule in several for estimate in _chunked(evaluator, schedule)]
    chunked.sort(key=lambda estimate: (estimate.step_s, estimate.num_stages, estimate.num_microbatches))
    for estimate in chunked[:MOST_CHUNKED]:
        yield estimate.candidate(evaluator.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunked:
    """An interleaved plan before it is priced."""

    step_s: float
    schedule: NamedSchedule
    num_microbatches: int
    num_replicas: int
    num_stages: int
    order: tuple[int, ...]
    ends: tuple[int, ...]

    def candidate(self, model: StageModel) -> Candidate:
        ranks = self.num_stages // self.schedule.num_chunks
        runs = itertools.pairwise((0, *self.ends))
        placements = tuple(
            Placement(
                tuple(sorted(self.order[begin:end])), stage % ranks * self.num_replicas, self.num_replicas
            )
            for stage, (begin, end) in enumerate(runs)
        )
        return Candidate(self.schedule, self.num_microbatches, placements)


def _chunked(evaluator: Evaluator, schedule: NamedSchedule) -> Iterator[_Chunked]:
    """For every number of ranks, microbatches and replicas the cut into runs of about equal time."""
    model, space, chunks = evaluator.model, evaluator.space, schedule.num_chunks
    order = tuple(range(model.num_blocks)) if space.boundaries else orders(model.num_blocks, model.values)[0]
    most = min(model.num_devices, model.num_blocks // chunks)
    for ranks, m in itertools.product(range(2, most + 1), space.num_microbatches):
        num_stages = ranks * chunks
        if space.num_stages not in (None, num_stages) or not schedule.runs(num_stages, m):
            continue
        for replicas in _replicas(evaluator, ranks, m):
            seconds = _seconds(model, order, model.rows // m // replicas, trains=schedule.has_backward)
            ends = _even(seconds, num_stages) if space.boundaries is None else space.boundaries[1:]
            if len(ends) == num_stages:
                sums = np.diff(np.concatenate([[0.0], np.cumsum(seconds)])[[0, *ends]])
                busiest_s = float(sums.reshape(chunks, ranks).sum(axis=0).max())
                yield _Chunked(
                    step_s=m * busiest_s + (ranks - 1) * float(sums.max()),
                    schedule=schedule,
                    num_microbatches=m,
                    num_replicas=replicas,
                    num_stages=num_stages,
                    order=order,
                    ends=tuple(ends),
                )


def _replicas(evaluator: Evaluator, ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """The most replicas that every rank may have, or the fixed number."""
    model, space = evaluator.model, evaluator.space
    fixed = {space.constraints.replicas_of(stage) for stage in range(space.num_stages or 1)}
    if len(fixed) > 1:
        return ()
    counts = replica_counts(model, model.rows // num_microbatches, fixed.pop())
    return tuple(r for r in counts if r * ranks <= model.num_devices)[-1:]


def _seconds(model: StageModel, order: Sequence[int], rows: int, *, trains: bool) -> NDArray[np.float64]:
    """Forward and cheapest backward of every block on the slowest kind of device."""
    kinds = range(len(model.kinds))
    prices = [[model.block_price(block, rows, kind) for kind in kinds] for block in order]
    return np.array(
        [max(p.forward_s + (min(p.backward_s.values()) if trains else 0.0) for p in each) for each in prices]
    )


def _even(seconds: NDArray[np.float64], parts: int) -> tuple[int, ...]:
    """Ends of `parts` runs whose longest is as short as can be; O(parts x blocks^2)."""
    count = len(seconds)
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    is_run = np.triu(np.ones((count + 1, count + 1), dtype=bool), 1)
    longest = np.where(is_run, total[None, :] - total[:, None], np.inf)
    best = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    choices = []
    for _ in range(parts):
        found = np.maximum(best[:, None], longest)
        choices.append(found.argmin(axis=0))
        best = found.min(axis=0)
    ends = [count]
    for choice in reversed(choices[1:]):
        ends.append(int(choice[ends[-1]]))
    return tuple(reversed(ends))
