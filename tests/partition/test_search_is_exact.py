"""On small programs the search must find what plain enumeration finds, and prove it."""

import math
from dataclasses import replace

import pytest

from rannc_jax.contract import Remat, Sharding
from rannc_jax.errors import PlanError
from rannc_jax.partition.check import check_decision
from rannc_jax.partition.constraints import Constraints
from rannc_jax.partition.search import search
from rannc_jax.partition.space import Menu
from rannc_jax.schedule import GPipe, OneFOneB, simulate
from tests.partition.brute_force import BOTH, best_step
from tests.partition.random_cases import random_problem

FAST = [range(first, first + 20) for first in range(0, 220, 20)]
SLOW = [range(first, first + 50) for first in range(1000, 2000, 50)]


def find(table, cluster, rows, constraints=None, **options):
    """The decision, or None where nothing fits."""
    try:
        options = {"menu": Menu(schedules=BOTH), **options}
        return search(table, cluster, constraints, rows=rows, simulate=simulate, **options)
    except PlanError as error:
        if "no plan fits" not in str(error):
            raise
        return None


def assert_optimal(seed, **sizes):
    table, cluster, rows = random_problem(seed, **sizes)
    least = best_step(table, cluster, rows)
    decision = find(table, cluster, rows)
    if decision is None:
        assert math.isinf(least), f"seed {seed}: a plan of {least} s was missed"
        return
    assert decision.is_optimal
    assert decision.step_s == pytest.approx(least, rel=1e-9), f"seed {seed}"
    assert decision.bound_s <= least * (1 + 1e-9), f"seed {seed}: bound {decision.bound_s} > {least}"
    check_decision(decision, table, cluster, Constraints(), rows=rows)


@pytest.mark.parametrize("seeds", FAST, ids=str)
def test_the_plan_equals_brute_force_and_the_bound_does_not_exceed_it(seeds):
    for seed in seeds:
        assert_optimal(seed, most_blocks=4, most_devices=3)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SLOW, ids=str)
def test_larger_plans_equal_brute_force_and_the_bound_does_not_exceed_it(seeds):
    for seed in seeds:
        assert_optimal(seed, most_blocks=5, most_devices=4)


def test_plans_with_sharded_and_offloaded_state_equal_brute_force():
    few = (Remat.SAVE_ALL, Remat.RECOMPUTE)
    used = set()
    for seed in range(500, 560):
        table, cluster, rows = random_problem(seed, most_blocks=3, most_devices=3)
        menu = Menu(schedules=BOTH, shardings=tuple(Sharding))
        decision = find(table, cluster, rows, menu=menu)
        least = best_step(table, cluster, rows, shardings=tuple(Sharding))
        if decision is None:
            assert math.isinf(least), f"seed {seed}: a plan of {least} s was missed"
            decision = find(table, cluster, rows, menu=replace(menu, offloads=(False, True)))
            least = best_step(
                table, cluster, rows, remats=few, shardings=tuple(Sharding), offloads=(False, True)
            )
            if decision is None:
                assert math.isinf(least), f"seed {seed}: a plan of {least} s was missed"
                continue
            assert decision.step_s <= least * (1 + 1e-9), f"seed {seed}"
            assert any(stage.offload for stage in decision.stages)
        else:
            assert decision.is_optimal
            assert decision.step_s == pytest.approx(least, rel=1e-9), f"seed {seed}"
        assert decision.bound_s <= decision.step_s * (1 + 1e-9)
        check_decision(decision, table, cluster, Constraints(), rows=rows)
        used |= {(stage.sharding, stage.offload) for stage in decision.stages if stage.num_replicas > 1}
    assert {Sharding.ZERO1, Sharding.ZERO2} <= {sharding for sharding, _ in used}


def test_plans_under_constraints_equal_brute_force_under_the_same():
    tried = 0
    for seed in range(300, 330):
        table, cluster, rows = random_problem(seed, most_blocks=4, most_devices=3)
        for constraints, limits in (
            (Constraints(remat=Remat.RECOMPUTE), {"remats": (Remat.RECOMPUTE,)}),
            (Constraints(schedule=OneFOneB()), {"schedules": (OneFOneB(),)}),
            (
                Constraints(schedule="gpipe", num_microbatches=1),
                {"schedules": (GPipe(),), "microbatches": [1]},
            ),
        ):
            decision = find(table, cluster, rows, constraints)
            least = best_step(table, cluster, rows, **limits)
            found = math.inf if decision is None else decision.step_s
            assert found == pytest.approx(least, rel=1e-9), f"seed {seed}, {constraints}"
            tried += decision is not None
    assert tried > 50


def test_the_fast_search_alone_is_seldom_far_from_the_optimum():
    ratios = []
    for seed in range(400, 460):
        table, cluster, rows = random_problem(seed, most_blocks=7, most_devices=4)
        exact, fast = find(table, cluster, rows), find(table, cluster, rows, most_visited=0)
        if exact is not None and fast is not None:
            assert fast.step_s >= exact.step_s * (1 - 1e-9)
            ratios.append(fast.step_s / exact.step_s)
    ratios.sort()
    assert len(ratios) > 30
    assert ratios[len(ratios) // 2] == pytest.approx(1.0)
    assert sum(ratios) / len(ratios) < 1.03


def test_two_searches_give_the_same_decision():
    for seed in (3, 8, 17):
        table, cluster, rows = random_problem(seed, most_blocks=6, most_devices=4)
        assert find(table, cluster, rows) == find(table, cluster, rows)
