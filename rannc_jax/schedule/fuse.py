"""Zero bubble where it pays: only the backwards whose split fills a bubble stay split.

Handing values from I to W costs memory traffic and a call, so that splitting every backward eats its own
gain. A stage splits its first backwards, so that the stages before it get going, and its last ones, so that
the pipeline drains; how many of each is found by simulation, many choices on one clock.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rannc_jax.schedule.action import Action, Kind
from rannc_jax.schedule.check import linearise
from rannc_jax.schedule.schedule import Grid, Schedule
from rannc_jax.schedule.simulate import Transfer, outgoing_transfers
from rannc_jax.schedule.written import Written

SPLIT_SHARE = 0.05
"""Seconds that a split costs, as a share of forward and backward. Four layers of a GPT of width 2048 on an
H200 took 3 % longer with kept matrix products, and 5 % where everything is computed again."""

_MOST_STEPS = 40_000
"""Actions on the clock, summed over trials: about a second. More are not worth the wait."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def fuse_backwards(
    schedule: Schedule,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float],
    transfers: Sequence[Transfer] = (),
    split_share: float = SPLIT_SHARE,
) -> Schedule:
    """The same schedule with whole backwards where a split costs more than it gains.

    Args:
        schedule: one that splits backwards.
        num_microbatches, forward_s, backward_s, weight_s, transfers: as in `simulate`.
        split_share: see `SPLIT_SHARE`.

    Returns:
        A schedule that holds no more at a time; `schedule` itself where every split is worth it.

    Complexity: O(stages x actions x microbatches), until a limit; what is left then stays as it is.
    """
    grid = _latest_first(schedule.actions(len(forward_s), num_microbatches))
    clock = _Clock(grid, num_microbatches, forward_s, backward_s, weight_s, transfers, split_share)
    split = clock.best(_ends(len(forward_s), num_microbatches))
    for stage in range(len(forward_s)):
        if clock.num_steps > _MOST_STEPS:
            break
        split = clock.best([split, *_at_stage(split, stage, num_microbatches)])
    return schedule if clock.sends.any() and split[clock.sends].all() else Written(_fused(grid, split))


def _ends(num_stages: int, count: int) -> list[Flags]:
    """Numbers of first and of last microbatches to split: none, powers of 2 and all, the same at every stage
    or one more or less from stage to stage."""
    index, stage = np.arange(count), np.arange(num_stages)[:, None]
    few = [0, *(2**k for k in range(count.bit_length()) if 2**k < count), count]
    rows = [np.maximum(0, least + slope * stage) for least in few for slope in (-1, 0, 1)]
    rows += [np.maximum(0, least - slope * stage[::-1]) for least in few for slope in (-1, 1)]
    found = ((index < first) | (index >= count - last) for first in rows for last in rows)
    return list({choice.tobytes(): choice for choice in found}.values())


def _at_stage(split: Flags, stage: int, count: int) -> list[Flags]:
    """The same choice with other first, or other last, microbatches split at one stage."""
    index, choices = np.arange(count), []
    own = split[stage]
    first = int(np.argmin(own)) if not own.all() else count
    last = int(np.argmin(own[::-1])) if not own.all() else 0
    for other in range(count + 1):
        for row in (
            (index < other) | (index >= count - last),
            (index < first) | (index >= count - other),
        ):
            changed = split.copy()
            changed[stage] = row
            choices.append(changed)
    return choices


class _Clock:
    """Simulates many choices of splits at once, all in one order of actions.

    Without the split of a backward its I lasts as long as both halves, and its W no time.
    """

    def __init__(
        self,
        grid: Grid,
        num_microbatches: int,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        weight_s: Sequence[float],
        transfers: Sequence[Transfer],
        split_share: float,
    ) -> None:
        self._order, self._count = linearise(grid), num_microbatches
        self._rank_of = {action.stage: rank for rank, row in enumerate(grid) for action in row}
        self._num_ranks = len(grid)
        self._forward, self._whole = np.asarray(forward_s, float), np.asarray(backward_s, float)
        self._late = np.asarray(weight_s, float)
        self._split = split_share * (self._forward + self._whole)
        self._outgoing, self._num_transfers = outgoing_transfers(len(forward_s), transfers), len(transfers)
        self.sends = np.array([bool(targets) for targets in self._outgoing[1]])
        self.num_steps = 0

    def best(self, choices: Sequence[Flags]) -> Flags:
        """The choice with the shortest step; of equal ones that with fewest splits, then the first.

        Args:
            choices: bool [stages, microbatches] each, what is split; a stage that sends no gradient splits
                nothing.
        """
        split = np.stack(choices) & self.sends[:, None]
        seconds = np.round(self._step_s(split) / self._whole.sum(), 9)
        return split[np.lexsort((split.sum(axis=(1, 2)), seconds))[0]]

    def _step_s(self, split: Flags) -> Floats:
        """Seconds of the step, [choices], for bool [choices, stages, microbatches]."""
        num_choices, num_stages, _ = split.shape
        self.num_steps += len(self._order)
        early = np.where(split, (self._whole - self._late + self._split)[:, None], self._whole[:, None])
        late = np.where(split, self._late[:, None], 0.0)
        arrived = np.zeros((2, num_stages, self._count, num_choices))
        channel = np.zeros((2, max(1, self._num_transfers), num_choices))
        free = np.zeros((self._num_ranks, num_choices))
        for action in self._order:
            stage, microbatch, rank = action.stage, action.microbatch, self._rank_of[action.stage]
            if action.kind is Kind.WEIGHT_GRAD:
                free[rank] += late[:, stage, microbatch]
                continue
            way = 0 if action.kind is Kind.FORWARD else 1
            lasts = early[:, stage, microbatch] if way else self._forward[stage]
            end = np.maximum(free[rank], arrived[way, stage, microbatch]) + lasts
            free[rank] = end
            for other, transfer_s, index in self._outgoing[way][stage]:
                arrival = np.maximum(end, channel[way, index]) + transfer_s
                channel[way, index] = arrival
                np.maximum(arrived[way, other, microbatch], arrival, out=arrived[way, other, microbatch])
        return free.max(axis=0)


def _latest_first(grid: Grid) -> Grid:
    """The same kinds at the same times, each W that of the latest microbatch that waits for one.

    As many as can be then follow their I at once; nobody waits for a W, so nothing is later for it.
    """
    rows = []
    for row in grid:
        waiting: dict[int, list[int]] = {}
        new: list[Action] = []
        for action in row:
            if action.kind is Kind.INPUT_GRAD:
                waiting.setdefault(action.stage, []).append(action.microbatch)
            late = action.kind is Kind.WEIGHT_GRAD
            new.append(Action(action.stage, action.kind, waiting[action.stage].pop()) if late else action)
        rows.append(tuple(new))
    return tuple(rows)


def _fused(grid: Grid, split: Flags) -> Grid:
    """Whole backwards where nothing is split."""

    def as_run(action: Action) -> Action | None:
        if action.kind is Kind.FORWARD or split[action.stage, action.microbatch]:
            return action
        whole = Action(action.stage, Kind.BACKWARD, action.microbatch)
        return whole if action.kind is Kind.INPUT_GRAD else None

    return tuple(tuple(new for action in row if (new := as_run(action)) is not None) for row in grid)
