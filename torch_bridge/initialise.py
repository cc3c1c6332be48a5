"""The first values of a converted module that was built without memory.

Each leaf has a maker, a function of a key: a recipe replayed in JAX, or values that torch computes
exactly because no random number enters them. Makers of different leaves do not need each other, so each
leaf can be made on the devices where it lives, inside jit, without the rest of the model.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from torch_bridge.errors import BridgeError, message
from torch_bridge.journal import journal_of
from torch_bridge.replay import exact, is_fill, is_random, recipe_of
from torch_bridge.tensors import is_abstract, to_jax

Maker = Callable[[Any], Any]


class Variables(NamedTuple):
    """Everything that a module holds, by torch's names; see `JaxModule`."""

    params: dict[str, Any]
    frozen: dict[str, Any]
    model_state: dict[str, Any]
    constants: dict[str, Any]


def held(name: str, tensor: torch.Tensor, *, computed: bool) -> Any:
    """What a converted module holds for a tensor: its values, or its shape if there are none.

    Args:
        name: for errors.
        tensor: real, meta or fake.
        computed: compute the values of a fake tensor if they follow from no random numbers.
    """
    journal = journal_of(tensor)
    if computed and journal is not None:
        view = journal.view(tensor)
        recipe = journal.recipe(view)
        if recipe and not is_random(journal, recipe):
            return to_jax(exact(journal, view, name), what=name)
    return to_jax(tensor, what=name)


class Initialiser:
    """Makes first values from a key.

    Args:
        tensors: the module's own tensors by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._makers: dict[str, Maker] = {}

    def maker(self, name: str, value: Any) -> Any:
        """The value held for a name, or what makes it from a key where only its shape is held.

        What is no tensor of the module (an offset, see `offsets`) begins with zeros.

        Raises:
            BridgeError: nothing was recorded of it, or an operator cannot be replayed.
        """
        if not isinstance(value, jax.ShapeDtypeStruct):
            return value
        if name not in self._makers:
            self._makers[name] = _maker(name, self._tensors[name]) if name in self._tensors else _zeros(value)
        return self._makers[name]


def _zeros(like: jax.ShapeDtypeStruct) -> Maker:
    return lambda _key: jnp.zeros(like.shape, like.dtype)


def _maker(name: str, tensor: torch.Tensor) -> Maker:
    journal = journal_of(tensor)
    if journal is None:
        raise BridgeError(
            message(
                f"{name} has a shape, but neither values nor a recorded initialisation.",
                f"it is a {'meta' if tensor.is_meta else 'fake'} tensor",
                hint="build the module under torch_bridge.fake_init(), or load values: "
                "jax_module.load_safetensors(path), jax_module.from_state_dict(values)",
            )
        )
    view = journal.view(tensor)
    recipe = journal.recipe(view)
    if recipe and not is_random(journal, recipe) and not is_fill(journal, recipe):
        values = to_jax(exact(journal, view, name), what=name)
        return lambda _key: values
    return recipe_of(journal, view, name)


def concrete(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the values that torch computes for it, if it has none and they were recorded."""
    journal = journal_of(tensor)
    if journal is None or not is_abstract(tensor):
        return tensor
    view = journal.view(tensor)
    recipe = journal.recipe(view)
    has_values = recipe and not is_random(journal, recipe)
    return exact(journal, view, "a tensor held as an attribute") if has_values else tensor
