"""Walk an exported graph once, under a JAX trace: a pure function of its inputs.

Every operator becomes its lowering, called in a named scope that is its module path, so whatever reads
the traced program (plans, profiles, errors) speaks in the names of the user's modules.
"""

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge import operators
from torch_bridge.errors import BridgeError, UnsupportedOpError, message
from torch_bridge.layout import ChannelsLast, plain
from torch_bridge.lowerings import registry
from torch_bridge.program import Affine, Graph, Node, Ref, refs, subgraphs, tree_map
from torch_bridge.random import node_key
from torch_bridge.tensors import jax_dtype

_WRITES = torch.ops.higher_order.auto_functionalized_v2


def check(graph: Graph, positions: Sequence[int]) -> None:
    """See that these nodes can be lowered, and those of their subgraphs.

    Raises:
        UnsupportedOpError: for the first operators that have no lowering, all of them in one message.
        BridgeError: for a dtype that JAX lacks here.
    """
    missing: dict[Any, Node] = {}
    for node in _with_subgraphs(graph, positions):
        called = _called(node)
        if called is not operator.getitem and registry.find(called) is None:
            missing.setdefault(called, node)
        for dtype in node.dtypes:
            if isinstance(dtype, torch.dtype):
                _checked_dtype(dtype, node)
    if missing:
        raise UnsupportedOpError(_unsupported(missing))


def _with_subgraphs(graph: Graph, positions: Sequence[int]) -> Iterator[Node]:
    for position in positions:
        node = graph.nodes[position]
        yield node
        for body in subgraphs(node.args):
            yield from _with_subgraphs(body, range(len(body.nodes)))


def _called(node: Node) -> Any:
    """The operator that a node calls, also where torch wraps one that writes its arguments."""
    return node.args[0] if node.operator is _WRITES else node.operator


def _unsupported(missing: Mapping[Any, Node]) -> str:
    details = []
    for op, node in missing.items():
        details += [f"{op}", *(f"  {line}" for line in where(node))]
    return message(
        f"no lowering for {', '.join(map(str, missing))}, nor does torch decompose it into ones that have.",
        *details,
        hint="@torch_bridge.register_lowering(torch.ops....) on a JAX function of the same arguments",
    )


def _checked_dtype(dtype: torch.dtype, node: Node) -> None:
    try:
        jax_dtype(dtype)
    except BridgeError as error:
        raise BridgeError(message(str(error), f"computed by {node.operator}", *where(node))) from None


def where(node: Node) -> tuple[str, ...]:
    """Module path and source line of a node, as lines of an error."""
    return (f"in module {node.path or '(root)'}", *([f"at {node.source}"] if node.source else []))


def draws_random(graph: Graph, positions: Sequence[int]) -> bool:
    """Whether any of these nodes needs a PRNG key."""
    return any(_draws(graph.nodes[position]) for position in positions)


def _draws(node: Node) -> bool:
    found = registry.find(node.operator)
    if found is not None and found.random(*node.args, **node.kwargs):
        return True
    return any(draws_random(body, range(len(body.nodes))) for body in subgraphs(node.args))


def run(
    graph: Graph,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    *,
    rows: int,
    rng: Any = None,
) -> tuple[Any, ...]:
    """Compute some outputs of a graph.

    Args:
        graph: the program.
        inputs: one a graph input; None for what the outputs do not depend on.
        outputs: `Ref`s of the wanted values (constants are passed through).
        rows: number of batch rows, for the literals that follow it.
        rng: PRNG key, for programs that draw random numbers.
    """
    walk = _Walk(graph=graph, rows=rows, rng=rng)
    values: dict[int, Any] = dict(enumerate(inputs))
    walk.compute(graph.needed(outputs), values)
    return plain(walk.resolved(tuple(outputs), values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraph:
    """A function that a higher-order operator takes: positional arrays to the tuple of what it returns.

    `where` says in errors where the operator is called.
    """

    graph: Graph
    rows: int
    where: tuple[str, ...]

    def __call__(self, *inputs: Any, rng: Any = None) -> tuple[Any, ...]:
        return run(self.graph, inputs, self.graph.outputs, rows=self.rows, rng=rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """One evaluation of a graph. `values` maps value numbers to arrays, in whichever layout they lie."""

    graph: Graph
    rows: int
    rng: Any

    def resolved(self, tree: Any, values: Mapping[int, Any], where: tuple[str, ...] = ()) -> Any:
        def leaf_value(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return values[leaf.index]
            if isinstance(leaf, Graph):
                return Subgraph(graph=leaf, rows=self.rows, where=where)
            return leaf.at(self.rows) if isinstance(leaf, Affine) else leaf

        return tree_map(leaf_value, tree)

    def compute(self, positions: Sequence[int], values: dict[int, Any]) -> None:
        for position in positions:
            node = self.graph.nodes[position]
            if operators.is_gradient(node.operator):
                result = self._differentiate(node, values)
            else:
                args, kwargs = self.resolved((node.args, node.kwargs), values, where(node))
                result = _evaluate(node, position, args, kwargs, self.rng)
            values[position + self.graph.num_inputs] = result

    def _differentiate(self, node: Node, values: Mapping[int, Any]) -> tuple[Any, ...]:
        """Gradients of some values with respect to earlier ones: the nodes between them, differentiated.

        Inputs get an additive zero each, which is what is differentiated: one input may depend on another.
        """
        outputs, inputs, seeds, batched = node.args
        numbers = [ref.index for ref in inputs]
        positions = self.graph.between(numbers, outputs)
        _check_connected(node, self.graph, numbers, positions)

        def moved(zeros: tuple[Any, ...]) -> tuple[Any, ...]:
            here, shift = dict(values), dict(zip(numbers, zeros, strict=True))
            for number in numbers:
                if number - self.graph.num_inputs not in positions:
                    here[number] = plain(here[number]) + shift[number]
            for position in positions:
                self.compute((position,), here)
                number = position + self.graph.num_inputs
                if number in shift:
                    here[number] = plain(here[number]) + shift[number]
            return plain(self.resolved(outputs, here))

        _, pull = jax.vjp(moved, tuple(jnp.zeros(values[n].shape, values[n].dtype) for n in numbers))
        (gradients,) = (jax.vmap(pull) if batched else pull)(plain(self.resolved(seeds, values)))
        return gradients


def _check_connected(node: Node, graph: Graph, inputs: Sequence[int], positions: Sequence[int]) -> None:
    """torch saw a path from every input; it must have survived the export."""
    used = {ref.index for position in positions for ref in refs((graph.nodes[position].args,))}
    used |= {ref.index for ref in refs(node.args[0])}
    if not used.issuperset(inputs):
        raise BridgeError(
            message(
                "a gradient that forward takes is lost in the exported graph.",
                *where(node),
                hint="differentiate with respect to a tensor that the outputs are computed from directly",
            )
        )


def _evaluate(node: Node, position: int, args: Any, kwargs: Any, rng: Any) -> Any:
    if node.operator is operator.getitem:
        return args[0][args[1]]
    found = registry.find(node.operator)
    if found is None:
        raise UnsupportedOpError(_unsupported({node.operator: node}))
    with jax.named_scope(node.path) if node.path else contextlib.nullcontext():
        if _draws(node):
            kwargs = {**kwargs, "rng": node_key(rng, position, node.path)}
        if found.in_layout is None:
            return _cast(found.function(*plain(args), **plain(kwargs)), node.dtypes)
        return _cast(found.in_layout(*args, **kwargs), node.dtypes)


def _cast(result: Any, dtypes: tuple[Any, ...]) -> Any:
    """Results in the dtype that torch gives them."""
    if isinstance(result, tuple | list):
        padded = (*dtypes, *(None,) * (len(result) - len(dtypes)))
        return tuple(_cast(item, (dtype,)) for item, dtype in zip(result, padded, strict=False))
    if isinstance(result, ChannelsLast):
        return ChannelsLast(_cast(result.array, dtypes))
    if not isinstance(result, jax.Array) or not dtypes or not isinstance(dtypes[0], torch.dtype):
        return result
    wanted = jax_dtype(dtypes[0])
    return result if result.dtype == wanted else result.astype(wanted)
