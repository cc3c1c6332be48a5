"""Play a case: force its plan on the front door, take a few steps, compare with one device."""

import functools
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import rannc_jax
from rannc_jax import ClusterSpec, DeviceGroup, DeviceSpec, LinkSpec
from tests.parity.cases import FACTORS, NUM_DEVICES, Case
from tests.parity.measure import Comparison, compare
from tests.parity.models import Model, model
from tests.parity.oracle import SEED, Outcome, reference

NUM_STEPS = 2

# Devices on which a few flops take long and calls and links are free: the planner then balances work, and
# every stage of these tiny networks gets a share of it.
_DEVICE = DeviceSpec(
    kind="snail",
    platform=jax.default_backend(),
    memory_bytes=2**30,
    flops_per_s={"float32": 1e6},
    bytes_per_s=1e9,
    launch_s=0.0,
    dispatch_s=0.0,
)
_LINK = LinkSpec(bytes_per_s=1e9, latency_s=0.0)
_GROUP = DeviceGroup(device=_DEVICE, count_per_host=min(NUM_DEVICES, jax.device_count()))
CLUSTER = ClusterSpec(groups=(_GROUP,), intra_host=_LINK, inter_host=_LINK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A case that was run."""

    comparison: Comparison
    plan: rannc_jax.Plan
    seconds: float


def play(case: Case) -> Played:
    """Run a case and its reference.

    Raises:
        AssertionError: the plan is not what the case asks for.
    """
    network = model(case.model, case.dropout)
    began = time.perf_counter()
    step, state = start(case, network)
    got = run(step, state, network.batch)
    seconds = time.perf_counter() - began
    expected = expected_outcome(case.model, case.dropout, case.optimizer, case.num_microbatches)
    comparison = compare(got, expected, network.params, case.optimizer)
    return Played(comparison=comparison, plan=step.plan, seconds=seconds)


def start(case: Case, network: Model) -> tuple[rannc_jax.Step, rannc_jax.TrainState]:
    """A step with the plan of the case, and its first state.

    Raises:
        AssertionError: the plan is not what the case asks for.
    """
    step = begin(case, network.loss_fn, takes=network.takes, cuts=balanced_cuts(case))
    state = step.init(network.params, network.batch, **given(network))
    plan = step.plan
    assert tuple(stage.num_replicas for stage in plan.stages) == case.replicas
    assert {(stage.remat, stage.offload) for stage in plan.stages} == {(case.remat, case.offload)}
    assert (plan.num_microbatches, plan.schedule) == (case.num_microbatches, case.schedule)
    return step, state


def begin(case: Case, fn: Any, **more: Any) -> rannc_jax.Step:
    """The front door, with everything fixed that a case fixes."""
    return rannc_jax.auto_partition(
        fn,
        optimizer=optimizer_of(case.optimizer),
        mesh=CLUSTER,
        num_stages=case.num_stages,
        replicas=case.replicas,
        num_microbatches=case.num_microbatches,
        schedule=case.schedule,
        remat=case.remat,
        offload=case.offload,
        **more,
    )


def given(network: Model) -> dict[str, Any]:
    """The keywords that the network takes."""
    known = {"model_state": network.model_state, "frozen": network.frozen, "rng": jax.random.key(SEED)}
    return {name: known[name] for name in network.takes}


@functools.cache
def planned(name: str, dropout: bool, replicas: tuple[int, ...]) -> rannc_jax.Plan:
    """The plan of a network for several microbatches, which give the planner a reason to share work."""
    network = model(name, dropout)
    return rannc_jax.make_plan(
        network.loss_fn,
        network.params,
        network.batch,
        optimizer=optimizer_of("sgd"),
        mesh=CLUSTER,
        takes=network.takes,
        replicas=replicas,
        num_microbatches=max(FACTORS["num_microbatches"]),
        **given(network),
    )


def balanced_cuts(case: Case) -> Any:
    """Where the planner cuts for several microbatches: for a single one every cut is as good as another."""
    if case.num_stages == 1 or case.num_microbatches > 1:
        return "auto"
    return tuple(stage.blocks[0] for stage in planned(case.model, case.dropout, case.replicas).stages[1:])


def run(step: rannc_jax.Step, state: rannc_jax.TrainState, batch: Any) -> Outcome:
    """Gradients of the batch, then a few updates."""
    out, grads = step.value_and_grad(state, batch)
    # Host copies now: a step takes the memory of the state over.
    first = step.gather({"loss": out.loss, "grads": grads, "aux": out.aux, "first_state": out.model_state})
    losses = []
    for _ in range(NUM_STEPS):
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    last = step.gather({"losses": tuple(losses), "params": state.params, "model_state": state.model_state})
    return Outcome(**jax.tree.map(np.asarray, {**first, **last}))


@functools.cache
def expected_outcome(name: str, dropout: bool, optimizer: str, num_microbatches: int) -> Outcome:
    """The reference of a case; the same for all plans with as many microbatches."""
    return reference(model(name, dropout), optimizer_of(optimizer), num_microbatches, NUM_STEPS)


def optimizer_of(name: str) -> optax.GradientTransformation:
    """SGD with momentum, or AdamW behind a clip that bites: its factor joins all stages."""
    if name == "sgd":
        return optax.sgd(0.02, momentum=0.9)
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
