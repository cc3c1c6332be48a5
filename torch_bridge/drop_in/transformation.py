"""A torch optimizer as an optax transformation whose hyperparameters are arguments of the step.

The state is `TorchState`: torch's per-parameter tensors under torch's names, and one small table of the
numbers of this step, a row a parameter, that the host writes before every update. So whatever a scheduler
or a user does to `optimizer.param_groups` between two steps is what the next one uses, and a parameter
without a gradient is left alone, state included, as torch does.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from torch_bridge.drop_in.rules import Group, Numbers, Rule


@functools.partial(jax.tree_util.register_dataclass, data_fields=("numbers", "slots"), meta_fields=())
@dataclass(frozen=True, slots=True)
class TorchState:
    """What a torch optimizer keeps.

    Args:
        numbers: float32[parameters, 1 + most numbers of a rule]; the first of a row is 1 where the parameter
            has a gradient, else 0.
        slots: torch's name of a slot -> parameter name -> array like the parameter.
    """

    numbers: Any
    slots: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """How one parameter is updated.

    Args:
        rule: of the optimizer that has it.
        group: of that optimizer, when the transformation is made.
    """

    rule: Rule
    group: Group

    @property
    def flags(self) -> dict[str, Any]:
        """What chose the formula."""
        return {flag: self.group[flag] for flag in self.rule.flags}

    @property
    def slots(self) -> tuple[str, ...]:
        return self.rule.slots(self.group)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers, in the order of a row."""
        return tuple(self.rule.numbers(self.group, {"step": 1.0}))


def transformation(leaves: Mapping[str, Leaf]) -> optax.GradientTransformation:
    """The update of these parameters.

    Args:
        leaves: by parameter name. `params` of the transformation is a dict of these and perhaps others, which
            stay as they are.
    """
    rows = {name: row for row, name in enumerate(sorted(leaves))}
    width = 1 + max((len(leaf.columns) for leaf in leaves.values()), default=0)

    def init(params: Mapping[str, Any]) -> TorchState:
        slots: dict[str, dict[str, Any]] = {}
        for name, leaf in leaves.items():
            first = leaf.rule.first(leaf.group)
            for slot in leaf.slots:
                slots.setdefault(slot, {})[name] = jnp.full_like(params[name], first.get(slot, 0.0))
        return TorchState(numbers=jnp.zeros((len(rows), width), jnp.float32), slots=slots)

    def update(grads: Mapping[str, Any], state: TorchState, params: Any = None) -> tuple[Any, TorchState]:
        assert params is not None
        changes = {name: jnp.zeros_like(param) for name, param in params.items() if name not in leaves}
        slots: dict[str, dict[str, Any]] = {slot: {} for slot in state.slots}
        for name, leaf in leaves.items():
            held = {slot: state.slots[slot][name] for slot in leaf.slots}
            changes[name], new = _change(leaf, state.numbers[rows[name]], grads[name], params[name], held)
            for slot, value in new.items():
                slots[slot][name] = value
        return changes, TorchState(numbers=state.numbers, slots=slots)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def _change(leaf: Leaf, row: Any, grad: Any, param: Any, slots: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One parameter's update in float32 or wider, in the dtypes it came in."""
    wide = jnp.promote_types(param.dtype, jnp.float32)
    numbers = {key: row[1 + column].astype(wide) for column, key in enumerate(leaf.columns)}
    g, p, held = jax.tree.map(lambda x: x.astype(wide), (grad, param, slots))
    flags = leaf.flags
    change, new = leaf.rule.change(-g if flags["maximize"] else g, p, held, numbers, flags)
    active = row[0] > 0
    change = jnp.where(active, change, 0).astype(param.dtype)
    return change, {
        slot: jnp.where(active, value.astype(slots[slot].dtype), slots[slot]) for slot, value in new.items()
    }


def table(leaves: Mapping[str, Leaf], numbers: Mapping[str, Numbers]) -> np.ndarray:
    """The rows of a step.

    Args:
        leaves: as `transformation` was given them.
        numbers: of the parameters that have a gradient.
    """
    width = 1 + max((len(leaf.columns) for leaf in leaves.values()), default=0)
    rows = np.zeros((len(leaves), width), np.float32)
    for row, name in enumerate(sorted(leaves)):
        if name in numbers:
            given = numbers[name]
            rows[row, : 1 + len(given)] = (1.0, *given.values())
    return rows
