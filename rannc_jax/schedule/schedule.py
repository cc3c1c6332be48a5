"""What every schedule promises: an order of actions for each stage, and how much it keeps in flight.

A schedule knows small integers only: stages, microbatches. It is a frozen value that is passed in, not
a string that is looked up. Seconds and transfers enter in `simulate`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from rannc_jax.errors import ScheduleError, message
from rannc_jax.schedule.action import Action

Grid = tuple[tuple[Action, ...], ...]
"""Actions by stage, each stage's in the order in which it runs them."""


@dataclass(frozen=True, slots=True)
class Schedule(ABC):
    """When each stage runs which microbatch. Abstract; the children are final."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The text form, as in `Plan.schedule`; `schedule_named` is the inverse."""

    @property
    def has_backward(self) -> bool:
        """Whether the schedule trains (False: forward only)."""
        return True

    @abstractmethod
    def stage_actions(self, stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
        """What `stage` runs, in order."""

    @abstractmethod
    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """The most microbatches whose residuals `stage` holds at one time.

        Depends on the distance to the last stage, not on `stage` itself: the planner builds plans from
        the last stage backwards.
        """

    def actions(self, num_stages: int, num_microbatches: int) -> Grid:
        """All actions, by stage.

        Raises:
            ScheduleError: there is no stage or no microbatch.
        """
        if num_stages < 1 or num_microbatches < 1:
            raise ScheduleError(
                message(
                    f"{self.name} cannot run {num_microbatches} microbatches on {num_stages} stages.",
                    hint="at least one of each.",
                )
            )
        return tuple(self.stage_actions(stage, num_stages, num_microbatches) for stage in range(num_stages))
