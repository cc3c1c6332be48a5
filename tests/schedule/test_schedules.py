"""What each schedule runs, keeps, and how it reads as text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_jax.errors import PlanError, ScheduleError
from rannc_jax.schedule import (
    Action,
    Forward,
    GPipe,
    Kind,
    OneFOneB,
    check_actions,
    linearise,
    parse_grid,
    print_grid,
    schedule_named,
)
from rannc_jax.schedule.check import peak_in_flight

SCHEDULES = (GPipe(), OneFOneB(), Forward())
any_schedule = st.sampled_from(SCHEDULES)
stages = st.integers(1, 9)
microbatches = st.integers(1, 17)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(any_schedule, stages, microbatches)
def test_every_schedule_is_complete_free_of_deadlock_and_holds_what_it_promises(schedule, p, m):
    promised = tuple(schedule.in_flight(stage, p, m) for stage in range(p))
    actions = schedule.actions(p, m)
    check_actions(actions, in_flight=promised)
    assert tuple(peak_in_flight(row) for row in actions) == promised


@settings(max_examples=500, deadline=None, derandomize=True)
@given(any_schedule, stages, microbatches)
def test_the_global_order_puts_every_action_after_what_it_needs(schedule, p, m):
    actions = schedule.actions(p, m)
    order = linearise(actions)
    at = {action: position for position, action in enumerate(order)}
    assert len(at) == len(order) == sum(len(row) for row in actions)
    for row in actions:
        assert [at[action] for action in row] == sorted(at[action] for action in row)
    for action in order:
        if action.kind is Kind.FORWARD and action.stage > 0:
            assert at[Action(action.stage - 1, Kind.FORWARD, action.microbatch)] < at[action]
        if action.kind is Kind.BACKWARD:
            assert at[Action(action.stage, Kind.FORWARD, action.microbatch)] < at[action]
            if action.stage + 1 < p:
                assert at[Action(action.stage + 1, Kind.BACKWARD, action.microbatch)] < at[action]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(any_schedule, stages, microbatches)
def test_what_is_in_flight_depends_on_the_distance_to_the_last_stage_alone(schedule, p, m):
    for stage in range(p):
        assert schedule.in_flight(stage, p, m) == schedule.in_flight(0, p - stage, m)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(any_schedule, stages, microbatches)
def test_printing_and_parsing_a_grid_are_inverses(schedule, p, m):
    actions = schedule.actions(p, m)
    assert parse_grid(print_grid(actions)) == actions


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
    assert "1F1 waits for the forward of 1 on stage 0" in str(caught.value)


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


def test_an_action_in_another_stages_line_is_an_error():
    with pytest.raises(ScheduleError, match="1F0 stands in line 0"):
        parse_grid("1F0")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_names_find_their_schedules(schedule):
    assert schedule_named(schedule.name) == schedule


def test_schedules_that_are_not_built_yet_say_so():
    with pytest.raises(PlanError, match="schedule 'zero_bubble' is not built yet"):
        schedule_named("zero_bubble")
    with pytest.raises(ScheduleError, match="no schedule '1f2b'"):
        schedule_named("1f2b")


def test_no_stage_or_no_microbatch_is_an_error():
    with pytest.raises(ScheduleError, match="0 microbatches on 2 stages"):
        GPipe().actions(2, 0)
