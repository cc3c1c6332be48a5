"""Actions and seconds in, a `Timeline` out: when each stage runs what.

A stage runs its actions in its own order, each as soon as the stage is free and what it needs has
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
    """When each stage ran each of its actions, simulated or measured.

    Args:
        actions: by stage, in the order in which they ran.
        start_s, end_s: seconds since the step began, shaped like `actions`.
    """

    actions: Grid
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """By stage, in order."""
        return tuple(
            tuple(
                Span(action=action, start_s=start, end_s=end)
                for action, start, end in zip(actions, starts, ends, strict=True)
            )
            for actions, starts, ends in zip(self.actions, self.start_s, self.end_s, strict=True)
        )

    @property
    def stage_end_s(self) -> tuple[float, ...]:
        """When each stage ends its last action."""
        return tuple(max(ends, default=0.0) for ends in self.end_s)

    @property
    def step_s(self) -> float:
        """When the last stage to end has ended."""
        return max(self.stage_end_s, default=0.0)

    @property
    def stage_bubble_fraction(self) -> tuple[float, ...]:
        """Share of `step_s` in which each stage is idle."""
        step_s = self.step_s
        if step_s <= 0.0:
            return (0.0,) * len(self.actions)
        return tuple(
            1.0 - sum(end - start for start, end in zip(starts, ends, strict=True)) / step_s
            for starts, ends in zip(self.start_s, self.end_s, strict=True)
        )

    @property
    def bubble_fraction(self) -> float:
        """Mean over the stages of their idle share."""
        shares = self.stage_bubble_fraction
        return sum(shares) / len(shares) if shares else 0.0


def simulate(
    schedule: Schedule,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfers: Sequence[Transfer] = (),
) -> Timeline:
    """Run one step on the clock.

    Args:
        schedule: forward, backward or forward-only actions.
        num_microbatches: at least 1.
        forward_s, backward_s: seconds of one microbatch, by stage.
        transfers: what goes between stages; at most one entry a pair of stages. Stages without a
            transfer between them do not wait for each other.

    Returns:
        The timeline. Linear in actions and transfers.

    Raises:
        ScheduleError: a transfer does not go from an earlier to a later stage, or the schedule splits
            the backward.
    """
    num_stages = len(forward_s)
    order = _order(schedule, num_stages, num_microbatches)
    outgoing = _outgoing(num_stages, transfers)
    seconds = (list(forward_s), list(backward_s))
    arrived = [[[0.0] * num_microbatches for _ in range(num_stages)] for _ in range(2)]
    channel = [[0.0] * len(transfers) for _ in range(2)]
    free = [0.0] * num_stages
    starts: list[list[float]] = [[] for _ in range(num_stages)]
    ends: list[list[float]] = [[] for _ in range(num_stages)]
    for stage, way, microbatch in order:
        start = free[stage]
        arrival = arrived[way][stage][microbatch]
        start = max(start, arrival)
        end = free[stage] = start + seconds[way][stage]
        starts[stage].append(start)
        ends[stage].append(end)
        for other, transfer_s, index in outgoing[way][stage]:
            busy = channel[way][index]
            arrival = channel[way][index] = (max(end, busy)) + transfer_s
            arrived[way][other][microbatch] = max(arrived[way][other][microbatch], arrival)
    return Timeline(
        actions=_grid(schedule, num_stages, num_microbatches),
        start_s=tuple(map(tuple, starts)),
        end_s=tuple(map(tuple, ends)),
    )


def _outgoing(
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
def _order(schedule: Schedule, num_stages: int, num_microbatches: int) -> tuple[tuple[int, int, int], ...]:
    """(stage, 0 forward or 1 backward, microbatch) in one order that respects every dependency."""
    ways = {Kind.FORWARD: 0, Kind.BACKWARD: 1}
    order = linearise(_grid(schedule, num_stages, num_microbatches))
    split = next((action for action in order if action.kind not in ways), None)
    if split is not None:
        raise ScheduleError(message(f"{split} splits the backward, which has no seconds of its own here."))
    return tuple((action.stage, ways[action.kind], action.microbatch) for action in order)
