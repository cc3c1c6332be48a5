"""`optimizer.step()`: the user's optimizer object, its update on the devices.

The object stays the one the user made. Its `param_groups` are read at every step, its `state` holds device
tensors under torch's names, so schedulers, `state_dict` and `load_state_dict` do what they do in torch.
"""

import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax
import torch

from torch_bridge.drop_in.deployment import Deployment
from torch_bridge.drop_in.device_tensor import DeviceTensor
from torch_bridge.drop_in.rules import RULES, Group, Rule
from torch_bridge.drop_in.storage import Storage
from torch_bridge.drop_in.transformation import Leaf, TorchState, table, transformation
from torch_bridge.errors import BridgeError, message
from torch_bridge.tensors import to_jax

Parameters = Mapping[str, torch.Tensor]


def groups_of(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Mapping[str, Group]:
    """The group of every parameter that the optimizer has, by name.

    Raises:
        BridgeError: it has none of them.
    """
    names = {id(p): name for name, p in parameters.items()}
    found = {
        names[id(p)]: group for group in optimizer.param_groups for p in group["params"] if id(p) in names
    }
    if not found:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        raise BridgeError(
            message(
                f"none of the optimizer's {total} parameters belongs to this model.",
                hint="make the optimizer from model.parameters() of the model that is wrapped, after the "
                "last call that replaces parameters (a new head, model.to_empty, deepcopy)",
            )
        )
    return found


def rule_of(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Rule | None:
    """What runs on the devices; None where torch's own code has to, on host copies."""
    rule = RULES.get(type(optimizer))
    is_complex = any(p.is_complex() for p in parameters.values())
    if rule is None or is_complex or any(g.get("differentiable") for g in optimizer.param_groups):
        return None
    return rule


class Updates:
    """Runs one optimizer's update on the devices for the parameters that one module has.

    Args:
        optimizer: the user's.
        rule: of its class.
        parameters: by name; each a device tensor once deployed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule, parameters: Parameters) -> None:
        self.optimizer, self.rule = optimizer, rule
        self.parameters = {
            name: p for name, p in parameters.items() if name in groups_of(optimizer, parameters)
        }

    @property
    def groups(self) -> Mapping[str, Group]:
        return groups_of(self.optimizer, self.parameters)

    def transformation(self) -> optax.GradientTransformation:
        """Of the flags that the groups have now."""
        return transformation(self.leaves())

    def leaves(self) -> dict[str, Leaf]:
        return {name: Leaf(rule=self.rule, group=group) for name, group in self.groups.items()}

    def run(self, deployment: Deployment) -> None:
        """One update of the deployment's parameters by their gradients."""
        state = deployment.state
        numbers = jax.numpy.asarray(self.numbers())
        held = TorchState(numbers=numbers, slots=self.slots(state.opt_state))
        grads = {name: deployment.gradient(name) for name in deployment.names.params}
        new = deployment.step.update(state.replace(opt_state=held), grads)
        deployment.keep(new)
        self.keep(new.opt_state)

    def numbers(self) -> Any:
        """This step's table of numbers; counters of parameters with a gradient go up by one."""
        groups, rows = self.groups, {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            state = self.optimizer.state[parameter]
            counters = {key: float(value) for key, value in state.items() if _is_counter(value)}
            counters["step"] = counters.get("step", 0.0) + 1
            if "momentum_buffer" in state and "step" not in state:
                counters["step"] += 1  # SGD counts nothing; its first step is the one without a buffer
            rows[name] = self.rule.numbers(groups[name], counters)
            if type(self.optimizer) is not torch.optim.SGD:
                state.update(
                    {key: torch.tensor(value, dtype=torch.float32) for key, value in counters.items()}
                )
        return table(self.leaves(), rows)

    def slots(self, held: TorchState) -> dict[str, dict[str, Any]]:
        """The arrays that torch's state holds now: `held` where it has none yet, what a user loaded where it
        holds plain tensors."""
        return {
            slot: {name: self._slot(name, slot, array) for name, array in by_name.items()}
            for slot, by_name in held.slots.items()
        }

    def _slot(self, name: str, slot: str, held: Any) -> Any:
        value = self.optimizer.state[self.parameters[name]].get(slot)
        if value is None:
            return held
        if isinstance(value, DeviceTensor):
            return value.storage_.array
        return jax.device_put(to_jax(value, what=slot).astype(held.dtype), held.sharding)

    def keep(self, new: TorchState) -> None:
        """Put the new arrays into torch's state; entries of parameters that were never updated stay away."""
        for slot, by_name in new.slots.items():
            for name, array in by_name.items():
                parameter = self.parameters[name]
                state = self.optimizer.state[parameter]
                value = state.get(slot)
                if isinstance(value, DeviceTensor):
                    value.storage_.replace(array)
                elif value is not None or parameter.grad is not None:
                    state[slot] = DeviceTensor(Storage(array, parameter.dtype), device=parameter.device)


def _is_counter(value: Any) -> bool:
    return isinstance(value, int | float) or (
        type(value) is torch.Tensor and value.dim() == 0 and value.is_floating_point()
    )


def replace_step(updates: Updates, deployment: Deployment) -> None:
    """Put the device update in the place of `step` of this one optimizer object.

    Schedulers that wrapped `step` before, or will, see a bound method with their mark on it; step hooks run.
    Parameters that are not the module's are updated as before.
    """
    optimizer = updates.optimizer
    before = optimizer.step
    mine = {id(p) for p in updates.parameters.values()}

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # what schedulers look at
        for hook in _hooks(self, "_optimizer_step_pre_hooks"):
            hook(self, (), {})
        updates.run(deployment)
        others = [p for group in self.param_groups for p in group["params"] if id(p) not in mine]
        if others:
            _without_gradients(updates.parameters, before)
        for hook in _hooks(self, "_optimizer_step_post_hooks"):
            hook(self, (), {})
        return loss

    step._wrapped_by_lr_sched = getattr(before, "_wrapped_by_lr_sched", False)
    optimizer.step = types.MethodType(step, optimizer)


def _without_gradients(parameters: Parameters, step: Callable[[], Any]) -> None:
    """Run torch's own step, which leaves parameters without a gradient alone."""
    grads = {name: p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    try:
        step()
    finally:
        for name, p in parameters.items():
            p.grad = grads[name]


def _hooks(optimizer: torch.optim.Optimizer, name: str) -> Iterator[Callable[..., Any]]:
    yield from list(getattr(optimizer, name, {}).values())


def warn_of_host(optimizer: torch.optim.Optimizer) -> None:
    """Say once that an optimizer's own code will run."""
    warnings.warn(
        f"{type(optimizer).__name__} is not one of torch.optim's that run on the devices; its own code runs, "
        "partly on copies in host memory: right, but slow. On the devices run: "
        + ", ".join(sorted(cls.__name__ for cls in RULES))
        + ".",
        stacklevel=4,
    )
