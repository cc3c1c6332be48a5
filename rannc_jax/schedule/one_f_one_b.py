"""1F1B: a stage that has enough forwards in flight alternates one forward and one backward.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2, in
the synchronous form of Megatron-LM. The bubble is GPipe's; stage i of p keeps only p - i microbatches.
"""

from dataclasses import dataclass

from rannc_jax.schedule.action import Action, Kind
from rannc_jax.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class OneFOneB(Schedule):
    """One forward, one backward.

    Example:
        >>> [str(action) for action in OneFOneB().rank_actions(0, 2, 3)]
        ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """

    @property
    def name(self) -> str:
        return "1f1b"

    def rank_actions(self, rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
        ahead = self.in_flight(rank, num_stages, num_microbatches)
        actions = [Action(rank, Kind.FORWARD, microbatch) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            actions.append(Action(rank, Kind.BACKWARD, microbatch))
            if microbatch + ahead < num_microbatches:
                actions.append(Action(rank, Kind.FORWARD, microbatch + ahead))
        return tuple(actions)

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return min(num_microbatches, num_stages - stage)
