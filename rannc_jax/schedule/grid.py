"""A grid of actions as a person reads and writes it: one line a rank, actions in columns."""

from rannc_jax.errors import ScheduleError, message
from rannc_jax.schedule.action import Action
from rannc_jax.schedule.schedule import Grid


def print_grid(actions: Grid) -> str:
    """One line a rank, actions in columns.

    Example:
        >>> print(print_grid(parse_grid("0F0 0B0")))
        0F0 0B0
    """
    width = max((len(str(action)) for row in actions for action in row), default=0)
    return "\n".join(" ".join(f"{action!s:<{width}}" for action in row).rstrip() for row in actions)


def parse_grid(text: str) -> Grid:
    """The inverse of `print_grid`; empty lines are left out.

    Raises:
        ScheduleError: a word is not an action, or a stage stands in two lines.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    grid = tuple(tuple(Action.parse(word) for word in words) for words in lines)
    line_of: dict[int, int] = {}
    for line, row in enumerate(grid):
        for action in row:
            first = line_of.setdefault(action.stage, line)
            if first != line:
                raise ScheduleError(
                    message(f"{action} stands in line {line}, and stage {action.stage} in line {first} too.")
                )
    return grid
