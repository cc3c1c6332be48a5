"""Values of torch as values of JAX and back: dtypes, promotion, tensors.

torch's int64 is int32 here unless JAX runs with x64, and a value that does not fit is an error, never a
wrap; the largest and the smallest int64, which stand for "beyond any", become those of int32. float64
and complex128 need x64. bfloat16 and float8 keep their bits.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from torch_bridge.errors import BridgeError, message

_DTYPES: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}
TORCH_DTYPES = {np.dtype(value): key for key, value in _DTYPES.items()}
# Dtypes numpy does not know travel through an integer view of the same width.
_CARRIERS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_NARROW = {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}
_NEEDS_X64 = {np.dtype(np.float64), np.dtype(np.complex128)}


def x64_enabled() -> bool:
    """Whether JAX currently keeps 64-bit dtypes."""
    return bool(jax.config.read("jax_enable_x64"))


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The dtype that stands for a torch dtype: the same one, or int32 for int64 without x64.

    Raises:
        BridgeError: for float64 and complex128 without x64, and for dtypes JAX does not have.
    """
    if dtype not in _DTYPES:
        raise BridgeError(message(f"{dtype} has no counterpart in JAX."))
    exact = np.dtype(_DTYPES[dtype])
    if x64_enabled():
        return exact
    if exact in _NEEDS_X64:
        raise BridgeError(
            message(
                f"{dtype} needs 64-bit JAX.",
                hint="jax.config.update('jax_enable_x64', True), or module.float() before convert",
            )
        )
    return _NARROW.get(exact, exact)


def to_jax(value: Any, *, what: str = "value") -> Any:
    """A jax.Array holding a copy of a torch tensor or numpy array; abstract tensors become avals.

    Args:
        value: a torch tensor (strided, any device), a numpy array, or anything `jnp.asarray` takes.
        what: how an error names it.

    Raises:
        BridgeError: if an integer does not fit into int32 and JAX runs without x64.
    """
    if isinstance(value, torch.Tensor):
        dtype = jax_dtype(value.dtype)
        if is_abstract(value):
            return jax.ShapeDtypeStruct(tuple(value.shape), dtype)
        value = _to_numpy(value)
    if isinstance(value, np.ndarray) and value.dtype in _NARROW and not x64_enabled():
        value = _narrowed(value, what)
    return jnp.array(value)


def to_torch(array: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A torch tensor (host) holding a copy of an array, in `dtype` if given."""
    host = np.asarray(array)
    own = TORCH_DTYPES[host.dtype]
    if own in _CARRIERS:
        carrier = np.dtype(_DTYPES[_CARRIERS[own]])
        tensor = torch.from_numpy(host.view(carrier).copy()).view(own)
    else:
        tensor = torch.from_numpy(np.array(host))
    return tensor if dtype is None else tensor.to(dtype)


def is_abstract(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no values (meta or fake)."""
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    if host.dtype in _CARRIERS:
        carrier = host.contiguous().view(_CARRIERS[host.dtype]).numpy()
        return carrier.view(_DTYPES[host.dtype])
    return host.numpy(force=True)  # torch's lazy zeros too


def constant(value: Any, dtype: Any) -> Any:
    """A number (or an array without dims, where it depends on data) in a dtype.

    Raises:
        BridgeError: if an integer does not fit into int32 and JAX runs without x64.
    """
    dtype = np.dtype(dtype)
    if isinstance(value, int) and np.issubdtype(dtype, np.integer):
        bounds = np.iinfo(dtype)
        if dtype == np.int32 and not x64_enabled():
            wide = np.iinfo(np.int64)
            value = {wide.max: bounds.max, wide.min: bounds.min}.get(value, value)
        if not bounds.min <= value <= bounds.max:
            raise BridgeError(
                message(
                    f"{value} does not fit into {dtype}.", hint="jax.config.update('jax_enable_x64', True)"
                )
            )
    return jnp.asarray(value, dtype)


def _narrowed(value: np.ndarray, what: str) -> np.ndarray:
    wide, bounds = np.iinfo(value.dtype), np.iinfo(_NARROW[value.dtype])
    narrow = value.astype(bounds.dtype)
    if not np.array_equal(narrow, value):
        narrow = np.where(value == wide.max, bounds.max, narrow)
        narrow = np.where(value == wide.min, bounds.min, narrow)
        outside = (narrow != value) & (value != wide.max) & (value != wide.min)
        if outside.any():
            raise BridgeError(
                message(
                    f"{what} holds integers that do not fit into {bounds.dtype}.",
                    f"range: {value[outside].min()} to {value[outside].max()}",
                    hint="jax.config.update('jax_enable_x64', True)",
                )
            )
    return narrow


def promoted(values: Sequence[Any]) -> np.dtype:
    """The dtype torch computes in, given arrays and Python scalars.

    A zero-dimensional array yields to one with dims of the same kind, and a Python scalar to both:
    https://pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc
    """
    ranked: list[list[np.dtype]] = [[], [], []]
    for value in values:
        if isinstance(value, bool | int | float | complex):
            ranked[2].append(_scalar_dtype(value))
        else:
            ranked[0 if value.ndim else 1].append(np.dtype(value.dtype))
    result: np.dtype | None = None
    for dtypes in ranked:
        if not dtypes:
            continue
        here = dtypes[0]
        for dtype in dtypes[1:]:
            here = np.dtype(jnp.promote_types(here, dtype))
        if result is None:
            result = here
        elif _category(here) > _category(result):
            result = _with_precision_of(here, result)
    assert result is not None, "promotion of nothing"
    return result


def promote(*values: Any) -> tuple[Any, ...]:
    """Arrays and scalars as arrays of the dtype that torch computes in."""
    dtype = promoted(values)
    return tuple(constant(value, dtype) for value in values)


def floating(x: Any) -> Any:
    """Integers and booleans as torch's default float dtype, floats as they are."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(default_float())


def widened(x: Any) -> Any:
    """Floats in the dtype that a function with many steps is computed in: float32 for half precision."""
    x = floating(x)
    return x.astype(accumulation(x.dtype))


def countable(x: Any) -> Any:
    """Booleans as numbers: what adds up to more than 0 is true again in torch."""
    return x.astype(jnp.int32) if x.dtype == bool else x


def default_float() -> np.dtype:
    """The dtype of a Python float that becomes a tensor."""
    return jax_dtype(torch.get_default_dtype())


def accumulation(dtype: Any) -> np.dtype:
    """float32 for half precision, the dtype itself otherwise: what torch accumulates reductions in."""
    half = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
    return np.dtype(np.float32) if np.dtype(dtype) in half else np.dtype(dtype)


def _scalar_dtype(value: complex) -> np.dtype:
    if isinstance(value, bool):
        return np.dtype(np.bool_)
    if isinstance(value, int):
        return jax_dtype(torch.int64)
    if isinstance(value, float):
        return default_float()
    return np.dtype(jnp.promote_types(default_float(), np.complex64))


def _category(dtype: np.dtype) -> int:
    if dtype == np.bool_:
        return 0
    if jnp.issubdtype(dtype, jnp.integer):
        return 1
    return 2 if jnp.issubdtype(dtype, jnp.floating) else 3


def _with_precision_of(higher: np.dtype, lower: np.dtype) -> np.dtype:
    # A complex scalar beside a float array keeps the array's precision.
    if _category(higher) == 3 and _category(lower) == 2:
        return np.dtype(jnp.promote_types(lower, np.complex64))
    return higher
