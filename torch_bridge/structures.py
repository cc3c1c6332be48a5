"""Classes that hold tensors, taken apart: what torch knows as pytrees, and dataclasses.

JAX takes apart the arguments of a call and puts together its results, so such classes are registered
with JAX when they are first met. Nothing is registered with torch.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch.utils import _pytree as torch_pytree

from torch_bridge.errors import BridgeError, message


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """How to put leaves together again.

    Args:
        spec: torch's structure, in which a dataclass that torch does not know is one leaf.
        opened: for each leaf of `spec`: None, or class, field names and structure of such a dataclass.
    """

    spec: Any
    opened: tuple[tuple[type, tuple[str, ...], "Structure"] | None, ...]

    def unflatten(self, leaves: Iterator[Any]) -> Any:
        filled = []
        for inside in self.opened:
            if inside is None:
                filled.append(next(leaves))
            else:
                cls, names, structure = inside
                filled.append(_made(cls, names, structure.unflatten(leaves)))
        return torch_pytree.tree_unflatten(filled, self.spec)


def take_apart(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a value, and its structure."""
    outer, spec = torch_pytree.tree_flatten(value, is_leaf=_is_unknown_dataclass)
    leaves: list[Any] = []
    opened: list[Any] = []
    for item in outer:
        if not _is_unknown_dataclass(item):
            leaves.append(item)
            opened.append(None)
            continue
        names = _fields(type(item))
        inner, structure = take_apart([getattr(item, name) for name in names])
        leaves += inner
        opened.append((type(item), names, structure))
    return leaves, Structure(spec=spec, opened=tuple(opened))


def share_with_jax(value: Any) -> None:
    """Register with JAX the classes in a value that torch knows as pytrees, and its dataclasses."""
    if isinstance(value, tuple | list):
        children = list(value)
    elif isinstance(value, dict):
        children = list(value.values())
    elif _is_unknown_dataclass(value):
        _register_dataclass(type(value))
        children = [getattr(value, name) for name in _fields(type(value))]
    else:
        children = []
    node = torch_pytree.SUPPORTED_NODES.get(type(value))
    if node is not None and not isinstance(value, torch.Size):
        _register_node(type(value), node)
        children = node.flatten_fn(value)[0]
    for child in children:
        share_with_jax(child)


def refuse_hidden_tensors(path: str, value: Any) -> None:
    """See that an argument that stays whole holds no tensors: they would be fixed at their values.

    Raises:
        BridgeError: naming the class.
    """
    if isinstance(value, torch.nn.Module):
        held = [*value.parameters(), *value.buffers()]
    else:
        held = [x for x in getattr(value, "__dict__", {}).values() if isinstance(x, torch.Tensor)]
    if held:
        raise BridgeError(
            message(
                f"{path} is a {type(value).__qualname__} that holds tensors, which nothing can take apart.",
                hint="make it a dataclass, or register it with torch.utils._pytree.register_pytree_node; "
                "a module belongs into the module that is converted",
            )
        )


def _is_unknown_dataclass(value: Any) -> bool:
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_instance and type(value) not in torch_pytree.SUPPORTED_NODES


def _fields(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


def _made(cls: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    """A dataclass from its fields, whatever its __init__ takes and does."""
    made = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _register_dataclass(cls: Any) -> None:
    names = _fields(cls)
    with contextlib.suppress(ValueError):  # JAX knows it already
        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda x: (tuple((jax.tree_util.GetAttrKey(n), getattr(x, n)) for n in names), None),
            lambda _, children: _made(cls, names, tuple(children)),
        )


class _Context:
    """torch's pytree context (often a list of keys) in the hashable form that JAX wants."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.value == other.value

    def __hash__(self) -> int:
        return hash(repr(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


def _register_node(cls: type, node: Any) -> None:
    def flatten(value: Any) -> tuple[tuple[Any, ...], _Context]:
        children, context = node.flatten_fn(value)
        return tuple(children), _Context(context)

    def unflatten(context: _Context, children: Any) -> Any:
        return node.unflatten_fn(list(children), context.value)

    with contextlib.suppress(ValueError):  # JAX knows it already
        jax.tree_util.register_pytree_node(cls, flatten, unflatten)
