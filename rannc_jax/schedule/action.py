"""One piece of a schedule: stage, kind and microbatch, with a text form ("2F0").

The notation is that of torch.distributed.pipelining: stage 2, forward, microbatch 0. Parsing and
printing are inverses.
"""

import enum
import re
from dataclasses import dataclass

from rannc_jax.errors import ScheduleError, message


class Kind(enum.Enum):
    """What a stage does with a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """`stage` runs `kind` for `microbatch`.

    Example:
        >>> str(Action.parse("2F0"))
        '2F0'
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The inverse of `str`.

        Raises:
            ScheduleError: the text is not stage, one of F B I W, microbatch.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                message(f"{text!r} is not an action.", hint='stage, one of F B I W, microbatch: "2F0".')
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))
