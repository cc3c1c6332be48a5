"""Products of rows with the matrix of their group: mixtures of experts with their tokens sorted by expert."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        out = _contracted_in_groups(x, weight, _sizes(offs))
    return out if out_dtype is None else out.astype(jax_dtype(out_dtype))


_CONTRACTED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (0,)), ((), ())), lhs_ragged_dimensions=[1], rhs_group_dimensions=[]
)


@jax.custom_vjp
def _contracted_in_groups(x: Any, y: Any, sizes: Any) -> Any:
    """`[rows, in] @ [in, columns]`, one product for each group of `in`. JAX has no derivative of it."""
    return lax.ragged_dot_general(x, y, sizes, _CONTRACTED)


def _contracted_forward(x: Any, y: Any, sizes: Any) -> tuple[Any, Any]:
    return _contracted_in_groups(x, y, sizes), (x, y, sizes)


def _contracted_backward(residuals: Any, cotangent: Any) -> tuple[Any, Any, Any]:
    x, y, sizes = residuals
    to_x = lax.ragged_dot(y, jnp.swapaxes(cotangent, 1, 2), sizes).T
    to_y = lax.ragged_dot(x.T, cotangent, sizes)
    return to_x, to_y, np.zeros(sizes.shape, jax.dtypes.float0)


_contracted_in_groups.defvjp(_contracted_forward, _contracted_backward)


def _sizes(offs: Any) -> Any:
    return jnp.diff(offs, prepend=jnp.zeros((1,), offs.dtype)).astype(jnp.int32)


@lowering_by_name("transformers::grouped_mm_fallback")
def grouped_mm_fallback(x: Any, weight: Any, offs: Any) -> Any:
    """What transformers exports where torch's own operator cannot be traced."""
    return grouped_mm(x, weight, offs)
