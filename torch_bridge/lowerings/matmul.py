"""Matrix products. Weights are contracted where they lie: no transposed copy of a weight is made.

Half-precision products accumulate in float32, as torch's do.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import accumulation, countable

aten = torch.ops.aten


def contract(a: Any, b: Any, a_dims: Sequence[int], b_dims: Sequence[int]) -> Any:
    """Sum over pairs of dims; the other dims of a, then those of b, remain."""
    return lax.dot_general(a, b, ((tuple(a_dims), tuple(b_dims)), ((), ())))


def biased(out: Any, bias: Any) -> Any:
    """out + bias, a broadcast bias. The gradient of the bias sums over all rows: in float32 at least."""
    wide = accumulation(out.dtype)
    return (out.astype(wide) + bias.astype(wide)).astype(out.dtype)


@lowering(aten.linear.default)
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """x `[..., in]`, weight `[out, in]` (or `[in]`)."""
    out = contract(x, weight, (x.ndim - 1,), (weight.ndim - 1,))
    return out if bias is None else biased(out, bias)


@lowering(aten.addmm.default)
def addmm(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _scaled_sum(x, contract(a, b, (1,), (0,)), beta, alpha)


@lowering(aten.addmv.default)
def addmv(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _scaled_sum(x, contract(a, b, (1,), (0,)), beta, alpha)


@lowering(aten.baddbmm.default)
def baddbmm(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _scaled_sum(x, jnp.matmul(a, b), beta, alpha)


@lowering(aten.addbmm.default)
def addbmm(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _scaled_sum(x, contract(a, b, (0, 2), (0, 1)), beta, alpha)


@lowering(aten.addr.default)
def addr(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _scaled_sum(x, jnp.outer(a, b), beta, alpha)


def _scaled_sum(x: Any, product: Any, beta: Any, alpha: Any) -> Any:
    if alpha != 1:
        product = jnp.asarray(alpha, product.dtype) * product
    if beta == 0:  # torch ignores x then, NaN and all
        return product
    return biased(product, x if beta == 1 else jnp.asarray(beta, x.dtype) * x)


@lowering(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default)
def matmul(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b)


@lowering(aten.vdot.default)
def vdot(a: Any, b: Any) -> Any:
    return jnp.vdot(a, b)


@lowering(aten.outer.default)
def outer(a: Any, b: Any) -> Any:
    return jnp.outer(a, b)


@lowering(aten.einsum.default)
def einsum(equation: str, operands: Sequence[Any], **_: Any) -> Any:
    return jnp.einsum(equation.replace(" ", ""), *operands)


@lowering(aten.bilinear.default)
def bilinear(a: Any, b: Any, weight: Any, bias: Any = None) -> Any:
    out = jnp.einsum("...i,oij,...j->...o", a, weight, b)
    return out if bias is None else out + bias


@lowering(aten.tensordot.default)
def tensordot(a: Any, b: Any, dims_self: Sequence[int], dims_other: Sequence[int]) -> Any:
    return jnp.tensordot(a, b, (tuple(dims_self), tuple(dims_other)))


@lowering(aten.kron.default)
def kron(a: Any, b: Any) -> Any:
    return jnp.kron(countable(a), countable(b))
