"""The picture of a step: it ends when the plan says, and stays readable however many devices there are."""

import dataclasses

import pytest

from rannc_jax import Plan
from rannc_jax.viz import predicted_timeline, timeline_text
from tests.messages import layered, planned
from tests.plan.plans import small_plan

TWO_KINDS = {
    "version": 1,
    "devices": [{"kind": "h100", "count_per_host": 2}, {"kind": "a100", "hosts": 2, "count_per_host": 2}],
    "links": {"intra_host": {"kind": "nvlink3"}, "inter_host": {"kind": "net25g"}},
}


def steps_of(plan: Plan) -> float:
    """When the last group of devices has ended, its tail included."""
    ends = predicted_timeline(plan).rank_end_s
    tails = [
        sum(stage.tail_s for stage in plan.stages if stage.devices == plan.stages[rank].devices)
        for rank in range(len(ends))
    ]
    return max(end + tail for end, tail in zip(ends, tails, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_stages": 3, "replicas": (1, 2, 1), "num_microbatches": 8},
        {"num_stages": 3, "replicas": (1, 2, 1), "num_microbatches": 4, "mesh": TWO_KINDS},
        {"schedule": "interleaved(2)", "num_microbatches": 8, "num_stages": 4, "runnable": False},
        {"schedule": "zb-h1", "num_microbatches": 8, "num_stages": 4, "runnable": False},
    ],
    ids=["uneven replicas", "two kinds, three hosts", "interleaved", "zero bubble"],
)
def test_the_step_on_the_clock_is_the_plans(settings):
    plan = planned(layered, (1024,) * 6, **settings)
    assert max(steps_of(plan), plan.host_s) == pytest.approx(plan.step_s, rel=1e-9)
    is_late = plan.host_s > steps_of(plan)
    assert ("not drawn: the host takes" in timeline_text(plan, predicted_timeline(plan))) is is_late


def test_a_timeline_is_drawn_like_this():
    first, second = small_plan().stages
    stages = (dataclasses.replace(first, tail_s=3e-3), second)
    plan = dataclasses.replace(small_plan(), schedule="gpipe", stages=stages)
    assert timeline_text(plan, predicted_timeline(plan), width=40) == PICTURE


def test_many_groups_of_devices_are_drawn_by_a_few():
    plan = planned(
        layered,
        (64,) * 41,
        mesh={
            "version": 1,
            "devices": [{"kind": "h100", "hosts": 512, "count_per_host": 8}],
            "links": {"intra_host": {"kind": "nvlink4"}, "inter_host": {"kind": "net100g"}},
        },
        num_stages=40,
        replicas=2,
        num_microbatches=4,
        schedule="1f1b",
    )
    lines = timeline_text(plan, predicted_timeline(plan)).splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) < 110
    assert "16 of 40 groups of devices, evenly spaced" in lines
    assert "4016 devices of 4096 not used" in lines


PICTURE = """\
devices  replicas  0 to 22.069 ms                            busy
      0         1  FFFFFFFFF.......BBBBBBBBBBBBBBBBBBB=====   82%
    1-2         2  ...FFFFFFFFFBBBBBBBBBBBBBB..............   54%

. waits, = reduction and update; one column is 0.552 ms
busy: 54% to 82%, mean 68%
1 device of 4 not used"""
