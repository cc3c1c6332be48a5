"""Where tensors of rows that values choose come from: the places where a mask is true."""

from typing import Any

import torch
from torch.fx import Node

from torch_bridge.bounded.registry import rule_for
from torch_bridge.bounded.rewriting import Bounded
from torch_bridge.explain import unknown_shape

aten = torch.ops.aten


def _places(bounded: Bounded, mask: Node) -> tuple[list[Node], Node | int]:
    """(one index for each dim of a mask, number of true places); further rows repeat the first place.

    The places of a mask that no argument has a part in are just as many.
    """
    known = bounded.constants.value(mask)
    mask = bounded.filled(mask, 0)
    value = mask.meta["val"]
    if value.dtype != torch.bool:
        mask = bounded.emit(aten.ne.Scalar, mask, 0)
    if known is not None:
        number = int(known.count_nonzero())
        found = bounded.emit(aten.nonzero_static.default, mask, size=number, fill_value=0)
        return [bounded.emit(aten.select.int, found, 1, dim) for dim in range(value.ndim)], number
    room, device = value.numel(), value.device
    found = bounded.emit(aten.nonzero_static.default, mask, size=room, fill_value=0)
    count = bounded.emit(aten.sum.default, mask)
    rows = bounded.emit(aten.arange.default, room, device=device, pin_memory=False)
    counted = bounded.emit(aten.unsqueeze.default, bounded.emit(aten.lt.Tensor, rows, count), 1)
    first = bounded.emit(aten.slice.Tensor, found, 0, 0, 1)
    found = bounded.emit(aten.where.self, counted, found, first)
    return [bounded.emit(aten.select.int, found, 1, dim) for dim in range(value.ndim)], count


def _bind(bounded: Bounded, value: torch.Tensor, dim: int, room: int, count: Node | int) -> None:
    bounded.bind(bounded.shape_seen(value)[dim], room, count)


@rule_for("nonzero", "argwhere", "nonzero_numpy")
def nonzero(bounded: Bounded, node: Any) -> Any:
    """Places, as one tensor of rows or as one index for each dim."""
    value = node.meta["val"]
    columns, count = _places(bounded, node.args[0])
    several = not isinstance(value, torch.Tensor)
    _bind(bounded, value[0] if several else value, 0, node.args[0].meta["val"].numel(), count)
    return tuple(columns) if several else bounded.emit(aten.stack.default, columns, 1)


@rule_for("masked_select")
def _masked_select(bounded: Bounded, node: Any) -> Any:
    x = bounded.emit(aten.mul.Tensor, *node.args)
    shape = x.meta["val"].shape
    if any(n in bounded.sizes for n in node.args):
        raise unknown_shape(node)
    parts = [bounded.emit(aten.expand.default, part, list(shape)) for part in node.args]
    bounded.graph.erase_node(x)
    columns, count = _places(bounded, parts[1])
    _bind(bounded, node.meta["val"], 0, shape.numel(), count)
    return there(bounded, bounded.emit(aten.index.Tensor, parts[0], columns), count)


def there(bounded: Bounded, x: Node, count: Node | int) -> Node:
    """Where a mask is false everywhere, ones: they have finite gradients whatever becomes of them."""
    if isinstance(count, int) or not x.meta["val"].is_floating_point():
        return x
    some = bounded.emit(aten.gt.Scalar, count, 0)
    return bounded.emit(aten.where.ScalarOther, some, x, 1.0)


@rule_for("index", "_unsafe_index")
def _index(bounded: Bounded, node: Any) -> Any:
    x, indices = node.args
    opened, counts = opened_indices(bounded, indices)
    for _, count, room, dim_of_result in counts:
        _bind(bounded, node.meta["val"], dim_of_result, room, count)
    result = bounded.emit(node.target, x, opened)
    for _, count, _, _ in counts:
        result = there(bounded, result, count)
    return result


def opened_indices(
    bounded: Bounded, indices: Any
) -> tuple[list[Any], list[tuple[Node, Node | int, int, int]]]:
    """Indices with masks as places, and (mask, count, room, dim of the result) of each mask."""
    opened: list[Any] = []
    masks: list[tuple[Node, Node | int, int]] = []
    for index in indices:
        if index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8):
            columns, count = _places(bounded, index)
            masks.append((index, count, index.meta["val"].numel()))
            opened += columns
        else:
            opened.append(index)
    given = [place for place, index in enumerate(opened) if index is not None]
    together = given == list(range(given[0], given[-1] + 1))
    return opened, [(*mask, given[0] if together else 0) for mask in masks]
