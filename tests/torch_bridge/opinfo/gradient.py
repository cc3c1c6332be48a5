"""Vector-Jacobian products of one sample against torch's.

They are pulled back with the same seed on both sides; torch's gradient of a complex value is the
conjugate of JAX's, so both are turned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from tests.torch_bridge.opinfo.compare import (
    GRADIENT_TOLERANCE,
    close,
    distance,
    leaves_of,
    moves,
    numeric,
    seed_of,
    short,
    to_numpy,
    tolerance_of,
)
from tests.torch_bridge.opinfo.outcome import Outcome, Verdict
from torch_bridge.tensors import to_jax


def judge_gradient(
    module: torch.nn.Module,
    function: Callable[..., list[Any]],
    tensors: Sequence[torch.Tensor],
    arrays: Sequence[Any],
) -> Verdict:
    """Compare the gradients of all tensors that torch can differentiate the module by.

    Args:
        module: takes `tensors`.
        function: the same of arrays; returns the numeric outputs.
        tensors: the sample's.
        arrays: the same as JAX has them.
    """
    places = [i for i, t in enumerate(tensors) if moves(t)]
    try:
        torch_gradient = _by_torch(module, tensors, places)
    except RuntimeError as error:
        if "not differentiable with respect to argument" not in str(error):
            return Verdict(Outcome.PASSED_FORWARD, f"torch's gradient fails: {short(error)}")
        places = [place for place in places if _takes_gradient(module, tensors, place)]
        torch_gradient = _by_torch(module, tensors, places)
    except Exception as error:
        return Verdict(Outcome.PASSED_FORWARD, f"torch's gradient fails: {short(error)}")
    if torch_gradient is None:
        return Verdict(Outcome.PASSED_FORWARD, "no differentiable input or output")
    moving, seeds, want = torch_gradient

    def pulled_back(*floats: Any) -> Any:
        def moved(*floats: Any) -> list[Any]:
            full = list(arrays)
            for place, value in zip(places, floats, strict=True):
                full[place] = value
            results = function(*full)
            return [results[i] for i in moving]

        _, pull = jax.vjp(moved, *floats)
        return [g.conj() for g in pull([to_jax(seed).conj() for seed in seeds])]

    try:
        got = jax.jit(pulled_back)(*[arrays[i] for i in places])
    except Exception as error:
        return Verdict(Outcome.FAILED_GRADIENT, short(error))
    tolerance = tolerance_of(tensors, GRADIENT_TOLERANCE)
    for place, a, b in zip(places, got, want, strict=True):
        reference = np.zeros(a.shape) if b is None else to_numpy(b)
        if not close(a, reference, tolerance):
            return Verdict(Outcome.WRONG_GRADIENT, f"of tensor {place}: {distance(a, reference)}")
    return Verdict(Outcome.PASSED)


def _by_torch(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor], places: Sequence[int]
) -> tuple[list[int], list[torch.Tensor], Sequence[Any]] | None:
    """(outputs that move, their seeds, gradients of the tensors at these places); None if nothing moves."""
    leaves = [t.clone().requires_grad_(i in places) for i, t in enumerate(tensors)]
    # An in-place operator must not meet a leaf.
    outputs = numeric(leaves_of(module(*[t * 1 if t.requires_grad else t for t in leaves])))
    moving = [i for i, out in enumerate(outputs) if out.requires_grad and moves(out)]
    if not moving or not places:
        return None
    seeds = [seed_of(outputs[i]) for i in moving]
    want = torch.autograd.grad(
        [outputs[i] for i in moving], [leaves[i] for i in places], seeds, allow_unused=True
    )
    return moving, seeds, want


def _takes_gradient(module: torch.nn.Module, tensors: Sequence[torch.Tensor], place: int) -> bool:
    try:
        _by_torch(module, tensors, [place])
    except RuntimeError:
        return False
    return True
