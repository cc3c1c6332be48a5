"""A plan's step on the clock, as text: one line for each group of devices, time from left to right.

The step is simulated from what the plan holds (seconds of stages, values that cross, links), by the same
rules as in the search, so it ends when the plan says. However many devices there are, a line is a group of
replicas; where there are many groups, evenly spaced ones stand for their neighbours.
"""

from collections.abc import Sequence

from rannc_jax.plan import Plan
from rannc_jax.plan.moves import transfers
from rannc_jax.plan.text import devices_text, grid
from rannc_jax.schedule import Kind, Span, Timeline, schedule_named, simulate
from rannc_jax.words import count, ms

IDLE, TAIL = ".", "="
MOST_LINES = 16
"""Groups of devices that are drawn."""


def predicted_timeline(plan: Plan) -> Timeline:
    """Simulate a step of a plan.

    Returns:
        Spans by group of devices, in the order of the plan's stages; the tails after the last actions
        (reduction and update) are not in it.
    """
    return simulate(
        schedule_named(plan.schedule),
        plan.num_microbatches,
        [stage.forward_s for stage in plan.stages],
        [stage.backward_s for stage in plan.stages],
        transfers(plan),
        [stage.weight_s for stage in plan.stages],
    )


def timeline_text(plan: Plan, timeline: Timeline, *, width: int = 72) -> str:
    """Draw a timeline.

    Args:
        plan: whose it is.
        timeline: simulated or measured.
        width: columns of the picture.

    Returns:
        A line for each group of devices: what takes most of every column, F forward, B backward (I and W its
        halves), "=" reduction and update, "." waiting; and the share of the step in which the group works.
    """
    ranks = [plan.stages[actions[0].stage] for actions in timeline.actions]
    tails = [sum(stage.tail_s for stage in plan.stages if stage.devices == rank.devices) for rank in ranks]
    ends = timeline.rank_end_s
    step_s = max(end + tail for end, tail in zip(ends, tails, strict=True)) or 1.0
    busy = [
        (sum(span.end_s - span.start_s for span in spans) + tail) / step_s
        for spans, tail in zip(timeline.spans, tails, strict=True)
    ]
    drawn = _drawn(len(ranks))
    rows = [
        [
            devices_text(ranks[rank].devices),
            str(ranks[rank].num_replicas),
            _line(timeline.spans[rank], tails[rank], step_s, width),
            f"{busy[rank]:.0%}",
        ]
        for rank in drawn
    ]
    lines = grid(["devices", "replicas", f"0 to {ms(step_s)} ms", "busy"], rows)
    idle = plan.cluster.num_devices - len({device for rank in ranks for device in rank.devices})
    notes = [f"{IDLE} waits, {TAIL} reduction and update; one column is {ms(step_s / width)} ms"]
    if len(drawn) < len(ranks):
        notes.append(f"{len(drawn)} of {count(len(ranks), 'group')} of devices, evenly spaced")
    notes.append(f"busy: {min(busy):.0%} to {max(busy):.0%}, mean {sum(busy) / len(busy):.0%}")
    if plan.host_s > step_s:
        notes.append(f"not drawn: the host takes {ms(plan.host_s)} ms to call the programs")
    if idle:
        notes.append(f"{count(idle, 'device')} of {plan.cluster.num_devices} not used")
    return "\n".join([*lines, "", *notes])


def _drawn(num_ranks: int) -> list[int]:
    """The first, the last, and others evenly between them."""
    if num_ranks <= MOST_LINES:
        return list(range(num_ranks))
    return [line * (num_ranks - 1) // (MOST_LINES - 1) for line in range(MOST_LINES)]


def _line(spans: Sequence[Span], tail_s: float, step_s: float, width: int) -> str:
    """What takes most of every column."""
    shares = [dict.fromkeys([IDLE, TAIL, *(kind.value for kind in Kind)], 0.0) for _ in range(width)]
    last_s = max((span.end_s for span in spans), default=0.0)
    pieces = [(span.action.kind.value, span.start_s, span.end_s) for span in spans]
    for mark, start_s, end_s in [*pieces, (TAIL, last_s, last_s + tail_s)]:
        first, end = start_s / step_s * width, end_s / step_s * width
        for column in range(int(first), min(width, int(end) + 1)):
            shares[column][mark] += max(0.0, min(end, column + 1) - max(first, column))
    for share in shares:
        share[IDLE] = 1.0 - sum(share.values())
    return "".join(max(share, key=lambda mark: share[mark]) for share in shares)
