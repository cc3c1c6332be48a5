"""A search that may choose is held against searches that are told what to choose."""

import math

import pytest

from rannc_jax.partition.constraints import Constraints
from rannc_jax.partition.space import Menu
from rannc_jax.schedule import ZeroBubble
from tests.partition.brute_force import BOTH
from tests.partition.random_cases import problem_on_hosts, smaller_clusters
from tests.partition.test_search_is_exact import find


def settings_worth(table, cluster, rows):
    """What may be fixed, and what the search finds then."""
    menu = Menu(schedules=(*BOTH, ZeroBubble()))
    for stages in range(1, min(len(table.blocks), cluster.num_devices) + 1):
        yield f"num_stages={stages}", find(table, cluster, rows, Constraints(num_stages=stages), menu=menu)
    for m in (m for m in range(1, rows + 1) if rows % m == 0):
        yield f"num_microbatches={m}", find(table, cluster, rows, Constraints(num_microbatches=m), menu=menu)
    for name in ("gpipe", "1f1b", "zb-h1"):
        yield name, find(table, cluster, rows, Constraints(schedule=name), menu=menu)
    for fewer in smaller_clusters(cluster):
        yield f"{fewer.num_devices} devices", find(table, fewer, rows, menu=menu)


def assert_not_worse(seed, factor):
    """A search that may do so too finds about the same by itself; how near is what is measured."""
    table, cluster, rows = problem_on_hosts(seed)
    free = find(table, cluster, rows, menu=Menu(schedules=(*BOTH, ZeroBubble())))
    step_s = math.inf if free is None else free.step_s
    found = {name: plan.step_s for name, plan in settings_worth(table, cluster, rows) if plan is not None}
    assert step_s <= factor * min(found.values(), default=math.inf), (seed, step_s, found)


@pytest.mark.parametrize("seed", [1, 5])
def test_a_search_that_may_choose_is_not_worse_than_one_that_is_told(seed):
    assert_not_worse(seed, 1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 60))
def test_on_several_hosts_a_search_that_may_choose_is_nearly_never_worse(seed):
    assert_not_worse(seed, 1.1)
