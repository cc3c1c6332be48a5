"""Rewrites of an exported graph that show its meaning.

Indexing by position, in order, is a reshape: mask code such as
`mask[batch_index[:, None], key_index[None, :]]` with both indices counting 0, 1, 2, ... reads every
element once. As a gather it looks as if examples saw each other; as the reshape that it is, the batch
dim stays plain. And a mask that was expanded for attention is handed to it unexpanded: attention keeps
its operands for the backward, so a mask of all rows would be kept where one row says it all.
"""

import itertools
from dataclasses import replace
from typing import Any

import torch

from torch_bridge.custom_gradient import fold_backwards
from torch_bridge.grouped import mark_regrouped
from torch_bridge.program import Graph, Node, Ref
from torch_bridge.upcasts import without_upcasts

_aten = torch.ops.aten


def simplify(graph: Graph, input_shapes: tuple[tuple[int, ...], ...]) -> Graph:
    """Leave out what no output needs, and write indexing and masks as what they mean (see above)."""
    graph = fold_backwards(graph.pruned())
    nodes = (_reshaped(graph, node, input_shapes) for node in graph.nodes)
    graph = replace(graph, nodes=tuple(_with_small_mask(graph, node, input_shapes) for node in nodes))
    return mark_regrouped(without_upcasts(graph), input_shapes)


def _with_small_mask(graph: Graph, node: Node, input_shapes: tuple[tuple[int, ...], ...]) -> Node:
    if node.operator is not _aten.scaled_dot_product_attention.default or len(node.args) < 4:
        return node
    mask = node.args[3]
    if not isinstance(mask, Ref) or mask.index < graph.num_inputs:
        return node
    maker = graph.nodes[mask.index - graph.num_inputs]
    if maker.operator is not _aten.expand.default or maker.shape is None:
        return node
    source = _shape(graph, maker.args[0], input_shapes)
    if source is None or len(source) != len(maker.shape):
        return node
    return replace(node, args=(*node.args[:3], maker.args[0], *node.args[4:]))


def _reshaped(graph: Graph, node: Node, input_shapes: tuple[tuple[int, ...], ...]) -> Node:
    if node.operator is not _aten.index.Tensor or node.shape is None:
        return node
    source, indices = node.args
    shape = _shape(graph, source, input_shapes)
    if shape is None or len(indices) != len(shape) or not all(isinstance(i, Ref) for i in indices):
        return node
    counts = [_counting(graph, index) for index in indices]
    if any(count is None for count in counts):
        return node
    dims = [count[0] for count in counts if count is not None]
    sizes = tuple(count[1] for count in counts if count is not None)
    # Dims are counted from the right: they must fall for the elements to stay in order.
    if sizes != shape or any(a <= b for a, b in itertools.pairwise(dims)):
        return node
    return replace(node, operator=_aten.reshape.default, args=(source, node.shape))


def _shape(graph: Graph, ref: Ref, input_shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...] | None:
    if ref.index < graph.num_inputs:
        return input_shapes[ref.index]
    return graph.nodes[ref.index - graph.num_inputs].shape


def _counting(graph: Graph, ref: Any) -> tuple[int, int] | None:
    """(dim from the right, size) if the value is 0, 1, ..., size-1 along one dim and 1 wide elsewhere."""
    if not isinstance(ref, Ref) or ref.index < graph.num_inputs:
        return None
    node = graph.nodes[ref.index - graph.num_inputs]
    if node.operator is _aten.arange.default:
        return (0, node.args[0]) if isinstance(node.args[0], int) else None
    if node.operator is _aten.arange.start:
        return (0, node.args[1]) if node.args[0] == 0 else None
    if node.operator in (_aten.arange.start_step,):
        return (0, node.args[1]) if node.args[0] == 0 and tuple(node.args[2:3]) in ((), (1,)) else None
    if node.operator is _aten.unsqueeze.default and node.shape is not None:
        inner = _counting(graph, node.args[0])
        if inner is None:
            return None
        from_right = len(node.shape) - 1 - node.args[1] % len(node.shape)
        return (inner[0] + 1 if from_right <= inner[0] else inner[0]), inner[1]
    if node.operator in (_aten.add.Tensor, _aten.add.Scalar):
        return _counting(graph, node.args[0]) if node.args[1] == 0 and not node.kwargs else None
    if node.operator in (_aten._to_copy.default, _aten.clone.default, _aten.alias.default):
        return _counting(graph, node.args[0])
    return None
