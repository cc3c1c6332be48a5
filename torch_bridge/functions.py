"""autograd.Functions that the user gave a JAX function for: one opaque operator a call signature.

`register_lowering(MyFunction)` keeps the JAX function; while exporting, `MyFunction.apply` becomes an
operator of ours that takes its tensors and numbers; its own backward is not used (others: see `followed`).
Other arguments (strings, enums, callables, None) and the structure of arguments and results are part of the
operator.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_bridge.errors import BridgeError, message
from torch_bridge.lowerings import registry
from torch_bridge.operators import NAMESPACE

_KINDS = ((torch.Tensor, "Tensor"), (bool, "bool"), (int, "int"), (float, "float"))
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """One call signature of a Function: what its operator is made from.

    Args:
        apply: the Function's own apply.
        spec: structure of (args, kwargs).
        kinds: schema type of each leaf, None for one that is fixed.
        fixed: the fixed leaves, `...` for others.
        results: structure of the results, and None for each leaf that is no tensor; set by a run.
    """

    apply: Callable[..., Any]
    spec: Any
    kinds: tuple[str | None, ...]
    fixed: tuple[Any, ...]
    results: list[Any] = field(default_factory=list)

    def arguments(self, leaves: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs), from the leaves that are not fixed."""
        remaining = iter(leaves)
        filled = [
            leaf if kind is None else next(remaining)
            for kind, leaf in zip(self.kinds, self.fixed, strict=True)
        ]
        return pytree.tree_unflatten(filled, self.spec)

    def run(self, *leaves: Any) -> list[torch.Tensor]:
        """The Function's forward, without history: fresh tensors, as an operator must return."""
        args, kwargs = self.arguments(leaves)
        with torch.no_grad():
            results, spec = pytree.tree_flatten(self.apply(*args, **kwargs))
        self.results[:] = [spec, [isinstance(x, torch.Tensor) for x in results]]
        return [x.clone() for x in results if isinstance(x, torch.Tensor)]

    def rebuilt(self, tensors: Any) -> Any:
        spec, is_tensor = self.results
        remaining = iter(tensors)
        return pytree.tree_unflatten([next(remaining) if is_one else None for is_one in is_tensor], spec)


_OPERATORS: dict[Any, tuple[Any, _Call]] = {}


def is_registered(function: type) -> bool:
    """Whether the user gave a JAX function for this autograd.Function."""
    return registry.find(function) is not None


def apply(function: type, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`function.apply(*args, **kwargs)` as one node of the graph."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kinds = tuple(_kind(leaf) for leaf in leaves)
    fixed = tuple(leaf if kind is None else ... for leaf, kind in zip(leaves, kinds, strict=True))
    key = (function, kinds, str(spec), tuple(map(_identity, fixed)))
    if key not in _OPERATORS:
        call = _Call(apply=original, spec=spec, kinds=kinds, fixed=fixed)
        _OPERATORS[key] = (_operator(function, call), call)
    operator, call = _OPERATORS[key]
    moving = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind is not None]
    versions = [x._version for x in moving if isinstance(x, torch.Tensor)]
    results = operator(*moving)
    _refuse_writes(function, moving, versions)
    return call.rebuilt(results)


def _kind(leaf: Any) -> str | None:
    return next((name for cls, name in _KINDS if isinstance(leaf, cls)), None)


def _identity(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)


def _operator(function: type, call: _Call) -> Any:
    names = [f"{kind} a{i}" for i, kind in enumerate(kind for kind in call.kinds if kind)]
    name = f"{function.__name__}_{next(_NUMBERS)}"
    made = torch.library.custom_op(
        f"{NAMESPACE}::{name}", call.run, mutates_args=(), schema=f"({', '.join(names)}) -> Tensor[]"
    )
    made.register_fake(call.run)
    made.register_autograd(lambda ctx, *_: ctx.zeros, setup_context=_remember_zeros)

    def lowered(*leaves: Any, **extra: Any) -> tuple[Any, ...]:
        args, kwargs = call.arguments(leaves)
        found = registry.find(function)
        assert found is not None, "an operator is made for registered Functions"
        results = pytree.tree_leaves(found.function(*args, **kwargs, **extra))
        return tuple(x for x in results if x is not None)

    found = registry.find(function)
    assert found is not None, "an operator is made for registered Functions"
    registry.lowering(made._opoverload, random=found.random)(lowered)
    return made._opoverload


def _remember_zeros(ctx: Any, inputs: Any, output: Any) -> None:
    """Only whether tensors are connected matters while exporting, not the values."""
    del output
    ctx.zeros = tuple(torch.zeros_like(x) if isinstance(x, torch.Tensor) else None for x in inputs)


def _refuse_writes(function: type, moving: Any, versions: Any) -> None:
    after = [x._version for x in moving if isinstance(x, torch.Tensor)]
    if after != versions:
        raise BridgeError(
            message(
                f"{function.__qualname__} writes into what it is given (mark_dirty).",
                hint="let its forward return a new tensor",
            )
        )
