"""One sample of one operator: its values under jit and its vector-Jacobian products against torch's.

Outputs of programs that draw random numbers, and unset memory, are compared by shape and dtype. Factors
that are unique only up to a sign or phase go through the reduction that the database itself states for
them. A sample that names a 64-bit dtype is judged with 64-bit JAX, as the bridge asks its users to do.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as torch_pytree

import torch_bridge
from tests.torch_bridge.opinfo.compare import (
    NUMBERS,
    VALUE_TOLERANCE,
    close,
    distance,
    leaves_of,
    numeric,
    short,
    to_numpy,
    tolerance_of,
)
from tests.torch_bridge.opinfo.gradient import judge_gradient
from tests.torch_bridge.opinfo.outcome import Outcome, Verdict
from torch_bridge.errors import UnsupportedOpError
from torch_bridge.interpret import draws_random
from torch_bridge.tensors import jax_dtype, to_jax

UNSET = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_".split()
)
UP_TO_PHASE = frozenset("linalg.svd svd linalg.eig linalg.eigh".split())
# Which of equal elements the index names is nobody's promise.
TIED_INDEX = frozenset("topk mode kthvalue sort argsort msort".split())
_WIDE = (torch.float64, torch.complex128, torch.uint64)


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
        want = leaves_of(module(*[t.clone() for t in call.tensors]))
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
        leaves = leaves_of(outputs)
        fixed[:] = [leaf for leaf in leaves if not isinstance(leaf, (jax.Array, *NUMBERS))]
        return [jnp.asarray(leaf) for leaf in leaves if isinstance(leaf, (jax.Array, *NUMBERS))]

    try:
        arrays = [to_jax(t) for t in tensors]
        got = jax.jit(function)(*arrays)
    except Exception as error:
        return Verdict(Outcome.FAILED_TO_RUN, short(error))
    expected = numeric(want)
    if (plain := [leaf for leaf in want if not isinstance(leaf, (torch.Tensor, *NUMBERS))]) != fixed:
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
    return judge_gradient(module, function, tensors, arrays)


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
    tolerance = tolerance_of(want, VALUE_TOLERANCE)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if name in TIED_INDEX and i > 0:
            continue
        if not close(a, to_numpy(b), tolerance):
            return Verdict(Outcome.WRONG_VALUE, f"output {i}: {distance(a, to_numpy(b))}")
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
