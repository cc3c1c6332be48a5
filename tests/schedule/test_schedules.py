"""What each schedule runs, keeps, and how it reads as text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_jax.errors import ScheduleError
from rannc_jax.schedule import (
    Forward,
    GPipe,
    Interleaved,
    OneFOneB,
    ZeroBubble,
    check_actions,
    linearise,
    parse_grid,
    print_grid,
    schedule_named,
    simulate,
)

CHAINS = (GPipe(), OneFOneB(), Forward())
SCHEDULES = (*CHAINS, ZeroBubble(), Interleaved(2), Interleaved(3))
any_schedule = st.sampled_from(SCHEDULES)
ranks = st.integers(1, 9)
microbatches = st.integers(1, 17)


def sized(schedule, p, m):
    """Numbers of stages and microbatches near these that the schedule is defined for."""
    return p * schedule.num_chunks, (m if schedule.num_chunks == 1 else -(-m // p) * p)


SIZES = [(p, m) for p in range(1, 15) for m in range(1, 28)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_at_every_size_actions_are_complete_in_an_order_that_runs_and_hold_what_is_promised(schedule):
    for p, m in dict.fromkeys(sized(schedule, p, m) for p, m in SIZES if p * schedule.num_chunks < 30):
        order = linearise(schedule.actions(p, m))
        stage, microbatch = np.array([(a.stage, a.microbatch) for a in order]).T
        kind = np.array([a.kind.value for a in order])
        at = {k: np.full((p, m), -1) for k in "FBIW"}  # when each action runs: position in the order
        for k, times in at.items():
            times[stage[kind == k], microbatch[kind == k]] = np.flatnonzero(kind == k)
        back = at["I" if schedule.splits_backward else "B"]
        last = at["W"] if schedule.splits_backward else back
        complete = [at["F"], *([back, last] if schedule.has_backward else [])]
        assert all((times >= 0).all() for times in complete)
        assert len(order) == p * m * len({id(times) for times in complete})
        assert (np.diff(at["F"], axis=0) > 0).all()
        if not schedule.has_backward:
            continue
        assert (np.diff(back, axis=0) < 0).all()
        assert (back > at["F"]).all()
        assert (last >= back).all()
        events = np.zeros((p, len(order)), int)  # +1 where a microbatch comes, -1 where it goes
        rows = np.arange(p)[:, None]
        events[rows, at["F"]] += 1
        events[rows, last] -= 1
        held = events.cumsum(axis=1).max(axis=1)
        assert held.tolist() == [schedule.in_flight(s, p, m) for s in range(p)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(any_schedule, ranks, microbatches)
def test_a_rank_runs_the_stages_that_differ_by_the_number_of_ranks(schedule, p, m):
    p, m = sized(schedule, p, m)
    actions = schedule.actions(p, m)
    assert len(actions) == p // schedule.num_chunks
    for rank, row in enumerate(actions):
        assert {action.stage for action in row} == set(range(rank, p, len(actions)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(any_schedule, ranks, microbatches)
def test_the_global_order_is_that_of_every_rank(schedule, p, m):
    actions = schedule.actions(*sized(schedule, p, m))
    check_actions(actions)
    order = linearise(actions)
    for row in actions:
        assert [action for action in order if action in set(row)] == list(row)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(CHAINS), ranks, microbatches)
def test_what_is_in_flight_depends_on_the_distance_to_the_last_stage_alone(schedule, p, m):
    for stage in range(p):
        assert schedule.in_flight(stage, p, m) == schedule.in_flight(0, p - stage, m)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(any_schedule, ranks, microbatches)
def test_printing_and_parsing_a_grid_are_inverses(schedule, p, m):
    actions = schedule.actions(*sized(schedule, p, m))
    assert parse_grid(print_grid(actions)) == actions


def bubble_of(schedule, p, m, forward, inputs, weights):
    """Idle seconds of the first rank where all stages are equal and nothing is lost between them."""
    v = schedule.num_chunks
    count = p * v
    chain = [(stage, stage + 1, 0.0, 0.0) for stage in range(count - 1)]
    times = [[seconds / v] * count for seconds in (forward, inputs + weights, weights)]
    step = simulate(schedule, m, times[0], times[1], chain, times[2]).step_s
    return step - m * (forward + inputs + weights)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(2, 8), st.integers(1, 4), st.floats(0.5, 2.0))
def test_bubbles_are_those_of_the_papers(p, times, seconds):
    m = p * times
    whole = 3 * seconds * (p - 1)
    assert bubble_of(GPipe(), p, m, seconds, seconds, seconds) == pytest.approx(whole)
    assert bubble_of(OneFOneB(), p, m, seconds, seconds, seconds) == pytest.approx(whole)
    for v in (2, 3):
        assert bubble_of(Interleaved(v), p, m, seconds, seconds, seconds) == pytest.approx(whole / v)
    # (p - 1) (F + I - W), Qi et al., table 1
    assert bubble_of(ZeroBubble(), p, m, seconds, seconds, seconds) == pytest.approx(whole / 3)


def test_interleaving_asks_for_a_multiple_of_the_ranks():
    with pytest.raises(
        ScheduleError, match="interleaved\\(2\\) cannot run 3 microbatches on 4 stages"
    ) as caught:
        Interleaved(2).actions(4, 3)
    assert "a multiple of 2 stages" in str(caught.value)


def test_1f1b_of_two_stages_reads_as_in_the_papers():
    assert print_grid(OneFOneB().actions(2, 3)) == ("0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")


def test_an_order_in_which_a_backward_comes_first_deadlocks():
    with pytest.raises(ScheduleError, match="0B0 waits for"):
        linearise(parse_grid("0B0 0F0\n1F0 1B0"))


def test_a_crossed_order_of_two_stages_deadlocks_and_names_both_sides():
    grid = parse_grid("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError, match="deadlocks") as caught:
        check_actions(grid)
    assert "0B0 waits for its forward, and the gradient of 0 on stage 1" in str(caught.value)
    assert "1F1 waits for 0F1" in str(caught.value)


def test_a_split_backward_is_ordered_input_gradients_before_weight_gradients():
    order = [str(a) for a in linearise(parse_grid("0F0 0I0 0W0\n1F0 1I0 1W0"))]
    assert order.index("1I0") < order.index("0I0") < order.index("0W0")
    with pytest.raises(ScheduleError, match="0W0 waits for 0I0"):
        linearise(parse_grid("0F0 0W0 0I0"))


def test_a_microbatch_that_is_missing_or_run_twice_is_an_error():
    with pytest.raises(ScheduleError, match="stage 0 does not run microbatch 1 exactly once"):
        check_actions(parse_grid("0F0 0B0\n1F0 1F1 1B0 1B1"))
    with pytest.raises(ScheduleError, match="got: BFF"):
        check_actions(parse_grid("0F0 0F0 0B0"))


def test_keeping_more_than_promised_is_an_error():
    with pytest.raises(ScheduleError, match="its peak: 2, promised: 1"):
        check_actions(GPipe().actions(1, 2), in_flight=(1,))


def test_a_stage_in_two_lines_is_an_error():
    with pytest.raises(ScheduleError, match="0B0 stands in line 1, and stage 0 in line 0 too"):
        parse_grid("0F0 1F0\n0B0 1B0")


def test_stages_without_a_number_in_between_are_an_error():
    with pytest.raises(ScheduleError, match=r"the stages are \[0, 2\]"):
        check_actions(parse_grid("0F0 0B0\n2F0 2B0"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_names_find_their_schedules(schedule):
    assert schedule_named(schedule.name) == schedule


def test_unknown_names_are_an_error():
    for name in ("1f2b", "interleaved(1)", "interleaved"):
        with pytest.raises(ScheduleError, match="there is no schedule"):
            schedule_named(name)


def test_no_stage_or_no_microbatch_is_an_error():
    with pytest.raises(ScheduleError, match="0 microbatches on 2 stages"):
        GPipe().actions(2, 0)
