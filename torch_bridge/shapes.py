"""One export for every batch size: two exports at two sizes, and the literals that follow the rows.

A second example is made by resizing the batch dims. If both graphs have the same nodes, an integer that
differs is a * rows + b. A secant through two points also fits what is not a line, so where a literal
looks like that (a negative offset) the caller confirms it at a third size.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torch_bridge.program import Affine, Graph, Node

BatchDims = tuple[int | None, ...]


class DifferentStructure(Exception):
    """Two exports cannot be described by one program."""


def batch_dim_candidates(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, BatchDims]]:
    """Guesses of (rows, batch dim of every tensor), best first.

    Rows are the commonest leading size. First guess: dim 0 of every tensor that leads with it. Second:
    the one dim of that size of every tensor. Then sizes that are the second dim of two tensors or more
    (an LSTM's sequence and states, batch_first=False); these come first where no two tensors share
    their leading size (a Transformer's two sequences).
    """
    leading = Counter(t.shape[0] for t in tensors if t.ndim)
    if not leading:
        return
    rows, count = leading.most_common(1)[0]
    second = Counter(t.shape[1] for t in tensors if t.ndim > 1 and t.shape[0] != 1)
    shared = [size for size, number in second.most_common() if number > 1]
    first = tuple(0 if t.ndim and t.shape[0] == rows else None for t in tensors)
    by_size = [(size, tuple(_only_dim(t, size) for t in tensors)) for size in dict.fromkeys([rows, *shared])]
    guesses = [(rows, first), *by_size]
    if count == 1 and shared and shared[0] not in leading:
        guesses.sort(key=lambda guess: guess[0] != shared[0])
    seen: set[BatchDims] = set()
    for size, dims in guesses:
        if dims not in seen and any(dim is not None for dim in dims):
            yield size, dims
        seen.add(dims)


def _only_dim(tensor: torch.Tensor, size: int) -> int | None:
    found = [dim for dim, here in enumerate(tensor.shape) if here == size]
    return found[0] if len(found) == 1 else None


def rows_of(shapes: Sequence[tuple[int, ...] | None], dims: BatchDims) -> set[int]:
    """The numbers of rows that these shapes have in their batch dims."""
    return {
        shape[dim] for shape, dim in zip(shapes, dims, strict=True) if dim is not None and shape is not None
    }


def resized(tensors: Sequence[torch.Tensor], dims: BatchDims, rows: int) -> tuple[torch.Tensor, ...]:
    """The tensors with `rows` rows in their batch dims: their own rows, over and over."""
    return tuple(
        tensor if dim is None else _resize(tensor, dim, rows)
        for tensor, dim in zip(tensors, dims, strict=True)
    )


def _resize(tensor: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    if tensor.shape[dim] == rows:
        return tensor
    index = torch.arange(rows, device=tensor.device) % max(tensor.shape[dim], 1)
    return tensor.detach().index_select(dim, index).requires_grad_(tensor.requires_grad)


def merge(small: Graph, large: Graph, rows: tuple[int, int]) -> Graph:
    """One graph for every number of rows, from two exports at `rows`.

    Raises:
        DifferentStructure: if the graphs differ in more than integers on a line.
    """
    if len(small.nodes) != len(large.nodes) or small.num_inputs != large.num_inputs:
        raise DifferentStructure(
            f"{len(small.nodes)} nodes at {rows[0]} rows, {len(large.nodes)} at {rows[1]}"
        )
    nodes = tuple(_merge_node(a, b, rows) for a, b in zip(small.nodes, large.nodes, strict=True))
    outputs = _merge_tree(small.outputs, large.outputs, rows)
    return Graph(num_inputs=small.num_inputs, nodes=nodes, outputs=outputs)


def _merge_node(a: Node, b: Node, rows: tuple[int, int]) -> Node:
    if a.operator != b.operator:
        raise DifferentStructure(f"{a.operator} at {rows[0]} rows is {b.operator} at {rows[1]}")
    return Node(
        operator=a.operator,
        args=_merge_tree(a.args, b.args, rows),
        kwargs=_merge_tree(a.kwargs, b.kwargs, rows),
        path=a.path,
        source=a.source,
        dtypes=a.dtypes,
        shape=a.shape,
    )


def _merge_tree(a: Any, b: Any, rows: tuple[int, int]) -> Any:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(_merge_tree(x, y, rows) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return {key: _merge_tree(a[key], b[key], rows) for key in a}
    if isinstance(a, Graph) and isinstance(b, Graph):
        return merge(a, b, rows)
    if type(a) is int and type(b) is int and a != b:
        scale, rest = divmod(b - a, rows[1] - rows[0])
        if rest:
            raise DifferentStructure(f"{a} at {rows[0]} rows is {b} at {rows[1]}")
        return Affine(scale, a - scale * rows[0])
    if type(a) is not type(b) or not _equal(a, b):
        raise DifferentStructure(f"{a!r} at {rows[0]} rows is {b!r} at {rows[1]}")
    return a


def _equal(a: Any, b: Any) -> bool:
    return a is b or bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def doubtful(graph: Graph) -> bool:
    """Whether some literal may lie on a curve rather than a line: worth a third export."""

    def curved(tree: Any) -> bool:
        if isinstance(tree, tuple):
            return any(curved(item) for item in tree)
        if isinstance(tree, dict):
            return any(curved(item) for item in tree.values())
        if isinstance(tree, Graph):
            return doubtful(tree)
        return isinstance(tree, Affine) and (tree.offset < 0 or tree.scale < 0)

    return any(curved((node.args, node.kwargs)) for node in graph.nodes) or curved(graph.outputs)


def agrees(graph: Graph, third: Graph, rows: int) -> bool:
    """Whether the merged graph predicts an export at another number of rows."""

    def predicts(tree: Any, other: Any) -> bool:
        if isinstance(tree, Affine):
            return tree.at(rows) == other
        if isinstance(tree, tuple):
            return isinstance(other, tuple) and len(tree) == len(other) and all(map(predicts, tree, other))
        if isinstance(tree, dict):
            return tree.keys() == other.keys() and all(predicts(tree[key], other[key]) for key in tree)
        if isinstance(tree, Graph):
            return isinstance(other, Graph) and agrees(tree, other, rows)
        return type(tree) is type(other) and _equal(tree, other)

    return len(graph.nodes) == len(third.nodes) and all(
        a.operator == b.operator and predicts((a.args, a.kwargs), (b.args, b.kwargs))
        for a, b in zip(graph.nodes, third.nodes, strict=True)
    )
