"""The clock: closed forms where they exist, an independent relaxation where they do not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_jax.errors import ScheduleError
from rannc_jax.schedule import Action, Forward, GPipe, Kind, OneFOneB, simulate

any_schedule = st.sampled_from((GPipe(), OneFOneB(), Forward()))
seconds = st.integers(0, 9).map(float)


@st.composite
def problems(draw):
    schedule = draw(any_schedule)
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    forward = draw(st.lists(seconds, min_size=p, max_size=p))
    backward = draw(st.lists(seconds, min_size=p, max_size=p))
    pairs = [(s, t) for s in range(p) for t in range(s + 1, p)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    transfers = [(s, t, draw(seconds), draw(st.none() | seconds)) for s, t in chosen]
    return schedule, m, forward, backward, transfers


def relaxed_ends(schedule, m, forward, backward, transfers):
    """The same longest path by relaxing every constraint until nothing moves."""
    p = len(forward)
    rows = schedule.actions(p, m)
    end, sent, changed = {}, {}, True
    while changed:
        changed = False
        for row in rows:
            for position, action in enumerate(row):
                start = end.get(row[position - 1], 0.0) if position else 0.0
                is_forward = action.kind is Kind.FORWARD
                for index, (s, t, _, back) in enumerate(transfers):
                    if is_forward and t == action.stage:
                        start = max(start, sent.get((index, "y", action.microbatch), 0.0))
                    if not is_forward and s == action.stage and back is not None:
                        start = max(start, sent.get((index, "x", action.microbatch), 0.0))
                value = start + (forward if is_forward else backward)[action.stage]
                if end.get(action) != value:
                    end[action], changed = value, True
        for index, (s, t, there, back) in enumerate(transfers):
            for way, stage, length in (("y", s, there), ("x", t, back)):
                if length is None:
                    continue
                kind = Kind.FORWARD if way == "y" else Kind.BACKWARD
                made = [action for action in rows[stage] if action.kind is kind]
                free = 0.0
                for action in made:
                    free = max(free, end[action]) + length
                    if sent.get((index, way, action.microbatch)) != free:
                        sent[index, way, action.microbatch], changed = free, True
    return tuple(tuple(end[action] for action in row) for row in rows)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(problems())
def test_the_timeline_equals_an_independent_relaxation(problem):
    assert simulate(*problem).end_s == relaxed_ends(*problem)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems(), st.data())
def test_a_longer_action_never_shortens_the_step(problem, data):
    schedule, m, forward, backward, transfers = problem
    stage = data.draw(st.integers(0, len(forward) - 1))
    longer = [f + (2.0 if s == stage else 0.0) for s, f in enumerate(forward)]
    before = simulate(schedule, m, forward, backward, transfers)
    after = simulate(schedule, m, longer, backward, transfers)
    assert all(
        x <= y for a, b in zip(before.end_s, after.end_s, strict=True) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 8), (2, 4), (4, 4), (4, 16)])
def test_equal_stages_have_the_textbook_bubble(schedule, p, m):
    chain = [(s, s + 1, 0.0, 0.0) for s in range(p - 1)]
    timeline = simulate(schedule, m, [1.0] * p, [2.0] * p, chain)
    assert timeline.step_s == (m + p - 1) * 3.0
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


def test_one_transfer_delays_the_arrival_but_not_the_sender():
    timeline = simulate(Forward(), 2, [1.0, 1.0], [0.0, 0.0], [(0, 1, 5.0, None)])
    assert timeline.start_s == ((0.0, 1.0), (6.0, 11.0))


def test_a_slow_channel_sets_the_pace():
    fast = simulate(GPipe(), 8, [1.0, 1.0], [1.0, 1.0], [(0, 1, 0.5, 0.5)])
    slow = simulate(GPipe(), 8, [1.0, 1.0], [1.0, 1.0], [(0, 1, 3.0, 3.0)])
    assert fast.step_s < slow.step_s
    assert slow.step_s >= 8 * 3.0 * 2


def test_stages_without_a_value_between_them_run_at_the_same_time():
    timeline = simulate(GPipe(), 1, [1.0, 1.0], [1.0, 1.0])
    assert timeline.start_s == ((0.0, 1.0), (0.0, 1.0))


def test_a_skip_connection_holds_back_the_stage_that_reads_it():
    chain = [(0, 1, 0.0, 0.0), (1, 2, 0.0, 0.0)]
    plain = simulate(GPipe(), 1, [1.0] * 3, [1.0] * 3, chain)
    skip = simulate(GPipe(), 1, [1.0] * 3, [1.0] * 3, [*chain, (0, 2, 4.0, 4.0)])
    assert (plain.step_s, skip.step_s) == (6.0, 12.0)


def test_spans_carry_actions_and_times():
    (row,) = simulate(Forward(), 1, [2.0], [0.0]).spans
    assert (row[0].action, row[0].start_s, row[0].end_s) == (Action(0, Kind.FORWARD, 0), 0.0, 2.0)


def test_a_transfer_backwards_is_an_error():
    with pytest.raises(ScheduleError, match="from stage 1 to stage 0"):
        simulate(GPipe(), 1, [1.0, 1.0], [1.0, 1.0], [(1, 0, 1.0, None)])
