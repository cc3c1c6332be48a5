"""torch's optimizers in JAX: the same parameters and states, step by step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from rannc_jax.runtime.optimizer import cut_optimizer
from torch_bridge.drop_in.rules import RULES
from torch_bridge.drop_in.transformation import Leaf, TorchState, table, transformation

optim = torch.optim
CASES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    (optim.RMSprop, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
]
SHAPES = {"a": (3, 4), "b": (5,)}


@pytest.mark.parametrize(("cls", "settings"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_is_torchs_own(cls: Any, settings: Any) -> None:
    """Rates change between the steps, and one parameter has no gradient in some of them."""
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    optimizer = cls(list(parameters.values()), **settings)
    group, rule = optimizer.param_groups[0], RULES[cls]
    leaves = {name: Leaf(rule=rule, group=group) for name in parameters}
    update = transformation(leaves)
    params = {name: jnp.asarray(p.detach().numpy().copy()) for name, p in parameters.items()}
    state: Any = update.init(params)
    counters = {name: {"step": 0.0} for name in parameters}
    run = jax.jit(update.update)
    for step in range(12):
        group["lr"] = settings["lr"] * (1 - step / 20)
        grads = {name: torch.randn(shape) for name, shape in SHAPES.items() if name == "a" or step % 4 != 1}
        numbers = {}
        for name, p in parameters.items():
            p.grad = grads.get(name)
            if name in grads:
                counters[name]["step"] += 1
                numbers[name] = rule.numbers(group, counters[name])
        optimizer.step()
        state = TorchState(numbers=jnp.asarray(table(leaves, numbers)), slots=state.slots)
        given = {n: jnp.asarray(grads[n].numpy()) if n in grads else jnp.ones(s) for n, s in SHAPES.items()}
        changes, state = run(given, state, params)
        params = optax.apply_updates(params, changes)
    for name, p in parameters.items():
        np.testing.assert_allclose(params[name], p.detach(), rtol=2e-5, atol=2e-6)
        for slot, arrays in state.slots.items():
            np.testing.assert_allclose(arrays[name], optimizer.state[p][slot], rtol=2e-5, atol=2e-6)


def test_the_numbers_of_a_step_are_sent_once_to_every_stage() -> None:
    p = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    group = optim.AdamW(p.values()).param_groups[0]
    update = transformation({name: Leaf(rule=RULES[optim.AdamW], group=group) for name in p})
    shapes = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    cut = cut_optimizer(update, shapes, [0, 1], 2)
    kinds = [type(op).__name__ for op in cut.update]
    assert kinds.count("Send") == 1
    assert cut.state_owner == (1, 0, 1, 0, 1)  # the table, then two slots of a and b
