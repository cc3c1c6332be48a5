"""Actions and seconds in, a `Timeline` out: when each stage runs what.

A rank runs its actions in its own order, each as soon as the rank is free and what it needs has
arrived. Values between two stages go over a channel of their own, one each way: transfers overlap
compute, delay arrival, and queue behind each other in the order in which they were made. A simulated
step is a longest path with fixed orders, so it never gets shorter when any duration grows.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from rannc_jax.errors import ScheduleError, message
from rannc_jax.schedule.action import Action, Kind
from rannc_jax.schedule.check import linearise
from rannc_jax.schedule.schedule import Grid, Schedule

Transfer = tuple[int, int, float, float | None]
"""Source stage, target stage (larger), seconds of the values of one microbatch, and of the cotangents
back (None: no cotangent, so the source's backward does not wait for the target's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action on the clock of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each rank ran each of its actions, simulated or measured.

    Args:
        actions: by rank, in the order in which they ran.
        start_s, end_s: seconds since the step began, shaped like `actions`.
    """

    actions: Grid
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """By rank, in order."""
        return tuple(
            tuple(
                Span(action=action, start_s=start, end_s=end)
                for action, start, end in zip(actions, starts, ends, strict=True)
            )
            for actions, starts, ends in zip(self.actions, self.start_s, self.end_s, strict=True)
        )

    @property
    def rank_end_s(self) -> tuple[float, ...]:
        """When each rank ends its last action."""
        return tuple(max(ends, default=0.0) for ends in self.end_s)

    @property
    def step_s(self) -> float:
        """When the last rank to end has ended."""
        return max(self.rank_end_s, default=0.0)

    @property
    def rank_bubble_fraction(self) -> tuple[float, ...]:
        """Share of `step_s` in which each rank is idle."""
        step_s = self.step_s
        if step_s <= 0.0:
            return (0.0,) * len(self.actions)
        return tuple(
            1.0 - sum(end - start for start, end in zip(starts, ends, strict=True)) / step_s
            for starts, ends in zip(self.start_s, self.end_s, strict=True)
        )

    @property
    def bubble_fraction(self) -> float:
        """Mean over the ranks of their idle share."""
        shares = self.rank_bubble_fraction
        return sum(shares) / len(shares) if shares else 0.0


def simulate(
    schedule: Schedule,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfers: Sequence[Transfer] = (),
    weight_s: Sequence[float] | None = None,
) -> Timeline:
    """Run one step on the clock.

    Args:
        schedule: of any kind.
        num_microbatches: at least 1.
        forward_s, backward_s: seconds of one microbatch, by stage.
        transfers: what goes between stages; at most one entry a pair of stages. Stages without a
            transfer between them do not wait for each other.
        weight_s: by stage, the seconds of the backward that a schedule which splits it may put off.

    Returns:
        The timeline. Linear in actions and transfers.

    Raises:
        ScheduleError: a transfer does not go from an earlier to a later stage, or the schedule splits
            the backward and `weight_s` is missing.
    """
    num_stages = len(forward_s)
    order, rank_of = _order(schedule, num_stages, num_microbatches)
    values, cotangents = outgoing_transfers(num_stages, transfers)
    outgoing = (values, cotangents, [()] * num_stages, cotangents)
    seconds = _seconds(schedule, forward_s, backward_s, weight_s)
    arrived = [[[0.0] * num_microbatches for _ in range(num_stages)] for _ in range(3)]
    arrived.append(arrived[1])  # whole backwards wait for the same cotangents as first halves
    channel = [[0.0] * len(transfers) for _ in range(3)]
    channel.append(channel[1])
    free = [0.0] * (num_stages // schedule.num_chunks)
    starts: list[list[float]] = [[] for _ in free]
    ends: list[list[float]] = [[] for _ in free]
    for stage, way, microbatch in order:
        rank = rank_of[stage]
        start = max(free[rank], arrived[way][stage][microbatch])
        end = free[rank] = start + seconds[way][stage]
        starts[rank].append(start)
        ends[rank].append(end)
        for other, transfer_s, index in outgoing[way][stage]:
            busy = channel[way][index]
            arrival = channel[way][index] = (max(end, busy)) + transfer_s
            arrived[way][other][microbatch] = max(arrived[way][other][microbatch], arrival)
    return Timeline(
        actions=_grid(schedule, num_stages, num_microbatches),
        start_s=tuple(map(tuple, starts)),
        end_s=tuple(map(tuple, ends)),
    )


def _seconds(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float] | None,
) -> tuple[list[float], list[float], list[float], list[float]]:
    """By stage: of a forward, of the first half of a backward, of its second half, of a whole one."""
    if not schedule.splits_backward:
        return list(forward_s), [], [], list(backward_s)
    if weight_s is None:
        raise ScheduleError(
            message(f"{schedule.name} splits the backward.", hint="weight_s, the seconds of the second half.")
        )
    halves = [whole - later for whole, later in zip(backward_s, weight_s, strict=True)]
    return list(forward_s), halves, list(weight_s), list(backward_s)


def outgoing_transfers(
    num_stages: int, transfers: Sequence[Transfer]
) -> tuple[list[list[tuple[int, float, int]]], list[list[tuple[int, float, int]]]]:
    """(other stage, seconds, channel) by sending stage: of values forward, and of cotangents back."""
    values: list[list[tuple[int, float, int]]] = [[] for _ in range(num_stages)]
    cotangents: list[list[tuple[int, float, int]]] = [[] for _ in range(num_stages)]
    for index, (source, target, value_s, cotangent_s) in enumerate(transfers):
        if not 0 <= source < target < num_stages:
            raise ScheduleError(
                message(
                    f"a transfer goes from stage {source} to stage {target} of {num_stages}.",
                    hint="values flow from an earlier stage to a later one.",
                )
            )
        values[source].append((target, value_s, index))
        if cotangent_s is not None:
            cotangents[target].append((source, cotangent_s, index))
    return values, cotangents


@functools.lru_cache(maxsize=64)
def _grid(schedule: Schedule, num_stages: int, num_microbatches: int) -> Grid:
    return schedule.actions(num_stages, num_microbatches)


@functools.lru_cache(maxsize=64)
def _order(
    schedule: Schedule, num_stages: int, num_microbatches: int
) -> tuple[tuple[tuple[int, int, int], ...], dict[int, int]]:
    """(stage, way, microbatch) in one order that respects every dependency, and the rank of every stage.

    The way is 0 for a forward, 1 for a gradient of inputs, 2 for a gradient of weights, 3 for both at once.
    """
    ways = {Kind.FORWARD: 0, Kind.INPUT_GRAD: 1, Kind.WEIGHT_GRAD: 2, Kind.BACKWARD: 3}
    grid = _grid(schedule, num_stages, num_microbatches)
    rank_of = {action.stage: rank for rank, row in enumerate(grid) for action in row}
    order = tuple((action.stage, ways[action.kind], action.microbatch) for action in linearise(grid))
    return order, rank_of
