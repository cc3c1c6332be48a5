"""Rows sorted by group and put back: the regrouping of mixtures of experts, seen in an exported graph.

Sorting tokens by expert mixes the rows of a batch, and putting them back undoes it; in between every
row is treated on its own, by the matrix of its expert. Whoever splits the batch need not care, but sees a
sort. So the nodes from the sort to the place where rows are back get the scope `rannc_separable` at the
end of their path. A region is marked only if everything in it is understood (see `_Region`): one value
that leaves it in sorted order, or a row that meets another, and it stays as it is.
"""

import enum
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_bridge.program import Graph, Node, Ref, refs

SCOPE = "rannc_separable"
_aten = torch.ops.aten


class Role(enum.Enum):
    """What a value is, inside a regrouping of `[slots, ...]` rows."""

    PAIR = "pair"  # (sorted group numbers, permutation)
    SOURCE = "source"  # for each sorted slot, the row it came from: the permutation, or that // slots a row
    SORTED = "sorted"  # `[slots, ...]` in sorted order, each row a function of its own row
    COUNTS = "counts"  # how many slots each group has, or where groups end
    INVERSE = "inverse"  # for each row, its place in sorted order
    BACK = "back"  # rows in their own order again: the region ends here


@dataclass(slots=True)
class _Region:
    """One sort and what follows from it; `sound` until something in it is not understood."""

    slots: int
    nodes: set[int] = field(default_factory=set)
    sound: bool = True


Known = dict[int, tuple[Role, _Region]]
_SORTS = {_aten.sort.default, _aten.sort.stable}
_COUNTING = {_aten.histc.default}
_READS = {_aten.index.Tensor, _aten.index_select.default}
_WRITES = {_aten.index_put.default, _aten.index_add.default, _aten.index_copy.default}
_CUMULATIVE = {_aten.cumsum.default}
_GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}
# Operators with a dim that must not be the first, and where it stands among the arguments.
_ALONG = {
    _aten.split.Tensor: 2, _aten.split_with_sizes.default: 2, _aten.chunk.default: 2, _aten.slice.Tensor: 1,
    _aten.select.int: 1, _aten.unsqueeze.default: 1, _aten.squeeze.dim: 1, _aten.softmax.int: 1,
    _aten.mean.dim: 1, _aten.sum.dim_IntList: 1,
}  # fmt: skip
_BY_ROW = {_aten.linear.default, _aten.rms_norm.default, _aten.layer_norm.default, _aten.dropout.default}
_OF_TABLES = {_aten._to_copy.default, _aten.alias.default, _aten.transpose.int, _aten.detach.default}
_SHAPE_ONLY = {_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default}
_POINTWISE = {_aten._to_copy.default, _aten.clone.default, _aten.floor_divide.default}  # not tagged by torch
_RESHAPES = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}


def mark_regrouped(graph: Graph, input_shapes: tuple[tuple[int, ...], ...]) -> Graph:
    """Mark every regrouping that is understood from its sort to its end."""
    reader = _Reader(graph, input_shapes)
    for position, node in enumerate(graph.nodes):
        reader.read(position, node)
    for ref in refs(graph.outputs):
        reader.leave(ref)
    marked = {p for region in reader.regions if region.sound and region.nodes for p in region.nodes}
    if not marked:
        return graph
    nodes = (
        replace(node, path=f"{node.path}/{SCOPE}".lstrip("/")) if position in marked else node
        for position, node in enumerate(graph.nodes)
    )
    return replace(graph, nodes=tuple(nodes))


class _Reader:
    """Follows roles through a graph, node by node."""

    def __init__(self, graph: Graph, input_shapes: tuple[tuple[int, ...], ...]) -> None:
        self.graph = graph
        self.input_shapes = input_shapes
        self.known: Known = {}
        self.regions: list[_Region] = []

    def read(self, position: int, node: Node) -> None:
        operands = {ref.index: self.known[ref.index] for ref in self.tagged(node)}
        index = position + self.graph.num_inputs
        if node.operator in _SORTS and self.starts(node, operands):
            region = _Region(slots=self.shape(node.args[0])[0])
            self.regions.append(region)
            region.nodes.add(position)
            self.known[index] = (Role.PAIR, region)
            return
        if not operands:
            return
        regions = list({id(region): region for _, region in operands.values()}.values())
        role = self.role(node, regions[0]) if len(regions) == 1 else None
        if role is None:
            for region in regions:
                region.sound = False
            return
        regions[0].nodes.add(position)
        if role is not Role.BACK:
            self.known[index] = (role, regions[0])

    def starts(self, node: Node, operands: Known) -> bool:
        """Group numbers, one a slot; a sort of the permutation itself is its inverse."""
        return len(self.shape(node.args[0])) == 1 and not operands

    def leave(self, ref: Ref) -> None:
        if ref.index in self.known:
            self.known[ref.index][1].sound = False

    def tagged(self, node: Node) -> list[Ref]:
        return [ref for ref in refs((node.args, node.kwargs)) if ref.index in self.known]

    def shape(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, Ref):
            return ()
        if value.index < self.graph.num_inputs:
            return self.input_shapes[value.index]
        return self.graph.nodes[value.index - self.graph.num_inputs].shape or ()

    def is_(self, value: Any, *roles: Role) -> bool:
        return isinstance(value, Ref) and value.index in self.known and self.known[value.index][0] in roles

    def role(self, node: Node, region: _Region) -> Role | None:
        """What a node makes of the roles of its operands; None if that is not understood."""
        op, args = node.operator, node.args
        if getattr(op, "__name__", "") == "getitem":
            return self.item(args)
        if op in _SORTS:  # of the permutation
            return Role.PAIR if self.is_(args[0], Role.SOURCE) else None
        if op in _SHAPE_ONLY:
            return Role.BACK  # no value goes on
        if op in _COUNTING:
            return Role.COUNTS if self.is_(args[0], Role.SORTED) else None
        if op in _CUMULATIVE:
            return Role.COUNTS if self.is_(args[0], Role.COUNTS) else None
        if op in _READS:
            return self.gathered(args)
        if op in _WRITES:
            return self.scattered(args)
        if isinstance(op, torch._ops.OpOverload) and op._schema.name in _GROUPED:
            fits = self.is_(args[0], Role.SORTED) and self.is_(args[2], Role.COUNTS)
            return Role.SORTED if fits and not self.is_(args[1], *Role) else None
        return self.row_by_row(node, region)

    def item(self, args: tuple[Any, ...]) -> Role | None:
        if self.is_(args[0], Role.SORTED):
            return Role.SORTED
        maker = self.graph.nodes[args[0].index - self.graph.num_inputs]
        of_permutation = self.is_(maker.args[0], Role.SOURCE)
        if args[1] == 0:
            return None if of_permutation else Role.SORTED
        return Role.INVERSE if of_permutation else Role.SOURCE

    def gathered(self, args: Any) -> Role | None:
        index = args[1][0] if len(args) == 2 and len(args[1]) == 1 else args[2] if args[1:2] == (0,) else None
        if self.is_(args[0], Role.SORTED):
            return Role.BACK if self.is_(index, Role.INVERSE) else None
        if self.is_(args[0], *Role):
            return None
        # Rows by where they came from; a table (the biases of experts) by group.
        by_group = self.is_(index, Role.SORTED) and self.is_table(args[0])
        return Role.SORTED if by_group or self.is_(index, Role.SOURCE) else None

    def is_table(self, value: Any) -> bool:
        """An input of the graph, at most cast or transposed: not rows that were computed."""
        while isinstance(value, Ref) and value.index >= self.graph.num_inputs:
            node = self.graph.nodes[value.index - self.graph.num_inputs]
            if node.operator not in _OF_TABLES:
                return False
            value = node.args[0]
        return isinstance(value, Ref)

    def scattered(self, args: Any) -> Role | None:
        base, *_ = args
        index, values = (args[1][0], args[2]) if isinstance(args[1], tuple) else (args[2], args[3])
        if self.is_(base, *Role) or not self.is_(index, Role.SOURCE):
            return None
        if self.is_(values, Role.SORTED):
            return Role.BACK
        return Role.INVERSE if self.counts_up(values) else None

    def counts_up(self, value: Any) -> bool:
        if not isinstance(value, Ref) or value.index < self.graph.num_inputs:
            return False
        return self.graph.nodes[value.index - self.graph.num_inputs].operator is _aten.arange.default

    def row_by_row(self, node: Node, region: _Region) -> Role | None:
        """Operators that treat each slot, or each group's number, on its own."""
        op, args = node.operator, node.args
        roles = {self.known[ref.index][0] for ref in self.tagged(node)}
        if len(roles) != 1 or not isinstance(op, torch._ops.OpOverload):
            return None
        (role,) = roles
        if op in _RESHAPES and role is Role.SORTED:
            return role if (node.shape or (0,))[0] == region.slots else None
        if op in _ALONG and role is Role.SORTED:
            dims = args[_ALONG[op]] if len(args) > _ALONG[op] else 0
            ndim = len(self.shape(args[0])) + (op is _aten.unsqueeze.default)
            listed = dims if isinstance(dims, tuple) else (dims,)
            return role if all(dim % ndim for dim in listed) else None
        if op in _BY_ROW and role is Role.SORTED:
            alone = self.is_(args[0], Role.SORTED) and len(self.tagged(node)) == 1
            return role if alone and len(self.shape(args[0])) > 1 else None
        if torch.Tag.pointwise not in op.tags and op not in _POINTWISE:
            return None
        if role is Role.SOURCE:  # perm // slots_per_row, with a plain number
            return role if len(list(refs((args, node.kwargs)))) == 1 else None
        meets_rows = any(self.has_rows(ref, node) for ref in refs((args, node.kwargs)))
        return role if role in (Role.SORTED, Role.COUNTS) and not meets_rows else None

    def has_rows(self, ref: Ref, node: Node) -> bool:
        """Whether an operand from outside brings rows in their own order."""
        if ref.index in self.known:
            return False
        shape = self.shape(ref)
        return len(shape) == len(node.shape or ()) and bool(shape) and shape[0] != 1
