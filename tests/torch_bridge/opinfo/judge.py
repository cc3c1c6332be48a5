"""One sample of one operator: its values under jit and its vector-Jacobian products against torch's.

Outputs that no two implementations share are compared by shape alone: random ones, and factors that are
unique only up to a sign or phase. Gradients are pulled back with the same seed on both sides.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

import torch_bridge
from torch_bridge.errors import UnsupportedOpError
from torch_bridge.tensors import to_jax

VALUE_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
# bfloat16 keeps 8 bits of mantissa; torch's own operator tests allow 1.6e-2.
HALF_TOLERANCE = 2e-2

RANDOM = frozenset(
    """empty empty_like empty_permuted empty_strided new_empty new_empty_strided bernoulli geometric
    randint_like randn_like rand_like uniform multinomial cauchy exponential log_normal randint randn rand
    normal pca_lowrank svd_lowrank nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d
    nn.functional.alpha_dropout nn.functional.feature_alpha_dropout nn.functional.rrelu
    nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d""".split()
)
UP_TO_PHASE = frozenset("linalg.svd svd linalg.eig linalg.eigh linalg.qr qr geqrf".split())
# Which of equal elements the index names is nobody's promise.
TIED_INDEX = frozenset("topk mode kthvalue sort argsort msort".split())


class Outcome(enum.StrEnum):
    """What became of a sample; SKIPPED and TORCH_ERROR say nothing about the bridge."""

    PASSED = "pass"
    PASSED_FORWARD = "pass (no gradient in torch)"
    REFUSED_BY_EXPORT = "torch.export refuses"
    UNSUPPORTED = "no lowering"
    FAILED_TO_CONVERT = "conversion fails"
    FAILED_TO_RUN = "run fails"
    FAILED_GRADIENT = "gradient fails"
    WRONG_SHAPE = "wrong shape"
    WRONG_DTYPE = "wrong dtype"
    WRONG_VALUE = "wrong value"
    WRONG_GRADIENT = "wrong gradient"
    TIMED_OUT = "out of time"
    TORCH_ERROR = "torch fails"
    SKIPPED = "skipped"


PASSES = frozenset({Outcome.PASSED, Outcome.PASSED_FORWARD})
NOT_COUNTED = frozenset({Outcome.TORCH_ERROR, Outcome.SKIPPED})


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome with what an engineer wants to know about it."""

    outcome: Outcome
    detail: str = ""


class Call(torch.nn.Module):
    """An operator as a module of the sample's tensors; everything else in the sample is fixed."""

    def __init__(self, function: Callable[..., Any], sample: Any, wrapper: Callable[..., Any] | None) -> None:
        super().__init__()
        leaves, self.spec = torch_pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.function, self.wrapper = function, wrapper
        self.tensors = tuple(leaves[i].detach().clone() for i in self.places)
        self.rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        first, args, kwargs = torch_pytree.tree_unflatten(leaves, self.spec)
        if self.wrapper is not None:
            return self.wrapper(self.function, first, *args, **kwargs)
        return self.function(first, *args, **kwargs)


class _Post(torch.nn.Module):
    """A call followed by the database's own reduction of it to what is unique."""

    def __init__(self, call: Call, post: Callable[[Any], Any]) -> None:
        super().__init__()
        self.call, self.post = call, post

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.post(self.call(*tensors))


def samples(op: Any, dtype: torch.dtype, count: int) -> Iterator[Any]:
    """The first samples that the database has for an operator."""
    torch.manual_seed(0)
    for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
        if i >= count:
            return
        yield sample


def judge(op: Any, sample: Any, *, gradients: bool = True, any_rows: bool = False) -> Verdict:
    """Compare one sample.

    Args:
        op: an entry of the database.
        sample: one of its samples.
        gradients: compare gradients too, where the operator has any.
        any_rows: convert for every batch size instead of the sample's own.
    """
    call = Call(op.op, sample, getattr(op, "gradcheck_wrapper", None))
    tensors = call.tensors
    module = _Post(call, sample.output_process_fn_grad) if op.name in UP_TO_PHASE else call
    if any(t.layout != torch.strided for t in tensors):
        return Verdict(Outcome.SKIPPED, "not strided")
    try:
        want = _leaves(module(*[t.clone() for t in tensors]))
    except Exception as error:
        return Verdict(Outcome.TORCH_ERROR, _short(error))
    if not all(isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided for leaf in want):
        return Verdict(Outcome.SKIPPED, "returns no strided tensors")
    try:
        dims = None if any_rows else (None,) * len(tensors)
        converted = torch_bridge.convert(module, tensors, batch_dims=dims)
    except Exception as error:
        return Verdict(_conversion_failure(error), _short(error))

    def function(*arrays: Any) -> list[Any]:
        outputs = converted.apply(converted.params, converted.buffers, *arrays, rng=jax.random.key(0))[0]
        return jax.tree.leaves(outputs)

    try:
        arrays = [to_jax(t) for t in tensors]
        got = jax.jit(function)(*arrays)
    except Exception as error:
        return Verdict(Outcome.FAILED_TO_RUN, _short(error))
    wrong = _compare(op.name, got, want, _tolerance(want, VALUE_TOLERANCE))
    if wrong is not None:
        return wrong
    random_or_ambiguous = op.name in RANDOM | UP_TO_PHASE
    if not gradients or random_or_ambiguous or not op.supports_autograd:
        return Verdict(Outcome.PASSED_FORWARD)
    return _judge_gradient(module, function, tensors, arrays)


def _judge_gradient(
    module: torch.nn.Module,
    function: Callable[..., list[Any]],
    tensors: Sequence[torch.Tensor],
    arrays: Sequence[Any],
) -> Verdict:
    places = [i for i, t in enumerate(tensors) if t.is_floating_point()]
    try:
        leaves = [t.clone().requires_grad_(i in places) for i, t in enumerate(tensors)]
        # An in-place operator must not meet a leaf.
        outputs = _leaves(module(*[t * 1 if t.requires_grad else t for t in leaves]))
        moving = [i for i, out in enumerate(outputs) if out.requires_grad and out.is_floating_point()]
        if not moving or not places:
            return Verdict(Outcome.PASSED_FORWARD)
        seeds = [_seed(outputs[i]) for i in moving]
        want = torch.autograd.grad(
            [outputs[i] for i in moving], [leaves[i] for i in places], seeds, allow_unused=True
        )
    except Exception as error:
        return Verdict(Outcome.PASSED_FORWARD, f"torch has no gradient: {_short(error)}")

    def pulled_back(*floats: Any) -> Any:
        def moved(*floats: Any) -> list[Any]:
            full = list(arrays)
            for place, value in zip(places, floats, strict=True):
                full[place] = value
            results = function(*full)
            return [results[i] for i in moving]

        _, pull = jax.vjp(moved, *floats)
        return pull([to_jax(seed) for seed in seeds])

    try:
        got = jax.jit(pulled_back)(*[arrays[i] for i in places])
    except Exception as error:
        return Verdict(Outcome.FAILED_GRADIENT, _short(error))
    tolerance = _tolerance(tensors, GRADIENT_TOLERANCE)
    for place, a, b in zip(places, got, want, strict=True):
        reference = np.zeros(a.shape) if b is None else _numpy(b)
        if not _close(a, reference, tolerance):
            return Verdict(Outcome.WRONG_GRADIENT, f"of tensor {place}: {_distance(a, reference)}")
    return Verdict(Outcome.PASSED)


def _compare(name: str, got: Sequence[Any], want: Sequence[torch.Tensor], tolerance: float) -> Verdict | None:
    if len(got) != len(want):
        return Verdict(Outcome.WRONG_SHAPE, f"{len(got)} outputs, torch {len(want)}")
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != tuple(b.shape):
            return Verdict(Outcome.WRONG_SHAPE, f"output {i}: {a.shape}, torch {tuple(b.shape)}")
        if a.dtype != torch_bridge.tensors.jax_dtype(b.dtype):
            return Verdict(Outcome.WRONG_DTYPE, f"output {i}: {a.dtype}, torch {b.dtype}")
        if name in RANDOM | UP_TO_PHASE or (name in TIED_INDEX and i > 0):
            continue
        if not _close(a, _numpy(b), tolerance):
            return Verdict(Outcome.WRONG_VALUE, f"output {i}: {_distance(a, _numpy(b))}")
    return None


def _conversion_failure(error: Exception) -> Outcome:
    if isinstance(error, UnsupportedOpError):
        return Outcome.UNSUPPORTED
    refused = "torch.export" in str(error) or isinstance(error.__cause__, Exception)
    return Outcome.REFUSED_BY_EXPORT if refused else Outcome.FAILED_TO_CONVERT


def _leaves(output: Any) -> list[Any]:
    return [leaf for leaf in torch_pytree.tree_leaves(output) if leaf is not None]


def _tolerance(tensors: Sequence[torch.Tensor], single: float) -> float:
    half = any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
    return HALF_TOLERANCE if half else single


def _seed(out: torch.Tensor) -> torch.Tensor:
    return torch.cos(torch.arange(out.numel()).to(out.dtype)).reshape(out.shape)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(to_jax(tensor.detach()))


def _wide(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _close(a: Any, b: Any, tolerance: float) -> bool:
    return np.allclose(_wide(a), _wide(b), rtol=tolerance, atol=tolerance, equal_nan=True)


def _distance(a: Any, b: Any) -> str:
    difference = np.abs(_wide(a) - _wide(b))
    finite = difference[np.isfinite(difference)]
    text = f"differs by {finite.max() if finite.size else 0.0:.3g}"
    return text if finite.size == difference.size else f"{text}, and by NaN or infinity"


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
