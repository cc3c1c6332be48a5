"""Values of torch beside values of JAX: as numpy arrays, and how near is near."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

from torch_bridge.tensors import to_jax

VALUE_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
# bfloat16 keeps 8 bits of mantissa; torch's own operator tests allow 1.6e-2.
HALF_TOLERANCE = 2e-2
NUMBERS = (bool, int, float, complex)


def leaves_of(output: Any) -> list[Any]:
    return [leaf for leaf in torch_pytree.tree_leaves(output) if leaf is not None]


def numeric(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors, and numbers as tensors."""
    return [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, (torch.Tensor, *NUMBERS))]


def moves(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def tolerance_of(tensors: Sequence[torch.Tensor], single: float) -> float:
    half = any(t.dtype in (torch.bfloat16, torch.float16, torch.complex32) for t in tensors)
    return HALF_TOLERANCE if half else single


def seed_of(out: torch.Tensor) -> torch.Tensor:
    turns = torch.arange(out.numel(), dtype=torch.float64)
    values = torch.polar(torch.ones_like(turns), turns) if out.is_complex() else torch.cos(turns)
    return values.to(out.dtype).reshape(out.shape)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(to_jax(tensor.detach()))


def _wide(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def close(a: Any, b: Any, tolerance: float) -> bool:
    return np.allclose(_wide(a), _wide(b), rtol=tolerance, atol=tolerance, equal_nan=True)


def distance(a: Any, b: Any) -> str:
    difference = np.abs(_wide(a) - _wide(b))
    finite = difference[np.isfinite(difference)]
    text = f"differs by {finite.max() if finite.size else 0.0:.3g}"
    return text if finite.size == difference.size else f"{text}, and by NaN or infinity"


def short(error: BaseException) -> str:
    """The error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
