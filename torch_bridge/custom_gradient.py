"""Backwards that a user wrote, in exported graphs: two operators, and how they become one node.

A followed autograd.Function (see `followed`) leaves this in the graph, in this order:

    forward       its operators, without history
    cotangents    outputs -> what backward is given for them: here the backward begins
    backward      its operators
    custom_gradient    the outputs, with the gradients that backward found

As plain nodes they go through functionalisation, decompositions, autocast, stamping and symbolic sizes
like all others. `fold_backwards` then takes the backward out of the graph: the last node holds it as a
graph of its own, from residuals and cotangents to gradients, and is lowered to a `jax.custom_vjp`.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from torch_bridge.errors import BridgeError, message
from torch_bridge.linear import SCOPE as COUPLED
from torch_bridge.linear import is_linear
from torch_bridge.lowerings.custom_gradient import custom_gradient as lowered
from torch_bridge.lowerings.registry import lowering
from torch_bridge.operators import NAMESPACE
from torch_bridge.program import Graph, Node, Ref, refs, subgraphs, tree_map


@cache
def cotangents() -> Any:
    """`outputs -> (cotangents, token)`: values that only exist in a backward, like the outputs.

    The token is not for backward, which may write into the others: it tells which backward it is.
    """

    def fake(outputs: Any) -> list[torch.Tensor]:
        return [*(torch.empty_like(x) for x in outputs), torch.empty(())]

    def mapped(_info: Any, in_dims: Any, outputs: Any) -> Any:
        return cotangents()(outputs), [*in_dims[0], None]

    made = torch.library.custom_op(
        f"{NAMESPACE}::cotangents", fake, mutates_args=(), schema="(Tensor[] outputs) -> Tensor[]"
    )
    made.register_fake(fake)
    made.register_vmap(mapped)
    lowering(made._opoverload)(_left_to_fold)
    return made._opoverload


@cache
def custom_gradient() -> Any:
    """`(outputs, inputs, token, gradients, unknown, once, function) -> outputs`.

    Values are those of `outputs`; a gradient reaches `inputs` alone, by way of `gradients`. Of `unknown`
    inputs the gradient is not known: asking for it is an error. With `once`, so is asking twice.
    """

    def fake(outputs: Any, *_: Any) -> list[torch.Tensor]:
        return [torch.empty_like(x) for x in outputs]

    def remember(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.tensors = inputs

    def connected(ctx: Any, *_grads: Any) -> Any:
        # Only whether tensors are connected matters while exporting, not the values.
        outputs, inputs, _token, gradients, unknown, _once, _function = ctx.tensors
        of_outputs, of_gradients, of_unknown = ([None] * len(x) for x in (outputs, gradients, unknown))
        found = [torch.zeros_like(x) for x in inputs]
        return of_outputs, found, None, of_gradients, of_unknown, None, None

    made = torch.library.custom_op(
        f"{NAMESPACE}::custom_gradient",
        fake,
        mutates_args=(),
        schema="(Tensor[] outputs, Tensor[] inputs, Tensor token, Tensor[] gradients, "
        "Tensor[] unknown, bool once, str function) -> Tensor[]",
    )
    made.register_fake(fake)
    made.register_autograd(connected, setup_context=remember)
    made.register_vmap(_mapped)
    lowering(made._opoverload)(lowered)
    return made._opoverload


def _left_to_fold(*_: Any) -> Any:
    raise AssertionError("fold_backwards takes cotangents out of every graph")


def _mapped(
    info: Any,
    in_dims: Any,
    outputs: Any,
    inputs: Any,
    token: Any,
    gradients: Any,
    unknown: Any,
    once: bool,
    function: str,
) -> Any:
    """Under torch.vmap: gradients lie like their inputs; of an input that is not mapped, they add up."""
    of_inputs, of_gradients = in_dims[1], in_dims[3]
    fitted = []
    for to, at, gradient in zip(of_inputs, of_gradients, gradients, strict=True):
        if to is None:
            fitted.append(gradient if at is None else gradient.sum(at))
        elif at is None:
            spread = gradient.unsqueeze(to)
            fitted.append(spread.expand(*gradient.shape[:to], info.batch_size, *gradient.shape[to:]))
        else:
            fitted.append(gradient.movedim(at, to))
    return custom_gradient()(outputs, inputs, token, fitted, unknown, once, function), in_dims[0]


def _is(wanted: Any, node: Node) -> bool:
    """Whether a node calls an operator of ours, which may not be made yet."""
    return wanted.cache_info().currsize > 0 and node.operator is wanted()


def fold_backwards(graph: Graph) -> Graph:
    """The graph with every backward inside the node that it belongs to; also in its subgraphs.

    Raises:
        BridgeError: if something outside a backward uses what it computes from its cotangents.
    """
    nodes = [_with_folded_bodies(node) for node in graph.nodes]
    closing = [position for position, node in enumerate(nodes) if _is(custom_gradient, node)]
    for position in closing:
        nodes[position] = _folded(graph, position)
    if not closing:
        return replace(graph, nodes=tuple(nodes))
    folded = replace(graph, nodes=tuple(nodes)).pruned()
    for node in folded.nodes:
        if _is(cotangents, node):
            raise BridgeError(
                message(
                    "the backward of an autograd.Function changes what is not its own.",
                    *([f"at {node.source}"] if node.source else []),
                    hint="let backward only return gradients; what counts them belongs to the optimizer",
                )
            )
    return folded


def _with_folded_bodies(node: Node) -> Node:
    if not any(subgraphs(node.args)):
        return node
    return replace(
        node, args=tree_map(lambda leaf: fold_backwards(leaf) if isinstance(leaf, Graph) else leaf, node.args)
    )


def _folded(graph: Graph, position: int) -> Node:
    """A custom_gradient node whose backward is a graph in its arguments (see its lowering).

    Where that is not linear in the cotangents, the node's path says so (see `linear`).
    """
    node = graph.nodes[position]
    outputs, inputs, token, gradients, unknown, once, function = node.args
    body = _Body.find(graph, position, token, gradients)
    residuals, backward = body.extracted(gradients)
    kept = tuple(outputs.index(ref) if ref in outputs else None for ref in residuals)
    backward = fold_backwards(backward)
    args = (outputs, inputs, unknown, residuals, kept, backward, once, function)
    if is_linear(backward, range(len(residuals), backward.num_inputs)):
        return replace(node, args=args)
    return replace(node, args=args, path=f"{node.path}/{COUPLED}".removeprefix("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The nodes of one backward.

    Args:
        start: number of the value that `cotangents` gives.
        positions: of what was computed after it on behalf of the gradients, in order.
    """

    graph: Graph
    start: int
    positions: tuple[int, ...]

    @staticmethod
    def find(graph: Graph, end: int, token: Ref, gradients: Sequence[Any]) -> "_Body":
        """Backward ran from `cotangents` up to the node at `end`: what it recomputed is its own, too."""
        start = graph.nodes[token.index - graph.num_inputs].args[0].index
        live = {ref.index for ref in refs(gradients)}
        found = []
        for position in range(end - 1, start - graph.num_inputs, -1):
            node = graph.nodes[position]
            if position + graph.num_inputs in live:
                live |= {ref.index for ref in refs((node.args, node.kwargs))}
                if not _takes(node, start):
                    found.append(position)
        return _Body(graph=graph, start=start, positions=tuple(reversed(found)))

    def extracted(self, gradients: Any) -> tuple[tuple[Ref, ...], Graph]:
        """The values that backward reads, and backward as a function of them and of the cotangents."""
        graph, first = self.graph, self.graph.num_inputs
        inside = {position + first for position in self.positions}
        read = [(graph.nodes[p].args, graph.nodes[p].kwargs) for p in self.positions]
        used = dict.fromkeys(ref.index for ref in refs((read, gradients)))
        seeds = {i: graph.nodes[i - first].args[1] for i in used if i >= first and self._is_seed(i)}
        residuals = [i for i in used if i not in inside and i not in seeds]
        place = {index: k for k, index in enumerate(residuals)}
        place |= {index: len(residuals) + seed for index, seed in seeds.items()}
        num_inputs = len(residuals) + len(graph.nodes[self.start - first].args[0])
        place |= {position + first: num_inputs + k for k, position in enumerate(self.positions)}

        def moved(leaf: Any) -> Any:
            return Ref(place[leaf.index]) if isinstance(leaf, Ref) else leaf

        nodes = tuple(
            replace(node, args=tree_map(moved, node.args), kwargs=tree_map(moved, node.kwargs))
            for node in (graph.nodes[position] for position in self.positions)
        )
        backward = Graph(num_inputs=num_inputs, nodes=nodes, outputs=tree_map(moved, tuple(gradients)))
        return tuple(Ref(i) for i in residuals), backward

    def _is_seed(self, index: int) -> bool:
        return _takes(self.graph.nodes[index - self.graph.num_inputs], self.start)


def _takes(node: Node, value: int) -> bool:
    """Whether a node takes an item out of this value."""
    return node.operator is operator.getitem and node.args[0] == Ref(value)
