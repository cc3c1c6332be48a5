"""What the integers of a tensor are below, as far as a graph tells: where they come from, or what they index.

An index is below the size of what it is read from, since torch raises where it is not.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from torch_bridge.bounded.registry import dims_of, name_of, named_arguments
from torch_bridge.bounded.rewriting import Bounded

_VIEWS = {
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "transpose", "t", "expand",
    "clone", "detach", "alias", "contiguous", "to", "_to_copy", "lift_fresh_copy", "movedim", "ravel",
}  # fmt: skip
_CHOOSING = {"slice", "select", "index", "index_select", "gather", "flip", "roll", "repeat", "take", "narrow",
             "masked_select", "split", "unbind", "chunk"}  # fmt: skip
# Operators whose result, or whose second one, is places along a dim.
_PLACES = {"argmax", "argmin", "argsort"}
_VALUES_AND_PLACES = {"topk", "sort", "max", "min", "kthvalue", "median", "mode"}
_READING = {"index_select", "gather", "scatter", "scatter_add"}


def limit(bounded: Bounded, node: Any) -> int | None:
    """A number that all values are below, None if none is known."""
    if isinstance(node, int):
        return node + 1
    if not isinstance(node, Node):
        return None
    known = bounded.constants.value(node)
    if isinstance(known, torch.Tensor) and known.numel() and not known.is_floating_point():
        return int(known.max()) + 1
    dtype = getattr(node.meta.get("val"), "dtype", None)
    if dtype == torch.bool:
        return 2
    return _by_origin(bounded, node) or _by_use(node, set())


def _by_origin(bounded: Bounded, node: Any) -> int | None:
    if node.target is operator.getitem:
        maker, place = node.args
        if name_of(maker) in _CHOOSING:
            return limit(bounded, maker.args[0])
        return _size_along(maker) if name_of(maker) in _VALUES_AND_PLACES and place == 1 else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name, named = name_of(node), named_arguments(node)
    if name in _VIEWS | _CHOOSING:
        return limit(bounded, node.args[0])
    if name in _PLACES:
        return _size_along(node)
    if name in ("cat", "stack", "where", "masked_fill"):
        parts = node.args[0] if name in ("cat", "stack") else [a for a in node.args if not _is_mask(a)]
        found = [limit(bounded, part) for part in parts]
        return None if None in found or not found else max(found)  # type: ignore[type-var]
    first, second = limit(bounded, node.args[0]), named.get("max", named.get("other"))
    if name == "add" and named["alpha"] == 1 and first and (other := limit(bounded, second)):
        return first + other - 1
    rule = _WITH_NUMBER.get(name)
    return rule(first or 0, second) if rule is not None and isinstance(second, int) and second > 0 else None


# (limit of the tensor, 0 if it has none; number) -> limit, 0 if there is none
_WITH_NUMBER: dict[str, Callable[[int, int], int]] = {
    "clamp": lambda _, n: n + 1,
    "clamp_max": lambda _, n: n + 1,
    "remainder": lambda _, n: n,
    "bitwise_and": lambda _, n: n + 1,
    "mul": lambda a, n: (a - 1) * n + 1 if a else 0,
    "floor_divide": lambda a, n: (a - 1) // n + 1 if a else 0,
}


def _is_mask(value: Any) -> bool:
    return isinstance(value, Node) and value.meta["val"].dtype == torch.bool


def _size_along(node: Any) -> int | None:
    x = node.args[0].meta["val"]
    sizes = [x.shape[dim] for dim in dims_of(node, node.args[0])]
    if not sizes or any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    return x.numel() if len(sizes) > 1 else sizes[0]


def _by_use(node: Node, seen: set[Node]) -> int | None:
    """The smallest of what the values index, also through views of them."""
    seen.add(node)
    found = []
    for user in node.users:
        if not isinstance(user.target, torch._ops.OpOverload):
            continue
        if user.args[0] is node and name_of(user) in _VIEWS:
            found.append(_by_use(user, seen))
        elif user.args[0] is node and name_of(user) == "one_hot":
            found.append(_positive(named_arguments(user)["num_classes"]))
        else:
            found.append(_read_from(node, user))
    source = node.args[0] if node.args and isinstance(node.target, torch._ops.OpOverload) else None
    if isinstance(source, Node) and source not in seen and name_of(node) in _VIEWS:
        found.append(_by_use(source, seen))
    known = [size for size in found if isinstance(size, int)]
    return min(known) if known else None


def _read_from(index: Node, user: Any) -> int | None:
    """The size of the dim that `user` reads at `index`."""
    named = named_arguments(user)
    if named.get("indices") is index and name_of(user) == "embedding":
        return _positive(named["weight"].meta["val"].shape[0])
    if named.get("index") is index and name_of(user) in _READING:
        return _positive(user.args[0].meta["val"].shape[named["dim"]])
    if name_of(user) == "index" and any(index is i for i in named["indices"]):
        place = [i is index for i in named["indices"]].index(True)
        before = [i for i in named["indices"][:place] if i is not None and _is_mask(i)]
        return None if before else _positive(user.args[0].meta["val"].shape[place])
    if named.get("target") is index and name_of(user) in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
        x = user.args[0].meta["val"]
        return _positive(x.shape[1 if x.ndim > 1 else 0])
    return None


def _positive(size: Any) -> int | None:
    return size if isinstance(size, int) and size > 0 else None
