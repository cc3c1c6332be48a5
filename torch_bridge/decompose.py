"""Operators without a lowering are opened by torch's decomposition of that overload, recursively.

What remains without one is reported with operator, module path and source line.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table

from torch_bridge.errors import BridgeError, message
from torch_bridge.explain import refuse_unknown_shapes
from torch_bridge.lowerings import registry
from torch_bridge.signature import IGNORED


def open_unlowered(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Decompose what has no lowering until everything has one, or nothing more can be opened."""
    refuse_unknown_shapes(program)
    seen: set[Any] = set()
    while True:
        table = {
            op: opened for op in unlowered(program.graph) if op not in seen and (opened := decomposition(op))
        }
        if not table:
            return program
        seen |= set(table)
        program = program.run_decompositions(table)


def drop_checks(graph_module: torch.fx.GraphModule) -> None:
    """Erase operators that only raise where values are wrong, which a compiled program cannot.

    Made functional, they would thread tokens of their side effect through the graph.
    """
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in reversed(module.graph.nodes):
                if node.target in IGNORED and not node.users:
                    module.graph.erase_node(node)
            module.recompile()


def unlowered(graph: torch.fx.Graph) -> list[Any]:
    """Operators of a graph without a lowering, each once, in order of first use."""
    targets = dict.fromkeys(node.target for node in graph.nodes if node.op == "call_function")
    return [
        op for op in targets if op not in IGNORED and op is not operator.getitem and registry.find(op) is None
    ]


def decomposition(op: Any) -> Callable[..., Any] | None:
    """torch's decomposition of one overload: from its table, or its composite kernel."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if op in _OPENED_HERE:
        return _OPENED_HERE[op]
    if op in decomposition_table:
        return decomposition_table[op]
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if not op.has_kernel_for_dispatch_key(composite):
        return None
    kernel = op.py_kernels.get(composite)
    # Not op.decompose: while decomposing, the operator's own entry is the function returned here.
    return kernel if callable(kernel) else partial(op._op_dk, composite)


def _strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """A view of the storage as a gather."""
    return torch.take(x, _places(x, size, stride, storage_offset))


def _strided_scatter(
    x: torch.Tensor,
    source: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """Writing into a view of the storage as a put."""
    return torch.ops.aten.put.default(x, _places(x, size, stride, storage_offset), source)


def _places(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> torch.Tensor:
    """Positions in the storage, which are those of x where that fills its storage in reading order."""
    if not x.is_contiguous() or x.storage_offset() != 0:
        raise BridgeError(
            message(
                "as_strided reads the memory of a tensor that is itself a view.",
                f"strides of the tensor: {tuple(x.stride())}, offset {x.storage_offset()}",
                hint="call .contiguous() first, or write the view with reshape, permute, unfold or slicing",
            )
        )
    index = torch.full((), storage_offset or 0, dtype=torch.int64, device=x.device)
    for length, step in zip(size, stride, strict=True):
        index = index.unsqueeze(-1) + torch.arange(length, device=x.device) * step
    return index


def _instance_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *settings: Any
) -> torch.Tensor:
    """Without running statistics, a group norm of one channel a group: torch's own way lays all instances
    in one dim of channels, which hides the batch and the channels."""
    use_input_stats, _momentum, eps, cudnn_enabled = settings
    if use_input_stats and mean is None and var is None:
        return torch.ops.aten.group_norm.default(x, x.shape[1], weight, bias, eps, cudnn_enabled)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch.ops.aten.instance_norm.default._op_dk(composite, x, weight, bias, mean, var, *settings)


_OPENED_HERE = {
    torch.ops.aten.instance_norm.default: _instance_norm,
    torch.ops.aten.as_strided.default: _strided,
    torch.ops.aten.as_strided_copy.default: _strided,
    torch.ops.aten.as_strided_scatter.default: _strided_scatter,
    torch.ops.prims.as_strided_scatter.default: _strided_scatter,
}
