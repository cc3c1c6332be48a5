"""Sizes that a program computes: Python integers in, Python integers out, nothing is traced."""

import math
import operator
from typing import Any

import torch

from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


@lowering(aten.sym_size.int)
def sym_size(x: Any, dim: int) -> int:
    return x.shape[dim]


@lowering(aten.sym_numel.default)
def sym_numel(x: Any) -> int:
    return math.prod(x.shape)


for _operator in (
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.truediv,
    operator.mod,
    operator.pow,
    operator.neg,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.and_,
    operator.or_,
    math.ceil,
    math.floor,
    math.trunc,
    round,
):
    lowering(_operator)(_operator)

lowering(torch.sym_max)(max)
lowering(torch.sym_min)(min)
lowering(torch.sym_int)(int)
lowering(torch.sym_float)(float)
lowering(torch.sym_not)(operator.not_)
lowering(torch.sym_sqrt)(math.sqrt)


@lowering(torch.sym_ite)
def sym_ite(condition: bool, yes: Any, no: Any) -> Any:
    return yes if condition else no
