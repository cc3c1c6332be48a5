"""What the search decides and says on cases that a person can check."""

from dataclasses import replace

import pytest

from rannc_jax.cluster import DeviceGroup, LinkSpec
from rannc_jax.contract import Remat, Sharding
from rannc_jax.cost.table import AffineBlock, AffineTable, BlockValue, StateBytes, TiedState
from rannc_jax.errors import PlanError
from rannc_jax.partition.check import check_decision
from rannc_jax.partition.constraints import Constraints
from rannc_jax.partition.manual import resolve_cuts
from rannc_jax.partition.search import search
from rannc_jax.partition.space import Menu
from rannc_jax.plan import Crossing, Tie
from rannc_jax.schedule import Forward, GPipe, OneFOneB, simulate
from tests.partition.random_cases import cluster, device, uniform

MIB = 2**20


def layer(index=0, *, row_s=1e-3, state=MIB, saved=MIB):
    return AffineBlock(
        path=f"net/layer_{index}",
        state=StateBytes(parameters=state, gradients=state, optimizer=2 * state),
        forward_s=(0.0, row_s),
        backward_s=((0.0, 2 * row_s), (0.0, 2.2 * row_s), (0.0, 3 * row_s)),
        residual_bytes=((0, saved), (0, saved // 4), (0, saved // 16)),
        working_bytes=((0, 0), (0, 0), (0, 0)),
    )


def chain(num_blocks, **options):
    values = tuple(
        BlockValue(name=f"x{i}", producer=i, consumers=(i + 1,), bytes_per_row=100.0)
        for i in range(num_blocks - 1)
    )
    return AffineTable(affine=tuple(layer(i, **options) for i in range(num_blocks)), values=values)


def machine(num_devices, memory_bytes=2**40):
    return replace(
        uniform(num_devices, memory_bytes=memory_bytes, bytes_per_s=1e12),
        intra_host=LinkSpec(bytes_per_s=1e11, latency_s=1e-6),
    )


BOTH = Menu(schedules=(GPipe(), OneFOneB()))


def decide(table, machine, *, rows=8, menu=BOTH, splittable=True, **constraints):
    chosen = Constraints(**constraints)
    decision = search(table, machine, chosen, rows=rows, menu=menu, simulate=simulate, splittable=splittable)
    merged = chosen.with_axes(machine.axes)
    check_decision(decision, table, machine, merged, rows=rows)
    return decision


def refusal(table, machine, **options):
    with pytest.raises(PlanError) as caught:
        decide(table, machine, **options)
    return str(caught.value)


def test_with_memory_to_spare_equal_rows_are_plain_data_parallel():
    decision = decide(chain(4), machine(4))
    assert [stage.devices for stage in decision.stages] == [(0, 1, 2, 3)]
    assert decision.num_microbatches == 1
    assert decision.stages[0].remat is Remat.SAVE_ALL
    assert decision.is_optimal


def test_a_memory_limit_forces_a_pipeline_and_is_respected():
    decision = decide(chain(4), machine(4), memory_limit_bytes=14 * MIB, memory_margin=0.0)
    assert decision.num_stages > 1
    assert max(stage.peak_bytes for stage in decision.stages) <= 14 * MIB
    assert any("needs 16" in runner.reason for runner in decision.runners_up)


def test_the_fastest_remat_that_fits_is_taken_stage_by_stage():
    limits = {"memory_limit_bytes": int(5.5 * MIB), "memory_margin": 0.0}
    decision = decide(chain(2), machine(2), num_stages=2, schedule="1f1b", num_microbatches=8, **limits)
    assert [stage.remat for stage in decision.stages] == [Remat.SAVE_MATMULS, Remat.SAVE_ALL]


def test_replicas_may_be_uneven_and_follow_the_work():
    table = AffineTable(
        affine=(layer(0, row_s=3e-3), layer(1)),
        values=(BlockValue(name="x", producer=0, consumers=(1,), bytes_per_row=1.0),),
    )
    decision = decide(table, machine(4), rows=24, num_stages=2)
    assert [stage.num_replicas for stage in decision.stages] == [3, 1]


def test_devices_stay_idle_if_rows_do_not_divide_and_the_plan_says_so():
    decision = decide(chain(1), machine(4), rows=3)
    assert decision.stages[0].devices == (0, 1, 2)
    assert decision.notes == ("1 of 4 devices stay idle: no faster use of them was found.",)


def test_a_slow_network_keeps_replicas_on_one_host():
    slow = LinkSpec(bytes_per_s=1e7, latency_s=1e-3)
    fast = LinkSpec(bytes_per_s=1e12, latency_s=1e-7)
    group = DeviceGroup(device=device(memory_bytes=2**40, bytes_per_s=1e12), hosts=2, count_per_host=2)
    decision = decide(chain(4), cluster(group, intra=fast, inter=slow), rows=16)
    assert [stage.devices for stage in decision.stages] == [(0, 1), (2, 3)]


def test_a_slower_kind_of_device_gets_less_work():
    table = replace(chain(6), speeds={"b": 0.5})
    mixed = cluster(
        DeviceGroup(device=device(memory_bytes=2**40, bytes_per_s=1e12), count_per_host=1),
        DeviceGroup(device=device("b", memory_bytes=2**40, bytes_per_s=1e12), count_per_host=1),
        intra=LinkSpec(bytes_per_s=1e11, latency_s=1e-6),
    )
    decision = decide(table, mixed, rows=32, num_stages=2)
    assert [len(stage.blocks) for stage in decision.stages] == [4, 2]


def test_inference_uses_the_forward_schedule_and_keeps_nothing():
    decision = decide(chain(4), machine(2), menu=Menu(schedules=(Forward(),)), num_stages=2)
    assert decision.schedule == Forward()
    assert all(stage.memory_bytes["residuals"] == 0 for stage in decision.stages)
    assert all(stage.backward_s == 0.0 for stage in decision.stages)


def test_crossings_and_ties_are_reported_with_their_stages():
    table = replace(
        chain(3),
        values=(
            BlockValue(name="x", producer=0, consumers=(1, 2), bytes_per_row=4.0),
            BlockValue(name="y", producer=1, consumers=(2,), fixed_bytes=8, needs_grad=False),
        ),
        ties=(TiedState(path="embed", blocks=(0, 2), state=StateBytes(parameters=4, gradients=4)),),
    )
    decision = decide(table, machine(3), num_stages=3)
    assert decision.crossings == (
        Crossing(name="x", source=0, targets=(1, 2), bytes_per_row=4.0, fixed_bytes=0, needs_grad=True),
        Crossing(name="y", source=1, targets=(2,), bytes_per_row=0.0, fixed_bytes=8, needs_grad=False),
    )
    assert decision.ties == (Tie(path="embed", owner=0, readers=(0, 2)),)
    assert decision.transfers[2][3] is None


def test_microbatches_that_do_not_divide_become_the_next_smaller_divisor():
    decision = decide(chain(2), machine(2), rows=10, num_microbatches=4, num_stages=2)
    assert decision.num_microbatches == 2
    assert "num_microbatches=4 does not divide 10 rows: 2 microbatches of 5." in decision.notes


def test_coupled_rows_stay_whole_and_refuse_to_be_split():
    assert decide(chain(2), machine(2), splittable=False).num_microbatches == 1
    text = refusal(chain(2), machine(2), splittable=False, num_microbatches=4)
    assert "num_microbatches=4 would change the loss: rows of the batch are coupled." in text


def test_a_range_without_a_divisor_lists_the_divisors():
    text = refusal(chain(2), machine(2), rows=10, num_microbatches=(3, 4))
    assert "num_microbatches=(3, 4): no such number divides 10 rows" in text
    assert "1, 2, 5, 10" in text


def test_named_cuts_are_kept():
    decision = decide(chain(4), machine(4), cuts=("net/layer_1", 3))
    assert [stage.blocks for stage in decision.stages] == [(0,), (1, 2), (3,)]


def test_a_cut_that_cannot_be_made_is_named():
    with pytest.raises(PlanError, match="cuts names 'net/head', but no module") as caught:
        resolve_cuts(["net/head"], [["net/a"], ["net/b"]])
    assert "nearest names: net/a, net/b, net" in str(caught.value)
    with pytest.raises(PlanError, match=r"cuts names 'net\.a', with which the program begins"):
        resolve_cuts(["net.a"], [["net/a"], ["net/b"]])
    with pytest.raises(PlanError, match="leave a stage without blocks"):
        resolve_cuts([2], [["net/a"], ["net/b"]])
    with pytest.raises(PlanError, match="two cuts fall on one block: 'b' and 1"):
        resolve_cuts(["b", 1], [["net/a"], ["net/b"]])


def test_the_mesh_fixes_stages_and_replicas():
    fixed = replace(machine(4), axes={"stage": 2, "data": 1})
    decision = decide(chain(4), fixed)
    assert [stage.num_replicas for stage in decision.stages] == [1, 1]
    assert "num_stages and the mesh do not agree" in refusal(chain(4), fixed, num_stages=3)


def test_an_infeasible_limit_says_where_and_names_the_smallest_change():
    text = refusal(chain(4), machine(4), num_stages=1, memory_limit_bytes=8 * MIB, memory_margin=0.0)
    assert text.startswith("no plan fits 8.0 MiB per device.\n  smallest peak found: 16.")
    assert "(stage 0 of 1: parameters 4.0 MiB, gradients 4.0 MiB, optimizer 8.0 MiB" in text
    assert "try: num_stages=4 (fits in 4.3 MiB)" in text


def test_an_infeasible_remat_or_schedule_is_named():
    options = {"num_stages": 2, "replicas": 1, "num_microbatches": 8, "memory_limit_bytes": 13 * MIB}
    text = refusal(chain(4), machine(2), remat=Remat.SAVE_ALL, schedule="gpipe", memory_margin=0.0, **options)
    assert "remat='recompute' (fits in" in text or "remat='save_matmuls' (fits in" in text
    assert "schedule='1f1b' (fits in" in text


def test_where_nothing_is_fixed_more_devices_are_proposed():
    text = refusal(chain(4), machine(2), memory_limit_bytes=6 * MIB, memory_margin=0.0)
    assert "4 devices (fits in" in text
    text = refusal(chain(1), machine(1), memory_limit_bytes=MIB, memory_margin=0.0)
    assert "try: 4.1 MiB of usable memory per device." in text
    text = refusal(chain(1), machine(1), memory_limit_bytes=7 * MIB // 2, memory_margin=0.0)
    assert "optimizer state in bfloat16 (fits in 3.1 MiB)" in text


def test_a_block_that_fits_nowhere_is_named_with_what_is_planned_but_not_run():
    fat = replace(layer(1), state=StateBytes(parameters=8 * MIB, gradients=8 * MIB, optimizer=16 * MIB))
    table = replace(chain(3), affine=(layer(0), fat, layer(2)))
    everything = Menu(schedules=BOTH.schedules, shardings=tuple(Sharding), offloads=(False, True))
    spec = machine(4, 20 * MIB)
    with pytest.raises(PlanError) as caught:
        search(table, spec, rows=8, menu=BOTH, simulate=simulate, beyond=everything)
    text = str(caught.value)
    assert "'net/layer_1' (block 1 of 3) cannot be cut and alone needs 32." in text
    assert "MiB too much (stage" in text
    assert "or sharding='zero2' (fits in" in text
    assert "planned with runnable=False, not run yet" in text


def test_what_is_not_run_yet_says_so():
    assert "sharding='fsdp' is not run yet" in refusal(chain(2), machine(2), sharding=Sharding.FSDP)
    assert "offload=True is not run yet" in refusal(chain(2), machine(2), offload=True)
    assert "schedule 'zb-h1' is not run yet" in refusal(chain(2), machine(2), schedule="zb-h1")


def test_all_unusable_constraints_are_reported_at_once():
    with pytest.raises(PlanError, match="constraints are not usable") as caught:
        Constraints(num_stages=0, memory_margin=1.5, remat="all")
    for name in ("num_stages: got 0", "memory_margin: got 1.5", "remat: got 'all'"):
        assert name in str(caught.value)


def test_constraints_that_disagree_on_the_number_of_stages_are_an_error():
    with pytest.raises(PlanError, match="do not agree on the number of stages") as caught:
        Constraints(num_stages=2, replicas=(1, 1, 2))
    assert "replicas asks for 3" in str(caught.value)


def test_more_stages_than_blocks_and_more_replicas_than_devices_are_errors():
    assert "3 stages cannot be made of 2 blocks" in refusal(chain(2), machine(4), num_stages=3)
    assert "ask for 6 devices, and the cluster has 4" in refusal(chain(2), machine(4), replicas=(4, 2))
    assert "8 rows does not divide by replicas=3" in refusal(chain(2), machine(4), replicas=3)


def test_runners_up_say_why_they_lost():
    decision = decide(chain(4), machine(4), rows=16)
    assert decision.runners_up
    assert all(runner.step_s >= decision.step_s and runner.reason for runner in decision.runners_up)


def test_the_check_finds_blocks_placed_twice_shared_devices_and_flow_backwards():
    table, spec = chain(2), machine(2)
    decision = decide(table, spec, num_stages=2)
    first, second = decision.stages
    swapped = replace(decision, stages=(replace(first, blocks=(1,)), replace(second, blocks=(0,))))
    shared = replace(decision, stages=(first, replace(second, devices=(0,), blocks=(0, 1))))
    with pytest.raises(PlanError, match="'x0' flows from stage 1 back to 0"):
        check_decision(swapped, table, spec, Constraints(), rows=8)
    with pytest.raises(PlanError, match=r"in several stages: \[0\]") as caught:
        check_decision(shared, table, spec, Constraints(), rows=8)
    assert "devices used too often: [0]" in str(caught.value)
    with pytest.raises(PlanError, match="stage 0 needs"):
        check_decision(decision, table, spec, Constraints(memory_limit_bytes=1), rows=8)
