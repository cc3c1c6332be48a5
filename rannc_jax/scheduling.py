"""The schedule of a plan, where it is more than a choice from a menu: given action by action, or refined
when the search has chosen zero bubble."""

from dataclasses import replace

from rannc_jax.errors import ScheduleError, message
from rannc_jax.partition.constraints import AUTO, Constraints
from rannc_jax.partition.decision import Decision
from rannc_jax.schedule import Kind, Written, ZeroBubble, fuse_backwards, schedule_named, simulate


def written_schedule(constraints: Constraints) -> tuple[Constraints, tuple[Written, ...]]:
    """A schedule that is given action by action, and constraints with the numbers that it fixes.

    Raises:
        ScheduleError: there is no such schedule, it cannot run, or its numbers are fixed differently.
    """
    schedule = constraints.schedule
    if isinstance(schedule, str) and schedule != AUTO:
        schedule = schedule_named(schedule)
    if not isinstance(schedule, Written):
        return constraints, ()
    numbers = {"num_stages": schedule.num_stages, "num_microbatches": schedule.num_microbatches}
    fixed = {"num_stages": constraints.fixed_num_stages, "num_microbatches": constraints.num_microbatches}
    for name, number in numbers.items():
        asked = fixed[name]
        in_range = isinstance(asked, tuple) and asked[0] <= number <= asked[1]
        if asked not in (None, AUTO, number) and not in_range:
            raise ScheduleError(
                message(
                    f"the schedule is written for {name}={number}, and {name}={asked} is asked for.",
                    hint=f"leave {name} out.",
                )
            )
    return replace(constraints, schedule=schedule, **numbers), (schedule,)


def with_fewer_splits(decision: Decision) -> Decision:
    """Zero bubble as it is run: backwards whose split fills no bubble are whole."""
    if not isinstance(decision.schedule, ZeroBubble) or decision.num_stages == 1:
        return decision
    stages, m = decision.stages, decision.num_microbatches
    forward_s, backward_s, weight_s = (
        [getattr(stage, name) for stage in stages] for name in ("forward_s", "backward_s", "weight_s")
    )
    schedule = fuse_backwards(decision.schedule, m, forward_s, backward_s, weight_s, decision.transfers)
    timeline = simulate(schedule, m, forward_s, backward_s, decision.transfers, weight_s)
    ends = zip(timeline.rank_end_s, stages, strict=True)
    split = sum(a.kind is Kind.WEIGHT_GRAD for row in schedule.actions(len(stages), m) for a in row)
    note = f"zero bubble: {split} of {m * len(stages)} backwards are split, those that fill a bubble."
    return replace(
        decision,
        schedule=schedule,
        step_s=max(decision.host_s, *(end_s + stage.tail_s for end_s, stage in ends)),
        bubble_fraction=timeline.bubble_fraction,
        notes=(*decision.notes, note),
    )
