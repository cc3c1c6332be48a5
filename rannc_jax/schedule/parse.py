"""Text forms: names of schedules, and grids of actions as a person reads them.

`schedule_named` turns the text that a plan holds into a schedule; `print_grid` and `parse_grid` are
inverses of each other.
"""

import re

from rannc_jax.errors import ScheduleError, message
from rannc_jax.schedule.action import Action
from rannc_jax.schedule.forward import Forward
from rannc_jax.schedule.gpipe import GPipe
from rannc_jax.schedule.interleaved import Interleaved
from rannc_jax.schedule.one_f_one_b import OneFOneB
from rannc_jax.schedule.schedule import Grid, Schedule
from rannc_jax.schedule.zero_bubble import ZeroBubble

_KNOWN: tuple[Schedule, ...] = (GPipe(), OneFOneB(), ZeroBubble(), Forward())
_INTERLEAVED = re.compile(r"interleaved\((\d+)\)")


def schedule_named(text: str) -> Schedule:
    """The schedule with this name.

    Raises:
        ScheduleError: the name is not known.

    Example:
        >>> schedule_named("1f1b"), schedule_named("interleaved(2)")
        (OneFOneB(), Interleaved(chunks=2))
    """
    for schedule in _KNOWN:
        if schedule.name == text:
            return schedule
    chunked = _INTERLEAVED.fullmatch(text)
    if chunked and int(chunked[1]) > 1:
        return Interleaved(int(chunked[1]))
    known = ", ".join(repr(schedule.name) for schedule in _KNOWN)
    hint = f"one of {known}, or 'interleaved(2)' with 2 chunks or more."
    raise ScheduleError(message(f"there is no schedule {text!r}.", hint=hint))


def print_grid(actions: Grid) -> str:
    """One line a rank, actions in columns.

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
        ScheduleError: a word is not an action, or a stage stands in two lines.
    """
    grid = tuple(tuple(Action.parse(word) for word in line.split()) for line in text.splitlines())
    line_of: dict[int, int] = {}
    for line, row in enumerate(grid):
        for action in row:
            first = line_of.setdefault(action.stage, line)
            if first != line:
                raise ScheduleError(
                    message(f"{action} stands in line {line}, and stage {action.stage} in line {first} too.")
                )
    return grid
