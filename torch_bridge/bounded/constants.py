"""Values that forward computes from no argument, parameter or buffer: known while it is exported."""

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

# Masks and positions are small; what is larger is left to the program.
_MOST_ELEMENTS = 2**20


class Constants:
    """Runs those operators of a graph whose arguments are known, one after another, in-place writes too.

    Args:
        given: placeholder -> the tensor that it stands for: made in forward, or a plain attribute.
    """

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        self._given = given
        self._known: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        """What a node is at this point of the graph, None where that depends on what is passed in."""
        return self._known.get(node)

    def step(self, node: Node) -> None:
        """Run the next operator of the graph, if it can be."""
        if node.op == "placeholder" and node.name in self._given:
            self._known[node] = self._given[node.name]
        if node.op != "call_function":
            return
        if _is_pure(node) and all(n in self._known for n in node.all_input_nodes):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._known.__getitem__)
            with torch.no_grad():
                self._known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            for source in node.all_input_nodes:
                self._forget(source)

    def _forget(self, node: Node) -> None:
        """Something unknown may be written into the memory of a node's value."""
        if (value := self._known.get(node)) is not None:
            memory = set(map(_memory, pytree.tree_leaves(value)))
            self._known = {
                n: v for n, v in self._known.items() if memory.isdisjoint(map(_memory, pytree.tree_leaves(v)))
            }


def _memory(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else id(value)


def _is_pure(node: Node) -> bool:
    shapes = [x.shape for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    if any(isinstance(size, torch.SymInt) for shape in shapes for size in shape):
        return node.target is torch.ops.aten.bincount.default
    if any(math.prod(shape) > _MOST_ELEMENTS for shape in shapes):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags
