"""Forward only: inference and evaluation. Nothing is kept, so nothing is in flight."""

from dataclasses import dataclass

from rannc_jax.schedule.action import Action, Kind
from rannc_jax.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Forward(Schedule):
    """All forwards, and no backward.

    Example:
        >>> [str(action) for action in Forward().rank_actions(1, 2, 2)]
        ['1F0', '1F1']
    """

    @property
    def name(self) -> str:
        return "forward"

    @property
    def has_backward(self) -> bool:
        return False

    def rank_actions(self, rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
        return tuple(Action(rank, Kind.FORWARD, microbatch) for microbatch in range(num_microbatches))

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return 0
