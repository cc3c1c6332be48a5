"""Gradients that forward itself takes (torch.autograd.grad, torch.func), as nodes of the graph.

While exporting, torch's own autograd says which inputs are connected and raises its own errors; the
values come from JAX, which differentiates the nodes between inputs and outputs (see `interpret`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch import eager_transforms, predispatch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from torch_bridge import operators


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad with the same arguments, inside forward."""
    del retain_graph, only_inputs
    outputs, inputs = _several(outputs), _several(inputs)
    given = _several(grad_outputs) if grad_outputs is not None else (None,) * len(outputs)
    seeds = [_seed(y) if s is None else s for y, s in zip(outputs, given, strict=True)]
    connected = _connected(outputs, inputs, allow_unused, materialize_grads)
    used = [x for x, is_used in zip(inputs, connected, strict=True) if is_used]
    moving = [(y, s) for y, s in zip(outputs, seeds, strict=True) if _innermost(y).requires_grad]
    gradients = operators.gradient()([y for y, _ in moving], used, [s for _, s in moving], is_grads_batched)
    results = iter(gradients)
    missing = torch.zeros_like if materialize_grads else _nothing
    found = [next(results) if is_used else missing(x) for is_used, x in zip(connected, inputs, strict=True)]
    return tuple(x if x is None or create_graph else x.detach() for x in found)


def _nothing(_: torch.Tensor) -> None:
    return None


def _seed(output: torch.Tensor) -> torch.Tensor:
    if output.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return torch.ones_like(output)


def _connected(outputs: Any, inputs: Any, allow_unused: bool | None, materialize: bool) -> list[bool]:
    """Which inputs the outputs depend on, by torch's autograd, which raises its own errors."""
    # Nor is the question itself on a tape.
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        inner = [_innermost(y) for y in outputs]
        found = torch.autograd.grad(
            inner,
            [_innermost(x) for x in inputs],
            [torch.ones_like(y) for y in inner],
            retain_graph=True,
            allow_unused=allow_unused or materialize,
        )
    return [x is not None for x in found]


def _innermost(x: torch.Tensor) -> torch.Tensor:
    """The tensor that torch.vmap maps, which is the one autograd knows."""
    while torch._C._functorch.is_batchedtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _several(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def grad_and_value(function: Callable[..., Any], argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
    """torch.func.grad_and_value's work: (gradients, value), or (gradients, (value, auxiliary))."""
    with torch.enable_grad():
        args, moving = _moving(args, argnums)
        result = function(*args, **kwargs)
        value, aux = result if has_aux else (result, None)
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            raise RuntimeError(f"torch.func.grad: the function must return a scalar tensor, got {value!r}")
        gradients = _gradients([value], moving, None)
    return gradients, ((value, aux) if has_aux else value)


def vjp(
    function: Callable[..., Any], *primals: Any, argnums: Any = None, has_aux: bool = False
) -> tuple[Any, ...]:
    """torch.func.vjp: what the function returns, and the function from cotangents to gradients."""
    with torch.enable_grad():
        primals, moving = _moving(primals, range(len(primals)) if argnums is None else argnums)
        result = function(*primals)
    outputs, aux = result if has_aux else (result, None)
    flat, spec = pytree.tree_flatten(outputs)
    moving = moving[0] if argnums is None and len(moving) == 1 else moving

    def pull(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        del retain_graph, create_graph
        seeds, given = pytree.tree_flatten(cotangents)
        if given != spec:
            raise RuntimeError(f"torch.func.vjp: cotangents have structure {given}, the outputs {spec}")
        gradients = _gradients(flat, moving, seeds)
        return (gradients,) if argnums is None and not isinstance(moving, tuple) else gradients

    return (outputs, pull, aux) if has_aux else (outputs, pull)


def jvp(
    function: Callable[..., Any],
    primals: Any,
    tangents: Any,
    argnums: Any,
    *,
    strict: bool = False,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """torch.func.jvp: what the function returns, and its directional derivative.

    The gradients are linear in the cotangents; their own gradient, along the tangents, is that derivative.
    """
    del strict
    with torch.enable_grad():
        primals, moving = _moving(primals, range(len(primals)) if argnums is None else argnums)
        result = function(*primals)
        outputs, aux = result if has_aux else (result, None)
        flat, spec = pytree.tree_flatten(outputs)
        seeds = [_fresh(torch.zeros_like(y)) for y in flat]
        pulled = pytree.tree_leaves(_gradients(flat, moving, seeds))
        forward = _gradients(pulled, seeds, pytree.tree_leaves(tangents))
    derivative = pytree.tree_unflatten(forward, spec)
    return (outputs, derivative, aux) if has_aux else (outputs, derivative)


def _moving(args: Any, argnums: Any) -> tuple[tuple[Any, ...], Any]:
    """The arguments with fresh tensors in the places that are differentiated, and those places."""
    single = isinstance(argnums, int)
    chosen = [n % len(args) for n in ((argnums,) if single else argnums)]
    fresh = [pytree.tree_map_only(torch.Tensor, _fresh, a) if i in chosen else a for i, a in enumerate(args)]
    moving = tuple(fresh[i] for i in chosen)
    return tuple(fresh), moving[0] if single else moving


def _fresh(x: torch.Tensor) -> torch.Tensor:
    made = _mapped(x).clone()
    if not _innermost(made).requires_grad:
        with eager_transforms.enable_inplace_requires_grad(True):  # under vmap it is not
            _innermost(made).requires_grad_()
    return made


def _mapped(x: torch.Tensor) -> torch.Tensor:
    """A tensor that every torch.vmap around maps: each example has a gradient of its own."""
    of_x, inner = set(), x
    while torch._C._functorch.is_batchedtensor(inner):
        of_x.add(torch._C._functorch.maybe_get_level(inner))
        inner = torch._C._functorch.get_unwrapped(inner)
    for interpreter in torch._C._functorch.get_interpreter_stack() or ():
        level = interpreter.level()
        if interpreter.key() == torch._C._functorch.TransformType.Vmap and level > max(of_x, default=0):
            batch_size = torch._C._functorch.CVmapInterpreterPtr(interpreter).batchSize()
            x = predispatch._add_batch_dim(x.expand(batch_size, *x.shape), 0, level)
    return x


def _gradients(outputs: Sequence[torch.Tensor], moving: Any, seeds: Sequence[Any] | None) -> Any:
    leaves, spec = pytree.tree_flatten(moving)
    wanted = [x for x in leaves if isinstance(x, torch.Tensor)]
    connected = [i for i, y in enumerate(outputs) if _innermost(y).requires_grad]
    found: Sequence[Any] = (None,) * len(wanted)
    if connected:
        kept = None if seeds is None else [seeds[i] for i in connected]
        found = grad([outputs[i] for i in connected], wanted, kept, create_graph=True, allow_unused=True)
    filled = iter(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True))
    return pytree.tree_unflatten([next(filled) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
