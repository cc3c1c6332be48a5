"""Systems of linear equations, inverses and pseudoinverses over batches `[..., rows, columns]`.

A singular matrix gives NaN or infinity here, since a compiled program cannot raise.
"""

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.linalg import hermitian_transpose, info, permutation_matrix, transposed, unpacked
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


def _is_vector(a: Any, b: Any) -> bool:
    """torch takes b as a batch of vectors if its shape is a's without the last dim."""
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])


def _batched(a: Any, b: Any) -> tuple[Any, Any]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])


@lowering(aten.cholesky_solve.default)
def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    lower = hermitian_transpose(factor) if upper else factor
    lower, b = _batched(lower, b)
    first = lax.linalg.triangular_solve(lower, b, left_side=True, lower=True)
    return lax.linalg.triangular_solve(
        lower, first, left_side=True, lower=True, transpose_a=True, conjugate_a=True
    )


@lowering(aten.cholesky_inverse.default)
def cholesky_inverse(factor: Any, upper: bool = False) -> Any:
    return cholesky_solve(_identity_like(factor), factor, upper)


def _identity_like(x: Any) -> Any:
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


@lowering(aten.linalg_inv_ex.default)
def inv_ex(x: Any, *, check_errors: bool = False) -> tuple[Any, Any]:
    del check_errors
    inverse = jnp.linalg.inv(x)
    return inverse, info(inverse)


@lowering(aten.linalg_pinv.atol_rtol_tensor)
def pinv_tensor(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    """Singular values up to max(atol, rtol * largest) count as 0."""
    if not x.size:
        return transposed(x)
    if atol is None and rtol is None:
        rtol = max(x.shape[-2:]) * float(jnp.finfo(x.dtype).eps)
    largest = lax.stop_gradient(jnp.linalg.svd(x, compute_uv=False)[..., 0])
    share = jnp.zeros_like(largest) if rtol is None else jnp.asarray(rtol, largest.dtype)
    if atol is not None:
        # As a share of the largest; a matrix of zeros has no share, and its inverse is zero anyway.
        tiny = jnp.finfo(largest.dtype).tiny
        share = jnp.maximum(share, jnp.asarray(atol, largest.dtype) / jnp.maximum(largest, tiny))
    return jnp.linalg.pinv(x, rtol=jnp.broadcast_to(share, largest.shape), hermitian=hermitian)


@lowering(aten.linalg_pinv.atol_rtol_float)
def pinv_float(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    return pinv_tensor(x, atol=atol, rtol=rtol, hermitian=hermitian)


@lowering(aten.linalg_pinv.default, aten.linalg_pinv.rcond_tensor, aten.pinverse.default)
def pinv(x: Any, rcond: Any = 1e-15, hermitian: bool = False) -> Any:
    return pinv_tensor(x, atol=0.0, rtol=rcond, hermitian=hermitian)


@lowering(aten._linalg_solve_ex.default)
def solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> tuple[Any, ...]:
    del check_errors
    factor, pivots, _ = lax.linalg.lu(lax.stop_gradient(a))
    vector = _is_vector(a, b)
    right = b[..., None] if vector else b
    if left:
        out = jnp.linalg.solve(*_batched(a, right))
    else:
        out = transposed(jnp.linalg.solve(*_batched(transposed(a), transposed(right))))
    return (out[..., 0] if vector else out), factor, pivots + 1, info(factor)


@lowering(aten.linalg_solve_triangular.default)
def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    a, b = (_batched(a, b)) if left else (_batched(transposed(a), transposed(b)))
    out = lax.linalg.triangular_solve(a, b, left_side=True, lower=upper != left, unit_diagonal=unitriangular)
    return out if left else transposed(out)


@lowering(aten.triangular_solve.default)
def triangular_solve(
    b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Any, Any]:
    wide, right = _batched(a, b)
    out = lax.linalg.triangular_solve(
        wide, right, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return out, wide


@lowering(aten.linalg_lu_solve.default)
def lu_solve(factor: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    if not left:
        # x a = b is a^H x^H = b^H.
        return hermitian_transpose(lu_solve(factor, pivots, hermitian_transpose(b), adjoint=not adjoint))
    permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, factor.shape[-2])
    matrix = permutation_matrix(permutation, factor.dtype)
    lower, upper = unpacked(factor)
    full = matrix @ lower @ upper
    return jnp.linalg.solve(*_batched(hermitian_transpose(full) if adjoint else full, b))


@lowering(aten.linalg_inv.default, aten.inverse.default)
def inv(x: Any) -> Any:
    return inv_ex(x)[0]


@lowering(aten.linalg_solve.default)
def solve(a: Any, b: Any, *, left: bool = True) -> Any:
    return solve_ex(a, b, left=left)[0]
