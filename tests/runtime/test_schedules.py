"""Every schedule that is planned is run, in its order, and trains as one device does."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rannc_jax
from rannc_jax import PlanError, Remat
from rannc_jax.errors import ScheduleError
from rannc_jax.ir.roles import Role
from rannc_jax.runtime.ops import OpKind
from rannc_jax.schedule import Action, Kind, schedule_named
from tests.door import assert_close, layers, rows

NUM_MICROBATCHES = 4
NUM_STAGES = 4
MIXED = """
0F0 0F1 0F2 0B0 0F3 0B1 0I2 0B3 0W2
1F0 1F1 1I0 1F2 1B1 1F3 1W0 1I2 1B3 1W2
2F0 2I0 2F1 2B1 2W0 2F2 2I2 2F3 2W2 2B3
3F0 3I0 3F1 3B1 3F2 3W0 3I2 3F3 3I3 3W3 3W2
"""
TWO_CHUNKS = """
0F0 0F1 2F0 2F1 2I0 2B1 0F2 0F3 2F2 2F3 2W0 2B2 2B3 0B0 0B1 0B2 0B3
1F0 1F1 3F0 3B0 3F1 3I1 1F2 1F3 3W1 3F2 3B2 3F3 3B3 1I0 1B1 1B2 1B3 1W0
"""
SCHEDULES = {"gpipe": "gpipe", "1f1b": "1f1b", "zb-h1": "zb-h1", "interleaved": "interleaved(2)"}
SCHEDULES |= {"mixed": MIXED, "two chunks": TWO_CHUNKS}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def fn(params, batch):
    """Layers, a skip over all of them, and the first weight again at the end."""
    first = jnp.tanh(batch["x"] @ params[0]["w"] + params[0]["b"])
    h = first
    for layer in params[1:]:
        h = h + jnp.tanh(jax.nn.gelu(h @ layer["w"]) @ layer["w"] + layer["b"])
    return jnp.mean(((h + first) @ params[0]["w"].T - batch["y"]) ** 2)


BATCH, PARAMS = rows(2 * NUM_MICROBATCHES), layers(NUM_STAGES)


@pytest.fixture(scope="module")
def plan():
    """Four stages, one device each."""
    found = rannc_jax.make_plan(
        fn, PARAMS, BATCH, optimizer=OPTIMIZER, num_microbatches=NUM_MICROBATCHES, schedule="1f1b",
        replicas=1, cuts=(2, 4, 6),
    )  # fmt: skip
    assert (0, 3) in [tie.readers for tie in found.ties]
    assert any(crossing.source == 0 and 3 in crossing.targets for crossing in found.crossings)
    return found


@pytest.fixture(scope="module")
def expected(plan):
    """Loss, gradients, and the state after two steps, of one device."""
    step, state = start(plan, "1f1b", Remat.SAVE_ALL)
    reference = jax.jit(step.reference)
    loss, grads = jax.jit(jax.value_and_grad(fn))(PARAMS, BATCH)
    state, _ = reference(step.gather(state), BATCH)
    state, _ = reference(state, BATCH)
    return loss, grads, step.gather(state.params)


def start(plan, schedule, remat=Remat.SAVE_MATMULS, **options):
    """A step of the plan with another schedule, and its first state."""
    chunks = schedule_named(schedule).num_chunks
    stages = tuple(
        replace(stage, remat=remat, devices=(s % (NUM_STAGES // chunks),))
        for s, stage in enumerate(plan.stages)
    )
    changed = replace(plan, schedule=schedule, stages=stages)
    step = rannc_jax.parallelize(fn, changed, optimizer=OPTIMIZER, **options)
    return step, step.init(PARAMS, BATCH)


def check(plan, expected, schedule, remat):
    loss, grads, params = expected
    step, state = start(plan, SCHEDULES[schedule], remat)
    out, got = step.value_and_grad(state, BATCH)
    assert_close(out.loss, loss)
    assert_close(step.gather(got), grads)
    seen, prepared = [], step._placement.home
    step._engine.run(prepared, dict(enumerate(jax.tree.leaves(state.params))), BATCH, watch=seen.append)
    assert done(seen) == done(prepared.ops)
    for _ in range(2):
        state, _ = step(state, BATCH)
    far = jax.tree.map(lambda a, b: np.asarray(a - b), params, PARAMS)
    assert_close(jax.tree.map(lambda a, b: np.asarray(a - b), step.gather(state.params), PARAMS), far, 1e-3)


QUICK = [("zb-h1", Remat.SAVE_MATMULS), ("two chunks", Remat.RECOMPUTE)]


@pytest.mark.parametrize(("schedule", "remat"), QUICK)
def test_schedules_train_as_one_device_does(plan, expected, schedule, remat):
    check(plan, expected, schedule, remat)


@pytest.mark.slow
@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_one_device_does(plan, expected, schedule, remat):
    check(plan, expected, schedule, remat)


# --- order --------------------------------------------------------------------------------------------


def done(ops):
    """Actions in the order in which operations run them."""
    labels = (label for op in ops if op.kind is OpKind.RUN for label in op.label.split("+"))
    return [Action.parse(label) for label in labels if label[0].isdigit()]


def runs_of(step):
    return [op for op in step._placement.home.ops if op.kind is OpKind.RUN]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_runs_its_actions_in_the_order_of_the_schedule(plan, schedule):
    step, _ = start(plan, SCHEDULES[schedule])
    grid = schedule_named(SCHEDULES[schedule]).actions(NUM_STAGES, NUM_MICROBATCHES)
    order = done(step._placement.home.ops)
    for row in grid:  # nothing goes on from the first stage, so it has no I, and its W is all of B
        own = [action for action in row if (action.stage, action.kind) != (0, Kind.INPUT_GRAD)]
        assert [action for action in order if action in own] == own
    assert len(order) == len(set(order))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_stage_holds_more_than_its_schedule_promises(plan, schedule):
    step, _ = start(plan, SCHEDULES[schedule])
    named = schedule_named(SCHEDULES[schedule])
    alive, most = set(), {}
    for op in step._placement.home.ops:
        alive -= {key for key in op.inputs if op.kind is OpKind.FREE}
        alive |= {key for key in op.outputs if key[0] in ("res", "front")}
        for s in range(NUM_STAGES):
            held = {key[2] for key in alive if key[3] == s}
            most[s] = max(most.get(s, 0), len(held))
    promised = {s: named.in_flight(s, NUM_STAGES, NUM_MICROBATCHES) for s in range(NUM_STAGES)}
    assert all(most[s] <= promised[s] for s in promised), (most, promised)
    assert any(most.values())


# --- what is joined -----------------------------------------------------------------------------------


def test_the_last_stage_runs_forward_and_backward_as_one_and_keeps_nothing_in_between(plan):
    step, _ = start(plan, "1f1b")
    runs = runs_of(step)
    last = NUM_STAGES - 1
    assert [op.label for op in runs if op.stage == last and op.label[0] == str(last)] == [
        f"{last}F{i}+{last}B{i}" for i in range(NUM_MICROBATCHES)
    ]
    assert not [key for op in runs for key in op.outputs if key[0] == "res" and key[3] == last]
    apart = runs_of(start(plan, "gpipe")[0])
    assert len(apart) - len(runs) == NUM_MICROBATCHES


def test_the_first_stage_has_no_input_gradients_unless_they_are_asked_for(plan):
    step, _ = start(plan, "zb-h1")
    names = {op.name for op in runs_of(step)}
    assert {"I1", "W1", "FI3", "W3", "B0"} <= names
    assert not {"I0", "W0", "B1", "F3"} & names
    asked = step._engine.prepared(BATCH, frozenset(step._placement.ids(Role.BATCH)[:1]))
    assert {"I0", "W0"} <= {op.name for op in asked.ops}


def test_chunks_that_are_copies_of_each_other_are_compiled_once():
    """Of 6 equal layers on 2 ranks, stages 2 and 4 are alike, and so are 1 and 3."""

    def chain(params, batch):
        h = batch["x"]
        for layer in params:
            h = jnp.tanh(h @ layer["w"])
        return jnp.mean((h - batch["y"]) ** 2)

    params = [{"w": layer["w"]} for layer in layers(6)]
    step = rannc_jax.auto_partition(
        chain, optimizer=optax.sgd(0.1), num_stages=6, num_microbatches=2, schedule="interleaved(3)",
        replicas=1, cuts=(1, 2, 3, 4, 5),
    )  # fmt: skip
    state = step.init(params, rows(4))
    out, grads = step.value_and_grad(state, rows(4))
    loss, expected = jax.value_and_grad(chain)(params, rows(4))
    assert_close(out.loss, loss)
    assert_close(step.gather(grads), expected)
    programs = step._placement.home.lowered.programs
    for kind in "FB":
        assert programs[f"{kind}2"].chosen is programs[f"{kind}4"].chosen
        assert programs[f"{kind}1"].chosen is programs[f"{kind}3"].chosen
        assert programs[f"{kind}1"].chosen is not programs[f"{kind}2"].chosen


# --- text ---------------------------------------------------------------------------------------------


def test_a_written_schedule_goes_through_the_front_door():
    step = rannc_jax.auto_partition(fn, optimizer=OPTIMIZER, schedule=MIXED, replicas=1)
    step.init(PARAMS, BATCH)
    assert (step.plan.num_stages, step.plan.num_microbatches) == (NUM_STAGES, NUM_MICROBATCHES)
    assert schedule_named(step.plan.schedule) == schedule_named(MIXED)
    assert "40 actions (8 of 16 backwards split)" in str(step.plan)


def test_fewer_microbatches_leave_the_others_out(plan):
    step, _ = start(plan, MIXED)
    order = done(step._engine.prepared(rows(2)).ops)
    assert {action.microbatch for action in order} == {0, 1}
    step, _ = start(plan, "interleaved(2)")
    order = done(step._engine.prepared(rows(3)).ops)
    assert {action.microbatch for action in order} == {0, 1, 2}


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("0F0 0B0\n1F0", "stage 1 does not run microbatch 0 exactly once"),
        ("0F0 0B0\n1B0 1F0", "1B0 waits for its forward"),
        ("0F0 0Q0\n1F0 1B0", "'0Q0' is not an action"),
        ("0F0 0B0\n1F0 1B0", "num_microbatches=1, and num_microbatches=4 is asked for"),
        ("1f2b", "there is no schedule '1f2b'"),
    ],
)
def test_wrong_text_is_an_error_that_says_what_is_wrong(schedule, said):
    with pytest.raises(ScheduleError) as caught:
        rannc_jax.make_plan(
            fn, PARAMS, BATCH, optimizer=OPTIMIZER, schedule=schedule, num_microbatches=NUM_MICROBATCHES
        )
    assert said in str(caught.value)


def test_a_plan_whose_schedule_is_for_other_numbers_is_refused(plan):
    with pytest.raises(ScheduleError, match="cannot run 4 microbatches on 4 stages"):
        rannc_jax.parallelize(fn, replace(plan, schedule="0F0 0B0\n1F0 1B0"), optimizer=OPTIMIZER)
    with pytest.raises(PlanError, match="do not go together"):
        rannc_jax.parallelize(fn, replace(plan, schedule="0F0"), optimizer=OPTIMIZER)
