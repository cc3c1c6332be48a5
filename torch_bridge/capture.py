"""What is watched and replaced while torch.export runs a module's forward.

Some of what Python code may do in forward leaves no trace in a graph. Here it is turned into something
that does (`.data`, inference_mode, torch.autograd.grad, autograd.Functions, checkpoints, autocast for an
accelerator), or refused (hooks on gradients, backward()).

Replacements hold for the exporting thread alone and are undone at the end; exports take turns.
"""

import contextlib
import functools
import importlib
import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.attention.flex_attention
from torch._functorch import eager_transforms
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_bridge import functions, gradients
from torch_bridge.errors import BridgeError, message
from torch_bridge.explain import user_line
from torch_bridge.followed import follow
from torch_bridge.rewrites import rewritten
from torch_bridge.signature import PREFIX

_EXPORTS = threading.RLock()
# They log what is raised as well; some exports are tries that may fail.
_NOISY = [
    logging.getLogger(f"torch.{name}")
    for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
]
_Tensor: Any = torch.Tensor


def _here() -> str:
    return f"called at: {user_line(traceback.extract_stack()) or '(unknown)'}"


class WatchedForward(TorchFunctionMode):
    """Calls on tensors that a graph cannot hold: made into ones that it can, or refused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call: Any = _WATCHED.get(func) or rewritten(func) or func
        if torch.is_grad_enabled() or not _autocasting():
            return call(*args, **(kwargs or {}))
        _refuse_silent_write(func, args)
        return pytree.tree_map(lambda x: _without_gradient(x, args), call(*args, **(kwargs or {})))


def _autocasting() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _without_gradient(result: Any, args: Any) -> Any:
    """torch.export loses `no_grad` inside autocast: what is computed there is detached here."""
    computed = isinstance(result, torch.Tensor) and all(result is not arg for arg in args)
    return result.detach() if computed and result.is_floating_point() else result


def _refuse_silent_write(func: Any, args: Any) -> None:
    name = getattr(func, "__name__", "")
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name[:3] == "__i"
    if writes and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
        raise BridgeError(
            message(
                f"{name} under no_grad, inside autocast, writes a tensor that wants a gradient.",
                _here(),
                hint="put autocast inside no_grad, or write into a clone",
            )
        )


def _assign_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`: a write without gradient."""
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        raise BridgeError(
            message(
                "forward gives a tensor other .data of another shape or dtype.",
                f"got: {value.dtype} {tuple(value.shape)}; had: {tensor.dtype} {tuple(tensor.shape)}",
                _here(),
                hint="make a new tensor",
            )
        )
    with torch.no_grad():
        tensor.copy_(value)


def _set_requires_grad(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad != requires_grad:
        raise BridgeError(
            message(
                f"forward sets requires_grad={requires_grad} on a parameter.",
                _here(),
                hint="freeze or unfreeze it before convert; for one use of it, take .detach() of it",
            )
        )
    return tensor.requires_grad_(requires_grad)


def _refuse_hook(*_: Any, **__: Any) -> Any:
    raise BridgeError(
        message(
            "forward registers a hook on a tensor's gradient, which no graph holds.",
            _here(),
            hint="remove it; to change a gradient, use a torch.autograd.Function",
        )
    )


def _refuse_backward(*_: Any, **__: Any) -> Any:
    raise BridgeError(
        message(
            "forward calls backward(), which writes .grad behind the graph.",
            _here(),
            hint="use torch.autograd.grad(outputs, inputs, create_graph=True), and return what it gives",
        )
    )


_WATCHED: dict[Any, Callable[..., Any]] = {
    _Tensor.data.__get__: lambda tensor: tensor.detach(),
    _Tensor.data.__set__: _assign_data,
    _Tensor.requires_grad_: _set_requires_grad,
    _Tensor.requires_grad.__set__: _set_requires_grad,
    _Tensor.register_hook: _refuse_hook,
    _Tensor.register_post_accumulate_grad_hook: _refuse_hook,
    _Tensor.backward: _refuse_backward,
    torch.autograd.backward: _refuse_backward,
    torch.autograd.grad: gradients.grad,
}


def refuse_gradient_hooks(module: torch.nn.Module) -> None:
    """See that no hook waits for a gradient, of a module or of a parameter.

    Raises:
        BridgeError: naming every such hook.
    """
    found = [
        f"{name.removeprefix(PREFIX) or '(root)'}: {_describe(hook)}"
        for name, child in module.named_modules()
        for hooks in (child._backward_hooks, child._backward_pre_hooks)
        for hook in hooks.values()
    ]
    found += [
        f"{name.removeprefix(PREFIX)}: {_describe(hook)}"
        for name, parameter in module.named_parameters()
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        for hook in (hooks or {}).values()
    ]
    if found:
        raise BridgeError(
            message(
                "the module has backward hooks, which would never be called.",
                *found,
                hint="remove them before convert (handle.remove()); to change a gradient, use a "
                "torch.autograd.Function",
            )
        )


def _describe(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(hook, '__qualname__', type(hook).__qualname__)}{where}"


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Replace, for this thread and for the time of an export, what leaves no trace in a graph."""
    thread = threading.get_ident()
    with _EXPORTS, contextlib.ExitStack() as undo:
        for where, name, make in _REPLACED:
            # Modules by name are loaded by torch.export, not by importing this package.
            owner = importlib.import_module(where) if isinstance(where, str) else where
            original = inspect.getattr_static(owner, name)
            if name in vars(owner):
                undo.callback(setattr, owner, name, original)
            else:  # of a class that it inherits from
                undo.callback(delattr, owner, name)
            setattr(owner, name, make(original, lambda: threading.get_ident() == thread))
        for logger in _NOISY:
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        yield


# What torch makes of a user's Function in the body of a higher-order operator.
_TRACED = "ApplyTemplate"


def _function_apply(original: Any, here: Callable[[], bool]) -> Any:
    """What Function.apply calls, also by another name that was given to it long ago (`f = Mine.apply`)."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = original.__get__(None, cls)
        return _applied(cls, call, args, kwargs) if here() else call(*args, **kwargs)

    return classmethod(apply)


def _mapped_apply(original: Any, here: Callable[[], bool]) -> Any:
    """What Function.apply calls under torch.vmap."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, cls)
        return _applied(cls, call, args, kwargs) if here() else call(*args, **kwargs)

    return apply


def _applied(cls: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Function.apply: opens reentrant checkpoints, calls what was registered, follows the rest."""
    if cls is torch.utils.checkpoint.CheckpointFunction:
        return _checkpointed(*args)
    if functions.is_registered(cls):
        return functions.apply(cls, call, args, kwargs)
    if cls.__module__.split(".")[0] == "torch" and cls.__name__ != _TRACED:
        return call(*args, **kwargs)
    return follow(cls, args, kwargs)


def _left_whole(original: Any, here: Callable[[], bool]) -> Any:
    """Bodies of torch.cond and the like: their calls of Functions wait until the body is exported.

    torch would follow forward alone where the example wants no gradient.
    """

    def is_left(called: Any) -> bool:
        is_function = isinstance(called, type) and issubclass(called, torch.autograd.Function)
        return original(called) or (here() and is_function)

    return is_left


def _checkpointed(run_function: Any, _preserve_rng_state: Any, *args: Any) -> Any:
    """A reentrant checkpoint. As in torch, it has no gradient if none of its arguments wants one."""
    torch.utils.checkpoint.check_backward_validity(args)  # warns of that
    if any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return run_function(*args)
    with torch.no_grad():
        return run_function(*args)


def _inference_enter(original: Any, here: Callable[[], bool]) -> Any:
    """inference_mode: its tensors are special in torch; for gradients it is no_grad."""

    def enter(self: Any) -> Any:
        if not here():
            return original(self)
        self.replaced = torch.set_grad_enabled(not self.mode)
        return None

    return enter


def _inference_exit(original: Any, here: Callable[[], bool]) -> Any:
    def leave(self: Any, *error: Any) -> Any:
        if not here():
            return original(self, *error)
        return self.replaced.__exit__(*error)

    return leave


def _autocast_init(original: Any, here: Callable[[], bool]) -> Any:
    """autocast("cuda") turns itself off where there is no GPU; the module is meant for one."""

    def init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **kw: Any
    ) -> None:
        if not here() or device_type != "cuda":
            return original(self, device_type, dtype, enabled, *rest, **kw)
        original(self, device_type, dtype, False, *rest, **kw)
        self._enabled = enabled
        return None

    return init


def _autocast_cast(original: Any, here: Callable[[], bool]) -> Any:
    """custom_fwd(cast_inputs=...) for GPUs casts tensors that lie there; the example's lie on the host."""

    def cast(value: Any, device_type: str, dtype: Any) -> Any:
        value = original(value, device_type, dtype)
        return original(value, "cpu", dtype) if here() and device_type == "cuda" else value

    return cast


def _func_grad_and_value(original: Any, here: Callable[[], bool]) -> Any:
    return lambda *args, **kwargs: (gradients.grad_and_value if here() else original)(*args, **kwargs)


def _func_vjp(original: Any, here: Callable[[], bool]) -> Any:
    return lambda *args, **kwargs: (gradients.vjp if here() else original)(*args, **kwargs)


def _func_jvp(original: Any, here: Callable[[], bool]) -> Any:
    return lambda *args, **kwargs: (gradients.jvp if here() else original)(*args, **kwargs)


def _vmap_whole(original: Any, here: Callable[[], bool]) -> Any:
    """torch.vmap chunk by chunk, which torch.export cannot follow: all at once, with the same result."""

    def call(
        func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kw: Any
    ) -> Any:
        return original(func, in_dims, out_dims, randomness, None if here() else chunk_size, *args, **kw)

    return call


def _batch_norm_forward(original: Any, here: Callable[[], bool]) -> Any:
    """BatchNorm with momentum=None: a cumulative average, whose factor torch takes out of a tensor."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        cumulative = self.momentum is None and self.training and self.track_running_stats
        if not here() or not cumulative:
            return original(self, x)
        self._check_input_dim(x)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            dims = [dim for dim in range(x.dim()) if dim != 1]
            var, mean = torch.var_mean(x.to(self.running_mean.dtype), dims, correction=1)
            share = 1.0 / self.num_batches_tracked.to(mean.dtype)
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(var, share)
        return torch.nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    return forward


def _flex_device(original: Any, here: Callable[[], bool]) -> Any:
    """flex_attention: torch has no gradient of it on the host; JAX has."""
    return lambda *args, **kwargs: None if here() else original(*args, **kwargs)


_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.autograd.Function.__base__, "apply", _function_apply),
    (torch.autograd.function, "custom_function_call", _mapped_apply),
    ("torch._dynamo.trace_rules", "is_callable_allowed", _left_whole),
    (torch.autograd.grad_mode.inference_mode, "__enter__", _inference_enter),
    (torch.autograd.grad_mode.inference_mode, "__exit__", _inference_exit),
    (torch.amp.autocast_mode.autocast, "__init__", _autocast_init),
    (torch.amp.autocast_mode, "_cast", _autocast_cast),
    ("torch._functorch.apis", "vmap_impl", _vmap_whole),
    (eager_transforms, "grad_and_value_impl", _func_grad_and_value),
    (eager_transforms, "_vjp_with_argnums", _func_vjp),
    (eager_transforms, "_jvp_with_argnums", _func_jvp),
    (torch.nn.modules.batchnorm._BatchNorm, "forward", _batch_norm_forward),
    (torch.nn.attention.flex_attention, "_validate_device", _flex_device),
)
