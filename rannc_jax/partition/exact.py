"""The exact search: every chain of ideals, replicas, modes, microbatches and schedules, by branch and bound.

Plans are built from the last stage backwards, because what a stage keeps in flight depends on its
distance to the end. A partial plan is given up when its own stages already take as long as the best
plan known, or when the blocks that are left cannot be done in time by the devices that are left.
Exponential in the blocks; the number of placed stages is limited, and the answer says whether the search was
completed. Schedules with one chunk a rank and whole backwards only. The oracle of the fast search, and its
finish on small programs.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rannc_jax.partition.bound import BestCase, best_case
from rannc_jax.partition.candidate import Candidate, Evaluation, Evaluator
from rannc_jax.partition.constraints import NamedSchedule
from rannc_jax.partition.order import ideals, members
from rannc_jax.partition.space import Space, chain_schedules, replica_counts
from rannc_jax.partition.stage import Placement, StagePrice

MOST_IDEALS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The best plan found, and whether it is proved to be the best under the cost model."""

    best: Evaluation | None
    is_optimal: bool
    num_visited: int


def exact_search(
    evaluator: Evaluator, space: Space, *, incumbent: Evaluation | None = None, most_visited: int
) -> ExactResult:
    """Search all plans that the constraints allow.

    Args:
        evaluator: prices candidates.
        space: what may be chosen.
        incumbent: a plan that is already known; kept unless a faster one exists.
        most_visited: stages to place before giving up.
    """
    model = evaluator.model
    if space.boundaries is not None:
        sets: list[int] | None = [(1 << boundary) - 1 for boundary in space.boundaries]
    else:
        sets = ideals(model.num_blocks, model.values, limit=MOST_IDEALS)
    if sets is None:
        return ExactResult(best=incumbent, is_optimal=False, num_visited=0)
    walk = _Walk(evaluator, space, sets, incumbent, most_visited)
    cases = [
        (case.step_s(model.num_devices), position, schedule, case)
        for position, schedule in enumerate(chain_schedules(space.schedules))
        for case in (best_case(model, m, trains=schedule.has_backward) for m in space.num_microbatches)
    ]
    for bound_s, _, schedule, case in sorted(cases, key=lambda case: case[:2]):
        if bound_s < walk.best_s:
            walk.run(schedule, case)
    return ExactResult(
        best=walk.best, is_optimal=walk.num_visited <= most_visited, num_visited=walk.num_visited
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    placement: Placement
    price: StagePrice


class _Walk:
    """Depth first over partial plans; holds the best complete one."""

    def __init__(
        self,
        evaluator: Evaluator,
        space: Space,
        sets: list[int],
        incumbent: Evaluation | None,
        most_visited: int,
    ) -> None:
        self.evaluator = evaluator
        self.model = evaluator.model
        self.space = space
        self.sets = sets
        self.best = incumbent
        self.most_visited = most_visited
        self.num_visited = 0
        self.smaller = functools.cache(self._smaller)
        self.schedule: NamedSchedule
        self.case: BestCase

    @property
    def best_s(self) -> float:
        return math.inf if self.best is None else self.best.step_s

    def run(self, schedule: NamedSchedule, case: BestCase) -> None:
        """All plans with one schedule and one number of microbatches."""
        self.schedule, self.case = schedule, case
        self.outside = functools.cache(self._outside)
        self.visit(self.sets[-1], self.model.num_devices, (), 0.0)

    def visit(self, ideal: int, devices: int, stages: tuple[_Placed, ...], bound_s: float) -> None:
        """Blocks of `ideal` are left for devices below `devices`; `stages` are those after them."""
        if ideal == 0:
            self._complete(stages)
            return
        if devices == 0 or len(stages) == self.space.most_stages(self.model):
            return
        if max(bound_s, self.case.shared_s(members(ideal), devices)) >= self.best_s:
            return
        for rest in self.smaller(ideal):
            blocks = members(ideal & ~rest)
            for placement in self._placements(blocks, devices, len(stages)):
                self.num_visited += 1
                if self.num_visited > self.most_visited:
                    return
                for price in self._prices(placement, len(stages)):
                    longest = max(bound_s, self._stage_bound(placement, price))
                    if longest < self.best_s:
                        placed = _Placed(placement, price)
                        self.visit(rest, placement.first_device, (placed, *stages), longest)

    def _complete(self, stages: tuple[_Placed, ...]) -> None:
        if self.space.num_stages not in (None, len(stages)):
            return
        placements = [stage.placement for stage in stages]
        first = placements[0].first_device
        if self.model.is_uniform and first > 0:
            placements = [Placement(p.blocks, p.first_device - first, p.num_replicas) for p in placements]
        candidate = Candidate(self.schedule, self.case.num_microbatches, tuple(placements))
        found = self.evaluator.evaluate(candidate, tuple(stage.price for stage in stages))
        if self.best is None or found.rank < self.best.rank:
            self.best = found

    def _placements(self, blocks: tuple[int, ...], devices: int, after: int) -> Iterator[Placement]:
        """Where a stage may lie, `after` stages before the end; devices after it may stay idle."""
        fixed = self.space.constraints.replicas_of(self.space.stage_before(after))
        counts = replica_counts(self.model, self.model.rows // self.case.num_microbatches, fixed)
        ends = [devices] if self.model.is_uniform else range(devices, 0, -1)
        return (Placement(blocks, end - r, r) for end in ends for r in counts if r <= end)

    def _prices(self, placement: Placement, after: int) -> list[StagePrice]:
        """What the stage may cost: the modes that fit, of which none beats another."""
        m = self.case.num_microbatches
        return self.model.good(
            placement,
            m,
            self.schedule.in_flight(0, after + 1, m),
            self.schedule.has_backward,
            self.space.modes_of(self.space.stage_before(after), placement),
        )

    def _stage_bound(self, placement: Placement, price: StagePrice) -> float:
        """No plan with this stage is faster: its way in, its own work, its way out."""
        into_s, out_s = self.outside(placement.blocks)
        work_s = self.case.num_microbatches * (price.forward_s + price.backward_s)
        return into_s + work_s + max(out_s, price.tail_s)

    def _outside(self, blocks: Sequence[int]) -> tuple[float, float]:
        """Longest paths of forwards into, and of backwards out of, a stage."""
        inside, case = set(blocks), self.case
        into_s = out_s = 0.0
        for value in self.model.values:
            if value.producer not in inside and not inside.isdisjoint(value.consumers):
                source = value.producer
                into_s = max(into_s, case.before_s[source] + case.forward_s[source])
                if value.needs_grad and self.schedule.has_backward:
                    out_s = max(out_s, case.after_s[source] + case.backward_s[source])
        return into_s, out_s

    def _smaller(self, ideal: int) -> list[int]:
        """Ideals that are properly inside `ideal`; with fixed cuts only the next one."""
        inside = [other for other in self.sets if other != ideal and other & ~ideal == 0]
        return inside if self.space.boundaries is None else inside[-1:]
