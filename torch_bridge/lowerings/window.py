"""Window functions and the distances within one set of points: few elements, many formulas."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from torch_bridge.lowerings.norm import minkowski
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import default_float, jax_dtype

aten = torch.ops.aten


def _window(formula: Callable[..., np.ndarray]) -> Callable[..., Any]:
    """`formula(phase, *parameters)` over phases from 0 to 1, which a periodic window does not reach."""

    def window(length: int, periodic: bool = True, *parameters: float, dtype: Any = None, **_: Any) -> Any:
        steps = length if periodic else length - 1
        phase = np.arange(length) / max(steps, 1)
        values = formula(phase, *parameters) if length > 1 else np.ones(length)
        return jnp.asarray(values, default_float() if dtype is None else jax_dtype(dtype))

    return window


def _cosines(phase: np.ndarray, *weights: float) -> np.ndarray:
    return sum(w * np.cos(2 * math.pi * k * phase) for k, w in enumerate(weights))  # type: ignore[return-value]


def _hamming(phase: np.ndarray, alpha: float = 0.54, beta: float = 0.46) -> np.ndarray:
    return _cosines(phase, alpha, -beta)


def _kaiser(phase: np.ndarray, beta: float = 12.0) -> np.ndarray:
    return np.i0(beta * np.sqrt(np.maximum(1 - (2 * phase - 1) ** 2, 0))) / np.i0(beta)


for _name, _formula in (
    ("hann", lambda phase: _cosines(phase, 0.5, -0.5)),
    ("hamming", _hamming),
    ("blackman", lambda phase: _cosines(phase, 0.42, -0.5, 0.08)),
    ("bartlett", lambda phase: 1 - np.abs(2 * phase - 1)),
    ("kaiser", _kaiser),
):
    _packet = getattr(aten, f"{_name}_window")
    for _overload in _packet.overloads():
        if not _overload.endswith("out"):
            lowering(getattr(_packet, _overload))(_window(_formula))


@lowering(aten.pdist.default, aten._pdist_forward.default)
def pdist(x: Any, p: float = 2.0) -> Any:
    """Distances between the rows i < j of x `[n, dim]`, in that order."""
    first, second = np.triu_indices(x.shape[0], 1)
    return minkowski(x[first] - x[second], p)
