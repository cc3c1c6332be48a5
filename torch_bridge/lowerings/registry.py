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
    on the arguments (a dropout that is off draws nothing)."""

    function: Callable[..., Any]
    random: Callable[..., bool]


_LOWERINGS: dict[Operator, Lowering] = {}
_BY_NAME: dict[str, Lowering] = {}  # of operators that exist once their library is imported


def never(*_args: Any, **_kwargs: Any) -> bool:
    """The operator draws no random numbers."""
    return False


def always(*_args: Any, **_kwargs: Any) -> bool:
    """The operator draws random numbers."""
    return True


def lowering(*operators: Operator, random: Callable[..., bool] = never) -> Callable[[Function], Function]:
    """Register the decorated function for some operators, replacing what was there.

    Args:
        operators: overloads such as `torch.ops.aten.add.Tensor`.
        random: given the operator's arguments, whether the function takes a PRNG key beside them, as `rng=`.
    """

    def register(function: Function) -> Function:
        for operator in operators:
            _LOWERINGS[operator] = Lowering(function=function, random=random)
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


def register_lowering(operator: Operator) -> Callable[[Function], Function]:
    """Teach the bridge an operator, or replace what it does for one.

    Args:
        operator: an overload, such as `torch.ops.mylib.fused.default`.

    Example:
        >>> import torch, jax.numpy as jnp
        >>> @register_lowering(torch.ops.aten.erfcx.default)  # doctest: +SKIP
        ... def erfcx(x):
        ...     return jnp.exp(x * x) * jax.scipy.special.erfc(x)
    """
    return lowering(operator)


def find(operator: Operator) -> Lowering | None:
    """The lowering of an operator, if there is one."""
    found = _LOWERINGS.get(operator)
    if found is None and isinstance(operator, torch._ops.OpOverload):
        return _BY_NAME.get(operator.name())
    return found
