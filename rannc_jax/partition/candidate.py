"""A whole plan that is being considered, and what it costs.

The step ends when the last stage has run its last action of the simulated timeline and its tail
(gradient reduction, update). The timeline comes from a simulator that is handed in, so this room does
not know what a schedule looks like inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rannc_jax.partition.constraints import NamedSchedule
from rannc_jax.partition.mode import Mode
from rannc_jax.partition.space import Space
from rannc_jax.partition.stage import MEMORY_CLASSES, Placement, StageModel, StagePrice


class SimulatedStep(Protocol):
    """What the search reads of a timeline."""

    @property
    def rank_end_s(self) -> tuple[float, ...]: ...
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
        weight_s: Sequence[float] | None = None,
        /,
    ) -> SimulatedStep: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """Stages in order, a number of microbatches and a schedule.

    Where the schedule has several chunks, stages whose numbers differ by `num_ranks` share their devices.
    """

    schedule: NamedSchedule
    num_microbatches: int
    placements: tuple[Placement, ...]

    @property
    def num_stages(self) -> int:
        return len(self.placements)

    @property
    def num_ranks(self) -> int:
        return len(self.placements) // self.schedule.num_chunks

    def stages_of(self, rank: int) -> range:
        """The stages on one group of devices."""
        return range(rank, self.num_stages, self.num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A candidate with its prices.

    Args:
        candidate: what was priced.
        prices: by stage.
        transfers: seconds between stages, as the simulator takes them.
        step_s: seconds of one step: `devices_s`, or `host_s` if that is longer.
        devices_s: seconds until the last device has ended, tails included.
        pipeline_s: seconds until the last action of the timeline.
        bubble_fraction: of the timeline.
        host_s: seconds that calling the programs takes.
    """

    candidate: Candidate
    prices: tuple[StagePrice, ...]
    transfers: tuple[tuple[int, int, float, float | None], ...]
    step_s: float
    devices_s: float
    pipeline_s: float
    bubble_fraction: float
    host_s: float

    @property
    def fullness(self) -> float:
        """Of the fullest stage."""
        return max(price.fullness for price in self.prices)

    @property
    def rank(self) -> tuple[float, float, int, int, float]:
        """What the search makes smallest: the step, then what devices take of it (where the host sets the
        pace), and of equally fast plans the simplest and emptiest.

        Seconds are rounded to ten digits, so that the order of additions decides nothing.
        """
        candidate = self.candidate
        step_s, devices_s = (float(f"{seconds:.10g}") for seconds in (self.step_s, self.devices_s))
        return step_s, devices_s, candidate.num_microbatches, candidate.num_stages, self.fullness

    @property
    def busiest_s(self) -> float:
        """Seconds that the busiest rank works on its microbatches."""
        candidate = self.candidate
        ranks = map(candidate.stages_of, range(candidate.num_ranks))
        work = (sum(self.prices[s].forward_s + self.prices[s].backward_s for s in stages) for stages in ranks)
        return max(work) * candidate.num_microbatches


class Evaluator:
    """Prices whole candidates; None where a stage does not fit."""

    def __init__(self, model: StageModel, space: Space, simulate: Simulator) -> None:
        self.model = model
        self.space = space
        self.simulate = simulate

    def __call__(self, candidate: Candidate) -> Evaluation | None:
        """Price a candidate, every rank in the mode that is fastest for itself."""
        m, chosen = candidate.num_microbatches, []
        for rank in range(candidate.num_ranks):
            fitting = [option for option in self.options(candidate, rank) if option[0].fullness <= 1.0]
            if not fitting:
                return None
            chosen.append(min(fitting, key=lambda option: (_step_s(option, m), _peak_bytes(option))))
        return self.evaluate(candidate, _by_stage(chosen))

    def smallest(self, candidate: Candidate) -> Evaluation | None:
        """Price a candidate with the modes that need least memory, fitting or not; None where constraints
        leave a stage no mode."""
        m = candidate.num_microbatches
        options = [self.options(candidate, rank) for rank in range(candidate.num_ranks)]
        if not all(options):
            return None
        chosen = [min(each, key=lambda option: (option[0].fullness, _step_s(option, m))) for each in options]
        return self.evaluate(candidate, _by_stage(chosen))

    def options(self, candidate: Candidate, rank: int) -> list[tuple[StagePrice, ...]]:
        """The prices of the stages of a rank in each mode, fitting or not: the same for all of them, or the
        nearest that a stage may take."""
        stages = candidate.stages_of(rank)
        columns = [self._stage_options(candidate, stage) for stage in stages]
        if len(stages) == 1:
            return [(price,) for price in columns[0]]
        modes = dict.fromkeys(price.mode for column in columns for price in column)
        options = [tuple(_nearest(column, mode) for column in columns) for mode in modes if all(columns)]
        return [_together(option) for option in dict.fromkeys(options)]

    def _stage_options(self, candidate: Candidate, stage: int) -> tuple[StagePrice, ...]:
        schedule, num_microbatches = candidate.schedule, candidate.num_microbatches
        return self.model.options(
            candidate.placements[stage],
            self.model.rows // num_microbatches,
            schedule.in_flight(stage, candidate.num_stages, num_microbatches),
            schedule.has_backward,
            self.space.modes_of(stage, candidate.placements[stage]),
        )

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
            [price.weight_s for price in prices],
        )
        ends = timeline.rank_end_s
        host_s = self.model.host_s(
            candidate.placements, candidate.num_microbatches, candidate.schedule.has_backward
        )
        tails = [sum(prices[s].tail_s for s in candidate.stages_of(rank)) for rank in range(len(ends))]
        devices_s = max(end + tail for end, tail in zip(ends, tails, strict=True))
        return Evaluation(
            candidate=candidate,
            prices=prices,
            transfers=transfers,
            step_s=max(host_s, devices_s),
            devices_s=devices_s,
            host_s=host_s,
            pipeline_s=max(ends),
            bubble_fraction=timeline.bubble_fraction,
        )


def _by_stage(of_rank: Sequence[tuple[StagePrice, ...]]) -> tuple[StagePrice, ...]:
    """Prices in the order of the stages: the first of every rank, the second of every rank, and so on."""
    return tuple(price for chunk in zip(*of_rank, strict=True) for price in chunk)


def _nearest(prices: Sequence[StagePrice], mode: Mode) -> StagePrice:
    """The price in that mode, or in one that differs in little."""
    return min(prices, key=lambda price: _distance(price.mode, mode))


def _distance(one: Mode, other: Mode) -> tuple[bool, bool, bool]:
    return one.offload != other.offload, one.sharding is not other.sharding, one.remat is not other.remat


def _step_s(prices: Sequence[StagePrice], num_microbatches: int) -> float:
    return sum(price.step_s(num_microbatches) for price in prices)


def _peak_bytes(prices: Sequence[StagePrice]) -> int:
    return sum(price.peak_bytes for price in prices)


def _together(prices: tuple[StagePrice, ...]) -> tuple[StagePrice, ...]:
    """Prices of stages that share devices: working memory is needed by one at a time, so the first counts
    the most that any needs, and all are as full as their devices."""
    work = MEMORY_CLASSES.index("working")
    most = max(price.memory_bytes[work] for price in prices)
    limit = min(price.peak_bytes / price.fullness for price in prices)
    memory = [list(price.memory_bytes) for price in prices]
    for index, classes in enumerate(memory):
        classes[work] = 0 if index else most
    fullness = sum(map(sum, memory)) / limit
    return tuple(
        replace(price, memory_bytes=tuple(classes), fullness=fullness)
        for price, classes in zip(prices, memory, strict=True)
    )
