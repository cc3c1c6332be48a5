"""Regions of a training graph that change how torch computes, as plain operators.

torch.export keeps `no_grad` and `autocast` regions as subgraphs until it decomposes the graph, which
inlines them. Before that, what they mean is written into the graph:

- results of a `no_grad` region get a `detach`;
- a tensor that is written under `no_grad`, or through `detach` or `.data`, has its new value and its old
  gradient history (`operators.with_history`), as in torch;
- `detach_` is a write that forgets the history;
- a tensor made in the body of a higher-order operator is one of our constants;
- autocast for an accelerator is applied to the tensors of the example, which lie on the host.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torch_bridge import operators
from torch_bridge.autocast_rules import apply_rules
from torch_bridge.errors import BridgeError, message
from torch_bridge.signature import source_line

_aten = torch.ops.aten
_MAY_RETURN_ITSELF = {
    *(_aten.to, _aten.contiguous, _aten.dropout, _aten.flatten, _aten.positive, _aten.real, _aten.conj),
    *(_aten.resolve_conj, _aten.resolve_neg, _aten.atleast_1d, _aten.atleast_2d, _aten.atleast_3d),
}
_NO_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def make_regions_explicit(graph_module: GraphModule) -> None:
    """Rewrite a training graph and its subgraphs in place."""
    _rewrite(graph_module, grad_enabled=True)


def _rewrite(graph_module: GraphModule, *, grad_enabled: bool) -> None:
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function":
            continue
        enabled = grad_enabled
        if node.target is _NO_GRAD:
            enabled = node.args[0]
            if grad_enabled and not enabled:
                _guard_region(graph_module, node)
        elif node.target is _AUTOCAST:
            node.args = _host_autocast(graph_module, node.args)
        for body in bodies(graph_module, node):
            _rewrite(body, grad_enabled=enabled)
            _number_constants(body)
    if grad_enabled:
        _guard_writes(graph_module.graph)
    graph_module.recompile()


def bodies(graph_module: GraphModule, node: Node) -> Iterator[GraphModule]:
    """The subgraphs that a node calls."""
    for leaf in node.all_input_nodes:
        if leaf.op == "get_attr":
            body = getattr(graph_module, str(leaf.target), None)
            if isinstance(body, GraphModule):
                yield body


def _number_constants(body: GraphModule) -> None:
    """Tensors that a body holds as attributes, as operators: torch can lift only those of the whole graph."""
    found = [(node, getattr(body, str(node.target), None)) for node in body.graph.find_nodes(op="get_attr")]
    tensors = [(node, value) for node, value in found if isinstance(value, torch.Tensor)]
    for node, value in tensors:
        with body.graph.inserting_before(node):
            number = operators.constant_number(value)
            node.replace_all_uses_with(_call(body.graph, operators.constant(), (number,), node))
        body.graph.erase_node(node)
    for name in {str(node.target) for node, _ in tensors}:
        delattr(body, name)
    body.recompile()


def _guard_region(graph_module: GraphModule, node: Node) -> None:
    """Results of a `no_grad` region have no gradient; what it writes keeps the history it had."""
    (body,) = bodies(graph_module, node)
    operands = [arg for arg in node.args if isinstance(arg, Node) and arg.op != "get_attr"]
    written, returned = _written_inputs(body)
    _detach_outputs(body)
    for operand in dict.fromkeys(operands[position] for position in written):
        _keep_history(graph_module.graph, node, operand)
    for result in list(node.users):  # a written input that is returned is that input
        if result.target is operator.getitem and result.args[1] in returned:
            result.replace_all_uses_with(operands[returned[int(result.args[1])]])  # type: ignore[arg-type]


def _written_inputs(body: GraphModule) -> tuple[list[int], dict[int, int]]:
    """Positions of the inputs that a body writes, also through views and in regions of its own.

    Beside them: position of a result -> position of the input that it is, after a write or a conversion
    that has nothing to convert.
    """
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    memory: dict[Any, Node] = {node: node for node in placeholders}  # whose memory a value shares
    itself: dict[Any, Node] = dict(memory)  # and which tensor a value is
    found: dict[Node, None] = {}
    for node in body.graph.nodes:
        targets = _written(node)
        if targets and targets[0] in itself:
            itself[node] = itself[targets[0]]
        elif _returns_itself(node) and node.args[0] in itself:
            itself[node] = memory[node] = itself[node.args[0]]
        if (viewed := _viewed(node)) in memory:
            memory[node] = memory[viewed]
        for inner in bodies(body, node) if node.target in (_NO_GRAD, _AUTOCAST) else ():
            operands = [arg for arg in node.args if isinstance(arg, Node) and arg.op != "get_attr"]
            positions, returned = _written_inputs(inner)
            targets += [operands[position] for position in positions]
            for result in node.users:
                source = operands[returned[result.args[1]]] if result.args[1] in returned else None
                if source in itself:
                    itself[result] = memory[result] = itself[source]
        found |= dict.fromkeys(memory[target] for target in targets if target in memory)
    (output,) = [node for node in body.graph.nodes if node.op == "output"]
    results = {i: itself[value] for i, value in enumerate(output.args[0]) if value in itself}
    return (
        [placeholders.index(node) for node in found],
        {i: placeholders.index(node) for i, node in results.items()},
    )


def _returns_itself(node: Node) -> bool:
    """Whether torch returns the tensor it is given, with its history, as `x.to(x.dtype)` does."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return False
    source = node.args[0]
    if node.target.overloadpacket not in _MAY_RETURN_ITSELF or not isinstance(source, Node):
        return False
    given, made = source.meta.get("val"), node.meta.get("val")
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    if node.target is _aten.dropout.default and node.args[2]:
        return False
    return given.shape == made.shape and given.dtype == made.dtype and True not in node.args[2:]


def _viewed(node: Node) -> Node | None:
    """The tensor whose memory a node's result shares, if it is a view or an in-place operator."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, Node):
            return value
    return None


def _written(node: Node) -> list[Node]:
    """The tensors that an operator writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    values = [
        *zip(schema.arguments, node.args, strict=False),
        *((a, node.kwargs[a.name]) for a in schema.arguments if a.name in node.kwargs),
    ]
    return [
        value
        for argument, value in values
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node)
    ]


def _keep_history(graph: Graph, writer: Node, tensor: Node) -> None:
    """After `writer`, `tensor` has its new value with the history it had before."""
    with graph.inserting_before(writer):
        before = _call(graph, _aten.clone.default, (tensor,), tensor)
    with graph.inserting_after(writer):
        kept = _call(graph, operators.with_history(), (tensor, before), tensor)
    with graph.inserting_after(kept):
        _call(graph, _aten.copy_.default, (tensor, kept), tensor)


def _call(graph: Graph, target: Any, args: tuple[Any, ...], like: Node) -> Node:
    node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    return node


def _detach_outputs(body: GraphModule) -> None:
    (output,) = [node for node in body.graph.nodes if node.op == "output"]

    def barrier(value: Node) -> Node:
        if value.op != "call_function" or not isinstance(value.meta.get("val"), torch.Tensor):
            return value
        with body.graph.inserting_before(output):
            return _call(body.graph, _aten.detach.default, (value,), value)

    output.args = torch.fx.map_arg(output.args, barrier)
    body.recompile()


def _guard_writes(graph: Graph) -> None:
    """Writes through `detach` keep the history of what they write; `detach_` forgets it."""
    detached_from: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _aten.detach_.default:
            _forget_history(graph, node)
            continue
        viewed = _viewed(node)
        if viewed is not None and viewed in detached_from:
            detached_from[node] = detached_from[viewed]
        elif node.target is _aten.detach.default and viewed is not None:
            detached_from[node] = viewed
        for target in _written(node):
            if target in detached_from:
                _refuse_history(node, target)
                _keep_history(graph, node, detached_from[target])


def _forget_history(graph: Graph, node: Node) -> None:
    tensor = node.args[0]
    assert isinstance(tensor, Node), "detach_ takes a tensor"
    with graph.inserting_before(node):
        value = _call(graph, _aten.detach.default, (tensor,), tensor)
        _call(graph, _aten.copy_.default, (tensor, value), tensor)
    node.replace_all_uses_with(tensor)
    graph.erase_node(node)


def _refuse_history(node: Node, target: Node) -> None:
    """What is written through a detached alias must itself be without gradient: two tensors that share
    memory would have two histories."""
    others = [arg for arg in node.all_input_nodes if arg is not target]
    if any(_wants_gradient(arg, set()) for arg in others):
        raise BridgeError(
            message(
                f"{node.target} writes a tensor that wants a gradient into the memory of another "
                "(an alias made by detach or .data).",
                *_source(node),
                hint="write into a clone: x.detach().clone()",
            )
        )


def _wants_gradient(node: Node, seen: set[Node]) -> bool:
    if node in seen or node.target in (_aten.detach.default, _NO_GRAD):
        return False
    seen.add(node)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
        return False
    if node.op == "placeholder":
        return True
    return any(_wants_gradient(arg, seen) for arg in node.all_input_nodes)


def _source(node: Node) -> list[str]:
    line = source_line(node.meta.get("stack_trace"))
    return [f"at {line}"] if line else []


def _host_autocast(graph_module: GraphModule, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An autocast region of an accelerator as one that is off, its rules written out as casts."""
    device, dtype, enabled, cache, attribute, *operands = args
    if device == "cpu" or not enabled:
        return args
    apply_rules(getattr(graph_module, attribute.target), dtype)
    return (device, dtype, False, cache, attribute, *operands)
