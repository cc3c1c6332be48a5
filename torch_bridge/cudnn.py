"""cuDNN's fused attention as a second way to compute `torch_bridge.attention`, on NVIDIA GPUs.

JAX offers it as `jax.nn.dot_product_attention(implementation="cudnn")`. Its forward makes what the XLA
form makes, an output and the logsumexp of each query in float32, but hands the logsumexp to its own
derivative rule only. So `forward` takes it out of the closure that `jax.vjp` returns, and `backward`
opens a closure of the same kind, puts the saved values in, and calls it; the forward that made that
closure is dead code, which XLA drops. What is saved is thus the same on every platform.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PLATFORM = "cuda"
MIN_COMPUTE_CAPABILITY = 8.0  # Ampere: cuDNN's fused attention needs its tensor cores
# JAX hides keys by these finite numbers for cuDNN, which cannot subtract one infinity from another.
_LOWEST = {np.dtype(jnp.bfloat16): -(2.0**41), np.dtype(np.float16): -(2.0**15)}


def takes(settings: Any, query: Any, key: Any, value: Any, bias: Any, allowed: Any, seeds: Any) -> bool:
    """Whether cuDNN computes this attention as torch defines it, on a GPU of this process.

    Not with dropout (its bits are not made row by row), with causal attention of unequal lengths or
    beside a mask, with a bias of another dtype (rounding it would change the result), nor what JAX's own
    checks of dtypes, head dims and lengths refuse.
    """
    plain = bias is None and allowed is None
    lengths_fit = query.shape[2] == key.shape[2]
    if seeds is not None or settings.keep < 1.0 or query.dtype not in _LOWEST:
        return False
    if settings.causal and not (plain and lengths_fit):
        return False
    if bias is not None and bias.dtype != query.dtype:
        return False
    avals = [None if x is None else (x.shape, np.dtype(x.dtype)) for x in (query, key, value, bias, allowed)]
    return _has_device() and _passes(settings, *avals)


@functools.cache
def _has_device() -> bool:
    try:
        devices = jax.local_devices(backend=PLATFORM)
    except RuntimeError:
        return False
    return all(float(device.compute_capability) >= MIN_COMPUTE_CAPABILITY for device in devices)


@functools.lru_cache(maxsize=1024)
def _passes(settings: Any, *avals: Any) -> bool:
    """Whether JAX's checks let it through, forward and backward."""
    operands = [None if aval is None else jax.ShapeDtypeStruct(*aval) for aval in avals]
    try:
        output, logsumexp = jax.eval_shape(functools.partial(forward, settings), *operands)
        jax.eval_shape(functools.partial(backward, settings), *operands, output, logsumexp, output)
    except (NotImplementedError, ValueError, RuntimeError):
        return False
    return True


def forward(settings: Any, query: Any, key: Any, value: Any, bias: Any, allowed: Any) -> tuple[Any, Any]:
    """Output `[batch, heads, queries, dim]` and logsumexp `[batch, heads, queries]`."""
    fused, operands = _fused(settings, query, key, value, bias, allowed)
    output, pull = jax.vjp(fused, *operands)
    (position,) = _statistics(jax.tree.leaves(pull), query)
    output = _swapped(output)
    visible = _visible(bias, allowed)
    if visible is not None:
        output = jnp.where(visible, output, jnp.zeros_like(output))
    return output, jax.tree.leaves(pull)[position]


def backward(
    settings: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    allowed: Any,
    output: Any,
    logsumexp: Any,
    cotangent: Any,
) -> tuple[Any, Any, Any, Any]:
    """Gradients of query, key, value and bias (None without one), from what `forward` returned."""
    visible = _visible(bias, allowed)
    if visible is not None:
        cotangent = jnp.where(visible, cotangent, jnp.zeros_like(cotangent))
    fused, operands = _fused(settings, query, key, value, bias, allowed)
    fresh, pull = jax.vjp(fused, *operands)
    leaves, structure = jax.tree.flatten(pull)
    (position,) = _statistics(leaves, query)
    leaves[position] = logsumexp
    leaves = [_swapped(output) if leaf is fresh else leaf for leaf in leaves]
    gradients = jax.tree.unflatten(structure, leaves)(_swapped(cotangent))
    by_operand = [_swapped(gradient) for gradient in gradients[:3]]
    return by_operand[0], by_operand[1], by_operand[2], gradients[3] if bias is not None else None


def _fused(
    settings: Any, query: Any, key: Any, value: Any, bias: Any, allowed: Any
) -> tuple[Any, tuple[Any, ...]]:
    """A function of (query, key, value[, bias]) in cuDNN's layout `[batch, length, heads, dim]`."""
    lengths = query.shape[2], key.shape[2]
    lowest = _LOWEST[np.dtype(query.dtype)]
    mask = None if allowed is None else jnp.broadcast_to(allowed, (*allowed.shape[:2], *lengths))

    def fused(query: Any, key: Any, value: Any, bias: Any = None) -> Any:
        if bias is not None:
            bias = jnp.broadcast_to(jnp.maximum(bias, lowest), (*bias.shape[:2], *lengths))
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            scale=settings.scale,
            is_causal=settings.causal,
            implementation="cudnn",
        )

    operands = (_swapped(query), _swapped(key), _swapped(value))
    return fused, operands if bias is None else (*operands, bias)


def _statistics(leaves: list[Any], query: Any) -> list[int]:
    """Where the logsumexp is among a closure's leaves: all else is in half precision."""
    shape = query.shape[:3]
    return [i for i, x in enumerate(leaves) if x.dtype == np.float32 and x.shape == shape]


def _swapped(x: Any) -> Any:
    return jnp.swapaxes(x, 1, 2)


def _visible(bias: Any, allowed: Any) -> Any:
    """Which queries see a key, `[batch, heads, queries, 1]`; None if all do. torch gives the others 0."""
    if allowed is not None:
        seen = allowed if bias is None else allowed & (bias > -jnp.inf)
    elif bias is not None:
        seen = bias > -jnp.inf
    else:
        return None
    return jnp.any(seen, -1, keepdims=True)
