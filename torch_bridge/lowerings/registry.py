"""Which JAX function stands for which torch operator.

A lowering is a pure function with the operator's own arguments: jax arrays for tensors, Python values
for the rest. It returns what the operator returns (a tuple where that returns several tensors); the
interpreter casts results to the dtype torch states. Random operators get their PRNG key as `rng`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
Operator = Any  # torch.ops overloads have no public type


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """`function` computes the operator; `random` tells whether it takes a key (`rng=`), which may depend
    on the arguments (a dropout that is off draws nothing). `in_layout` is the same for values that may lie
    channels-last (`layout.ChannelsLast`), and may return such; None for what knows torch's order alone."""

    function: Callable[..., Any]
    random: Callable[..., bool]
    in_layout: Callable[..., Any] | None = None


_LOWERINGS: dict[Operator, Lowering] = {}
_BY_NAME: dict[str, Lowering] = {}  # of operators that exist once their library is imported


def never(*_args: Any, **_kwargs: Any) -> bool:
    """The operator draws no random numbers."""
    return False


def always(*_args: Any, **_kwargs: Any) -> bool:
    """The operator draws random numbers."""
    return True


def lowering(
    *operators: Operator,
    random: Callable[..., bool] = never,
    layouts: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Callable[[Function], Function]:
    """Register the decorated function for some operators, replacing what was there.

    Args:
        operators: overloads such as `torch.ops.aten.add.Tensor`.
        random: given the operator's arguments, whether the function takes a PRNG key beside them, as `rng=`.
        layouts: a rule of `lowerings.layouts`, if the operator need not have its values in torch's order.
    """

    def register(function: Function) -> Function:
        in_layout = None if layouts is None else layouts(function)
        for operator in operators:
            _LOWERINGS[operator] = Lowering(function=function, random=random, in_layout=in_layout)
        return function

    return register


def lowering_by_name(name: str) -> Callable[[Function], Function]:
    """Register the decorated function for an operator of a library that need not be there.

    Args:
        name: such as "mylib::fused", or "mylib::fused.overload".
    """

    def register(function: Function) -> Function:
        _BY_NAME[name] = Lowering(function=function, random=never)
        return function

    return register


def register_lowering(target: Any, *, random: bool = False) -> Callable[[Function], Function]:
    """Teach the bridge an operator or an autograd.Function, or replace what it does for one.

    Gradients are those of the JAX function: give it a `jax.custom_vjp` where they are to be others than
    its own derivative. A gradient formula that torch has for the operator (`register_autograd`, or the
    Function's `backward`) is not used.

    Args:
        target: an overload such as `torch.ops.mylib.fused.default`; an operator with one overload, such as
            `torch.ops.mylib.fused` or what `torch.library.custom_op` returns; or a subclass of
            `torch.autograd.Function`. The JAX function takes the operator's arguments, or those of the
            Function's `apply`: arrays for tensors, the values themselves for the rest. It returns what the
            operator returns, and then the new values of arguments that the operator writes.
        random: whether the function draws random numbers; it then gets a PRNG key as `rng=`.

    Raises:
        TypeError: if `target` is none of these.

    Example:
        >>> import torch, jax, jax.numpy as jnp
        >>> class Clip(torch.autograd.Function):  # values clipped to [-1, 1], gradient passed through
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x.clamp(-1, 1)
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad
        >>> @register_lowering(Clip)
        ... @jax.custom_vjp
        ... def clip(x):
        ...     return jnp.clip(x, -1, 1)
        >>> clip.defvjp(lambda x: (clip(x), None), lambda _, grad: (grad,))
    """
    return lowering(_operator(target), random=always if random else never)


def _operator(target: Any) -> Operator:
    if isinstance(target, torch.library.CustomOpDef):
        return target._opoverload
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = target.overloads()
        if len(overloads) > 1:
            raise TypeError(f"{target} has several overloads: name one of {', '.join(overloads)}")
        return getattr(target, overloads[0])
    is_function = isinstance(target, type) and issubclass(target, torch.autograd.Function)
    if is_function or isinstance(target, torch._ops.OperatorBase):
        return target
    raise TypeError(
        f"got {target!r}; expected an operator (torch.ops....), a torch.library.custom_op, or a subclass of "
        "torch.autograd.Function"
    )


def find(operator: Operator) -> Lowering | None:
    """The lowering of an operator, if there is one."""
    found = _LOWERINGS.get(operator)
    if found is None and isinstance(operator, torch._ops.OpOverload):
        return _BY_NAME.get(operator.name())
    return found


def draws(operator: Operator, *args: Any, **kwargs: Any) -> bool:
    """Whether an operator, called with these arguments, draws random numbers."""
    found = find(operator)
    return found is not None and found.random(*args, **kwargs)
