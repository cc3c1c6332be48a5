"""What the search may choose from: microbatches, schedules, replicas, cuts, devices.

All constraints but the memory limit are applied here, once, so that every search walks the same space.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rannc_jax.contract import Sharding
from rannc_jax.errors import PlanError, message
from rannc_jax.partition.conflicts import check_indices, check_rules
from rannc_jax.partition.constraints import AUTO, Constraints, NamedSchedule
from rannc_jax.partition.manual import resolve_cuts
from rannc_jax.partition.mode import Mode
from rannc_jax.partition.rules import BY_STAGE, Rule, each_value, modes_under, rules_of
from rannc_jax.partition.stage import Placement, StageModel

_ONLY_PLAN = "make_plan(..., runnable=False) to plan it all the same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """What there is to choose from before anybody fixes anything: what the runtime can run.

    Args:
        schedules: in the order in which ties are broken, all with or all without a backward.
        shardings: the same.
        offloads: whether optimizer state may stay on the host; True is tried only where nothing else fits.
    """

    schedules: tuple[NamedSchedule, ...]
    shardings: tuple[Sharding, ...] = (Sharding.REPLICATED,)
    offloads: tuple[bool, ...] = (False,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The choices that constraints leave.

    Args:
        constraints: what is fixed.
        schedules: in the order in which ties are broken.
        num_microbatches: ascending, each a divisor of the rows.
        num_stages: fixed, or None.
        boundaries: where stages may begin in the blocks' own order, both ends included, or None where
            any convex cut is allowed; with fixed cuts every boundary is used.
        shardings, offloads: where no constraint says which.
        rules: what is fixed of the stages that hold some module.
        chains: schedules whose plans, found from the last stage backwards, others may run as well.
        notes: what was changed, for the plan.
    """

    constraints: Constraints
    schedules: tuple[NamedSchedule, ...]
    shardings: tuple[Sharding, ...]
    offloads: tuple[bool, ...]
    num_microbatches: tuple[int, ...]
    num_stages: int | None
    boundaries: tuple[int, ...] | None
    rules: tuple[Rule, ...]
    chains: tuple[NamedSchedule, ...]
    notes: tuple[str, ...]

    def most_stages(self, model: StageModel) -> int:
        """No plan has more stages."""
        return self.num_stages or min(model.num_blocks, model.num_devices)

    def modes_of(self, stage: int, placed: Placement | None = None) -> tuple[Mode, ...]:
        """The modes that a stage may take; with `placed` those that its modules leave, none where it must
        have other replicas."""
        modes = self.constraints.modes_of(stage, self.shardings, self.offloads)
        if placed is None:
            return modes
        if self.constraints.replicas_of(stage) not in (None, placed.num_replicas):
            return ()
        rules = [rule for rule in self.rules if not rule.blocks.isdisjoint(placed.blocks)]
        return modes_under(rules, modes, placed.num_replicas)

    def stage_before(self, after: int) -> int:
        """The stage with `after` stages behind it; constraints by stage come with a fixed number."""
        return 0 if self.num_stages is None else self.num_stages - 1 - after


def chain_schedules(schedules: Sequence[NamedSchedule]) -> tuple[NamedSchedule, ...]:
    """Those whose plans are priced from the last stage backwards: one chunk a rank, whole backwards."""
    return tuple(s for s in schedules if s.num_chunks == 1 and not s.splits_backward)


def replica_counts(model: StageModel, microbatch_rows: int, fixed: int | None) -> tuple[int, ...]:
    """Replicas that a stage may have: divisors of the rows of a microbatch, up to all devices."""
    counts = (fixed,) if fixed is not None else range(1, min(model.num_devices, microbatch_rows) + 1)
    return tuple(r for r in counts if microbatch_rows % r == 0 and r <= model.num_devices)


def search_space(model: StageModel, constraints: Constraints, menu: Menu, *, splittable: bool) -> Space:
    """Apply the constraints.

    Raises:
        PlanError: a constraint names something that is not there, or nothing is left to choose from.
    """
    if model.rows < 1:
        raise PlanError(message(f"a batch of {model.rows} rows cannot be used.", hint="one row or more."))
    microbatches, notes = _microbatches(model.rows, constraints, splittable=splittable)
    boundaries = None
    paths = [block.modules for block in model.blocks]
    if constraints.cuts != AUTO:
        boundaries = (0, *resolve_cuts(constraints.cuts, paths), model.num_blocks)
    num_stages = constraints.fixed_num_stages
    check_menu(constraints, menu)
    _check_size(model, constraints, num_stages)
    check_indices(constraints, num_stages)
    rules = rules_of(constraints.by_stage, paths)
    if boundaries is not None:
        check_rules(constraints, rules, boundaries)
    return Space(
        constraints=constraints,
        schedules=_schedules(constraints, menu.schedules),
        shardings=menu.shardings,
        offloads=menu.offloads,
        num_microbatches=microbatches,
        num_stages=num_stages,
        boundaries=boundaries,
        rules=rules,
        chains=chain_schedules(menu.schedules),
        notes=notes,
    )


def check_menu(constraints: Constraints, menu: Menu) -> None:
    """What is fixed must be there to choose.

    Raises:
        PlanError: it is not.
    """
    for sharding in each_value(constraints.sharding):
        if sharding not in menu.shardings:
            known = ", ".join(repr(choice.value) for choice in menu.shardings)
            raise PlanError(
                message(
                    f"sharding={sharding.value!r} is not run yet.", hint=f"one of {known}, or {_ONLY_PLAN}."
                )
            )
    for offload in each_value(constraints.offload):
        if offload not in menu.offloads:
            raise PlanError(message(f"offload={offload} is not run yet.", hint=f"a remat, or {_ONLY_PLAN}."))


def _schedules(constraints: Constraints, schedules: Sequence[NamedSchedule]) -> tuple[NamedSchedule, ...]:
    name = constraints.schedule_name
    chosen = tuple(schedule for schedule in schedules if name in (None, schedule.name))
    if not chosen:
        built = ", ".join(repr(schedule.name) for schedule in schedules)
        raise PlanError(
            message(f"schedule {name!r} is not run yet.", hint=f"one of {built}, or {_ONLY_PLAN}.")
        )
    return chosen


def _microbatches(
    rows: int, constraints: Constraints, *, splittable: bool
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Allowed numbers of microbatches, and what to tell the user."""
    wanted = constraints.num_microbatches
    least, most = (1, rows) if wanted == AUTO else wanted if isinstance(wanted, tuple) else (wanted, wanted)
    if not splittable:
        if least > 1:
            raise PlanError(
                message(
                    f"num_microbatches={wanted} would change the loss: rows of the batch are coupled.",
                    hint="num_microbatches=1, or allow_coupled=True to accept another loss.",
                )
            )
        return _divisors(rows, 1, constraints), (
            "rows are coupled, so the batch stays whole: one microbatch.",
        )
    divisors = _divisors(rows, rows, constraints)
    if isinstance(wanted, int):
        if rows % wanted == 0 and wanted not in divisors:
            raise PlanError(
                message(
                    f"num_microbatches={wanted} and {constraints.said('replicas')} do not go together.",
                    f"a microbatch of {rows // wanted} rows does not divide over so many replicas",
                    hint=f"num_microbatches={max(filter(wanted.__ge__, divisors))}, or another batch size.",
                )
            )
        taken = max(m for m in divisors if m <= wanted)
        note = (
            f"num_microbatches={wanted} does not divide {rows} rows: {taken} microbatches of {rows // taken}."
        )
        return (taken,), () if taken == wanted else (note,)
    inside, fixed = tuple(m for m in divisors if least <= m <= most), constraints.said("replicas")
    if not inside:
        raise PlanError(
            message(
                f"num_microbatches={wanted}: no such number divides {rows} rows.",
                f"numbers that do{fixed and f', with {fixed}'}: {', '.join(map(str, divisors))}",
                hint="a range that holds one of them, or another batch size.",
            )
        )
    return inside, ()


def _divisors(rows: int, most: int, constraints: Constraints) -> tuple[int, ...]:
    """Numbers of microbatches up to `most` whose rows divide by every fixed number of replicas."""
    counts = each_value(constraints.replicas)
    kept = tuple(m for m in range(1, most + 1) if rows % m == 0 and all(rows // m % r == 0 for r in counts))
    if not kept:
        raise PlanError(
            message(
                f"a batch of {rows} rows does not divide by {constraints.said('replicas')}.",
                hint="replicas or a batch size that divide each other, or replicas='auto'.",
            )
        )
    return kept


def _check_size(model: StageModel, constraints: Constraints, num_stages: int | None) -> None:
    """Fixed numbers of stages and replicas must find enough blocks and devices."""
    said = constraints.said("num_stages", "cuts", *BY_STAGE)
    if num_stages is not None and num_stages > model.num_blocks:
        raise PlanError(
            message(
                f"{num_stages} stages cannot be made of {model.num_blocks} blocks.",
                f"asked for by {said}",
                hint=f"num_stages={model.num_blocks} or less, or cuts at modules, which make more blocks.",
            )
        )
    largest = max(each_value(constraints.replicas), default=1)
    by_stage = [constraints.replicas_of(stage) or 1 for stage in range(num_stages or 1)]
    least = max(sum(by_stage), largest + len(by_stage) - 1)
    if least > model.num_devices:
        raise PlanError(
            message(
                f"the constraints ask for {least} devices, and the cluster has {model.num_devices}.",
                f"asked for by {said}",
                hint="fewer stages or replicas, or a larger cluster.",
            )
        )
