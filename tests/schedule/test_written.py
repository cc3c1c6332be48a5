"""Schedules as text, and zero bubble with only the splits that pay."""

import pytest

from rannc_jax.errors import ScheduleError
from rannc_jax.schedule import (
    Forward,
    Interleaved,
    Kind,
    OneFOneB,
    Written,
    ZeroBubble,
    check_actions,
    fuse_backwards,
    linearise,
    most_held,
    print_grid,
    schedule_named,
    simulate,
)

MIXED = "0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1B1 1W0"


def test_text_and_schedule_are_inverses_and_its_properties_are_read_off():
    written = schedule_named(MIXED)
    assert isinstance(written, Written)
    assert Written.parse(written.name) == written
    assert (written.num_stages, written.num_microbatches, written.num_chunks) == (2, 2, 1)
    assert written.splits_backward
    assert written.has_backward
    assert [written.in_flight(stage, 2, 2) for stage in (0, 1)] == [2, 2]
    for schedule, p, m in (
        (Forward(), 3, 2),
        (OneFOneB(), 3, 4),
        (ZeroBubble(), 3, 4),
        (Interleaved(2), 4, 2),
    ):
        copy = Written(schedule.actions(p, m))
        names = ("num_chunks", "has_backward", "splits_backward")
        assert all(getattr(copy, name) == getattr(schedule, name) for name in names)
        assert all(
            copy.in_flight(s, p, m) == schedule.in_flight(s, p, m) for s in range(p) if copy.has_backward
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "0F0 0B0\n1F0",
            "stage 1 does not run microbatch 0 exactly once.\n  got: F\n  expected: F and B, or",
        ),
        ("0F0 0I0 1F0 1B0", "does not run microbatch 0 exactly once.\n  got: FI"),
        ("0F0 0B0 0B0", "got: BBF"),
        ("0F0 0W0 0I0", "0W0 waits for 0I0"),
        ("0F0 0B0\n1B0 1F0", "1B0 waits for its forward"),
        ("0F0 1F0 1B0 0B0\n2F0 2B0", "line 0 of the schedule runs stages 0, 1.\n  expected, of 3 stages"),
        ("0F1 0B1", r"the microbatches are [1], expected 0, 1, 2"),
        ("0F0 0X0", "'0X0' is not an action"),
        ("0F0\n0B0", "stage 0 in line 0 too"),
    ],
)
def test_text_that_cannot_run_is_an_error(text, said):
    with pytest.raises(ScheduleError) as caught:
        schedule_named(text)
    assert said in str(caught.value)


def test_it_runs_at_its_own_numbers_and_with_fewer_microbatches():
    written = schedule_named(MIXED)
    with pytest.raises(ScheduleError, match="written for 2 stages and 2 microbatches"):
        written.actions(2, 3)
    assert print_grid(written.some_actions(2, 1)) == "0F0 0B0\n1F0 1I0 1W0"
    assert print_grid(Interleaved(2).some_actions(4, 1)) == "0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0"
    for m in range(1, 9):
        check_actions(Interleaved(2).some_actions(6, m))


def test_whole_and_split_backwards_take_their_own_time():
    chain = [(0, 1, 0.0, 0.0)]
    times = [1.0, 1.0], [3.0, 3.0], chain, [1.0, 1.0]
    timeline = simulate(schedule_named(MIXED), 2, *times)
    assert timeline.end_s == ((1.0, 2.0, 7.0, 11.0), (2.0, 4.0, 5.0, 8.0, 9.0))


# --- fewer splits -------------------------------------------------------------------------------------


def pipeline(p, m, share, backward=2.0, weight=1.0, transfer=0.0):
    """(ZB-H1 with fewer splits, seconds of its step, of ZB-H1's, of 1F1B's; splits cost nothing there)."""
    chain = [(s, s + 1, transfer, transfer) for s in range(p - 1)]
    times = [1.0] * p, [backward] * p
    found = fuse_backwards(ZeroBubble(), m, *times, [weight] * p, chain, share)
    whole = [simulate(s, m, *times, chain, [weight] * p).step_s for s in (found, ZeroBubble(), OneFOneB())]
    return found, *whole


def splits(schedule, p, m):
    return [sum(a.kind is Kind.WEIGHT_GRAD for a in row) for row in schedule.actions(p, m)]


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_equal_stages_keep_the_whole_gain_with_as_many_splits_as_there_are_stages(p, m):
    found, step_s, zero_bubble_s, one_f_one_b_s = pipeline(p, m, share=0.0)
    assert step_s == pytest.approx(zero_bubble_s)
    assert step_s < one_f_one_b_s
    assert splits(found, p, m) == [0] + [p] * (p - 1)


@pytest.mark.parametrize("transfer", [0.0, 0.05])
@pytest.mark.parametrize("share", [0.0, 0.06, 0.3, 10.0])
def test_a_step_is_never_longer_for_it_and_nothing_is_held_longer(share, transfer):
    p, m = 4, 12
    found, *_ = pipeline(p, m, share, 2.2, 0.8, transfer)
    check_actions(found.actions(p, m))
    assert linearise(found.actions(p, m))
    for row in found.actions(p, m):
        assert all(held <= ZeroBubble().in_flight(s, p, m) for s, held in most_held(row).items())

    def costed(schedule):
        """Seconds of a step in which each split costs its share: whole backwards are shorter."""
        cost = share * 3.2
        order = linearise(schedule.actions(p, m))
        free, value, back, sent, returned = [0.0] * p, {}, {}, [0.0] * p, [0.0] * p
        for a in order:
            s, i = a.stage, a.microbatch
            lasts = {"F": 1.0, "B": 2.2, "I": 1.4 + cost, "W": 0.8}[a.kind.value]
            arrival = (value if a.kind is Kind.FORWARD else back).get((s, i), 0.0)
            free[s] = max(free[s], arrival if a.kind is not Kind.WEIGHT_GRAD else 0.0) + lasts
            if a.kind is Kind.FORWARD and s + 1 < p:
                sent[s] = value[s + 1, i] = max(free[s], sent[s]) + transfer
            if a.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and s:
                returned[s] = back[s - 1, i] = max(free[s], returned[s]) + transfer
        return max(free)

    assert costed(found) <= costed(ZeroBubble()) * (1 + 1e-9)
    if share == 10.0:
        assert splits(found, p, m) == [0] * p


def test_one_stage_and_one_microbatch_have_nothing_to_split():
    assert splits(pipeline(1, 4, 0.0)[0], 1, 4) == [0]
    assert sum(splits(pipeline(2, 1, 10.0)[0], 2, 1)) == 0
