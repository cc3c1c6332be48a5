"""Operators without a lowering are opened by torch's decomposition of that overload, recursively.

What remains without one is reported with operator, module path and source line.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table

from torch_bridge.lowerings import registry

# Checks of values and of symbolic sizes: they compute nothing.
IGNORED = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_async.default,
    torch.ops.aten._functional_assert_scalar.default,
    torch.ops.aten._functional_assert_async.msg,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


def open_unlowered(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Decompose what has no lowering until everything has one, or nothing more can be opened."""
    seen: set[Any] = set()
    while True:
        table = {
            op: opened for op in unlowered(program.graph) if op not in seen and (opened := decomposition(op))
        }
        if not table:
            return program
        seen |= set(table)
        program = program.run_decompositions(table)


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
    if op in decomposition_table:
        return decomposition_table[op]
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if not op.has_kernel_for_dispatch_key(composite):
        return None
    kernel = op.py_kernels.get(composite)
    # Not op.decompose: while decomposing, the operator's own entry is the function returned here.
    return kernel if callable(kernel) else partial(op._op_dk, composite)
