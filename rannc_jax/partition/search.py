"""Choose stages, replicas, microbatches, schedule and remat together.

For every schedule and number of microbatches that may still win, the fast search along a few orders
proposes plans; the best are priced on the clock, refined by small moves, and on small programs the
exact search proves or beats the result. Everything is deterministic: ties go to the smaller index, and
limits count plans, never seconds.
"""

import itertools
import math
from dataclasses import dataclass, field, replace

from rannc_jax.cluster import ClusterSpec
from rannc_jax.contract import Sharding
from rannc_jax.cost.table import CostTable
from rannc_jax.errors import InfeasibleError, PlanError, message
from rannc_jax.partition.bound import lower_bound
from rannc_jax.partition.candidate import Candidate, Evaluation, Evaluator, Simulator
from rannc_jax.partition.chain import ChainSearch, Estimate, spans
from rannc_jax.partition.constraints import Constraints
from rannc_jax.partition.decision import Decision, decide, summary
from rannc_jax.partition.even import even_cuts, split_backwards
from rannc_jax.partition.exact import ExactResult, exact_search
from rannc_jax.partition.infeasible import explain_infeasible
from rannc_jax.partition.interval import IntervalCosts
from rannc_jax.partition.order import orders
from rannc_jax.partition.refine import refine
from rannc_jax.partition.remedies import Question
from rannc_jax.partition.space import Menu, Space, chain_schedules, replica_counts, search_space
from rannc_jax.partition.stage import Placement, StageModel
from rannc_jax.plan import RunnerUp
from rannc_jax.words import gib

MOST_PRICED = 96
"""Proposals that are priced on the clock, best estimates first."""
MOST_REFINED = 3
"""Plans that are refined because they are the best; others because they are the best of their kind."""
MOST_KINDS = 9
"""Kinds (numbers of stages, of microbatches, schedules) whose best plan is refined too."""
KIND_NEAR = 1.35
"""Such a plan may take so many times as long as the best one, and still overtake it."""
MOST_TRIED = 200
"""Plans that one refinement may price."""
EXACT_BLOCKS = 10
"""The exact search has no hope to finish on many more blocks, and costs seconds."""
MOST_VISITED = 30_000
"""Stages that the exact search may place."""
FAR = 2.0
"""Plans whose estimate, which none of their case beats, is further above the best priced plan are not priced:
on many devices they have thousands of microbatches, and the clock runs every one."""
NEAR = 1.3
"""Estimates up to this factor above the best priced plan are still worth a look: they spread tails over
microbatches and count both directions of a link, and may be so much too long."""


def search(
    costs: CostTable,
    cluster: ClusterSpec,
    constraints: Constraints | None = None,
    *,
    rows: int,
    menu: Menu,
    simulate: Simulator,
    beyond: Menu | None = None,
    splittable: bool = True,
    most_visited: int = MOST_VISITED,
    explain: bool = True,
) -> Decision:
    """Find the fastest plan that fits.

    Args:
        costs: prices of blocks.
        cluster: devices and links; what its `axes` fix is a constraint like any other.
        constraints: what is fixed; nothing by default.
        rows: batch rows of one step.
        menu: what there is to choose from.
        simulate: `rannc_jax.schedule.simulate`.
        beyond: what there would be to choose from if it could be run; named where nothing fits.
        splittable: False where rows are coupled, so that the batch must stay whole.
        most_visited: stages that the exact search may place; 0 leaves it out. It is also left out where
            it has no hope to finish and a plan is known.
        explain: say what would fit where nothing does, which is searched too.

    Returns:
        The decision, the same for the same arguments on every machine.

    Raises:
        PlanError: constraints contradict each other or the program, or no plan fits the memory.
    """
    constraints = (constraints or Constraints()).with_axes(cluster.axes)
    if not costs.blocks:
        raise PlanError(message("the program has no block that could be placed."))
    model = StageModel(costs, cluster, constraints, rows)
    space = search_space(model, constraints, menu, splittable=splittable)
    evaluator, found, pool = _resident_or_offloaded(model, space, simulate, most_visited)
    if found.best is None:
        question = Question(model, constraints, menu, beyond, simulate, splittable)
        raise InfeasibleError(explain_infeasible(question, evaluator.space) if explain else "no plan fits.")
    every = range(1, rows + 1) if splittable else (1,)
    return decide(
        model,
        found.best,
        pool.ranked(),
        bound_s=lower_bound(
            model,
            [m for m in every if rows % m == 0],
            trains=space.schedules[0].has_backward,
            splits_backward=any(schedule.splits_backward for schedule in space.schedules),
        ),
        is_optimal=found.is_optimal,
        notes=space.notes,
        too_large=_one_stage_that_does_not_fit(evaluator, space),
    )


def _resident_or_offloaded(
    model: StageModel, space: Space, simulate: Simulator, most_visited: int
) -> tuple[Evaluator, ExactResult, "_Pool"]:
    """The best plan that keeps all state on the devices; if none fits, the best that need not."""
    for offloads in dict.fromkeys((tuple(o for o in space.offloads if not o), space.offloads)):
        if not offloads:
            continue
        evaluator = Evaluator(model, replace(space, offloads=offloads), simulate)
        pool = _Pool(evaluator)
        found = _best(pool, most_visited)
        if found.best is not None:
            break
    return evaluator, found, pool


def _best(pool: "_Pool", most_visited: int) -> ExactResult:
    """Propose, refine, prove."""
    evaluator, space = pool.evaluator, pool.evaluator.space
    if chain_schedules(space.schedules):
        _propose(pool, space)
    for candidate in even_cuts(evaluator):
        pool.price(candidate)
    for candidate in split_backwards(evaluator, _with_whole_backwards(pool)):
        pool.price(candidate)
    for start in _starts(pool):
        pool.add(refine(evaluator, start, most_tried=MOST_TRIED))
    hopeless = (
        pool.best is not None and evaluator.model.num_blocks > EXACT_BLOCKS and space.boundaries is None
    )
    return exact_search(evaluator, space, incumbent=pool.best, most_visited=0 if hopeless else most_visited)


def _starts(pool: "_Pool") -> list[Evaluation]:
    """Plans to refine: the best ones, and the best of kinds that may overtake them, in turn by number of
    stages, of microbatches and by schedule. A search that is told one of these would begin there."""
    ranked = pool.ranked()
    starts = dict.fromkeys(ranked[:MOST_REFINED])
    near = [found for found in ranked if found.step_s <= KIND_NEAR * pool.best_s]
    kinds = []
    for name in ("num_stages", "num_microbatches", "schedule"):
        firsts = {getattr(found.candidate, name): found for found in reversed(near)}
        kinds.append(sorted(firsts.values(), key=lambda found: found.rank))
    others = (found for turn in itertools.zip_longest(*kinds) for found in turn if found is not None)
    starts |= dict.fromkeys(itertools.islice((found for found in others if found not in starts), MOST_KINDS))
    return list(starts)


def _with_whole_backwards(pool: "_Pool") -> list[Evaluation]:
    """Good plans for schedules that split the backward; found apart where no other schedule is allowed."""
    evaluator, space = pool.evaluator, pool.evaluator.space
    if not all(schedule.splits_backward for schedule in space.schedules) or not space.chains:
        return pool.ranked()
    apart = _Pool(Evaluator(evaluator.model, replace(space, schedules=space.chains), evaluator.simulate))
    _propose(apart, apart.evaluator.space)
    for candidate in even_cuts(apart.evaluator):
        apart.price(candidate)
    return apart.ranked()


@dataclass(slots=True)
class _Pool:
    """Plans that were priced."""

    evaluator: Evaluator
    priced: dict[Candidate, Evaluation | None] = field(default_factory=dict)
    best: Evaluation | None = None

    @property
    def best_s(self) -> float:
        return math.inf if self.best is None else self.best.step_s

    def price(self, candidate: Candidate) -> None:
        """Price a candidate unless it is known."""
        if candidate not in self.priced:
            self.priced[candidate] = None
            found = self.evaluator(candidate)
            if found is not None:
                self.add(found)

    def add(self, found: Evaluation) -> None:
        self.priced[found.candidate] = found
        if self.best is None or found.rank < self.best.rank:
            self.best = found

    def ranked(self) -> list[Evaluation]:
        """Those that fit, best first; of equals the first that was found."""
        return sorted((e for e in self.priced.values() if e is not None), key=lambda e: e.rank)


def _propose(pool: _Pool, space: Space) -> None:
    """Run the fast search for everything that may still win, and price its best proposals."""
    model = pool.evaluator.model
    own = tuple(range(model.num_blocks))
    chosen = [own] if space.boundaries is not None else orders(model.num_blocks, model.values)
    cases: list[tuple[float, ChainSearch, Candidate | None]] = []
    for costs in map(IntervalCosts, itertools.repeat(model), chosen):
        chains = itertools.product(spans(model), chain_schedules(space.schedules), space.num_microbatches)
        for span, schedule, num_microbatches in chains:
            chain = ChainSearch(costs, space, schedule, num_microbatches, span)
            outlook_s, candidate = chain.outlook()
            cases.append((outlook_s, chain, candidate))
    cases.sort(key=lambda case: case[0])
    for outlook_s, _, candidate in cases:
        if candidate is None or space.num_stages not in (None, candidate.num_stages):
            continue
        if outlook_s <= pool.best_s * FAR:
            pool.price(candidate)
    proposals: list[Estimate] = []
    for outlook_s, chain, _ in cases:
        if math.isfinite(outlook_s) and outlook_s <= pool.best_s * NEAR:
            found = list(chain.estimates(beat_s=pool.best_s * NEAR))
            if found:
                pool.price(min(found, key=lambda estimate: estimate.step_s).candidate)
            proposals += found
    proposals.sort(key=lambda estimate: estimate.step_s)
    for estimate in proposals[:MOST_PRICED]:
        pool.price(estimate.candidate)


def _one_stage_that_does_not_fit(evaluator: Evaluator, space: Space) -> list[RunnerUp]:
    """Data parallelism, as plain as allowed, if memory alone forbids it: what a user would try first."""
    if space.num_stages not in (None, 1) or not chain_schedules(space.schedules):
        return []
    model, schedule = evaluator.model, chain_schedules(space.schedules)[0]
    if Sharding.REPLICATED in space.shardings:
        space = replace(space, shardings=(Sharding.REPLICATED,), offloads=(False,))
        evaluator = Evaluator(model, space, evaluator.simulate)
    blocks = tuple(range(model.num_blocks))
    candidates = []
    for num_microbatches in space.num_microbatches:
        fixed = space.constraints.replicas_of(0)
        replicas = max(replica_counts(model, model.rows // num_microbatches, fixed))
        candidates.append(Candidate(schedule, num_microbatches, (Placement(blocks, 0, replicas),)))
    if any(evaluator(candidate) is not None for candidate in candidates):
        return []
    widest = max(candidate.placements[0].num_replicas for candidate in candidates)
    priced = (evaluator.smallest(c) for c in candidates if c.placements[0].num_replicas == widest)
    smallest = min(filter(None, priced), key=lambda evaluation: evaluation.fullness, default=None)
    if smallest is None:
        return []
    price = smallest.prices[0]
    reason = f"needs {gib(price.peak_bytes)} per device, {gib(price.peak_bytes / price.fullness)} may be used"
    return [RunnerUp(summary=summary(smallest), step_s=smallest.step_s, reason=reason)]
