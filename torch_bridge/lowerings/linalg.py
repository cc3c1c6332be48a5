"""Factorisations, solves and what follows from them, over batches of matrices `[..., rows, columns]`.

A factorisation that fails gives NaN here, since a compiled program cannot raise; the `info` that torch
returns beside a factor says 0 where the factor is finite. Pivots count from 1, as LAPACK's do.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


def _adjoint(x: Any) -> Any:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _info(factor: Any) -> Any:
    return jnp.where(jnp.all(jnp.isfinite(factor), (-2, -1)), 0, 1).astype(jnp.int32)


def _is_vector(a: Any, b: Any) -> bool:
    """torch takes b as a batch of vectors if its shape is a's without the last dim."""
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])


def _batched(a: Any, b: Any) -> tuple[Any, Any]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])


@lowering(aten.linalg_cholesky_ex.default)
def cholesky_ex(x: Any, *, upper: bool = False, check_errors: bool = False) -> tuple[Any, Any]:
    del check_errors
    # The lower triangle alone counts, or the upper one: no symmetrisation, so that gradients agree.
    factor = jnp.linalg.cholesky(_adjoint(x) if upper else x)
    return (_adjoint(factor) if upper else factor), _info(factor)


@lowering(aten.cholesky.default)
def cholesky(x: Any, upper: bool = False) -> Any:
    return cholesky_ex(x, upper=upper)[0]


@lowering(aten.cholesky_solve.default)
def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    lower = _adjoint(factor) if upper else factor
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
    return inverse, _info(inverse)


@lowering(aten.linalg_pinv.atol_rtol_tensor)
def pinv_tensor(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    """Singular values up to max(atol, rtol * largest) count as 0."""
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


@lowering(aten.linalg_matrix_rank.atol_rtol_tensor, aten.linalg_matrix_rank.atol_rtol_float)
def matrix_rank(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    values = jnp.abs(jnp.linalg.eigvalsh(x)) if hermitian else jnp.linalg.svd(x, compute_uv=False)
    largest = jnp.max(values, -1)
    if rtol is None:
        unset = max(x.shape[-2:]) * float(jnp.finfo(values.dtype).eps)
        rtol = unset if atol is None else jnp.where(jnp.asarray(atol) > 0, 0.0, unset)
    limit = jnp.asarray(rtol, values.dtype) * largest
    if atol is not None:
        limit = jnp.maximum(limit, jnp.asarray(atol, values.dtype))
    return jnp.sum(values > limit[..., None], -1)


@lowering(aten.linalg_matrix_rank.default, aten.linalg_matrix_rank.tol_tensor)
def matrix_rank_tol(x: Any, tol: Any, hermitian: bool = False) -> Any:
    return matrix_rank(x, atol=tol, rtol=0.0, hermitian=hermitian)


@lowering(aten._linalg_det.default)
def det(x: Any) -> tuple[Any, Any, Any]:
    factor, pivots, _ = lax.linalg.lu(lax.stop_gradient(x))
    return jnp.linalg.det(x), factor, pivots + 1


@lowering(aten._linalg_slogdet.default)
def slogdet(x: Any) -> tuple[Any, Any, Any, Any]:
    factor, pivots, _ = lax.linalg.lu(lax.stop_gradient(x))
    sign, logarithm = jnp.linalg.slogdet(x)
    return sign, logarithm, factor, pivots + 1


@lowering(aten._linalg_solve_ex.default)
def solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> tuple[Any, ...]:
    del check_errors
    factor, pivots, _ = lax.linalg.lu(lax.stop_gradient(a))
    vector = _is_vector(a, b)
    right = b[..., None] if vector else b
    if left:
        out = jnp.linalg.solve(*_batched(a, right))
    else:
        out = _transposed(jnp.linalg.solve(*_batched(_transposed(a), _transposed(right))))
    return (out[..., 0] if vector else out), factor, pivots + 1, _info(factor)


def _transposed(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2)


@lowering(aten.linalg_solve_triangular.default)
def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    a, b = (_batched(a, b)) if left else (_batched(_transposed(a), _transposed(b)))
    out = lax.linalg.triangular_solve(a, b, left_side=True, lower=upper != left, unit_diagonal=unitriangular)
    return out if left else _transposed(out)


@lowering(aten.triangular_solve.default)
def triangular_solve(
    b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Any, Any]:
    wide, right = _batched(a, b)
    out = lax.linalg.triangular_solve(
        wide, right, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return out, wide


@lowering(aten.linalg_lu_factor_ex.default)
def lu_factor_ex(x: Any, *, pivot: bool = True, check_errors: bool = False) -> tuple[Any, Any, Any]:
    del pivot, check_errors
    factor, pivots, _ = lax.linalg.lu(x)
    return factor, pivots + 1, _info(factor)


@lowering(aten.linalg_lu.default)
def lu(x: Any, *, pivot: bool = True) -> tuple[Any, Any, Any]:
    del pivot
    factor, _, permutation = lax.linalg.lu(x)
    return (_permutation_matrix(permutation, factor.dtype), *_split(factor))


@lowering(aten.lu_unpack.default)
def lu_unpack(
    factor: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Any, Any, Any]:
    nothing = jnp.zeros((0,), factor.dtype)
    matrix = nothing
    if unpack_pivots:
        permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, factor.shape[-2])
        matrix = _permutation_matrix(permutation, factor.dtype)
    lower, upper = _split(factor) if unpack_data else (nothing, nothing)
    return matrix, lower, upper


def _permutation_matrix(permutation: Any, dtype: Any) -> Any:
    return _transposed(jax.nn.one_hot(permutation, permutation.shape[-1], dtype=dtype))


def _split(factor: Any) -> tuple[Any, Any]:
    """(unit lower, upper) of a packed factor."""
    rows, columns = factor.shape[-2:]
    inner = min(rows, columns)
    lower = jnp.tril(factor[..., :, :inner], -1) + jnp.eye(rows, inner, dtype=factor.dtype)
    return lower, jnp.triu(factor[..., :inner, :])


@lowering(aten.linalg_lu_solve.default)
def lu_solve(factor: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    if not left:
        # x a = b is a^H x^H = b^H.
        return _adjoint(lu_solve(factor, pivots, _adjoint(b), adjoint=not adjoint))
    permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, factor.shape[-2])
    matrix = _permutation_matrix(permutation, factor.dtype)
    lower, upper = _split(factor)
    full = matrix @ lower @ upper
    return jnp.linalg.solve(*_batched(_adjoint(full) if adjoint else full, b))


@lowering(aten._linalg_eigh.default)
def eigh(x: Any, uplo: str = "L", compute_v: bool = True) -> tuple[Any, Any]:
    if not compute_v:
        return jnp.linalg.eigvalsh(x, UPLO=uplo), jnp.zeros((0,), x.dtype)
    values, vectors = jnp.linalg.eigh(x, UPLO=uplo)
    return values, vectors


@lowering(aten.linalg_eig.default)
def eig(x: Any) -> tuple[Any, Any]:
    values, vectors = jnp.linalg.eig(x)
    return values, vectors


@lowering(aten.linalg_eigvals.default, aten._linalg_eigvals.default)
def eigvals(x: Any) -> Any:
    return jnp.linalg.eigvals(x)


@lowering(aten._linalg_svd.default)
def svd(
    x: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Any, Any, Any]:
    del driver
    if not compute_uv:
        nothing = jnp.zeros((0,), x.dtype)
        return nothing, jnp.linalg.svd(x, compute_uv=False), nothing
    u, s, vh = jnp.linalg.svd(x, full_matrices=full_matrices)
    return u, s, vh


@lowering(aten.linalg_qr.default)
def qr(x: Any, mode: str = "reduced") -> tuple[Any, Any]:
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


@lowering(aten.geqrf.default)
def geqrf(x: Any) -> tuple[Any, Any]:
    packed, taus = jnp.linalg.qr(x, mode="raw")
    return _transposed(packed), taus


@lowering(aten.linalg_householder_product.default)
def householder_product(x: Any, tau: Any) -> Any:
    """The first columns of the product of I - tau_i v_i v_i^H; v_i is below the diagonal, 1 on it."""
    rows, columns = x.shape[-2:]
    vectors = jnp.tril(x, -1) + jnp.eye(rows, columns, dtype=x.dtype)
    out = jnp.broadcast_to(jnp.eye(rows, columns, dtype=x.dtype), x.shape)
    for i in reversed(range(tau.shape[-1])):
        vector = vectors[..., :, i : i + 1]
        out = out - tau[..., i, None, None] * vector @ (_adjoint(vector) @ out)
    return out


@lowering(aten.ormqr.default)
def ormqr(x: Any, tau: Any, other: Any, left: bool = True, transpose: bool = False) -> Any:
    """Q (of all its columns) times `other`, from either side."""
    rows = x.shape[-2]
    wide = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rows - x.shape[-1])])
    q = householder_product(wide, tau)
    q = _adjoint(q) if transpose else q
    return q @ other if left else other @ q


@lowering(aten.linalg_matrix_exp.default)
def matrix_exp(x: Any) -> Any:
    if not x.size:
        return x
    exponential = jax.scipy.linalg.expm
    return jnp.vectorize(exponential, signature="(n,n)->(n,n)")(x)


# Forms that raise in torch where a matrix is singular: the ones that return `info`, without it. Opened by
# torch they would check the info in an operator with side effects.
@lowering(aten.linalg_cholesky.default)
def linalg_cholesky(x: Any, *, upper: bool = False) -> Any:
    return cholesky_ex(x, upper=upper)[0]


@lowering(aten.linalg_inv.default, aten.inverse.default)
def inv(x: Any) -> Any:
    return inv_ex(x)[0]


@lowering(aten.linalg_solve.default)
def solve(a: Any, b: Any, *, left: bool = True) -> Any:
    return solve_ex(a, b, left=left)[0]


@lowering(aten.linalg_lu_factor.default)
def lu_factor(x: Any, *, pivot: bool = True) -> tuple[Any, Any]:
    factor, pivots, _ = lu_factor_ex(x, pivot=pivot)
    return factor, pivots
