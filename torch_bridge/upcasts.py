"""Casts to float32 in front of a cross entropy, which computes in float32 by itself.

Models widen their logits for the loss (`logits.float()`, and autocast does so too). The loss keeps its
logits for the backward, so the widened copy, the largest array of many models, would be kept. Where
nothing else reads that copy, the loss is handed the narrow logits; the result is the same.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from torch_bridge.program import Graph, Node, Ref, refs

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_LOSSES = {_aten.cross_entropy_loss.default}
_VIEWS = {
    _aten.alias.default, _aten.clone.default, _aten.contiguous.default, _aten.view.default,
    _aten._unsafe_view.default, _aten.reshape.default, _aten.slice.Tensor, _aten.select.int,
    _aten.transpose.int, _aten.permute.default, _aten.squeeze.dim, _aten.unsqueeze.default,
}  # fmt: skip


def without_upcasts(graph: Graph) -> Graph:
    """Hand losses the logits as they were before they were widened for them."""
    uses = Counter(ref.index for node in graph.nodes for ref in refs((node.args, node.kwargs)))
    uses.update(ref.index for ref in refs(graph.outputs))
    changed: dict[int, Node] = {}
    for node in graph.nodes:
        if node.operator in _LOSSES:
            changed |= _narrowed(graph, uses, node.args[0])
    if not changed:
        return graph
    return replace(graph, nodes=tuple(changed.get(i, node) for i, node in enumerate(graph.nodes)))


def _narrowed(graph: Graph, uses: Counter[int], value: Any) -> dict[int, Node]:
    """The nodes from a widening to this value, without it; none if there is none or others read them."""
    passed: dict[int, Node] = {}
    while isinstance(value, Ref) and value.index >= graph.num_inputs and uses[value.index] == 1:
        position = value.index - graph.num_inputs
        node = graph.nodes[position]
        if node.operator is _aten._to_copy.default:
            source = _dtype(graph, node.args[0])
            if node.kwargs != {"dtype": torch.float32} or source not in _HALF:
                return {}
            passed[position] = replace(node, operator=_aten.alias.default, kwargs={})
            return {i: replace(each, dtypes=(source,)) for i, each in passed.items()}
        if node.operator not in _VIEWS:
            return {}
        passed[position] = node
        value = node.args[0]
    return {}


def _dtype(graph: Graph, value: Any) -> torch.dtype | None:
    if not isinstance(value, Ref) or value.index < graph.num_inputs:
        return None
    return graph.nodes[value.index - graph.num_inputs].dtypes[0]
