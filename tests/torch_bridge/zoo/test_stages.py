"""Networks of the zoo cut into as many stages as they have atoms, up to four, against one device."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

import rannc_jax
import torch_bridge
from tests.parity.measure import compare
from tests.parity.oracle import Outcome
from tests.parity.play import CLUSTER, NUM_STEPS, run
from tests.torch_bridge.zoo.catalogue import SPECIMENS
from tests.torch_bridge.zoo.specimen import build, split

ROWS = 8
TOPOLOGIES = [name for name, specimen in SPECIMENS.items() if specimen.group == "topologies"]
NETWORKS = ["bert", "gpt2", "llama", "mixtral batched", "t5", "vit", "swin", "convnext", "resnet", "u-net"]


def mean_square(outputs: Any) -> torch.Tensor:
    """A loss for networks that return none."""
    return outputs.square().mean()


def converted(name: str) -> torch_bridge.JaxModule:
    specimen = SPECIMENS[name]
    args, kwargs = split(specimen.batch(ROWS))
    module = build(specimen)
    plain = torch_bridge.convert(module, args, kwargs)
    if plain.programs.first.loss is not None:
        return plain
    return torch_bridge.convert(module, args, kwargs, loss=mean_square)


def on_one_device(module: torch_bridge.JaxModule, optimizer: optax.GradientTransformation) -> Outcome:
    """Two updates of the whole batch, without anything of the runtime."""
    extra = {"frozen": module.frozen} if module.frozen else {}

    def loss_fn(params: Any, state: Any) -> tuple[Any, Any]:
        given = {**extra, "model_state": state} if module.model_state else extra
        out = module.loss_fn(params, module.batch, **given)
        return (out.loss, out.model_state) if module.model_state else (out, None)

    grads_of = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    params, state = module.params, module.model_state or None
    opt_state, losses, first = optimizer.init(params), [], None
    for _ in range(NUM_STEPS):
        (loss, state), grads = grads_of(params, state)
        first = first or {"loss": loss, "grads": grads, "aux": None, "first_state": state}
        losses.append(loss)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert first is not None
    outcome = Outcome(**first, losses=tuple(losses), params=params, model_state=state)
    return Outcome(**jax.tree.map(np.asarray, vars(outcome)))


def check(name: str, expected_stages: int | None = None) -> None:
    module = converted(name)
    optimizer = optax.sgd(0.02, momentum=0.9)
    # Batch normalisation is over a microbatch: the reference has one.
    parts = 1 if module.model_state else 2
    step, stages = _cut(module, optimizer, parts)
    got = run(step, step.init(), module.batch)
    comparison = compare(got, on_one_device(module, optimizer), module.params, "sgd")
    assert comparison.problems == ()
    assert len(step.plan.stages) == stages
    if expected_stages is not None:
        assert stages == expected_stages


def _cut(module: Any, optimizer: Any, parts: int) -> tuple[rannc_jax.Step, int]:
    """A step of as many stages as can be had, up to four."""
    for stages in (4, 3, 2, 1):
        step = rannc_jax.auto_partition(
            module,
            optimizer=optimizer,
            mesh=CLUSTER,
            num_stages=stages,
            num_microbatches=parts,
        )
        try:
            step.init()
        except rannc_jax.PlanError:
            continue
        return step, stages
    raise AssertionError("no plan of any number of stages")


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_small_topology_trains_in_as_many_stages_as_it_has_atoms(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_the_zoo_trains_in_four_stages_as_on_one_device(name: str) -> None:
    check(name, expected_stages=4)
