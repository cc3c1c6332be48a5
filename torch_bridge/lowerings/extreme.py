"""The largest and smallest elements over some dims; where several are equal, they share the gradient.

A compiler may compute x anew where it is compared with its extreme, rounded differently, so that nothing
equals it. The position found together with the extreme always counts: the gradient is never lost.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def largest(x: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    """The largest elements over `dims`."""
    return _extreme(x, dims, keepdims, True)


def smallest(x: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    """The smallest elements over `dims`."""
    return _extreme(x, dims, keepdims, False)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extreme(x: Any, dims: tuple[int, ...], keepdims: bool, is_largest: bool) -> Any:
    return (jnp.max if is_largest else jnp.min)(x, dims, keepdims=keepdims)


@_extreme.defjvp
def _extreme_jvp(dims: Any, keepdims: bool, is_largest: bool, primals: Any, tangents: Any) -> Any:
    (x,), (moved,) = primals, tangents
    out = _extreme(x, dims, True, is_largest)
    chosen = (x == out) | _first(x, dims, is_largest)
    share = chosen.astype(x.dtype) / jnp.sum(chosen, dims, keepdims=True).astype(x.dtype)
    moved = jnp.sum(moved * lax.stop_gradient(share), dims, keepdims=True)
    return (out, moved) if keepdims else (jnp.squeeze(out, dims), jnp.squeeze(moved, dims))


def _first(x: Any, dims: tuple[int, ...], is_largest: bool) -> Any:
    """True at one extreme element of each reduction."""
    kept = [d for d in range(x.ndim) if d not in dims]
    order = [*kept, *dims]
    rows = jnp.transpose(x, order).reshape(*(x.shape[d] for d in kept), math.prod(x.shape[d] for d in dims))
    index = (jnp.argmax if is_largest else jnp.argmin)(rows, -1)
    hit = lax.broadcasted_iota(index.dtype, rows.shape, len(kept)) == index[..., None]
    return jnp.transpose(hit.reshape([x.shape[d] for d in order]), [order.index(d) for d in range(x.ndim)])
