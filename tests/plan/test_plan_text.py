"""What a plan looks like to a person."""

import dataclasses

from rannc_jax.plan.text import grid
from tests.plan.plans import small_plan


def test_the_table_reads_like_this() -> None:
    assert str(small_plan()) == TABLE


def test_equal_plans_have_no_difference() -> None:
    assert small_plan().diff(small_plan()) == ""


def test_a_difference_is_one_line_a_fact() -> None:
    plan = small_plan()
    moved = dataclasses.replace(plan.stages[1], devices=(1, 3))
    other = dataclasses.replace(plan, schedule="gpipe", notes=(), stages=(plan.stages[0], moved))
    lines = plan.diff(other).splitlines()
    assert [line.split(":")[0] for line in lines] == ["plan", "stage 1", "note 0"]
    assert lines[0].endswith("16 rows in 4 microbatches, gpipe")
    assert lines[1] == "stage 1: devices 1-2 -> 1, 3"
    assert lines[2].endswith("-> (none)")


def test_a_stage_that_only_one_plan_has_is_short_and_values_are_summed() -> None:
    plan = small_plan()
    merged = dataclasses.replace(plan.stages[0], blocks=(0, 1, 2, 3))
    other = dataclasses.replace(plan, stages=(merged,), crossings=(), ties=())
    lines = plan.diff(other).splitlines()
    assert "stage 1: head (1) on devices 1-2 -> (none)" in lines
    assert "values between stages: 0.5 MiB a microbatch -> 0 bytes a microbatch" in lines


def test_the_parts_of_a_step_are_those_of_one_group_of_devices() -> None:
    lines = small_plan().explain().splitlines()
    assert lines[1] == (
        "  most to do on stage 0: 15.000 ms (75%) forward and backward, 0.000 ms (0%) reduction and update, "
        "5.000 ms (25%) filling, draining and waiting"
    )


def test_long_paths_keep_their_last_parts() -> None:
    plan = small_plan()
    block = dataclasses.replace(plan.blocks[0], path="bert/encoder/layer/11/attention/self/query")
    text = str(dataclasses.replace(plan, blocks=(block, *plan.blocks[1:])))
    assert ".../11/attention/self/query .. layers.1 (3)" in text
    assert "layer/11" not in text


def test_blocks_without_a_path_are_named_by_their_neighbours_or_numbers() -> None:
    plan = small_plan()
    first, *rest = (dataclasses.replace(block, path="") for block in plan.blocks)
    some = dataclasses.replace(plan, blocks=(first, *plan.blocks[1:]))
    assert "layers.0 .. layers.1 (3)" in str(some)
    none = dataclasses.replace(plan, blocks=(first, *rest))
    assert "block 0 .. block 2 (3)" in str(none)
    assert "block 3 (1)" in str(none)


def test_columns_of_numbers_are_set_right() -> None:
    assert grid(["name", "s"], [["a", "1"], ["bcdef", "10"]]) == ["name    s", "a       1", "bcdef  10"]


TABLE = """\
plan: 2 stages on 3 of 4 devices (4 x cpu), 16 rows in 4 microbatches, 1f1b
predicted: step 20.000 ms, bubble 20.0 %, 25.0 % above the lower bound of 16.000 ms
loss: weighted; rows: separable

stage  blocks                 devices  remat          F ms   B ms  params  optim  resid  work    MiB / limit
    0  embed .. layers.1 (3)        0  recompute     1.250  2.500   10.00  20.00   5.00  0.00  35.00 / 92.00
    1  head (1)                   1-2  save_matmuls  1.000  2.000    4.00   0.00   0.00  1.00   5.00 / 92.00

crossings:
  0 -> 1: 1 value, 0.500 MiB a microbatch (layers.1/out)

ties:
  params['embed']: lives on stage 0, read by 0, 1

notes:
  The loss is weighted by the number of tokens.

runners-up:
  21.000 ms  1 stage, 4 replicas: 5 % slower

made by rannc_jax 0.1.0, jax 0.10.2"""
