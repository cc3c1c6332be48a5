"""From the text that a plan holds, or a user gives, to a schedule."""

import re

from rannc_jax.errors import ScheduleError, message
from rannc_jax.schedule.forward import Forward
from rannc_jax.schedule.gpipe import GPipe
from rannc_jax.schedule.interleaved import Interleaved
from rannc_jax.schedule.one_f_one_b import OneFOneB
from rannc_jax.schedule.schedule import Schedule
from rannc_jax.schedule.written import Written
from rannc_jax.schedule.zero_bubble import ZeroBubble

_KNOWN: tuple[Schedule, ...] = (GPipe(), OneFOneB(), ZeroBubble(), Forward())
_INTERLEAVED = re.compile(r"interleaved\((\d+)\)")
_ACTION = re.compile(r"\s*\d+[A-Za-z]\d+(\s|$)")


def schedule_named(text: str) -> Schedule:
    """The schedule with this name, or the one that is written out in the text (see `Written`).

    Raises:
        ScheduleError: the name is not known, or what is written cannot run.

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
    if _ACTION.match(text):
        return Written.parse(text)
    known = ", ".join(repr(schedule.name) for schedule in _KNOWN)
    hint = f"one of {known}, 'interleaved(2)' with 2 chunks or more, or actions ('0F0 0B0'), a line a rank."
    raise ScheduleError(message(f"there is no schedule {text!r}.", hint=hint))
