"""Fourier transforms: torch's three kernels, from complex or real input to complex or real output.

torch scales by 1, 1/sqrt(n) or 1/n as a number says; the transforms here are the unscaled ones.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import default_float, jax_dtype

aten = torch.ops.aten
prims = torch.ops.prims


def _scaled(x: Any, sizes: Sequence[int], normalization: int) -> Any:
    power = (0.0, 0.5, 1.0)[normalization]
    return x / math.prod(sizes) ** power if power else x


def _over(transform: Callable[..., Any], x: Any, dims: Sequence[int]) -> Any:
    """Dims one by one: any number of them, in any order."""
    for dim in dims:
        x = transform(x, axis=dim)
    return x


@lowering(aten._fft_c2c.default)
def complex_to_complex(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    sizes = [x.shape[d] for d in dim]
    if forward:
        return _scaled(_over(jnp.fft.fft, x, dim), sizes, normalization)
    out = _over(lambda y, axis: jnp.fft.ifft(y, axis=axis, norm="forward"), x, dim)
    return _scaled(out, sizes, normalization)


@lowering(aten._fft_r2c.default)
def real_to_complex(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    sizes = [x.shape[d] for d in dim]
    if not onesided:
        return _scaled(_over(jnp.fft.fft, x, dim), sizes, normalization)
    out = _over(jnp.fft.fft, jnp.fft.rfft(x, axis=dim[-1]), dim[:-1])
    return _scaled(out, sizes, normalization)


@lowering(aten._fft_c2r.default)
def complex_to_real(x: Any, dim: Sequence[int], normalization: int, last_dim_size: int) -> Any:
    """The last of `dim` is onesided and becomes `last_dim_size` long."""
    sizes = [*(x.shape[d] for d in dim[:-1]), last_dim_size]
    x = _over(lambda y, axis: jnp.fft.ifft(y, axis=axis, norm="forward"), x, dim[:-1])
    # The transform of a real signal is real at frequency 0: torch ignores what is imaginary there.
    out = jnp.fft.irfft(x, last_dim_size, axis=dim[-1], norm="forward")
    return _scaled(out, sizes, normalization)


@lowering(aten.fft_fftshift.default)
def fftshift(x: Any, dim: Sequence[int] | None = None) -> Any:
    return jnp.fft.fftshift(x, dim)


@lowering(aten.fft_ifftshift.default)
def ifftshift(x: Any, dim: Sequence[int] | None = None) -> Any:
    return jnp.fft.ifftshift(x, dim)


@lowering(prims.fft_c2c.default)
def prim_complex_to_complex(x: Any, *, dim: Sequence[int], forward: bool) -> Any:
    return complex_to_complex(x, dim, 0, forward)


@lowering(prims.fft_r2c.default)
def prim_real_to_complex(x: Any, *, dim: Sequence[int], onesided: bool) -> Any:
    return real_to_complex(x, dim, 0, onesided)


@lowering(prims.fft_c2r.default)
def prim_complex_to_real(x: Any, *, dim: Sequence[int], last_dim_size: int) -> Any:
    return complex_to_real(x, dim, 0, last_dim_size)


@lowering(aten.fft_fftfreq.default)
def fftfreq(n: int, d: float = 1.0, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.fft.fftfreq(n, d).astype(default_float() if dtype is None else jax_dtype(dtype))


@lowering(aten.fft_rfftfreq.default)
def rfftfreq(n: int, d: float = 1.0, *, dtype: Any = None, **_: Any) -> Any:
    return jnp.fft.rfftfreq(n, d).astype(default_float() if dtype is None else jax_dtype(dtype))
