"""A whole plan that is being considered, and what it costs.

The step ends when the last stage has run its last action of the simulated timeline and its tail
(gradient reduction, update). The timeline comes from a simulator that is handed in, so this room does
not know what a schedule looks like inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rannc_jax.partition.constraints import Constraints, NamedSchedule
from rannc_jax.partition.stage import Placement, StageModel, StagePrice


class SimulatedStep(Protocol):
    """What the search reads of a timeline."""

    @property
    def stage_end_s(self) -> tuple[float, ...]: ...
    @property
    def bubble_fraction(self) -> float: ...


class Simulator(Protocol):
    """`rannc_jax.schedule.simulate`; the search asks that no duration that grows shortens the step."""

    def __call__(
        self,
        schedule: Any,  # one of the schedules the search was given
        num_microbatches: int,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        transfers: Sequence[tuple[int, int, float, float | None]] = (),
        /,
    ) -> SimulatedStep: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """Stages in order, a number of microbatches and a schedule."""

    schedule: NamedSchedule
    num_microbatches: int
    placements: tuple[Placement, ...]

    @property
    def num_stages(self) -> int:
        return len(self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A candidate with its prices.

    Args:
        candidate: what was priced.
        prices: by stage.
        transfers: seconds between stages, as the simulator takes them.
        step_s: seconds of one step, tails included.
        pipeline_s: seconds until the last action of the timeline.
        bubble_fraction: of the timeline.
    """

    candidate: Candidate
    prices: tuple[StagePrice, ...]
    transfers: tuple[tuple[int, int, float, float | None], ...]
    step_s: float
    pipeline_s: float
    bubble_fraction: float

    @property
    def fullness(self) -> float:
        """Of the fullest stage."""
        return max(price.fullness for price in self.prices)

    @property
    def rank(self) -> tuple[float, int, int, float]:
        """What the search makes smallest: the step, and of equally fast plans the simplest and emptiest.

        Seconds are rounded to ten digits, so that the order of additions decides nothing.
        """
        candidate = self.candidate
        step_s = float(f"{self.step_s:.10g}")
        return step_s, candidate.num_microbatches, candidate.num_stages, self.fullness

    @property
    def busiest_s(self) -> float:
        """Seconds that the busiest stage works on its microbatches."""
        work = max(price.forward_s + price.backward_s for price in self.prices)
        return work * self.candidate.num_microbatches


class Evaluator:
    """Prices whole candidates; None where a stage does not fit."""

    def __init__(self, model: StageModel, constraints: Constraints, simulate: Simulator) -> None:
        self.model = model
        self.constraints = constraints
        self.simulate = simulate

    def stage_price(self, candidate: Candidate, stage: int) -> StagePrice | None:
        """The fastest fitting price of one stage of a candidate."""
        schedule, num_microbatches = candidate.schedule, candidate.num_microbatches
        return self.model.price(
            candidate.placements[stage],
            self.model.rows // num_microbatches,
            schedule.in_flight(stage, candidate.num_stages, num_microbatches),
            schedule.has_backward,
            self.constraints.remats_of(stage),
        )

    def smallest_price(self, candidate: Candidate, stage: int) -> StagePrice:
        """The price of one stage that needs least memory, fitting or not."""
        schedule, num_microbatches = candidate.schedule, candidate.num_microbatches
        options = self.model.options(
            candidate.placements[stage],
            self.model.rows // num_microbatches,
            schedule.in_flight(stage, candidate.num_stages, num_microbatches),
            schedule.has_backward,
        )
        allowed = self.constraints.remats_of(stage)
        return min((o for o in options if o.remat in allowed), key=lambda o: (o.fullness, o.backward_s))

    def __call__(self, candidate: Candidate) -> Evaluation | None:
        """Price a candidate."""
        prices = []
        for stage in range(candidate.num_stages):
            price = self.stage_price(candidate, stage)
            if price is None:
                return None
            prices.append(price)
        return self.evaluate(candidate, tuple(prices))

    def smallest(self, candidate: Candidate) -> Evaluation:
        """Price a candidate with the remats that need least memory, fitting or not."""
        stages = range(candidate.num_stages)
        return self.evaluate(candidate, tuple(self.smallest_price(candidate, stage) for stage in stages))

    def evaluate(self, candidate: Candidate, prices: tuple[StagePrice, ...]) -> Evaluation:
        """Run the clock on given prices."""
        transfers = self.model.transfers(
            candidate.placements,
            self.model.rows // candidate.num_microbatches,
            candidate.schedule.has_backward,
        )
        timeline = self.simulate(
            candidate.schedule,
            candidate.num_microbatches,
            [price.forward_s for price in prices],
            [price.backward_s for price in prices],
            transfers,
        )
        ends = timeline.stage_end_s
        return Evaluation(
            candidate=candidate,
            prices=prices,
            transfers=transfers,
            step_s=max(end + price.tail_s for end, price in zip(ends, prices, strict=True)),
            pipeline_s=max(ends),
            bubble_fraction=timeline.bubble_fraction,
        )
