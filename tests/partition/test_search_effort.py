"""How much the search does, in counts and not in seconds, as a network of equal layers grows."""

from dataclasses import dataclass, replace
from typing import Any

from rannc_jax.contract import Sharding
from rannc_jax.cost.table import AffineTable
from rannc_jax.partition import interval
from rannc_jax.partition.search import search
from rannc_jax.partition.space import Menu
from rannc_jax.schedule import GPipe, OneFOneB, ZeroBubble, simulate
from tests.partition.test_modes import MIB, machine, network

MENU = Menu(schedules=(OneFOneB(), GPipe(), ZeroBubble()), shardings=tuple(Sharding))


@dataclass
class Effort:
    """What one search asked for.

    Args:
        run_prices: how often the runs of blocks were priced in one mode.
        actions: forwards that were run on the clock.
    """

    run_prices: int = 0
    actions: int = 0


def effort(monkeypatch, table: AffineTable, *, rows: int, memory_bytes: int) -> Effort:
    found, stage_seconds = Effort(), interval.stage_seconds

    def priced(*args: Any) -> Any:
        found.run_prices += 1
        return stage_seconds(*args)

    def clocked(schedule: Any, num_microbatches: int, forward_s: Any, *rest: Any) -> Any:
        found.actions += num_microbatches * len(forward_s)
        return simulate(schedule, num_microbatches, forward_s, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(interval, "stage_seconds", priced)
        search(table, machine(8, memory_bytes), rows=rows, menu=MENU, simulate=clocked)
    return found


def with_launches(table: AffineTable, launch_s: float) -> AffineTable:
    """The same network with a cost of every forward and backward, however few its rows."""
    return replace(
        table,
        affine=tuple(
            replace(
                block,
                forward_s=(launch_s, block.forward_s[1]),
                backward_s=tuple((launch_s, per_row) for _, per_row in block.backward_s),
            )
            for block in table.affine
        ),
    )


def test_runs_are_priced_once_for_all_schedules_depths_and_microbatches_in_flight(monkeypatch):
    # 7 numbers of microbatches of 64 rows, each with its numbers of replicas: 7 times 1 with 3 modes, and
    # 15 times 2, 4 or 8 with 12 modes
    for depth in (8, 32):
        found = effort(monkeypatch, network(depth), rows=64, memory_bytes=3 * depth * MIB // 2)
        assert found.run_prices == 7 * 3 + 15 * 12


def test_microbatches_that_cannot_win_are_not_run_on_the_clock(monkeypatch):
    few, many = (
        effort(
            monkeypatch,
            with_launches(network(8, row_s=0.064 / rows), 1e-2),
            rows=rows,
            memory_bytes=2**40,
        )
        for rows in (64, 1024)  # the same work in finer rows
    )
    assert many.actions < 2 * few.actions
