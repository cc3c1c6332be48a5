"""Ways out where nothing fits: the least change of constraints, devices or modes that makes room.

Every way out is a plan that was priced and fits, so it is stated with the memory it takes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rannc_jax.cluster import MOST_DEVICES, ClusterSpec
from rannc_jax.contract import Remat
from rannc_jax.errors import PlanError
from rannc_jax.partition.candidate import Candidate, Evaluation, Evaluator, Simulator
from rannc_jax.partition.chain import ChainSearch, spans
from rannc_jax.partition.constraints import AUTO, Constraints
from rannc_jax.partition.even import even_cuts
from rannc_jax.partition.interval import IntervalCosts
from rannc_jax.partition.mode import modes_of
from rannc_jax.partition.order import orders
from rannc_jax.partition.rules import each_value
from rannc_jax.partition.space import Menu, Space, chain_schedules, replica_counts, search_space
from rannc_jax.partition.stage import MEMORY_CLASSES, Placement, StageModel, StagePrice
from rannc_jax.words import gib

LARGER = (2, 3, 4, 8)
"""How many times as many devices are looked at."""


@dataclass(frozen=True, slots=True)
class Question:
    """A program on a cluster; the answers vary constraints, devices and what there is to choose from.

    `beyond` is what can be planned but not run; None where that is nothing more than `menu`.
    """

    model: StageModel
    constraints: Constraints
    menu: Menu
    beyond: Menu | None
    simulate: Simulator
    splittable: bool


def remedies(question: Question, smallest: Evaluation) -> list[str]:
    """The nearest ways out, with what they take.

    Args:
        question: nothing of it fits.
        smallest: the plan that needs least memory.
    """
    cluster = question.model.cluster
    found = list(_changes(question, smallest.candidate)) or [*_larger(question)]
    needed = f"{gib(max(price.peak_bytes for price in smallest.prices))} of usable memory per device"
    sharded = [*_beyond(question, cluster)]
    if not found and not sharded:
        sharded = [*_larger_beyond(question)]
    return [*(found or [needed]), *sharded, *_slimmer(smallest)]


def _larger_beyond(question: Question) -> Iterator[str]:
    """The fewest times as many devices that make room in modes that are planned but not run."""
    menu, beyond = question.menu, question.beyond
    if beyond is None:
        return
    widest = replace(menu, shardings=beyond.shardings, offloads=beyond.offloads)
    for larger in _larger_clusters(question):
        if _first(question, larger, widest) is not None:
            yield from _beyond(question, larger, f"{larger.num_devices} devices and ")
            return


def _beyond(question: Question, cluster: ClusterSpec, words: str = "") -> Iterator[str]:
    """The mildest modes that are planned but not run and make room."""
    menu, beyond, fixed = question.menu, question.beyond, question.constraints.fixed
    if beyond is None:
        return
    tries: list[tuple[str, Menu]] = []
    more = [s for s in beyond.shardings if s not in menu.shardings and "sharding" not in fixed]
    for sharding in more:
        wider = replace(menu, shardings=(*menu.shardings, sharding))
        tries.append((f"sharding={sharding.value!r}", wider))
    if beyond.offloads != menu.offloads and "offload" not in fixed:
        tries.append(("offload=True", replace(menu, offloads=beyond.offloads)))
        if more:
            wider = replace(menu, offloads=beyond.offloads, shardings=beyond.shardings)
            tries.append((f"sharding={more[-1].value!r} and offload=True", wider))
    for setting, wider in tries:
        nearest = _first(question, cluster, wider)
        if nearest is not None:
            remark = "planned with runnable=False, not run yet"
            yield _says(f"{words}{setting}", nearest, remark)
            return


def _slimmer(smallest: Evaluation) -> Iterator[str]:
    """Half the optimizer state, if that makes room."""
    at = MEMORY_CLASSES.index("optimizer")
    peaks = [(price, price.peak_bytes - price.memory_bytes[at] // 2) for price in smallest.prices]
    if all(peak <= price.peak_bytes / price.fullness for price, peak in peaks):
        yield f"optimizer state in bfloat16 (fits in {gib(max(peak for _, peak in peaks))})"


def _changes(question: Question, smallest: Candidate) -> Iterator[str]:
    """Single constraints whose removal makes room, each with the nearest value that fits."""
    fixed = question.constraints
    pipeline = {name: AUTO for name in ("num_stages", "replicas", "cuts") if getattr(fixed, name) != AUTO}
    if pipeline and not isinstance(fixed.remat, tuple):
        fitting = _fitting(question, pipeline)
        nearest = min(
            fitting,
            key=lambda e: (abs(e.candidate.num_stages - smallest.num_stages), e.fullness),
            default=None,
        )
        if nearest is not None:
            yield _says(f"num_stages={nearest.candidate.num_stages}", nearest)
    for name in ("remat", "sharding"):
        fitting = _fitting(question, {name: AUTO}) if getattr(fixed, name) != AUTO else []
        nearest = min(fitting, key=lambda e: (e.step_s, e.fullness), default=None)
        if nearest is not None:
            yield _says(f"{name}={_common({getattr(price.mode, name) for price in nearest.prices})}", nearest)
    if fixed.num_microbatches != AUTO and question.splittable:
        fitting = _fitting(question, {"num_microbatches": AUTO})
        wanted = smallest.num_microbatches
        nearest = min(
            fitting, key=lambda e: (abs(e.candidate.num_microbatches - wanted), e.fullness), default=None
        )
        if nearest is not None:
            yield _says(f"num_microbatches={nearest.candidate.num_microbatches}", nearest)
    if fixed.schedule != AUTO:
        fitting = _fitting(question, {"schedule": AUTO})
        nearest = min(fitting, key=lambda e: e.fullness, default=None)
        if nearest is not None:
            yield _says(f"schedule={nearest.candidate.schedule.name!r}", nearest)


def _larger(question: Question) -> Iterator[str]:
    """The fewest times as many devices that make room."""
    for larger in _larger_clusters(question):
        nearest = _first(question, larger, question.menu)
        if nearest is not None:
            yield _says(f"{larger.num_devices} devices", nearest)
            return


def _larger_clusters(question: Question) -> Iterator[ClusterSpec]:
    """Several times as many hosts, or devices where there is one host."""
    cluster = question.model.cluster
    for times in LARGER:
        groups = tuple(
            replace(group, hosts=group.hosts * times)
            if group.hosts > 1
            else replace(group, count_per_host=group.count_per_host * times)
            for group in cluster.groups
        )
        if cluster.num_devices * times <= MOST_DEVICES:
            yield replace(cluster, groups=groups)


def _fitting(question: Question, freed: dict[str, str]) -> list[Evaluation]:
    """Plans that fit once some constraints are freed."""
    return [e for e in plans(question, freed) if e.fullness <= 1.0]


def plans(question: Question, freed: dict[str, str]) -> Iterator[Evaluation]:
    """The smallest plans once some constraints are freed; none where the rest still contradicts itself."""
    opened = _open(question, question.model.cluster, freed, question.menu)
    if opened is not None:
        yield from smallest_plans(*opened, question.simulate)


def _first(question: Question, cluster: ClusterSpec, menu: Menu) -> Evaluation | None:
    """A plan that fits another cluster or menu; looked for only where every block fits alone."""
    opened = _open(question, cluster, {}, menu)
    if opened is None or blocks_too_large(*opened):
        return None
    return next((e for e in smallest_plans(*opened, question.simulate) if e.fullness <= 1.0), None)


def _open(
    question: Question, cluster: ClusterSpec, freed: dict[str, str], menu: Menu
) -> tuple[StageModel, Space] | None:
    constraints = replace(question.constraints, **freed)
    model = StageModel(question.model.table, cluster, constraints, question.model.rows)
    try:
        return model, search_space(model, constraints, menu, splittable=question.splittable)
    except PlanError:
        return None


def smallest_plans(model: StageModel, space: Space, simulate: Simulator) -> Iterator[Evaluation]:
    """For each schedule, microbatches and stages, the plan that needs least memory."""
    evaluator = Evaluator(model, space, simulate)
    for candidate in _candidates(evaluator, space):
        found = evaluator.smallest(candidate)
        if found is not None:
            yield found


def _candidates(evaluator: Evaluator, space: Space) -> Iterator[Candidate]:
    """Chains by the memory they need, whatever their speed; where no chain is allowed, plans made of them."""
    model, own = evaluator.model, tuple(range(evaluator.model.num_blocks))
    chains = chain_schedules(space.schedules)
    split = () if chains else tuple(s for s in space.schedules if s.splits_backward and s.num_chunks == 1)
    for order in [own] if space.boundaries is not None else orders(model.num_blocks, model.values):
        costs = IntervalCosts(model, order)
        for schedule in chains or (space.chains if split else ()):
            for m in space.num_microbatches:
                for candidate in ChainSearch(costs, space, schedule, m, spans(costs.model)[0]).smallest():
                    runs = [s for s in split if s.runs(candidate.num_stages, m)]
                    yield from (replace(candidate, schedule=s) for s in runs) if split else [candidate]
    if not chains:
        yield from even_cuts(evaluator)


def blocks_too_large(model: StageModel, space: Space) -> list[tuple[int, StagePrice]]:
    """Blocks that fit no device even alone, spread as far as is allowed, and their prices; fullest first."""
    fixed = space.constraints
    modes = modes_of(
        each_value(fixed.remat) or tuple(Remat),
        each_value(fixed.sharding) or space.shardings,
        each_value(fixed.offload) or space.offloads,
    )
    firsts = [model.kind_of.index(kind) for kind in range(len(model.kinds))]
    found = []
    for block in range(model.num_blocks):
        prices = [
            price
            for m in (space.num_microbatches[0], space.num_microbatches[-1])
            for replicas in replica_counts(model, model.rows // m, None)
            for first in firsts
            if first + replicas <= model.num_devices
            for price in model.options(
                Placement((block,), first, replicas),
                model.rows // m,
                1,
                space.schedules[0].has_backward,
                modes,
            )
        ]
        least = min(prices, key=lambda price: price.fullness)
        if least.fullness > 1.0:
            found.append((block, least))
    return sorted(found, key=lambda pair: -pair[1].fullness)


def _says(change: str, found: Evaluation, remark: str = "") -> str:
    peak = max(price.peak_bytes for price in found.prices)
    return f"{change} (fits in {gib(peak)}{remark and f'; {remark}'})"


def _common(values: set[Any]) -> str:
    """The value that all stages share, as text, or "auto"."""
    return repr(next(iter(values)).value if len(values) == 1 else AUTO)
