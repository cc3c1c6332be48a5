"""What a module is called with: which leaves are tensors, which are fixed, which go to the loss only.

The structure of a call is that of JAX pytrees. Leaves that are not tensors (flags, sizes, strings) are
part of the exported program; at a call they may be left out (None, or the whole keyword) or must equal
what they were at export. Arguments beyond those that `forward` takes belong to the loss function.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path

from torch_bridge.errors import BridgeError, message
from torch_bridge.structures import refuse_hidden_tensors, share_with_jax
from torch_bridge.tensors import to_torch


def flatten(tree: Any) -> tuple[list[Any], PyTreeDef]:
    """Leaves and structure, None being a leaf (an argument that is None is a fixed one)."""
    return jax.tree.flatten(tree, is_leaf=lambda x: x is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of the call: position or keyword, its structure, its example leaves.

    `leaves` holds torch tensors and fixed values; `slots` the tensor's number among all tensors of the
    call, or None for a fixed value.
    """

    key: int | str
    treedef: PyTreeDef
    leaves: tuple[Any, ...]
    slots: tuple[int | None, ...]
    for_loss: bool

    @property
    def fixed(self) -> bool:
        return all(slot is None for slot in self.slots)

    def build(self, tensors: Sequence[Any]) -> Any:
        """The argument with these tensors (all tensors of the call) in place of the example ones."""
        filled = [
            leaf if slot is None else tensors[slot]
            for leaf, slot in zip(self.leaves, self.slots, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, filled)

    def map_tensors(self, values: Sequence[Any]) -> Any:
        """The argument's structure with `values[slot]` for tensors and None for fixed leaves."""
        filled = [None if slot is None else values[slot] for slot in self.slots]
        return jax.tree.unflatten(self.treedef, filled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The example call. `tensors` are its tensors in slot order, `paths` their names for messages."""

    arguments: tuple[Argument, ...]
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    paths: tuple[str, ...]

    def call(self, tensors: Sequence[Any], *, for_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the module, or of the loss."""
        chosen = [a for a in self.arguments if a.for_loss == for_loss]
        args = tuple(a.build(tensors) for a in chosen if isinstance(a.key, int))
        return args, {a.key: a.build(tensors) for a in chosen if isinstance(a.key, str)}

    def batch(self, values: Sequence[Any]) -> Any:
        """`values` (one a tensor) as a batch: a tuple, a dict of keywords, or both under their names."""
        args = tuple(a.map_tensors(values) for a in self.arguments if isinstance(a.key, int))
        kwargs = {
            a.key: a.map_tensors(values) for a in self.arguments if isinstance(a.key, str) and not a.fixed
        }
        if args and kwargs:
            return {"args": args, "kwargs": kwargs}
        return kwargs if kwargs else args

    def bind_batch(self, batch: Any, *, partial: bool = False) -> list[Any]:
        """Tensors of a batch in any of the three forms, in slot order (`partial`: see `bind`)."""
        args, kwargs = split_batch(batch)
        return self.bind(args, kwargs, partial=partial)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, partial: bool = False) -> list[Any]:
        """Tensors of a call in slot order; None for tensors of the loss that were not given.

        With `partial`, None may stand in the place of any tensor.

        Raises:
            BridgeError: for an argument that is missing, unknown, of another structure, or fixed at
                another value.
        """
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        values: list[Any] = [None] * len(self.tensors)
        for argument in self.arguments:
            if argument.key in given:
                self._bind_one(argument, given.pop(argument.key), values, partial)
            elif not (argument.fixed or argument.for_loss):
                raise BridgeError(message(f"argument {argument.key!r} is missing.", self._expected()))
        if given:
            unknown = ", ".join(repr(key) for key in given)
            raise BridgeError(
                message(
                    f"the module was not exported with {unknown}.",
                    self._expected(),
                    hint="convert again with the arguments you call it with",
                )
            )
        return values

    def _bind_one(self, argument: Argument, value: Any, values: list[Any], partial: bool) -> None:
        leaves, treedef = flatten(value)
        if treedef != argument.treedef:
            raise BridgeError(
                message(
                    f"argument {argument.key!r} has another structure than at export.",
                    f"got: {treedef}",
                    f"expected: {argument.treedef}",
                )
            )
        for leaf, slot, example in zip(leaves, argument.slots, argument.leaves, strict=True):
            if slot is not None:
                if leaf is None and not partial:
                    raise BridgeError(message(f"{self.paths[slot]} is None, but was a tensor at export."))
                values[slot] = leaf
            elif leaf is not None and not _same(leaf, example):
                raise BridgeError(
                    message(
                        f"argument {argument.key!r} is fixed at {example!r} in the exported program.",
                        f"got: {leaf!r}",
                        hint="convert again with the new value",
                    )
                )

    def _expected(self) -> str:
        return "expected: " + ", ".join(str(a.key) for a in self.arguments)


def describe(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[..., Any] | None,
) -> Inputs:
    """Take the example call apart.

    With a loss, the arguments that `module.forward` does not take are the loss's: positional ones
    beyond its positional parameters, keywords it does not name. A `forward(*args)` leaves the last ones
    to the loss, as many as that requires beside the outputs.
    """
    entries: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    share_with_jax([value for _, value in entries])
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    own_args, own_kwargs = _taken_by_module(module, len(args), list(kwargs), loss)
    arguments: list[Argument] = []
    tensors: list[torch.Tensor] = []
    paths: list[str] = []
    for key, value in entries:
        with_paths, _ = tree_flatten_with_path(value, is_leaf=lambda x: x is None)
        leaves, treedef = flatten(value)
        slots: list[int | None] = []
        for index, (path, leaf) in enumerate(with_paths):
            if isinstance(leaf, np.ndarray | jax.Array):
                leaf = leaves[index] = to_torch(leaf)
            name = (f"args[{key}]" if isinstance(key, int) else key) + keystr(path)
            if isinstance(leaf, torch.Tensor):
                slots.append(len(tensors))
                tensors.append(_another(leaf) if id(leaf) in seen else leaf)
                seen.add(id(leaf))
                paths.append(name)
            else:
                refuse_hidden_tensors(name, leaf)
                slots.append(None)
        is_own = key < own_args if isinstance(key, int) else key in own_kwargs
        arguments.append(
            Argument(key=key, treedef=treedef, leaves=tuple(leaves), slots=tuple(slots), for_loss=not is_own)
        )
    return Inputs(arguments=tuple(arguments), tensors=tuple(tensors), paths=tuple(paths))


def _another(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a tensor of its own: torch.export takes one tensor in two places for one input."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _taken_by_module(
    module: torch.nn.Module, num_args: int, keywords: list[str], loss: Callable[..., Any] | None
) -> tuple[int, set[str]]:
    if loss is None:
        return num_args, set(keywords)
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = {p.kind for p in parameters}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    own_kwargs = set(keywords) if inspect.Parameter.VAR_KEYWORD in kinds else named & set(keywords)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return max(num_args - _required_beside_outputs(loss), 0), own_kwargs
    return min(num_args, len(positional)), own_kwargs


def _required_beside_outputs(loss: Callable[..., Any]) -> int:
    target = loss.forward if isinstance(loss, torch.nn.Module) else loss
    parameters = inspect.signature(target).parameters.values()
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return max(len(required) - 1, 0)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, jax.Array | np.ndarray):
        return not isinstance(a, jax.core.Tracer) and a.ndim == 0 and a.item() == b
    return type(a) is type(b) and a == b


def split_batch(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments of a batch in any of its three forms."""
    if isinstance(batch, Mapping) and set(batch) == {"args", "kwargs"}:
        return tuple(batch["args"]), batch["kwargs"]
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}
