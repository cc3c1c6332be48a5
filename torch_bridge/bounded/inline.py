"""`no_grad` regions put in the place of their calls, so that one pass sees all of a graph."""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

_NO_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_regions(graph_module: GraphModule) -> None:
    """Inline every `no_grad` region; that its results have no gradient stands in the graph already."""
    nodes: list[Any] = list(graph_module.graph.nodes)
    for node in nodes:
        if node.target is _NO_GRAD:
            body = graph_module.get_submodule(str(node.args[1].target))
            assert isinstance(body, GraphModule), "regions are graphs"
            inline_regions(body)
            _inline(graph_module, node, body)


def _inline(graph_module: GraphModule, call: Node, body: GraphModule) -> None:
    graph = graph_module.graph
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    known = dict(zip(inputs, call.args[2:], strict=True))
    with graph.inserting_before(call):
        results = graph.graph_copy(body.graph, known)  # type: ignore[arg-type]
    results = results if isinstance(results, tuple | list) else (results,)
    for user in list(call.users):
        assert user.target is operator.getitem, "regions return tuples"
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(call)
