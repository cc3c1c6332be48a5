"""The other doors of a step compute what one device does: rows that do not divide, gradients of the
batch, evaluation, plans from files, and the step's own reference."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import rannc_jax
from rannc_jax import Plan, Remat
from tests.parity.cases import Case
from tests.parity.measure import compare, norm
from tests.parity.models import MODELS, Model, model
from tests.parity.oracle import Outcome, reference
from tests.parity.play import NUM_STEPS, expected_outcome, given, optimizer_of, run, start

UNEVEN_ROWS = 23


def case(name: str, *, dropout: bool = False, replicas: tuple[int, ...] = (2, 2)) -> Case:
    return Case(
        model=name,
        dropout=dropout,
        replicas=replicas,
        num_microbatches=4,
        schedule="1f1b",
        remat=Remat.SAVE_MATMULS,
        optimizer="sgd",
    )


def shortened(network: Model) -> Model:
    return dataclasses.replace(network, batch=jax.tree.map(lambda leaf: leaf[:UNEVEN_ROWS], network.batch))


@pytest.mark.parametrize("name", ["mlp", "transformer", "unet", "frozen", "masked"])
def test_rows_that_do_not_divide_are_filled_up_and_do_not_count(name: str) -> None:
    network = model(name, True)
    short = shortened(network)
    step, state = start(case(name, dropout=True), network)
    got = run(step, state, short.batch)
    expected = reference(short, optimizer_of("sgd"), 4, NUM_STEPS)
    assert compare(got, expected, network.params, "sgd").problems == ()


def test_rows_that_outputs_count_are_left_to_one_replica() -> None:
    network = model("auxiliary", False)
    short = shortened(network)
    step, state = start(case("auxiliary"), network)
    got = run(step, state, short.batch)
    expected = reference(short, optimizer_of("sgd"), 1, NUM_STEPS)
    assert compare(got, expected, network.params, "sgd").problems == ()


def test_rows_that_others_see_must_divide() -> None:
    network = model("batch_norm", False)
    step, state = start(case("batch_norm"), network)
    with pytest.raises(rannc_jax.TraceError, match="23 rows do not divide into 4 microbatches"):
        step(state, shortened(network).batch)


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_of_a_step_is_the_oracle(name: str) -> None:
    network = model(name, True)
    step, state = start(case(name, dropout=True), network)
    expected = expected_outcome(name, True, "sgd", 4)
    losses = []
    for _ in range(NUM_STEPS):
        state, out = step.reference(state, network.batch)
        losses.append(out.loss)
    got = dataclasses.replace(
        expected,
        losses=tuple(map(np.asarray, losses)),
        params=jax.tree.map(np.asarray, state.params),
        model_state=jax.tree.map(np.asarray, state.model_state),
    )
    assert compare(got, expected, network.params, "sgd").problems == ()


@pytest.mark.parametrize(("name", "leaves"), [("mlp", ("x", "y")), ("unet", ("image",))])
def test_gradients_of_batch_leaves_are_those_of_jax(name: str, leaves: tuple[str, ...]) -> None:
    network = model(name, False)
    step, state = start(case(name, replicas=(3, 1)), network)
    _, (grads, found) = step.value_and_grad(state, network.batch, wrt_batch=leaves)
    both = jax.grad(network.loss_fn, argnums=(0, 1))(network.params, network.batch)
    expected = {leaf: both[1][leaf] for leaf in leaves}
    for got, wanted in ((grads, both[0]), (found, expected)):
        got, wanted = step.gather(got), step.gather(wanted)
        assert norm(jax.tree.map(np.subtract, got, wanted)) < 1e-5 * norm(wanted)


def test_another_function_of_the_parameters_is_evaluated_where_they_live() -> None:
    network = model("auxiliary", False)

    def outputs(params: Any, batch: Any) -> Any:
        aux = network.loss_fn(params, batch).aux
        return {"output": aux["output"], "activity": aux["activity"]}

    step, state = start(case("auxiliary"), network)
    got = step.gather(step.evaluate(outputs)(state, network.batch))
    expected = jax.tree.map(np.asarray, outputs(network.params, network.batch))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert norm(jax.tree.map(np.subtract, got, expected)) < 1e-6 * norm(expected)


def test_a_plan_from_a_file_trains_as_the_one_that_was_saved(tmp_path: Path) -> None:
    network = model("transformer", True)
    step, state = start(case("transformer", dropout=True), network)
    step.plan.save(tmp_path / "plan.json")
    again = rannc_jax.parallelize(
        network.loss_fn,
        Plan.load(tmp_path / "plan.json"),
        optimizer=optimizer_of("sgd"),
        takes=network.takes,
    )
    fresh = again.init(network.params, network.batch, **given(network))
    first, second = run(step, state, network.batch), run(again, fresh, network.batch)
    jax.tree.map(np.testing.assert_array_equal, vars_of(first), vars_of(second))


def test_ones_own_update_may_replace_the_optimizer() -> None:
    network = model("mlp", False)
    step = rannc_jax.auto_partition(network.loss_fn, optimizer=optax.identity(), num_stages=2, replicas=1)
    state = step.init(network.params, network.batch)
    for _ in range(NUM_STEPS):
        _, grads = step.value_and_grad(state, network.batch)
        state = state.replace(params=jax.tree.map(lambda p, g: p - 0.02 * g, state.params, grads))
    expected = reference(network, optax.sgd(0.02), 1, NUM_STEPS).params
    got = step.gather(state.params)
    assert norm(jax.tree.map(np.subtract, got, expected)) < 1e-6 * norm(expected)


def vars_of(outcome: Outcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in Outcome.__dataclass_fields__}
