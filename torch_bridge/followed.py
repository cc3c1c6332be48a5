"""autograd.Functions followed while a module is exported: their own forward and their own backward.

Where torch would call forward now and backward when the loss is differentiated, both run at once here, on
the tensors of the export and with a context of ours, so that the graph gets the operators of both.
Between them stand two operators that say which gradient the backward is (see `custom_gradient`). What
torch does around a forward and a backward is done here: gradients are off in forward; outputs that backward
does not flow through; zeros or None for gradients that do not exist; sums, casts and None for those that
backward returns.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from torch_bridge.custom_gradient import cotangents, custom_gradient
from torch_bridge.errors import BridgeError, message
from torch_bridge.explain import explained
from torch_bridge.precision import follows_gpus

Function = torch.autograd.Function
_ONCE = once_differentiable(lambda ctx: None).__code__


class Context(FunctionCtx):
    """What forward and backward are given as `ctx`."""

    to_save: tuple[Any, ...] = ()
    dirty_tensors: tuple[torch.Tensor, ...] = ()
    non_differentiable: tuple[torch.Tensor, ...] = ()
    materialize_grads: bool = True

    def __init__(self, function: type, args: Sequence[Any]) -> None:
        self._forward_cls = function
        # Whoever converts may differentiate with respect to anything, also to what the example does not.
        self.needs_input_grad = tuple(_is_differentiable(arg) for arg in args)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


def follow(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`function.apply(*args, **kwargs)` with its own gradient.

    Args:
        function: the user's class.
        args, kwargs: of its apply.

    Raises:
        BridgeError: if its backward does what no graph can hold.
    """
    if _has_setup(function):
        signature = inspect.signature(function.forward)
        # torch 2.11 leaves what it has placed among the keywords.
        placed = signature.bind_partial(*args).arguments
        bound = signature.bind(*args, **{key: value for key, value in kwargs.items() if key not in placed})
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    if kwargs:
        raise TypeError(f"{function.__qualname__}.apply() takes no keyword arguments")
    call = _Call(function=function, args=args, ctx=Context(function, args))
    returned = call.forward()
    if not torch.is_grad_enabled():
        return returned
    outputs = call.with_gradients(returned if isinstance(returned, tuple) else (returned,))
    return outputs if isinstance(returned, tuple) else outputs[0]


def _has_setup(function: type[Function]) -> bool:
    return function.setup_context is not Function.setup_context


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _among(value: Any, tensors: Sequence[Any]) -> bool:
    return any(value is tensor for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a Function."""

    function: Any
    args: tuple[Any, ...]
    ctx: Context

    def forward(self) -> Any:
        """What the Function's forward returns, without history."""
        try:
            with torch.no_grad(), _as_on_gpus():
                if not _has_setup(self.function):
                    return self.function.forward(self.ctx, *self.args)
                returned = self.function.forward(*self.args)
                self.function.setup_context(self.ctx, self.args, returned)
                return returned
        except Exception as error:  # the user's own code may wait for it
            error.add_note(f"in {self.name}, an autograd.Function: {self._way_out()}")
            raise

    def with_gradients(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs, with the gradients of the Function's backward."""
        flowing = [
            i
            for i, output in enumerate(outputs)
            if _is_differentiable(output) and not _among(output, self.ctx.non_differentiable)
        ]
        made = [_without_history(x, self.ctx.dirty_tensors) for x in outputs]
        if not flowing or not any(map(_is_differentiable, self.args)):
            return tuple(made)
        *seeds, token = cotangents()([outputs[i].detach() for i in flowing])
        by_output = dict(zip(flowing, seeds, strict=True))
        given = [by_output[i] if i in by_output else self._absent(x) for i, x in enumerate(outputs)]
        gradients, unknown = self._backward(given)
        known = [(x, g) for x, g in zip(self.args, gradients, strict=True) if g is not None]
        results = custom_gradient()(
            [outputs[i] for i in flowing],
            [x for x, _ in known],
            token,
            [g for _, g in known],
            unknown,
            _marked_once(_backward_of(self.function)),
            self.name,
        )
        for i, result in zip(flowing, results, strict=True):
            made[i] = self._put_in_place(outputs[i], result)
        return tuple(made)

    def _absent(self, output: Any) -> torch.Tensor | None:
        """The gradient of an output that none flows through."""
        if isinstance(output, torch.Tensor) and self.ctx.materialize_grads:
            return torch.zeros_like(output)
        return None

    def _put_in_place(self, output: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """An input that forward has written in place (mark_dirty) stays the tensor that it was."""
        return output.copy_(result) if _among(output, self.ctx.dirty_tensors) else result

    def _backward(self, given: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
        """A gradient or None for every argument, and the arguments whose gradient cannot be had."""
        backward = _backward_of(self.function)
        if backward is None:
            return [None] * len(self.args), [x for x in self.args if _is_differentiable(x)]
        try:
            try:
                return self._fitted(self._run(backward, given)), []
            except Exception:
                unknown = self._ask_for_less()
                if not unknown:
                    raise
                return self._fitted(self._run(backward, given)), unknown
        except Exception as error:
            raise self._refusal(error) from error

    def _run(self, backward: Callable[..., Any], given: Sequence[Any]) -> Any:
        given = [list(given)] if _boxes_gradients(self.function) else given
        with _without_autocast(), _as_on_gpus(), _outside_checkpoints():
            return backward(self.ctx, *given)

    def _ask_for_less(self) -> list[torch.Tensor]:
        """Only want the gradients that the example wants; returns the arguments that this leaves out."""
        wanted = self.ctx.needs_input_grad
        self.ctx.needs_input_grad = tuple(getattr(arg, "requires_grad", False) for arg in self.args)
        pairs = zip(self.args, wanted, self.ctx.needs_input_grad, strict=True)
        return [arg for arg, before, now in pairs if before and not now]

    def _fitted(self, returned: Any) -> list[Any]:
        """What backward returned, one for every argument, as torch takes it."""
        gradients = list(returned) if isinstance(returned, tuple) else [returned]
        expected = len(self.args)
        if len(gradients) < expected or any(g is not None for g in gradients[expected:]):
            raise RuntimeError(
                f"it returned an incorrect number of gradients (expected {expected}, got {len(gradients)})"
            )
        return [_fit(g, arg) for g, arg in zip(gradients, self.args, strict=False)]

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def _way_out(self) -> str:
        decorator = f"@torch_bridge.register_lowering({self.function.__qualname__})"
        return f"{decorator} on a jax.custom_vjp that takes what its apply takes replaces it"

    def _refusal(self, error: Exception) -> BridgeError:
        known = error if isinstance(error, BridgeError) else explained(error)
        what = f"the backward of {self.name}, an autograd.Function, cannot be followed."
        where_none = "where no gradient is wanted, call it under torch.no_grad()"
        return BridgeError(message(what, str(known), f"or: {self._way_out()}", f"or: {where_none}"))


def _without_history(output: Any, dirty: Sequence[torch.Tensor]) -> Any:
    """An argument that forward returns as it is still has its own."""
    keeps = isinstance(output, torch.Tensor) and output.requires_grad and not _among(output, dirty)
    return output.detach() if keeps else output


def _backward_of(function: Any) -> Callable[..., Any] | None:
    """The function's backward, under either of its names; None if it has none."""
    if function.vjp is not Function.vjp:
        return function.vjp
    return None if function.backward is Function.backward else function.backward


def _boxes_gradients(function: Any) -> bool:
    """Whether backward takes its gradients as one list, which torch knows since 2.13."""
    return hasattr(Function, "boxed_grads_call") and function.boxed_grads_call


def _marked_once(backward: Any) -> bool:
    """Whether a backward is decorated with once_differentiable."""
    while backward is not None:
        if getattr(backward, "__code__", None) is _ONCE:
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False


def _fit(gradient: Any, arg: Any) -> torch.Tensor | None:
    """A gradient in the shape and dtype of its argument."""
    if gradient is None:
        return None
    if not isinstance(arg, torch.Tensor):
        raise RuntimeError("it returned a gradient for an argument that is no tensor")
    if not _is_differentiable(arg):
        return None
    if gradient.shape != arg.shape:
        gradient = gradient.sum_to_size(arg.shape)
    if gradient.is_complex() and not arg.is_complex():
        gradient = gradient.real
    return gradient if gradient.dtype == arg.dtype else gradient.to(arg.dtype)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """torch calls backward outside the autocast region that forward ran in."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _outside_checkpoints() -> contextlib.AbstractContextManager[Any]:
    """In torch a checkpointed region is over when backward runs: what that saves is its own."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


@contextlib.contextmanager
def _as_on_gpus() -> Iterator[None]:
    """Let custom_fwd and custom_bwd for GPUs see the region of the host, if that stands for one of a GPU."""
    found = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    if follows_gpus():
        torch.set_autocast_enabled("cuda", torch.is_autocast_enabled("cpu"))
        torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("cpu"))
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", found[0])
        torch.set_autocast_dtype("cuda", found[1])
