"""Which operators of a module the bridge can lower: a table to read before converting.

Example, from the shell: `python -m torch_bridge coverage package.module:factory`, where `factory()`
returns (module, args) or (module, args, kwargs).
"""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_bridge import lowerings  # noqa: F401 - fills the registry
from torch_bridge.export import Exportable, export
from torch_bridge.inputs import describe
from torch_bridge.lowerings import registry
from torch_bridge.precision import FullPrecision
from torch_bridge.signature import read_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorUse:
    """One operator of a module: how often it is called, whether it has a lowering, where it is first met."""

    operator: str
    count: int
    lowered: bool
    path: str
    source: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """Every operator of an exported module, those without a lowering first. Prints as a table."""

    uses: tuple[OperatorUse, ...]

    @property
    def missing(self) -> tuple[OperatorUse, ...]:
        return tuple(use for use in self.uses if not use.lowered)

    def __str__(self) -> str:
        width = max((len(use.operator) for use in self.uses), default=8)
        lines = [f"{'operator':{width}}  count  lowered  first module path"]
        for use in self.uses:
            path = use.path or "(root)"
            where = path if use.lowered or not use.source else f"{path}  at {use.source}"
            lines.append(
                f"{use.operator:{width}}  {use.count:5d}  {'yes' if use.lowered else 'NO':7}  {where}"
            )
        calls = sum(use.count for use in self.uses)
        done = sum(use.count for use in self.uses if use.lowered)
        lines.append(
            f"{done} of {calls} calls, {len(self.uses) - len(self.missing)} of {len(self.uses)} operators"
        )
        return "\n".join(lines)


def coverage(
    module: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Coverage:
    """Export a module and look up each operator, after torch's decompositions of what has no lowering.

    Args:
        module, args, kwargs: as for `convert`.

    Raises:
        BridgeError: if the module cannot be exported.
    """
    inputs = describe(module, tuple(args), dict(kwargs or {}), None)
    program = export(Exportable(module, inputs, None, FullPrecision()), inputs.tensors)
    nodes = [
        n for n in read_graph(program.graph, program.graph_module).nodes if n.operator is not operator.getitem
    ]
    counts = Counter(node.operator for node in nodes)
    first = {node.operator: node for node in reversed(nodes)}
    uses = [
        OperatorUse(
            operator=str(op),
            count=count,
            lowered=registry.find(op) is not None,
            path=first[op].path,
            source=first[op].source,
        )
        for op, count in counts.items()
    ]
    return Coverage(tuple(sorted(uses, key=lambda use: (use.lowered, -use.count, use.operator))))
