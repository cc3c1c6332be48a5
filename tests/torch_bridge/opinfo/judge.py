"""One sample of one operator: its values under jit and its vector-Jacobian products against torch's.

Outputs of programs that draw random numbers, and unset memory, are compared by shape and dtype. Factors
that are unique only up to a sign or phase go through the reduction that the database itself states for
them. Gradients are pulled back with the same seed on both sides; torch's gradient of a complex value is
the conjugate of JAX's, so both are turned.
A sample that names a 64-bit dtype is judged with 64-bit JAX, as the bridge asks its users to do.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

import torch_bridge
from tests.torch_bridge.opinfo.outcome import Outcome, Verdict
from torch_bridge.errors import UnsupportedOpError
from torch_bridge.interpret import draws_random
from torch_bridge.tensors import jax_dtype, to_jax

VALUE_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
# bfloat16 keeps 8 bits of mantissa; torch's own operator tests allow 1.6e-2.
HALF_TOLERANCE = 2e-2

UNSET = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_".split()
)
UP_TO_PHASE = frozenset("linalg.svd svd linalg.eig linalg.eigh".split())
# Which of equal elements the index names is nobody's promise.
TIED_INDEX = frozenset("topk mode kthvalue sort argsort msort".split())
_WIDE = (torch.float64, torch.complex128, torch.uint64)
_NUMBERS = (bool, int, float, complex)


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
    module = _Post(call, sample.output_process_fn_grad) if op.name in UP_TO_PHASE else call
    try:
        want = _leaves(module(*[t.clone() for t in call.tensors]))
    except Exception as error:
        return Verdict(Outcome.TORCH_ERROR, short(error))
    involved = [leaf for leaf in (*call.tensors, *want) if isinstance(leaf, torch.Tensor)]
    if any(tensor.layout != torch.strided for tensor in involved):
        layouts = {str(t.layout) for t in involved if t.layout != torch.strided}
        return Verdict(Outcome.NOT_STRIDED, ", ".join(sorted(layouts)))
    wide = any(t.dtype in _WIDE for t in involved) or any(leaf in _WIDE for leaf in call.rest)
    with jax.enable_x64(wide or bool(jax.config.read("jax_enable_x64"))):
        return _judge(op, module, call.tensors, want, gradients, any_rows)


def _judge(
    op: Any,
    module: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    want: Sequence[Any],
    gradients: bool,
    any_rows: bool,
) -> Verdict:
    try:
        dims = None if any_rows else (None,) * len(tensors)
        converted = torch_bridge.convert(module, tuple(tensors), batch_dims=dims)
    except Exception as error:
        return _conversion_failure(error, module, tensors)
    drawn = op.name in UNSET or _draws(converted)
    fixed: list[Any] = []  # results that are neither tensors nor numbers, known when traced

    def function(*arrays: Any) -> list[Any]:
        outputs = converted.apply(converted.params, converted.buffers, *arrays, rng=jax.random.key(0))[0]
        leaves = _leaves(outputs)
        fixed[:] = [leaf for leaf in leaves if not isinstance(leaf, (jax.Array, *_NUMBERS))]
        return [jnp.asarray(leaf) for leaf in leaves if isinstance(leaf, (jax.Array, *_NUMBERS))]

    try:
        arrays = [to_jax(t) for t in tensors]
        got = jax.jit(function)(*arrays)
    except Exception as error:
        return Verdict(Outcome.FAILED_TO_RUN, short(error))
    expected = _numeric(want)
    if (plain := [leaf for leaf in want if not isinstance(leaf, (torch.Tensor, *_NUMBERS))]) != fixed:
        return Verdict(Outcome.WRONG_VALUE, f"{fixed}, torch {plain}"[:300])
    wrong = _compare_shapes(got, expected)
    if wrong is None and not drawn:
        wrong = _compare_values(op.name, got, expected)
    if wrong is not None:
        return wrong
    if drawn:
        return Verdict(Outcome.PASSED_SHAPE)
    if not gradients:
        return Verdict(Outcome.PASSED_FORWARD, "no gradient was asked for")
    if not op.supports_autograd:
        return Verdict(Outcome.PASSED_FORWARD, "the database states no gradient")
    return _judge_gradient(module, function, tensors, arrays)


def _judge_gradient(
    module: torch.nn.Module,
    function: Callable[..., list[Any]],
    tensors: Sequence[torch.Tensor],
    arrays: Sequence[Any],
) -> Verdict:
    places = [i for i, t in enumerate(tensors) if _moves(t)]
    try:
        leaves = [t.clone().requires_grad_(i in places) for i, t in enumerate(tensors)]
        # An in-place operator must not meet a leaf.
        outputs = _leaves(module(*[t * 1 if t.requires_grad else t for t in leaves]))
        outputs = _numeric(outputs)
        moving = [i for i, out in enumerate(outputs) if out.requires_grad and _moves(out)]
        if not moving or not places:
            return Verdict(Outcome.PASSED_FORWARD, "no differentiable input or output")
        seeds = [_seed(outputs[i]) for i in moving]
        want = torch.autograd.grad(
            [outputs[i] for i in moving], [leaves[i] for i in places], seeds, allow_unused=True
        )
    except Exception as error:
        return Verdict(Outcome.PASSED_FORWARD, f"torch's gradient fails: {short(error)}")

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
    tolerance = _tolerance(tensors, GRADIENT_TOLERANCE)
    for place, a, b in zip(places, got, want, strict=True):
        reference = np.zeros(a.shape) if b is None else _numpy(b)
        if not _close(a, reference, tolerance):
            return Verdict(Outcome.WRONG_GRADIENT, f"of tensor {place}: {_distance(a, reference)}")
    return Verdict(Outcome.PASSED)


def _draws(converted: torch_bridge.JaxModule) -> bool:
    """Whether the program has an operator that torch marks as random and the bridge gives a key."""
    graph = converted.programs.first.graph
    marked = [
        position
        for position, node in enumerate(graph.nodes)
        if torch.Tag.nondeterministic_seeded in getattr(node.operator, "tags", ())
    ]
    return draws_random(graph, marked)


def _compare_shapes(got: Sequence[Any], want: Sequence[torch.Tensor]) -> Verdict | None:
    if len(got) != len(want):
        return Verdict(Outcome.WRONG_SHAPE, f"{len(got)} outputs, torch {len(want)}")
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != tuple(b.shape):
            return Verdict(Outcome.WRONG_SHAPE, f"output {i}: {a.shape}, torch {tuple(b.shape)}")
        if a.dtype != jax_dtype(b.dtype):
            return Verdict(Outcome.WRONG_DTYPE, f"output {i}: {a.dtype}, torch {b.dtype}")
    return None


def _compare_values(name: str, got: Sequence[Any], want: Sequence[torch.Tensor]) -> Verdict | None:
    tolerance = _tolerance(want, VALUE_TOLERANCE)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if name in TIED_INDEX and i > 0:
            continue
        if not _close(a, _numpy(b), tolerance):
            return Verdict(Outcome.WRONG_VALUE, f"output {i}: {_distance(a, _numpy(b))}")
    return None


def _conversion_failure(
    error: Exception, module: torch.nn.Module, tensors: Sequence[torch.Tensor]
) -> Verdict:
    """Whose fault it is: plain torch.export is asked, without the bridge."""
    if isinstance(error, UnsupportedOpError):
        return Verdict(Outcome.UNSUPPORTED, short(error))
    try:
        torch.export.export(module, tuple(tensors), strict=False).run_decompositions({})
    except Exception as refusal:
        return Verdict(Outcome.REFUSED_BY_EXPORT, short(refusal))
    return Verdict(Outcome.FAILED_TO_CONVERT, short(error))


def _leaves(output: Any) -> list[Any]:
    return [leaf for leaf in torch_pytree.tree_leaves(output) if leaf is not None]


def _numeric(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors, and numbers as tensors."""
    return [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, (torch.Tensor, *_NUMBERS))]


def _moves(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tolerance(tensors: Sequence[torch.Tensor], single: float) -> float:
    half = any(t.dtype in (torch.bfloat16, torch.float16, torch.complex32) for t in tensors)
    return HALF_TOLERANCE if half else single


def _seed(out: torch.Tensor) -> torch.Tensor:
    turns = torch.arange(out.numel(), dtype=torch.float64)
    values = torch.polar(torch.ones_like(turns), turns) if out.is_complex() else torch.cos(turns)
    return values.to(out.dtype).reshape(out.shape)


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


def short(error: BaseException) -> str:
    """The error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
