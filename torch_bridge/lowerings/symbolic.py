"""Numbers that a program computes beside its tensors.

Sizes are Python integers and stay such: nothing is traced. What is read out of a tensor (`.item()`) is a
scalar array, and the same arithmetic goes on with it.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import default_float, jax_dtype

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
):
    lowering(_operator)(_operator)


def _either(of_numbers: Callable[..., Any], of_arrays: Callable[..., Any]) -> Callable[..., Any]:
    """The one for Python numbers, or the one for arrays if any argument is one."""
    return lambda *args: (of_arrays if any(isinstance(a, jax.Array) for a in args) else of_numbers)(*args)


for _target, _of_numbers, _of_arrays in (
    (math.ceil, math.ceil, jnp.ceil),
    (math.floor, math.floor, jnp.floor),
    (math.trunc, math.trunc, jnp.trunc),
    (round, round, jnp.round),
    (torch.sym_max, max, jnp.maximum),
    (torch.sym_min, min, jnp.minimum),
    (torch.sym_int, int, lambda x: jnp.trunc(x).astype(jax_dtype(torch.int64))),
    (torch.sym_float, float, lambda x: jnp.asarray(x, default_float())),
    (torch.sym_not, operator.not_, jnp.logical_not),
    (torch.sym_ite, lambda condition, yes, no: yes if condition else no, jnp.where),
):
    lowering(_target)(_either(_of_numbers, _of_arrays))

lowering(torch.sym_sqrt)(math.sqrt)
