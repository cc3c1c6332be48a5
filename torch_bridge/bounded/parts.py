"""Cutting at sizes that are values (`x.split(counts.tolist())`), and joining rows of which some do not count.

A part has room for all rows of what it is cut from. Joined again, every part begins where the rows that
count of the one before it end.
"""

from typing import Any

import torch
from torch.fx import Node

from torch_bridge.bounded.registry import dims_of, named_arguments, rule_for
from torch_bridge.bounded.rewriting import Bounded
from torch_bridge.bounded.sources import there
from torch_bridge.explain import unknown_shape

aten = torch.ops.aten


@rule_for("item", "_local_scalar_dense")
def _item(bounded: Bounded, node: Any) -> Any:
    """A value that becomes a size; torch may know that it is no more than something."""
    count = bounded.emit(aten.reshape.default, node.args[0], [])
    symbol = bounded.size_seen(node.meta["val"])
    bounded.counts[symbol] = count
    most = bounded.most(symbol)
    if most is not None:
        bounded.rooms[symbol] = most
    return count


@rule_for("split_with_sizes")
def _split(bounded: Bounded, node: Any) -> Any:
    named, x = named_arguments(node), node.args[0]
    (dim,) = dims_of(node, x)
    if dim in bounded.open_dims(x):
        raise unknown_shape(node, "rows of a mask are cut")
    whole = x.meta["val"].shape[dim]
    sizes = [bounded.shape_seen(part)[dim] for part in node.meta["val"]]
    numbers = [size for size in named["split_sizes"] if isinstance(size, Node)]
    if not numbers:
        return node
    for symbol in set().union(*(size.free_symbols for size in sizes if not isinstance(size, int))):
        bounded.rooms[symbol] = min(whole, bounded.rooms.get(symbol, whole))
    results, start = [], 0
    for size in sizes:
        count = bounded.number(size)
        results.append(_cut(bounded, x, dim, start, count, bounded.room(size)))
        start = _sum(bounded, start, count)
    _add_up(bounded, sizes, whole)
    return tuple(results)


def _cut(bounded: Bounded, x: Node, dim: int, start: Any, count: Any, room: int) -> Node:
    """Rows from `start` on; those that do not count repeat the first."""
    value = x.meta["val"]
    rows = bounded.emit(aten.arange.default, room, device=value.device, pin_memory=False)
    if isinstance(count, Node):
        rows = bounded.emit(aten.where.ScalarOther, bounded.emit(aten.lt.Tensor, rows, count), rows, 0)
    places = bounded.emit(
        aten.clamp.default, bounded.emit(aten.add.Tensor, rows, start), 0, value.shape[dim] - 1
    )
    return there(bounded, bounded.emit(aten.index_select.default, x, dim, places), count)


def _add_up(bounded: Bounded, sizes: list[Any], whole: int) -> None:
    """All parts together are the whole, which torch checks: so one of their sizes follows from the others."""
    total = sum(sizes)
    symbols = [] if isinstance(total, int) else sorted(total.free_symbols, key=str)
    for symbol in symbols:
        if total.coeff(symbol) == 1:
            bounded.known[symbol] = whole - (total - symbol)
            return


def _sum(bounded: Bounded, a: Any, b: Any) -> Any:
    if isinstance(a, Node) or isinstance(b, Node):
        first, second = (a, b) if isinstance(a, Node) else (b, a)
        return bounded.emit(aten.add.Tensor, first, second)
    return a + b


@rule_for("cat", "concat")
def _join(bounded: Bounded, node: Any) -> Any:
    parts = node.args[0]
    (dim,) = dims_of(node, parts[0])
    if not any(dim in bounded.open_dims(part) for part in parts):
        return node
    sizes = bounded.shape_seen(node.meta["val"])
    room = bounded.room(sizes[dim])
    places, start = [], 0
    for part in parts:
        size = bounded.seen(part)[dim]
        count = bounded.number(size)
        rows = bounded.emit(
            aten.arange.default, bounded.room(size), device=part.meta["val"].device, pin_memory=False
        )
        place = bounded.emit(aten.add.Tensor, rows, start)
        if isinstance(count, Node):  # what does not count goes out of bounds, where it is dropped
            place = bounded.emit(
                aten.where.ScalarOther, bounded.emit(aten.lt.Tensor, rows, count), place, room
            )
        places.append(place)
        start = _sum(bounded, start, count)
    joined = bounded.emit(node.target, list(parts), dim)
    shape = [room if d == dim else size for d, size in enumerate(joined.meta["val"].shape)]
    base = bounded.emit(aten.new_ones.default, joined, shape, pin_memory=False)
    result = bounded.emit(aten.index_copy.default, base, dim, bounded.emit(aten.cat.default, places), joined)
    if not isinstance(sizes[dim], int):
        bounded.sizes[result] = sizes
        result = bounded.settled(result, (dim,))
    return result
