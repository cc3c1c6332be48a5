"""Factorisations and what follows from them, over batches of matrices `[..., rows, columns]`.

A factorisation that fails gives NaN here, since a compiled program cannot raise; the `info` that torch
returns beside a factor says 0 where the factor is finite. Pivots count from 1, as LAPACK's do.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import jax_dtype

aten = torch.ops.aten


def hermitian_transpose(x: Any) -> Any:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def info(factor: Any) -> Any:
    return jnp.where(jnp.all(jnp.isfinite(factor), (-2, -1)), 0, 1).astype(jnp.int32)


@lowering(aten.linalg_cholesky_ex.default)
def cholesky_ex(x: Any, *, upper: bool = False, check_errors: bool = False) -> tuple[Any, Any]:
    del check_errors
    # The lower triangle alone counts, or the upper one: no symmetrisation, so that gradients agree.
    factor = jnp.linalg.cholesky(hermitian_transpose(x) if upper else x)
    return (hermitian_transpose(factor) if upper else factor), info(factor)


@lowering(aten.cholesky.default)
def cholesky(x: Any, upper: bool = False) -> Any:
    return cholesky_ex(x, upper=upper)[0]


@lowering(aten.linalg_matrix_rank.atol_rtol_tensor, aten.linalg_matrix_rank.atol_rtol_float)
def matrix_rank(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    if not x.size:
        return jnp.zeros(x.shape[:-2], jax_dtype(torch.int64))
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
    value = jnp.linalg.det(x) if x.size else jnp.ones(x.shape[:-2], x.dtype)
    return value, factor, pivots + 1


@lowering(aten._linalg_slogdet.default)
def slogdet(x: Any) -> tuple[Any, Any, Any, Any]:
    factor, pivots, _ = lax.linalg.lu(lax.stop_gradient(x))
    sign, logarithm = jnp.linalg.slogdet(x)
    return sign, logarithm, factor, pivots + 1


def transposed(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2)


@lowering(aten.linalg_lu_factor_ex.default)
def lu_factor_ex(x: Any, *, pivot: bool = True, check_errors: bool = False) -> tuple[Any, Any, Any]:
    del pivot, check_errors
    factor, pivots, _ = lax.linalg.lu(x)
    return factor, pivots + 1, info(factor)


@lowering(aten.linalg_lu.default)
def lu(x: Any, *, pivot: bool = True) -> tuple[Any, Any, Any]:
    del pivot
    factor, _, permutation = lax.linalg.lu(x)
    return (permutation_matrix(permutation, factor.dtype), *unpacked(factor))


@lowering(aten.lu_unpack.default)
def lu_unpack(
    factor: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Any, Any, Any]:
    nothing = jnp.zeros((0,), factor.dtype)
    matrix = nothing
    if unpack_pivots:
        permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, factor.shape[-2])
        matrix = permutation_matrix(permutation, factor.dtype)
    lower, upper = unpacked(factor) if unpack_data else (nothing, nothing)
    return matrix, lower, upper


def permutation_matrix(permutation: Any, dtype: Any) -> Any:
    return transposed(jax.nn.one_hot(permutation, permutation.shape[-1], dtype=dtype))


def unpacked(factor: Any) -> tuple[Any, Any]:
    """(unit lower, upper) of a packed factor."""
    rows, columns = factor.shape[-2:]
    inner = min(rows, columns)
    lower = jnp.tril(factor[..., :, :inner], -1) + jnp.eye(rows, inner, dtype=factor.dtype)
    return lower, jnp.triu(factor[..., :inner, :])


@lowering(aten._linalg_eigh.default)
def eigh(x: Any, uplo: str = "L", compute_v: bool = True) -> tuple[Any, Any]:
    if not compute_v:
        return jnp.linalg.eigvalsh(x, UPLO=uplo), jnp.zeros((0,), x.dtype)
    values, vectors = jnp.linalg.eigh(x, UPLO=uplo)
    return values, vectors


@lowering(aten.linalg_eig.default)
@jax.custom_jvp
def eig(x: Any) -> tuple[Any, Any]:
    """Eigenvectors of length 1, each up to a phase."""
    values, vectors = jnp.linalg.eig(x)
    return values, vectors


@eig.defjvp
def _eig_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    """dV = V (V^-1 dA V / (l_j - l_i)), less what would change the vectors' lengths (Boeddeker et al. 2017).

    JAX's own rule fixes the phase; torch's gradient holds for functions that do not see it.
    """
    values, vectors = eig(primals[0])
    inner = jnp.linalg.solve(vectors, tangents[0].astype(vectors.dtype) @ vectors)
    same = jnp.eye(values.shape[-1], dtype=bool)
    gaps = jnp.where(same, 1, values[..., None, :] - values[..., :, None])
    moved = vectors @ jnp.where(same, 0, inner / gaps)
    along = jnp.real(jnp.sum(jnp.conj(vectors) * moved, -2, keepdims=True))
    return (values, vectors), (jnp.diagonal(inner, axis1=-2, axis2=-1), moved - vectors * along)


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
    return transposed(packed), taus


@lowering(aten.linalg_householder_product.default)
def householder_product(x: Any, tau: Any) -> Any:
    """The first columns of the product of I - tau_i v_i v_i^H; v_i is below the diagonal, 1 on it."""
    rows, columns = x.shape[-2:]
    vectors = jnp.tril(x, -1) + jnp.eye(rows, columns, dtype=x.dtype)
    out = jnp.broadcast_to(jnp.eye(rows, columns, dtype=x.dtype), x.shape)
    for i in reversed(range(tau.shape[-1])):
        vector = vectors[..., :, i : i + 1]
        out = out - tau[..., i, None, None] * vector @ (hermitian_transpose(vector) @ out)
    return out


@lowering(aten.ormqr.default)
def ormqr(x: Any, tau: Any, other: Any, left: bool = True, transpose: bool = False) -> Any:
    """Q (of all its columns) times `other`, from either side."""
    rows = x.shape[-2]
    wide = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rows - x.shape[-1])])
    q = householder_product(wide, tau)
    q = hermitian_transpose(q) if transpose else q
    return q @ other if left else other @ q


@lowering(aten.linalg_matrix_exp.default)
def matrix_exp(x: Any) -> Any:
    exponential = jax.scipy.linalg.expm
    return jnp.vectorize(exponential, signature="(n,n)->(n,n)")(x) if x.size else x


# Forms that raise in torch where a matrix is singular: the ones that return `info`, without it. Opened by
# torch they would check the info in an operator with side effects.
@lowering(aten.linalg_cholesky.default)
def linalg_cholesky(x: Any, *, upper: bool = False) -> Any:
    return cholesky_ex(x, upper=upper)[0]


@lowering(aten.linalg_lu_factor.default)
def lu_factor(x: Any, *, pivot: bool = True) -> tuple[Any, Any]:
    factor, pivots, _ = lu_factor_ex(x, pivot=pivot)
    return factor, pivots
