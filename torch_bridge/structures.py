"""Classes that hold tensors, taken apart: what torch knows as pytrees, dataclasses, and plain results.

JAX takes apart the arguments of a call and puts together its results, so such classes are registered
with JAX when they are first met. Nothing is registered with torch.
"""

import contextlib
import dataclasses
import enum
import functools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch.utils import _pytree as torch_pytree

from torch_bridge.errors import BridgeError, message

# Values that an exported program returns as they are; JAX takes the former for part of the structure.
NAMES = (str, bytes, enum.Enum, type, types.FunctionType, range, torch.dtype, torch.device, torch.layout)
CONSTANTS = (*NAMES, int, float, complex, type(None), torch.memory_format)
# What is not taken apart by its attributes.
_WHOLE = (
    *CONSTANTS,
    torch.Tensor,
    torch.nn.Module,
    types.ModuleType,
    types.MethodType,
    functools.partial,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)


class Kind(enum.Enum):
    """How an object that torch does not know as a pytree holds its parts."""

    FIELDS = "fields"  # of a dataclass
    ATTRIBUTES = "attributes"
    ITEMS = "items"  # a subclass of dict
    SEQUENCE = "sequence"  # a subclass of list or tuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """An object taken apart: its class, how it holds its parts, and under which names."""

    cls: type
    kind: Kind
    names: tuple[Any, ...]

    def parts(self, value: Any) -> list[Any]:
        """The parts of an object of this shape."""
        if self.kind is Kind.SEQUENCE:
            return list(value)
        return [value[n] if self.kind is Kind.ITEMS else getattr(value, n) for n in self.names]

    def made(self, parts: Sequence[Any]) -> Any:
        """An object with these parts, whatever its __init__ takes and does."""
        if issubclass(self.cls, tuple):
            return tuple.__new__(self.cls, parts)
        new: Any = self.cls.__new__
        made = new(self.cls)
        if self.kind is Kind.SEQUENCE:
            list.extend(made, parts)
        for name, value in zip(self.names, parts, strict=self.kind is not Kind.SEQUENCE):
            (dict.__setitem__ if self.kind is Kind.ITEMS else object.__setattr__)(made, name, value)
        return made


def opening(value: Any, *, any_class: bool) -> Opening | None:
    """How to take a value apart that torch does not know; None for one that stays whole.

    Args:
        value: an argument, or what forward returned.
        any_class: also objects of plain classes, by their attributes. Results are opened so; an argument
            of such a class is refused instead, since code may do anything with it.
    """
    cls = type(value)
    if cls in torch_pytree.SUPPORTED_NODES or isinstance(value, type | torch.Size):
        return None
    if dataclasses.is_dataclass(value):
        return Opening(cls=cls, kind=Kind.FIELDS, names=tuple(f.name for f in dataclasses.fields(value)))
    if not any_class or isinstance(value, _WHOLE) or torch_pytree.is_namedtuple_instance(value):
        return None
    if isinstance(value, dict):
        return Opening(cls=cls, kind=Kind.ITEMS, names=tuple(value))
    if isinstance(value, list | tuple):
        return Opening(cls=cls, kind=Kind.SEQUENCE, names=())
    slots = {n for c in cls.__mro__ for n in _listed(getattr(c, "__slots__", ())) if hasattr(value, n)}
    names = tuple(
        dict.fromkeys([*sorted(slots - {"__dict__", "__weakref__"}), *getattr(value, "__dict__", {})])
    )
    held = names or hasattr(value, "__dict__")
    return Opening(cls=cls, kind=Kind.ATTRIBUTES, names=names) if held else None


def _listed(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """How to put leaves together again.

    Args:
        spec: torch's structure, in which an object that torch does not know is one leaf.
        opened: for each leaf of `spec`: None, or such an object's opening and the structure of its parts.
    """

    spec: Any
    opened: tuple[tuple[Opening, "Structure"] | None, ...]

    def unflatten(self, leaves: Iterator[Any]) -> Any:
        filled = []
        for inside in self.opened:
            if inside is None:
                filled.append(next(leaves))
            else:
                how, structure = inside
                filled.append(how.made(structure.unflatten(leaves)))
        return torch_pytree.tree_unflatten(filled, self.spec)


def take_apart(value: Any, inside: tuple[int, ...] = ()) -> tuple[list[Any], Structure]:
    """The leaves of what forward returned, and its structure.

    Raises:
        BridgeError: an object holds itself.
    """
    outer, spec = torch_pytree.tree_flatten(value, is_leaf=lambda x: opening(x, any_class=True) is not None)
    leaves: list[Any] = []
    opened: list[Any] = []
    for item in outer:
        how = opening(item, any_class=True)
        if how is None:
            leaves.append(item)
            opened.append(None)
            continue
        if id(item) in inside:
            raise BridgeError(message(f"forward returns a {how.cls.__qualname__} that holds itself."))
        inner, structure = take_apart(how.parts(item), (*inside, id(item)))
        leaves += inner
        opened.append((how, structure))
    return leaves, Structure(spec=spec, opened=tuple(opened))


def share_with_jax(value: Any, *, any_class: bool = False) -> None:
    """Register with JAX the classes in a value that torch knows as pytrees, or that `opening` opens."""
    node = torch_pytree.SUPPORTED_NODES.get(type(value))
    how = opening(value, any_class=any_class)
    children: Sequence[Any] = ()
    if how is not None:
        _register_opening(how.cls, any_class)
        children = how.parts(value)
    elif node is not None and not isinstance(value, torch.Size):
        _register_node(type(value), node)
        children = node.flatten_fn(value)[0]
    elif isinstance(value, tuple | list):
        children = value
    for child in children:
        share_with_jax(child, any_class=any_class)


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


def _register_opening(cls: type, any_class: bool) -> None:
    """Parts that no array stands for (names, classes) belong to the structure: a jitted call returns them."""

    def flatten(value: Any) -> tuple[tuple[Any, ...], _Context]:
        how = opening(value, any_class=any_class)
        assert how is not None, "the class was opened once"
        parts = how.parts(value)
        fixed = tuple(part if isinstance(part, (*NAMES, torch.Size)) else ... for part in parts)
        moving = tuple(p for p, f in zip(parts, fixed, strict=True) if f is ...)
        return moving, _Context((how, fixed))

    def unflatten(context: _Context, children: Any) -> Any:
        how, fixed = context.value
        remaining = iter(children)
        return how.made([next(remaining) if part is ... else part for part in fixed])

    with contextlib.suppress(ValueError):  # JAX knows it already
        jax.tree_util.register_pytree_node(cls, flatten, unflatten)


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
