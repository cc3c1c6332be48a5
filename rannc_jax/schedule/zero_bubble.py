"""ZB-H1: the backward in two halves, so that gradients of weights fill what would be bubbles.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.3. The gradient of the input (I) goes on
to the stage before at once; the gradient of the weights (W) waits. Stage i of p lets i of them wait, so that
every stage holds at most p microbatches, what the first stage of 1F1B holds; the bubble is that of 1F1B less
2 (p - 1) W.
"""

from dataclasses import dataclass

from rannc_jax.schedule.action import Action, Kind
from rannc_jax.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ZeroBubble(Schedule):
    """One forward, one input gradient, one weight gradient, the last one late.

    Example:
        >>> [str(action) for action in ZeroBubble().rank_actions(1, 2, 2)]
        ['1F0', '1I0', '1F1', '1I1', '1W0', '1W1']
    """

    @property
    def name(self) -> str:
        return "zb-h1"

    @property
    def splits_backward(self) -> bool:
        return True

    def rank_actions(self, rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
        ahead = min(num_microbatches, num_stages - rank)
        actions = [Action(rank, Kind.FORWARD, microbatch) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            actions.append(Action(rank, Kind.INPUT_GRAD, microbatch))
            if microbatch >= rank:
                actions.append(Action(rank, Kind.WEIGHT_GRAD, microbatch - rank))
            if microbatch + ahead < num_microbatches:
                actions.append(Action(rank, Kind.FORWARD, microbatch + ahead))
        late = range(max(0, num_microbatches - rank), num_microbatches)
        return (*actions, *(Action(rank, Kind.WEIGHT_GRAD, microbatch) for microbatch in late))

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return min(num_microbatches, num_stages)
