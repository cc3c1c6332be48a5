"""What this runtime can run. A plan may say more: it is refused before anything is compiled."""

from rannc_jax.contract import Sharding
from rannc_jax.errors import PlanError, message
from rannc_jax.plan import Plan

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved(2)", "interleaved(3)", "interleaved(4)", "forward")
SHARDINGS = (Sharding.REPLICATED,)
OFFLOADS = (False,)


def check_runs(plan: Plan) -> None:
    """Refuse what cannot be run.

    Raises:
        PlanError: lists every setting that is planned but not run yet.
    """
    wrong = []
    if plan.schedule not in SCHEDULES:
        wrong.append(f"schedule: got {plan.schedule!r}, run are {', '.join(map(repr, SCHEDULES))}")
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
