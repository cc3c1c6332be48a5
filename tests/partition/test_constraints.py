"""Whatever a user fixes is in the plan that comes out, or the error names it."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_jax.contract import Remat, Sharding
from rannc_jax.errors import PlanError
from rannc_jax.partition.check import check_decision
from rannc_jax.partition.constraints import Constraints
from rannc_jax.partition.search import search
from rannc_jax.partition.space import Menu
from rannc_jax.schedule import GPipe, Interleaved, OneFOneB, ZeroBubble, simulate
from tests.partition.brute_force import BOTH, all_plans
from tests.partition.random_cases import random_problem

EVERYTHING = Menu(
    schedules=(OneFOneB(), GPipe(), ZeroBubble(), Interleaved(2)),
    shardings=tuple(Sharding),
    offloads=(False, True),
)
PARTS = ("first", "second", "third")
MODULES = ("net.first", "net/second", "third", "block_1", "block_3")


def named(table):
    """The same blocks in modules: net/first/block_0, net/second/block_1, net/third/block_2, ..."""
    blocks = tuple(
        replace(block, path=f"net/{PARTS[index * 3 // len(table.affine)]}/{block.path}")
        for index, block in enumerate(table.affine)
    )
    return replace(table, affine=blocks)


def by_stage(values):
    """A setting in each of its forms."""
    one = st.sampled_from(values)
    open_ = st.one_of(st.just("auto"), one)
    return st.one_of(
        one,
        st.lists(open_, min_size=1, max_size=3),
        st.dictionaries(st.one_of(st.integers(-2, 2), st.sampled_from(MODULES)), one, min_size=1, max_size=2),
    )


CONSTRAINTS = {
    "num_stages": st.integers(1, 4),
    "num_microbatches": st.one_of(st.integers(1, 6), st.just((1, 2)), st.just((2, 6))),
    "replicas": by_stage((1, 2)),
    "schedule": st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved(2)"]),
    "remat": by_stage(tuple(Remat)),
    "sharding": by_stage(tuple(Sharding)),
    "offload": by_stage((False, True)),
    "cuts": st.lists(st.one_of(st.integers(1, 4), st.sampled_from(MODULES)), min_size=1, max_size=2),
}


def outcome(table, cluster, rows, asked, menu=EVERYTHING):
    """The constraints and the decision, or what the user is told."""
    try:
        constraints = Constraints(**asked)
        decision = search(table, cluster, constraints, rows=rows, menu=menu, simulate=simulate)
    except PlanError as error:
        return str(error)
    return constraints, decision


def check(seed, asked):
    table, cluster, rows = random_problem(seed, most_blocks=5, most_devices=4)
    table = named(table)
    found = outcome(table, cluster, rows, asked)
    if isinstance(found, str):
        assert "no plan fits" in found or any(name in found for name in asked), found
    else:
        check_decision(found[1], table, cluster, found[0], rows=rows)


SOME = st.lists(st.sampled_from(list(CONSTRAINTS)), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: CONSTRAINTS[name] for name in names})
)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), asked=SOME)
def test_every_constraint_is_in_the_plan_or_the_error_names_it(seed: int, asked: dict[str, Any]) -> None:
    check(seed, asked)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(seed=st.integers(0, 1_000_000), asked=SOME)
def test_every_constraint_is_in_one_of_many_plans_or_its_error(seed: int, asked: dict[str, Any]) -> None:
    check(seed, asked)


def with_module(table, plan, part):
    """(replicas, mode) of the stages of an enumerated plan that hold a block of the module."""
    stages, devices, _, _, modes = plan
    inside = [f"/{part}/" in block.path for block in table.affine]
    each = zip(stages, devices, modes, strict=True)
    return [(len(on), mode) for blocks, on, mode in each if any(inside[block] for block in blocks)]


def recomputes_second(table, plan):
    return all(mode[0] is Remat.RECOMPUTE for _, mode in with_module(table, plan, "second"))


def copies_first(table, plan):
    return all(replicas == 2 for replicas, _ in with_module(table, plan, "first"))


def two_stages(table, plan):
    return len(plan[0]) == 2 and plan[4][1][0] is Remat.SAVE_ALL and len(plan[1][0]) == 1


@pytest.mark.parametrize(
    "asked, keeps",
    [
        ({"remat": {"net.second": "recompute"}}, recomputes_second),
        ({"replicas": {"first": 2}}, copies_first),
        ({"num_stages": 2, "remat": ("auto", "save_all"), "replicas": {-2: 1}}, two_stages),
    ],
    ids=["remat by module", "replicas by module", "by stage"],
)
def test_what_is_left_open_is_searched_as_well_as_by_brute_force(asked, keeps):
    compared = 0
    for seed in range(300, 320):
        table, cluster, rows = random_problem(seed, most_blocks=4, most_devices=3)
        if len(table.affine) < 3:
            continue
        table = named(table)
        plans = all_plans(table, cluster, rows)
        least = min((step_s for step_s, plan in plans if keeps(table, plan)), default=math.inf)
        found = outcome(table, cluster, rows, asked, Menu(schedules=BOTH))
        step_s = math.inf if isinstance(found, str) else found[1].step_s
        assert step_s == pytest.approx(least, rel=1e-9), f"seed {seed}: {found}"
        compared += math.isfinite(step_s)
    assert compared > 3
