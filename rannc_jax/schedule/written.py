"""A schedule that somebody wrote down, action by action.

It is checked when it is made, so a `Written` can run. It is written for one number of stages; with fewer
microbatches than it was written for, the actions of those that are not there are left out (what is left of
an order in which nothing waits for ever is one).
"""

from dataclasses import dataclass

from rannc_jax.errors import ScheduleError, message
from rannc_jax.schedule.action import Action, Kind
from rannc_jax.schedule.check import check_actions
from rannc_jax.schedule.grid import parse_grid, print_grid
from rannc_jax.schedule.held import most_held
from rannc_jax.schedule.schedule import Grid, Schedule


@dataclass(frozen=True, slots=True)
class Written(Schedule):
    r"""The actions of `grid`, a row a rank.

    Whole backwards (B) and split ones (I and W) may mix, microbatch by microbatch and stage by stage. Of
    `p` stages on `r` ranks, row k holds the stages k, k + r, k + 2 r, and so on.

    Raises:
        ScheduleError: an action is missing or there twice, the rows do not hold the stages they should, or
            the actions wait for each other for ever.

    Example:
        >>> Written.parse("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1B1 1W0").in_flight(1, 2, 2)
        2
    """

    grid: Grid

    def __post_init__(self) -> None:
        if not any(self.grid):
            raise ScheduleError(message("the schedule has no actions.", hint='"0F0 0B0", one line a rank.'))
        check_actions(self.grid)
        self._check_numbers()

    @classmethod
    def parse(cls, text: str) -> "Written":
        """From the text that `name` gives: one line a rank, actions parted by spaces.

        Raises:
            ScheduleError: the text is no schedule, or it cannot run.
        """
        return cls(parse_grid(text))

    def _check_numbers(self) -> None:
        ranks = len(self.grid)
        for rank, row in enumerate(self.grid):
            stages = sorted({action.stage for action in row})
            if stages != list(range(rank, self.num_stages, ranks)) or self.num_stages % ranks:
                wanted = ", ".join(map(str, range(rank, self.num_stages, ranks)))
                raise ScheduleError(
                    message(
                        f"line {rank} of the schedule runs stages {', '.join(map(str, stages))}.",
                        f"expected, of {self.num_stages} stages in {ranks} lines: {wanted}",
                        hint="as many stages in every line; line k of r has k, k + r, k + 2 r, ...",
                    )
                )
        there = sorted({action.microbatch for row in self.grid for action in row})
        if there != list(range(len(there))):
            raise ScheduleError(message(f"the microbatches are {there}, expected 0, 1, 2, ..."))

    @property
    def name(self) -> str:
        return print_grid(self.grid)

    @property
    def num_stages(self) -> int:
        """The number of stages that it is written for."""
        return 1 + max(action.stage for row in self.grid for action in row)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches that it is written for."""
        return 1 + max(action.microbatch for row in self.grid for action in row)

    @property
    def has_backward(self) -> bool:
        return any(action.kind is not Kind.FORWARD for action in self.grid[0])

    @property
    def num_chunks(self) -> int:
        return self.num_stages // len(self.grid)

    @property
    def splits_backward(self) -> bool:
        return any(action.kind is Kind.WEIGHT_GRAD for row in self.grid for action in row)

    def runs(self, num_stages: int, num_microbatches: int) -> bool:
        return (num_stages, num_microbatches) == (self.num_stages, self.num_microbatches)

    @property
    def wants(self) -> str:
        return f"it is written for {self.num_stages} stages and {self.num_microbatches} microbatches."

    def rank_actions(self, rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
        return self.grid[rank]

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        own = self.num_stages - (num_stages - stage)  # the stage that is as far from the last one
        return most_held(self.grid[own % len(self.grid)])[own] if 0 <= own < self.num_stages else 0

    def some_actions(self, num_stages: int, num_microbatches: int) -> Grid:
        whole = self.actions(num_stages, max(num_microbatches, self.num_microbatches))
        return tuple(tuple(a for a in row if a.microbatch < num_microbatches) for row in whole)
