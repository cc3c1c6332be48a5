"""Whether a grid of actions can run: completeness, dependencies, no deadlock, memory.

Dependencies are those of a chain of stages: a forward waits for the same microbatch on the stage
before, a gradient for the stage after. Values that skip stages ask for less, so an order that is right
for the chain is right for every plan.
"""

from collections import Counter

from rannc_jax.errors import ScheduleError, message
from rannc_jax.schedule.action import Action, Kind
from rannc_jax.schedule.held import most_held
from rannc_jax.schedule.schedule import Grid

_FORWARD_ONLY = (Counter({Kind.FORWARD: 1}),)
_TRAINS = (
    Counter({Kind.FORWARD: 1, Kind.BACKWARD: 1}),
    Counter({Kind.FORWARD: 1, Kind.INPUT_GRAD: 1, Kind.WEIGHT_GRAD: 1}),
)


def linearise(actions: Grid) -> tuple[Action, ...]:
    """One global order in which every action comes after all that it needs.

    It is the order in which the actions would start if each took one unit of time, ties by rank: a
    single thread that dispatches in this order keeps all stages fed. Linear in the number of actions.

    Raises:
        ScheduleError: the actions wait for each other for ever.
    """
    starts = _unit_starts(actions)
    stuck = [row[len(times)] for row, times in zip(actions, starts, strict=True) if len(times) < len(row)]
    if stuck:
        raise ScheduleError(_deadlock(stuck, 1 + max(a.stage for row in actions for a in row)))
    timed = [
        (start, rank, position) for rank, times in enumerate(starts) for position, start in enumerate(times)
    ]
    timed.sort()
    return tuple(actions[rank][position] for _, rank, position in timed)


def _unit_starts(actions: Grid) -> list[list[int]]:
    """Start of each action if each takes one unit; a row ends early at an action that waits for ever."""
    rank_of = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    num_stages = 1 + max(rank_of, default=-1)
    there_already = {action.microbatch: 0 for row in actions for action in row}
    values: list[dict[int, int]] = [{} for _ in range(num_stages)]
    cotangents: list[dict[int, int]] = [{} for _ in range(num_stages)]
    starts: list[list[int]] = [[] for _ in actions]
    waiting = list(range(len(actions)))
    while waiting:
        rank = waiting.pop()
        row, times = actions[rank], starts[rank]
        touched = set()
        clock = times[-1] + 1 if times else 0
        while len(times) < len(row):
            stage, kind, microbatch = row[len(times)].stage, row[len(times)].kind, row[len(times)].microbatch
            own, back = values[stage], cotangents[stage]
            if kind is Kind.FORWARD:
                arrival = (values[stage - 1] if stage > 0 else there_already).get(microbatch)
            elif kind is Kind.WEIGHT_GRAD:
                arrival = back.get(microbatch)
            else:
                after = cotangents[stage + 1] if stage + 1 < num_stages else there_already
                arrival = after.get(microbatch) if microbatch in own else None
            if arrival is None:
                break
            start = max(clock, arrival)
            times.append(start)
            clock = start + 1
            touched.add(stage)
            if kind is Kind.FORWARD:
                own[microbatch] = clock
            elif kind is not Kind.WEIGHT_GRAD:
                back[microbatch] = clock
        near = {rank_of[other] for stage in touched for other in (stage - 1, stage + 1) if other in rank_of}
        waiting += sorted(near - {rank})
    return starts


def check_actions(actions: Grid, *, in_flight: tuple[int, ...] | None = None) -> None:
    """Check that each stage runs each microbatch once, with a backward everywhere or nowhere, that nothing
    deadlocks, and what is kept.

    Args:
        actions: by rank.
        in_flight: the promise of each stage, if any.

    Raises:
        ScheduleError: names the stage and the first action that is wrong.
    """
    microbatches = {action.microbatch for row in actions for action in row}
    trains = any(action.kind is not Kind.FORWARD for row in actions for action in row)
    owners: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for stage in sorted({action.stage for action in row}):
            if owners.setdefault(stage, rank) != rank:
                raise ScheduleError(message(f"stage {stage} is run by rank {owners[stage]} and by {rank}."))
            _check_complete(stage, row, microbatches, trains=trains)
    if sorted(owners) != list(range(len(owners))):
        raise ScheduleError(message(f"the stages are {sorted(owners)}, expected 0, 1, 2, ..."))
    linearise(actions)
    if in_flight is None:
        return
    for row in actions:
        for stage, most in most_held(row).items():
            if most > in_flight[stage]:
                raise ScheduleError(
                    message(
                        f"stage {stage} keeps more microbatches than its schedule promises.",
                        f"in flight at its peak: {most}, promised: {in_flight[stage]}",
                    )
                )


def _check_complete(stage: int, row: tuple[Action, ...], microbatches: set[int], *, trains: bool) -> None:
    kinds: dict[int, Counter[Kind]] = {microbatch: Counter() for microbatch in microbatches}
    for action in row:
        if action.stage == stage:
            kinds[action.microbatch][action.kind] += 1
    for microbatch, counted in sorted(kinds.items()):
        if counted not in (_TRAINS if trains else _FORWARD_ONLY):
            got = "".join(sorted(kind.value for kind in counted.elements())) or "nothing"
            raise ScheduleError(
                message(
                    f"stage {stage} does not run microbatch {microbatch} exactly once.",
                    f"got: {got}",
                    "expected: F and B, or F, I and W" if trains else "expected: F",
                )
            )


def _deadlock(stuck: list[Action], num_stages: int) -> str:
    """Each stage's first action that never runs, and what it waits for."""
    lines = []
    for action in stuck:
        if action.kind is Kind.FORWARD:
            needs = f"{Action(action.stage - 1, Kind.FORWARD, action.microbatch)}"
        elif action.kind is Kind.WEIGHT_GRAD:
            needs = f"{Action(action.stage, Kind.INPUT_GRAD, action.microbatch)}"
        elif action.stage + 1 == num_stages:
            needs = "its forward"
        else:
            needs = f"its forward, and the gradient of {action.microbatch} on stage {action.stage + 1}"
        lines.append(f"{action} waits for {needs}")
    return message("the schedule deadlocks.", *lines)
