"""Which rule an operator has.

A rule gets the rewriting and a node. It returns the node itself (kept, its inputs as they now are), what
stands in its place, or a tuple in the place of several results.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

Rule = Callable[[Any, Node], Any]  # of a `Bounded` and a node
_RULES: dict[str, Rule] = {}


def rule(node: Any) -> Rule | None:
    """The rule of an operator; one that writes in place has that of its twin."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return _RULES["getitem" if target is operator.getitem else "number"]
    name = name_of(node)
    found = _RULES.get(name) or _RULES.get(name.removesuffix("_"))
    return found or (_RULES["getitem"] if torch.Tag.pointwise in target.tags else None)


def rule_of(name: str) -> Rule:
    """The rule of this name."""
    return _RULES[name]


def rule_for(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of the operators of these names, and of their twins that write in place."""

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


def named_arguments(node: Any) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults included."""
    schema = node.target._schema
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return {**defaults, **given, **node.kwargs}


def replace_argument(node: Any, name: str, value: Any) -> None:
    """Give a node another argument."""
    names = [a.name for a in node.target._schema.arguments]
    if names.index(name) < len(node.args):
        node.update_arg(names.index(name), value)
    else:
        node.update_kwarg(name, value)


def dims_of(node: Any, of: Any, name: str = "dim") -> tuple[int, ...]:
    """The dims that an operator works along; all of them where it names none."""
    dims, ndim = named_arguments(node).get(name), of.meta["val"].ndim
    dims = range(ndim) if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
    return tuple(dim % max(ndim, 1) for dim in dims)


def name_of(node: Any) -> str:
    """The operator's name without its namespace and overload."""
    return node.target._schema.name.removeprefix("aten::")
