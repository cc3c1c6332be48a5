"""Products of rows with the matrix of their group: mixtures of experts with their tokens sorted by expert."""

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.errors import BridgeError, message
from torch_bridge.lowerings.registry import lowering, lowering_by_name
from torch_bridge.tensors import jax_dtype

aten = torch.ops.aten


@lowering(aten._grouped_mm.default)
def grouped_mm(x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Group g of the rows (or columns, or the contracted dim) ends at offs[g].

    `[rows, in] @ [groups, in, out]`; `[groups, rows, in] @ [in, columns]`, columns in groups;
    `[rows, in] @ [in, columns]`, the contracted dim in groups, gives `[groups, rows, columns]`; and
    `[groups, rows, in] @ [groups, in, out]` without offs. Rows after the last group are 0.
    """
    if bias is not None:
        raise BridgeError(message("_grouped_mm with a bias has no lowering.", hint="add it afterwards"))
    if x.ndim == weight.ndim == 3:
        out = jnp.matmul(x, weight)
    elif x.ndim == 2 and weight.ndim == 3:
        out = lax.ragged_dot(x, weight, _sizes(offs))
    elif x.ndim == 3:
        turned = lax.ragged_dot(weight.T, jnp.swapaxes(x, 1, 2), _sizes(offs))
        out = turned.T
    else:
        out = lax.ragged_dot_general(x, weight, _sizes(offs), _CONTRACTED)
    return out if out_dtype is None else out.astype(jax_dtype(out_dtype))


_CONTRACTED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (0,)), ((), ())), lhs_ragged_dimensions=[1], rhs_group_dimensions=[]
)


def _sizes(offs: Any) -> Any:
    return jnp.diff(offs, prepend=jnp.zeros((1,), offs.dtype)).astype(jnp.int32)


@lowering_by_name("transformers::grouped_mm_fallback")
def grouped_mm_fallback(x: Any, weight: Any, offs: Any) -> Any:
    """What transformers exports where torch's own operator cannot be traced."""
    return grouped_mm(x, weight, offs)
