"""The rewriting of a graph so that every shape in it is fixed: what the rules of operators work with."""

import math
import operator
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from torch_bridge.bounded.constants import Constants
from torch_bridge.bounded.registry import rule, rule_of
from torch_bridge.explain import unknown_shape

aten = torch.ops.aten
Size = Any  # an int, or a sympy expression in symbols that stand for numbers of rows
_SIZED_BY_VALUES = {
    *(aten.bincount.default, aten.nonzero.default, aten.nonzero_numpy.default, aten.masked_select.default),
    *(aten.argwhere.default, aten.where.default),
}
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Bounded:
    """The rewriting of one graph; rules call it to put operators in front of the current one.

    Attributes:
        sizes: of every tensor in such room, the shape that torch sees.
        counts: symbol -> node of the number of rows, an integer tensor without dims.
        numbers: nodes that were numbers for torch and are such tensors now.
        rooms: symbol -> the most rows there can be.
        known: symbol -> what it must be, a number or an expression in others.
    """

    def __init__(self, graph: torch.fx.Graph, constants: Constants) -> None:
        self.graph = graph
        self.constants = constants
        self.sizes: dict[Node, tuple[Size, ...]] = {}
        self.counts: dict[Any, Node] = {}
        self.numbers: set[Node] = set()
        self.rooms: dict[Any, int] = {}
        self.known: dict[Any, Size] = {}
        self.current: Node = next(iter(graph.nodes))
        values = (v for n in graph.nodes for v in pytree.tree_leaves(n.meta.get("val")))
        self.mode = next(v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor))
        self.in_shapes = {x for n in graph.nodes for x in free_unbacked_symbols(shapes(n.meta.get("val")))}

    def run(self) -> None:
        for node in self.graph.nodes:  # fx steps over what is erased meanwhile
            self.current = node
            self.constants.step(node)
            if node.op == "output" and any(n in self.sizes for n in node.all_input_nodes):
                opened = next(n for n in node.all_input_nodes if n in self.sizes)
                raise unknown_shape(opened, "it is returned")
            if node.op == "call_function" and self._concerned(node):
                with self.graph.inserting_before(node):
                    self._rewrite(node)

    def _concerned(self, node: Node) -> bool:
        inputs = any(n in self.sizes or n in self.numbers for n in node.all_input_nodes)
        seen = node.meta.get("val")
        chosen = free_unbacked_symbols([*shapes(seen), *([seen] if isinstance(seen, torch.SymInt) else [])])
        return inputs or sized_by_values(node) or not self.in_shapes.isdisjoint(chosen)

    def _rewrite(self, node: Node) -> None:
        seen = node.meta.get("val")
        found = rule(node)
        if found is None and self._is_settled(node):
            found = rule_of("getitem")
        if found is None:
            raise unknown_shape(node)
        result = found(self, node)
        if result is None:
            return
        sizes = pytree.tree_map(self.shape_seen, seen)
        if result is node:
            node.meta["val"] = self.value(node.target, node.args, node.kwargs)
        if isinstance(result, tuple):
            self._unpack(node, result)
            return
        if isinstance(sizes, _Shape):
            self._check(result, sizes)
        if _is_open(sizes):
            self.sizes[result] = sizes
        if isinstance(seen, SYMBOLIC) and isinstance(result, Node):
            self.numbers.add(result)
        if result is not node:
            for user in list(node.users):
                user.args, user.kwargs = torch.fx.map_arg(
                    (user.args, user.kwargs), lambda n: result if n is node else n
                )
            self.graph.erase_node(node)

    def _is_settled(self, node: Node) -> bool:
        """Whether a node's shapes are all known by now, and those of what it reads."""
        inputs = any(n in self.sizes or n in self.numbers for n in node.all_input_nodes)
        found = pytree.tree_map(self.shape_seen, pytree.tree_leaves(node.meta.get("val")))
        return not inputs and not any(map(_is_open, found))

    def _check(self, result: Node, sizes: tuple[Size, ...]) -> None:
        """See that a result has the room that torch's shape asks for: a rule may not suit the arguments."""
        if tuple(result.meta["val"].shape) != tuple(self.room(size) for size in sizes):
            raise unknown_shape(self.current)

    def _unpack(self, node: Node, results: tuple[Node, ...]) -> None:
        """Put each of several results in the place of the `getitem` that took it."""
        for user in list(node.users):
            assert user.target is operator.getitem, "several results are taken one by one"
            sizes = self.shape_seen(user.meta["val"])
            result = results[user.args[1]]  # type: ignore[index]
            if _is_open(sizes):
                self.sizes[result] = sizes
            user.replace_all_uses_with(result)
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def emit(self, target: Any, /, *args: Any, **kwargs: Any) -> Node:
        """A new operator in front of the current one, as if from the same line of the user's."""
        node = self.graph.call_function(target, args, kwargs)
        kept = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn")
        node.meta = {key: self.current.meta[key] for key in kept if key in self.current.meta}
        node.meta["val"] = self.value(target, args, kwargs)
        self.constants.step(node)
        return node

    def value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives, without data."""
        args, kwargs = pytree.tree_map(_value, (tuple(args), dict(kwargs)))
        with self.mode, torch.no_grad():
            return target(*args, **kwargs)

    def shape_seen(self, value: Any) -> Any:
        """Shape of a tensor, with expressions for sizes that depend on values."""
        if not isinstance(value, torch.Tensor):
            return None
        return _Shape(self.size_seen(size) for size in value.shape)

    def size_seen(self, size: Any) -> Size:
        """A size, or an expression in the symbols that nothing is known of."""
        expression = sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size).subs(
            self.known
        )
        return int(expression) if expression.is_Integer else sympy.expand(expression)

    def seen(self, node: Node) -> tuple[Size, ...]:
        """The shape that torch sees, of any tensor."""
        return self.sizes.get(node) or tuple(node.meta["val"].shape)

    def open_dims(self, node: Any) -> tuple[int, ...]:
        """Dims with rows that do not count."""
        sizes = self.sizes.get(node, ()) if isinstance(node, Node) else ()
        return tuple(dim for dim, size in enumerate(sizes) if not _is_fixed(size))

    def room(self, size: Size) -> int:
        """The most that a size can be."""
        return sum(max(scale, 0) * self.rooms[symbol] for symbol, scale in self._terms(size)) + _offset(size)

    def number(self, size: Size) -> Any:
        """What a size is: an int, or a node."""
        total: Any = None
        for symbol, scale in self._terms(size):
            count = self.counts[symbol]
            term = count if scale == 1 else self.emit(aten.mul.Tensor, count, scale)
            total = term if total is None else self.emit(aten.add.Tensor, total, term)
        offset = _offset(size)
        return (
            offset if total is None else total if offset == 0 else self.emit(aten.add.Tensor, total, offset)
        )

    def most(self, symbol: Any) -> int | None:
        """The most that torch knows a symbol to be, None if that is nothing."""
        known = self.mode.shape_env
        upper = known.var_to_range[symbol].upper if known is not None and symbol.is_Symbol else None
        return int(upper) if upper is not None and upper.is_Integer else None

    def _terms(self, size: Size) -> list[tuple[Any, int]]:
        """(symbol, how often) of a size that is a sum of numbers of rows.

        Raises:
            BridgeError: it is none, or has a symbol of which nothing is known.
        """
        if _is_fixed(size):
            return []
        symbols = sorted(size.free_symbols, key=str)
        scales = [sympy.diff(size, symbol) for symbol in symbols]
        if not all(scale.is_Integer for scale in scales) or not self.rooms.keys() >= set(symbols):
            raise unknown_shape(self.current)
        return [(symbol, int(scale)) for symbol, scale in zip(symbols, scales, strict=True)]

    def bind(self, size: Size, room: int, count: Node | int) -> None:
        """Say how many rows a new symbol stands for."""
        if _is_fixed(size):
            return
        if not isinstance(size, sympy.Symbol):
            raise unknown_shape(self.current)
        if isinstance(count, int):
            self.known[size] = count
        else:
            self.counts[size], self.rooms[size] = count, room

    def counted(self, node: Node, dim: int) -> Node:
        """Which rows of a dim count, with as many dims as the tensor so that it broadcasts."""
        sizes = self.seen(node)
        device = node.meta["val"].device
        places = self.emit(aten.arange.default, self.room(sizes[dim]), device=device, pin_memory=False)
        count = self.emit(aten.lt.Tensor, places, self.number(sizes[dim]))
        shape = [1] * len(sizes)
        shape[dim] = self.room(sizes[dim])
        return self.emit(aten.reshape.default, count, shape)

    def settled(self, node: Node, dims: tuple[int, ...]) -> Node:
        """A tensor whose rows that do not count repeat the first again: they stay finite where it is."""
        sizes = self.sizes[node]
        for dim in set(dims) & set(self.open_dims(node)):
            first = self.emit(aten.slice.Tensor, node, dim, 0, 1)
            node = self.emit(aten.where.self, self.counted(node, dim), node, first)
            self.sizes[node] = sizes
        return node

    def filled(self, node: Node, fill: float, dims: Any = None) -> Node:
        """A tensor with `fill` (infinite: the dtype's own) wherever a row does not count."""
        if node not in self.sizes:
            return node
        sizes, dtype = self.sizes[node], node.meta["val"].dtype
        for dim in self.open_dims(node):
            if dims is None or dim in dims:
                other = _finite(fill, dtype)
                new = self.emit(aten.where.ScalarOther, self.counted(node, dim), node, other)
                self.sizes[new] = sizes
                node = new
        return node


class _Shape(tuple[Size, ...]):
    """A shape that pytrees leave whole."""

    __slots__ = ()


def _offset(size: Size) -> int:
    """What a size that is a sum of numbers of rows has besides them."""
    return int(size) if _is_fixed(size) else int(size.subs(dict.fromkeys(size.free_symbols, 0)))


def _finite(fill: float, dtype: torch.dtype) -> float | bool:
    if dtype == torch.bool:
        return fill > 0
    if dtype.is_floating_point or dtype.is_complex:
        return fill
    info = torch.iinfo(dtype)
    return int(fill) if math.isfinite(fill) else info.max if fill > 0 else info.min


def _value(leaf: Any) -> Any:
    return leaf.meta["val"] if isinstance(leaf, Node) else leaf


def sized_by_values(node: Node) -> bool:
    """Whether an operator's size is a value that its arguments do not say, also where torch knows it."""
    if node.target is aten.index.Tensor:
        indices = [i for i in node.args[1] if isinstance(i, Node)]  # type: ignore[union-attr]
        return any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)
    return node.target in _SIZED_BY_VALUES


def shapes(value: Any) -> list[Any]:
    """All sizes of all tensors in a value."""
    return [size for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor) for size in x.shape]


def _is_fixed(size: Size) -> bool:
    return isinstance(size, int) or (isinstance(size, sympy.Expr) and bool(size.is_Integer))


def _is_open(sizes: Any) -> bool:
    return isinstance(sizes, _Shape) and not all(map(_is_fixed, sizes))
