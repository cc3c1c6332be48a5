"""What every schedule promises: an order of actions for each rank, and how much each stage keeps in flight.

A *rank* is a group of devices that runs one action at a time. It holds one stage, or, where a schedule
has several chunks a rank, the stages rank, rank + ranks, rank + 2 ranks, and so on. A schedule knows small
integers only: stages, microbatches. It is a frozen value that is passed in, not a string that is looked
up. Seconds and transfers enter in `simulate`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from rannc_jax.errors import ScheduleError, message
from rannc_jax.schedule.action import Action

Grid = tuple[tuple[Action, ...], ...]
"""Actions by rank, each rank's in the order in which it runs them."""


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

    @property
    def num_chunks(self) -> int:
        """Stages a rank."""
        return 1

    @property
    def splits_backward(self) -> bool:
        """Whether backwards come as gradients of inputs and, later, gradients of weights."""
        return False

    @abstractmethod
    def rank_actions(self, rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
        """What `rank` runs, in order."""

    @abstractmethod
    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """The most microbatches whose residuals `stage` holds at one time.

        Where a rank has one stage and the backward is whole, this depends on the distance to the last
        stage, not on `stage` itself: the planner builds plans from the last stage backwards.
        """

    def runs(self, num_stages: int, num_microbatches: int) -> bool:
        """Whether the schedule is defined for these numbers."""
        return num_stages >= 1 and num_microbatches >= 1 and num_stages % self.num_chunks == 0

    def actions(self, num_stages: int, num_microbatches: int) -> Grid:
        """All actions, by rank.

        Raises:
            ScheduleError: the schedule is not defined for these numbers.
        """
        if not self.runs(num_stages, num_microbatches):
            raise ScheduleError(
                message(
                    f"{self.name} cannot run {num_microbatches} microbatches on {num_stages} stages.",
                    hint=self.wants,
                )
            )
        ranks = range(num_stages // self.num_chunks)
        return tuple(self.rank_actions(rank, num_stages, num_microbatches) for rank in ranks)

    def some_actions(self, num_stages: int, num_microbatches: int) -> Grid:
        """Like `actions`, for any number of microbatches: where the schedule is not defined for it, the
        actions for the next larger number without those of the microbatches that are not there.

        Raises:
            ScheduleError: the schedule is not defined for so many stages.
        """
        larger = range(num_microbatches, num_microbatches + num_stages)
        count = next((m for m in larger if self.runs(num_stages, m)), num_microbatches)
        whole = self.actions(num_stages, count)
        return tuple(tuple(a for a in row if a.microbatch < num_microbatches) for row in whole)

    @property
    def wants(self) -> str:
        """What `runs` asks for, in words."""
        return "at least one of each."
