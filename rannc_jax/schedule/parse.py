"""Text forms: names of schedules, and grids of actions as a person reads them.

`schedule_named` turns the text that a plan holds into a schedule; `print_grid` and `parse_grid` are
inverses of each other.
"""

from rannc_jax.errors import PlanError, ScheduleError, message
from rannc_jax.schedule.action import Action
from rannc_jax.schedule.forward import Forward
from rannc_jax.schedule.gpipe import GPipe
from rannc_jax.schedule.one_f_one_b import OneFOneB
from rannc_jax.schedule.schedule import Grid, Schedule

_BUILT: tuple[Schedule, ...] = (GPipe(), OneFOneB(), Forward())
_NOT_BUILT = ("interleaved", "zero_bubble")


def schedule_named(text: str) -> Schedule:
    """The schedule with this name.

    Raises:
        PlanError: the name is known, but the schedule is not built yet.
        ScheduleError: the name is not known.

    Example:
        >>> schedule_named("1f1b")
        OneFOneB()
    """
    for schedule in _BUILT:
        if schedule.name == text:
            return schedule
    built = ", ".join(repr(schedule.name) for schedule in _BUILT)
    if text in _NOT_BUILT:
        raise PlanError(message(f"schedule {text!r} is not built yet.", hint=f"one of {built}."))
    raise ScheduleError(message(f"there is no schedule {text!r}.", hint=f"one of {built}."))


def print_grid(actions: Grid) -> str:
    """One line a stage, actions in columns.

    Example:
        >>> print(print_grid(GPipe().actions(2, 2)))
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
    """
    width = max((len(str(action)) for row in actions for action in row), default=0)
    return "\n".join(" ".join(f"{action!s:<{width}}" for action in row).rstrip() for row in actions)


def parse_grid(text: str) -> Grid:
    """The inverse of `print_grid`.

    Raises:
        ScheduleError: a word is not an action, or stands in another stage's line.
    """
    grid = tuple(tuple(Action.parse(word) for word in line.split()) for line in text.splitlines())
    for stage, row in enumerate(grid):
        for action in row:
            if action.stage != stage:
                raise ScheduleError(message(f"{action} stands in line {stage}, which is stage {stage}."))
    return grid
