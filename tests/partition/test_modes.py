"""Sharding, offloading and schedules that are no chains: when they win, and that the numbers are right."""

from dataclasses import replace
from typing import Any

import pytest

from rannc_jax.cluster import LinkSpec
from rannc_jax.contract import Remat, Sharding
from rannc_jax.cost.table import AffineBlock, AffineTable, BlockValue, StateBytes
from rannc_jax.errors import InfeasibleError
from rannc_jax.partition.check import check_decision
from rannc_jax.partition.constraints import Constraints
from rannc_jax.partition.search import search
from rannc_jax.partition.space import Menu
from rannc_jax.schedule import GPipe, Interleaved, OneFOneB, ZeroBubble, simulate
from tests.partition.random_cases import random_problem, uniform

CHAINS = (OneFOneB(), GPipe())
SHARDED = Menu(schedules=CHAINS, shardings=tuple(Sharding))
MIB = 2**20


def network(num_blocks, *, state=MIB, row_s=1e-3, weight_share=0.5):
    blocks = tuple(
        AffineBlock(
            path=f"layer_{index}",
            state=StateBytes(parameters=state, gradients=state, optimizer=2 * state),
            forward_s=(0.0, row_s),
            backward_s=((0.0, 2 * row_s), (0.0, 2 * row_s), (0.0, 3 * row_s)),
            residual_bytes=((0, 1000), (0, 1000), (0, 100)),
            working_bytes=((0, 0), (0, 0), (0, 0)),
            weight_s=(0.0, 2 * row_s * weight_share),
        )
        for index in range(num_blocks)
    )
    values = tuple(
        BlockValue(name=f"x{i}", producer=i, consumers=(i + 1,), bytes_per_row=10.0)
        for i in range(num_blocks - 1)
    )
    return AffineTable(affine=blocks, values=values)


def machine(num_devices, memory_bytes):
    fast = LinkSpec(bytes_per_s=1e11, latency_s=1e-7)
    return replace(uniform(num_devices, memory_bytes=memory_bytes, bytes_per_s=1e12), intra_host=fast)


def decide(table, cluster, menu, *, rows=8, splittable=True, **constraints: Any):
    chosen = Constraints(**constraints)
    decision = search(table, cluster, chosen, rows=rows, menu=menu, simulate=simulate, splittable=splittable)
    check_decision(decision, table, cluster, chosen, rows=rows)
    return decision


def test_a_network_that_fits_no_other_way_is_fully_sharded():
    """Rows are coupled, so a pipeline would run one microbatch through stage after stage."""
    decision = decide(network(4), machine(8, 9 * MIB // 2), SHARDED, splittable=False)
    assert [stage.sharding for stage in decision.stages] == [Sharding.FSDP]
    memory = decision.stages[0].memory_bytes
    # 4 blocks on 8 replicas; two gathered blocks are there at a time
    assert memory["parameters"] == memory["gradients"] == 4 * MIB // 8
    assert memory["optimizer"] == MIB
    assert memory["transfers"] == 2 * MIB


def test_state_is_sharded_no_further_than_memory_asks():
    plenty = decide(network(4), machine(8, 2**40), SHARDED, splittable=False).stages[0]
    assert plenty.sharding in (Sharding.REPLICATED, Sharding.ZERO1)
    kept = decide(network(4), machine(8, 10 * MIB), SHARDED, splittable=False).stages[0]
    assert kept.sharding is Sharding.ZERO1


def test_optimizer_state_goes_to_the_host_only_where_nothing_else_fits():
    table, menu = network(4), replace(SHARDED, offloads=(False, True))
    roomy = decide(table, machine(1, 17 * MIB), menu)
    assert not roomy.stages[0].offload
    with pytest.raises(InfeasibleError, match="no plan fits"):
        decide(table, machine(1, 14 * MIB), SHARDED)
    tight = decide(table, machine(1, 14 * MIB), menu)
    assert tight.stages[0].offload
    assert tight.stages[0].memory_bytes["optimizer"] == 0
    assert tight.stages[0].memory_bytes["transfers"] == 2 * 2 * MIB
    fetched_s = 2 * 8 * MIB / machine(1, 1).device(0).host_bytes_per_s
    assert tight.step_s - roomy.step_s == pytest.approx(fetched_s, rel=1e-6)


def test_a_sharding_that_is_fixed_is_kept():
    decision = decide(network(4), machine(4, 2**40), SHARDED, sharding="zero2", num_stages=2)
    assert {stage.sharding for stage in decision.stages} == {Sharding.ZERO2}
    each = (Sharding.FSDP, Sharding.REPLICATED)
    decision = decide(network(4), machine(4, 2**40), SHARDED, sharding=each)
    assert tuple(stage.sharding for stage in decision.stages) == each


def test_several_chunks_a_rank_shrink_the_bubble():
    table, cluster = network(16), machine(4, 2**40)
    fixed: dict[str, Any] = {"rows": 4, "num_microbatches": 4, "replicas": 1}
    chain = decide(table, cluster, Menu(schedules=CHAINS), **fixed, num_stages=4)
    chunked = decide(table, cluster, Menu(schedules=(*CHAINS, Interleaved(2), Interleaved(4))), **fixed)
    assert chunked.schedule == Interleaved(4)
    assert len({stage.devices for stage in chunked.stages}) == 4
    work_s = 16 / 4 * 4 * 3e-3
    assert chain.step_s == pytest.approx(work_s + 3 * 4 * 3e-3, rel=0.01)
    assert chunked.step_s == pytest.approx(work_s + 3 * 3e-3, rel=0.01)
    assert chunked.bound_s <= chunked.step_s


def test_memory_of_stages_that_share_devices_adds_up():
    table = network(16)
    menu = Menu(schedules=(OneFOneB(), Interleaved(2)))
    fixed: dict[str, Any] = {"rows": 4, "num_microbatches": 4, "replicas": 1, "remat": Remat.SAVE_ALL}
    needed = decide(table, machine(4, 2**40), menu, **fixed)
    peak = max(
        sum(stage.peak_bytes for stage in needed.stages if stage.devices == devices)
        for devices in {stage.devices for stage in needed.stages}
    )
    assert decide(table, machine(4, peak), menu, **fixed).schedule == Interleaved(2)
    assert decide(table, machine(4, peak - 1), menu, **fixed).step_s > needed.step_s


def test_weight_gradients_that_wait_fill_the_bubble():
    table, cluster = network(8), machine(4, 2**40)
    fixed: dict[str, Any] = {"rows": 8, "num_microbatches": 8, "replicas": 1, "num_stages": 4}
    chain = decide(table, cluster, Menu(schedules=CHAINS), **fixed)
    split = decide(table, cluster, Menu(schedules=(*CHAINS, ZeroBubble())), **fixed)
    assert split.schedule == ZeroBubble()
    bubble_s = 3 * 2 * 3e-3
    assert chain.step_s - split.step_s == pytest.approx(bubble_s * 2 / 3, rel=0.02)
    assert split.bound_s <= split.step_s


def test_more_to_choose_from_is_never_worse_and_never_below_the_bound():
    everything = Menu(
        schedules=(*CHAINS, ZeroBubble(), Interleaved(2)), shardings=tuple(Sharding), offloads=(False, True)
    )
    for seed in range(700, 730):
        table, cluster, rows = random_problem(seed, most_blocks=6, most_devices=4)
        try:
            fewer = search(table, cluster, rows=rows, menu=Menu(schedules=CHAINS), simulate=simulate)
        except InfeasibleError:
            continue
        more = search(table, cluster, rows=rows, menu=everything, simulate=simulate)
        assert more.step_s <= fewer.step_s * (1 + 1e-9), f"seed {seed}"
        assert more.bound_s <= more.step_s * (1 + 1e-9), f"seed {seed}"
        check_decision(more, table, cluster, Constraints(), rows=rows)
