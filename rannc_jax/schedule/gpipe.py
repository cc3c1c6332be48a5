"""GPipe: all forwards, then all backwards, in the order of the microbatches.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019,
section 2.3. Keeps every microbatch in flight; hides transfers well, because no forward ever waits for a
backward.
"""

from dataclasses import dataclass

from rannc_jax.schedule.action import Action, Kind
from rannc_jax.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class GPipe(Schedule):
    """All forwards, then all backwards.

    Example:
        >>> [str(action) for action in GPipe().rank_actions(0, 2, 2)]
        ['0F0', '0F1', '0B0', '0B1']
    """

    @property
    def name(self) -> str:
        return "gpipe"

    def rank_actions(self, rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
        return tuple(
            Action(rank, kind, microbatch)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for microbatch in range(num_microbatches)
        )

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return num_microbatches
