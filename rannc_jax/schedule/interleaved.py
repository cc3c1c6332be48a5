"""Interleaved 1F1B: each rank holds several chunks of the network, and works on them in turn.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2. With v chunks the bubble is 1/v of that of 1F1B; the price is v times as many transfers, and
more microbatches in flight on the first ranks.
"""

import functools
from dataclasses import dataclass

from rannc_jax.schedule.action import Action, Kind
from rannc_jax.schedule.held import most_held
from rannc_jax.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Interleaved(Schedule):
    """1F1B over `chunks` stages a rank.

    Example:
        >>> [str(action) for action in Interleaved(2).rank_actions(1, 4, 2)]
        ['1F0', '1F1', '3F0', '3B0', '3F1', '3B1', '1B0', '1B1']
    """

    chunks: int

    @property
    def name(self) -> str:
        return f"interleaved({self.chunks})"

    @property
    def num_chunks(self) -> int:
        return self.chunks

    def runs(self, num_stages: int, num_microbatches: int) -> bool:
        whole = num_stages >= 1 and num_microbatches >= 1 and num_stages % self.chunks == 0
        return whole and num_microbatches % (num_stages // self.chunks) == 0

    @property
    def wants(self) -> str:
        return f"a multiple of {self.chunks} stages, and of microbatches a multiple of the ranks."

    def rank_actions(self, rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
        return _rank_actions(self.chunks, rank, num_stages // self.chunks, num_microbatches)

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        ranks = num_stages // self.chunks
        return most_held(_rank_actions(self.chunks, stage % ranks, ranks, num_microbatches))[stage]


@functools.lru_cache(maxsize=256)
def _rank_actions(chunks: int, rank: int, ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Forwards in groups of as many microbatches as there are ranks, each group through all chunks."""
    forwards = [
        (chunk * ranks + rank, microbatch)
        for first in range(0, num_microbatches, ranks)
        for chunk in range(chunks)
        for microbatch in range(first, first + ranks)
    ]
    backwards = [
        ((chunks - 1 - chunk) * ranks + rank, microbatch)
        for first in range(0, num_microbatches, ranks)
        for chunk in range(chunks)
        for microbatch in range(first, first + ranks)
    ]
    total = len(forwards)
    ahead = min((chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1, total)
    actions = [Action(stage, Kind.FORWARD, microbatch) for stage, microbatch in forwards[:ahead]]
    for turn, (stage, microbatch) in enumerate(backwards):
        actions.append(Action(stage, Kind.BACKWARD, microbatch))
        if turn + ahead < total:
            actions.append(Action(forwards[turn + ahead][0], Kind.FORWARD, forwards[turn + ahead][1]))
    return tuple(actions)
