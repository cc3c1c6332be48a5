"""What to say when nothing fits: the smallest peak there is, where it is, and the least change that helps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rannc_jax.cluster import ClusterSpec
from rannc_jax.contract import Remat
from rannc_jax.errors import PlanError, message
from rannc_jax.partition.candidate import Candidate, Evaluation, Evaluator, Simulator
from rannc_jax.partition.chain import ChainSearch
from rannc_jax.partition.constraints import AUTO, Constraints
from rannc_jax.partition.interval import IntervalCosts
from rannc_jax.partition.order import orders
from rannc_jax.partition.space import Menu, Space, chain_schedules, search_space
from rannc_jax.partition.stage import MEMORY_CLASSES, StageModel
from rannc_jax.words import gib


@dataclass(frozen=True, slots=True)
class _Question:
    """A program on a cluster; the answers vary constraints and devices."""

    model: StageModel
    constraints: Constraints
    menu: Menu
    simulate: Simulator
    splittable: bool


def explain_infeasible(
    model: StageModel,
    constraints: Constraints,
    space: Space,
    menu: Menu,
    simulate: Simulator,
    *,
    splittable: bool,
) -> str:
    """The text of the PlanError."""
    question = _Question(model, constraints, menu, simulate, splittable)
    smallest = min(_smallest(model, space, simulate), key=lambda e: e.fullness, default=None)
    if smallest is None:
        return message(
            "the constraints leave no plan at all.",
            f"{model.num_blocks} blocks, {model.num_devices} devices, {model.rows} rows",
            hint="fix less: 'auto' searches a value.",
        )
    worst = max(range(len(smallest.prices)), key=lambda stage: smallest.prices[stage].fullness)
    price = smallest.prices[worst]
    limit = price.peak_bytes / price.fullness
    classes = ", ".join(
        f"{name} {gib(amount)}"
        for name, amount in zip(MEMORY_CLASSES, price.memory_bytes, strict=True)
        if amount > 0
    )
    changes = list(_changes(question, smallest.candidate)) or [*_larger(question)]
    needed = f"{gib(price.peak_bytes)} of usable memory per device"
    optimizer = price.memory_bytes[MEMORY_CLASSES.index("optimizer")]
    slimmer = ["optimizer state in bfloat16"] if optimizer == max(price.memory_bytes) else []
    return message(
        f"no plan fits {gib(limit)} per device.",
        f"smallest peak found: {gib(price.peak_bytes)} (stage {worst} of {len(smallest.prices)}: {classes})",
        hint=", or ".join(changes + ([] if changes else [needed]) + slimmer) + ".",
    )


def _smallest(model: StageModel, space: Space, simulate: Simulator) -> Iterator[Evaluation]:
    """For each schedule, microbatches and stages, the plan that needs least memory."""
    evaluator = Evaluator(model, space, simulate)
    own = tuple(range(model.num_blocks))
    chosen = [own] if space.boundaries is not None else orders(model.num_blocks, model.values)
    for order in chosen:
        costs = IntervalCosts(model, order)
        for schedule in chain_schedules(space.schedules):
            for m in space.num_microbatches:
                for candidate in ChainSearch(costs, space, schedule, m).smallest():
                    yield evaluator.smallest(candidate)


def _changes(question: _Question, smallest: Candidate) -> Iterator[str]:
    """Single constraints whose removal makes room, each with the nearest value that fits."""
    fixed = question.constraints
    pipeline = {name: AUTO for name in ("num_stages", "replicas", "cuts") if getattr(fixed, name) != AUTO}
    if pipeline and not isinstance(fixed.remat, tuple):
        fitting = _fitting(question, question.model.cluster, pipeline)
        nearest = min(
            fitting,
            key=lambda e: (abs(e.candidate.num_stages - smallest.num_stages), e.fullness),
            default=None,
        )
        if nearest is not None:
            yield _says(f"num_stages={nearest.candidate.num_stages}", nearest)
    if fixed.remat != AUTO:
        fitting = _fitting(question, question.model.cluster, {"remat": AUTO})
        nearest = min(fitting, key=lambda e: (e.step_s, e.fullness), default=None)
        if nearest is not None:
            modes = {price.mode.remat for price in nearest.prices}
            yield _says(f"remat={_mode(modes)}", nearest)
    if fixed.num_microbatches != AUTO and question.splittable:
        fitting = _fitting(question, question.model.cluster, {"num_microbatches": AUTO})
        wanted = smallest.num_microbatches
        nearest = min(
            fitting, key=lambda e: (abs(e.candidate.num_microbatches - wanted), e.fullness), default=None
        )
        if nearest is not None:
            yield _says(f"num_microbatches={nearest.candidate.num_microbatches}", nearest)
    if fixed.schedule != AUTO:
        fitting = _fitting(question, question.model.cluster, {"schedule": AUTO})
        nearest = min(fitting, key=lambda e: e.fullness, default=None)
        if nearest is not None:
            yield _says(f"schedule={nearest.candidate.schedule.name!r}", nearest)


def _larger(question: _Question) -> Iterator[str]:
    """The fewest times as many hosts, or devices a host, that make room."""
    cluster = question.model.cluster
    for times in (2, 4, 8):
        groups = tuple(
            replace(group, hosts=group.hosts * times)
            if group.hosts > 1
            else replace(group, count_per_host=group.count_per_host * times)
            for group in cluster.groups
        )
        larger = replace(cluster, groups=groups)
        nearest = min(_fitting(question, larger, {}), key=lambda e: e.fullness, default=None)
        if nearest is not None:
            yield _says(f"{larger.num_devices} devices", nearest)
            return


def _fitting(question: _Question, cluster: ClusterSpec, freed: dict[str, str]) -> list[Evaluation]:
    """Plans that fit once some constraints are freed; none where the rest still contradicts itself."""
    constraints = replace(question.constraints, **freed)
    model = StageModel(question.model.table, cluster, constraints, question.model.rows)
    try:
        space = search_space(model, constraints, question.menu, splittable=question.splittable)
    except PlanError:
        return []
    return [e for e in _smallest(model, space, question.simulate) if e.fullness <= 1.0]


def _says(change: str, found: Evaluation) -> str:
    peak = max(price.peak_bytes for price in found.prices)
    return f"{change} (fits in {gib(peak)})"


def _mode(modes: set[Remat]) -> str:
    return str(next(iter(modes))) if len(modes) == 1 else repr(AUTO)
