"""Walk an exported graph once, under a JAX trace: a pure function of its inputs.

Every operator becomes its lowering, called in a named scope that is its module path, so whatever reads
the traced program (plans, profiles, errors) speaks in the names of the user's modules.
"""

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch

from torch_bridge.errors import BridgeError, UnsupportedOpError, message
from torch_bridge.lowerings import registry
from torch_bridge.program import Affine, Graph, Node, Ref, tree_map
from torch_bridge.random import node_key
from torch_bridge.tensors import jax_dtype


def check(graph: Graph, positions: Sequence[int]) -> None:
    """See that these nodes can be lowered.

    Raises:
        UnsupportedOpError: for the first operators that have no lowering, all of them in one message.
        BridgeError: for a dtype that JAX lacks here.
    """
    missing: dict[Any, Node] = {}
    for position in positions:
        node = graph.nodes[position]
        if node.operator is not operator.getitem and registry.find(node.operator) is None:
            missing.setdefault(node.operator, node)
        for dtype in node.dtypes:
            if isinstance(dtype, torch.dtype):
                _checked_dtype(dtype, node)
    if missing:
        raise UnsupportedOpError(_unsupported(missing))


def _unsupported(missing: Mapping[Any, Node]) -> str:
    details = []
    for op, node in missing.items():
        details.append(f"{op} in module {node.path or '(root)'}")
        if node.source:
            details.append(f"  at {node.source}")
    return message(
        f"no lowering for {', '.join(map(str, missing))}, nor does torch decompose it into ones that have.",
        *details,
        hint="@torch_bridge.register_lowering(torch.ops....) on a JAX function of the same arguments",
    )


def _checked_dtype(dtype: torch.dtype, node: Node) -> None:
    try:
        jax_dtype(dtype)
    except BridgeError as error:
        where = [
            f"computed by {node.operator} in module {node.path or '(root)'}",
            *([f"at {node.source}"] if node.source else []),
        ]
        raise BridgeError(message(str(error), *where)) from None


def draws_random(graph: Graph, positions: Sequence[int]) -> bool:
    """Whether any of these nodes needs a PRNG key."""
    for position in positions:
        node = graph.nodes[position]
        found = registry.find(node.operator)
        if found is not None and found.random(*node.args, **node.kwargs):
            return True
    return False


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
    values: dict[int, Any] = dict(enumerate(inputs))

    def resolved(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return values[leaf.index]
        return leaf.at(rows) if isinstance(leaf, Affine) else leaf

    for position in graph.needed(outputs):
        node = graph.nodes[position]
        args, kwargs = tree_map(resolved, node.args), tree_map(resolved, node.kwargs)
        values[position + graph.num_inputs] = _evaluate(node, position, args, kwargs, rng)
    return tuple(tree_map(resolved, out) for out in outputs)


def _evaluate(node: Node, position: int, args: Any, kwargs: Any, rng: Any) -> Any:
    if node.operator is operator.getitem:
        return args[0][args[1]]
    found = registry.find(node.operator)
    if found is None:
        raise UnsupportedOpError(_unsupported({node.operator: node}))
    with jax.named_scope(node.path) if node.path else contextlib.nullcontext():
        if found.random(*node.args, **node.kwargs):
            kwargs = {**kwargs, "rng": node_key(rng, position, node.path)}
        return _cast(found.function(*args, **kwargs), node.dtypes)


def _cast(result: Any, dtypes: tuple[Any, ...]) -> Any:
    """Results in the dtype that torch gives them."""
    if isinstance(result, tuple | list):
        padded = (*dtypes, *(None,) * (len(result) - len(dtypes)))
        return tuple(_cast(item, (dtype,)) for item, dtype in zip(result, padded, strict=False))
    if not isinstance(result, jax.Array) or not dtypes or not isinstance(dtypes[0], torch.dtype):
        return result
    wanted = jax_dtype(dtypes[0])
    return result if result.dtype == wanted else result.astype(wanted)
