"""What this runtime can run. A plan may say more: it is refused before anything is compiled."""

from rannc_jax.contract import Sharding
from rannc_jax.errors import PlanError, message
from rannc_jax.plan import Plan
from rannc_jax.schedule import schedule_named

SHARDINGS = tuple(Sharding)
OFFLOADS = (False, True)


def check_runs(plan: Plan) -> None:
    """Refuse what cannot be run.

    Raises:
        PlanError: lists every setting that is planned but not run yet.
        ScheduleError: the schedule is none, or not one of so many stages and microbatches.
    """
    schedule_named(plan.schedule).actions(plan.num_stages, plan.num_microbatches)
    wrong = []
    for index, stage in enumerate(plan.stages):
        if stage.sharding not in SHARDINGS:
            known = ", ".join(repr(sharding.value) for sharding in SHARDINGS)
            wrong.append(f"stages[{index}].sharding: got {stage.sharding.value!r}, run are {known}")
        if stage.offload not in OFFLOADS:
            wrong.append(f"stages[{index}].offload: optimizer state on the host is not run yet")
    if wrong:
        raise PlanError(
            message(
                "the plan asks for what is planned but not run yet.",
                *wrong,
                hint="make_plan with runnable=True, its default, plans what runs.",
            )
        )
