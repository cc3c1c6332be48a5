"""Operators of our own, for what torch.export would otherwise lose: they stand in exported graphs.

They are made when a module first needs one, so that importing this package, or converting a module that
needs none, adds nothing to torch's dispatcher.

    with_history   the value of one tensor, the gradient history of another
    constant       a tensor made in a branch or a loop's body
    gradient       torch.autograd.grad inside forward
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import torch

from torch_bridge.errors import BridgeError, message
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import to_jax

NAMESPACE = "torch_bridge"


def define(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    backward: Callable[..., Any],
) -> Any:
    """A functional operator with this schema; `fake` gives results of the right shapes.

    `backward` matters only while exporting: it says which inputs torch considers connected.
    """
    operator = torch.library.custom_op(f"{NAMESPACE}::{name}", fake, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    operator.register_autograd(backward)
    return operator._opoverload


@cache
def with_history() -> Any:
    """`(value, history) -> value`, as what `history` is to autograd.

    torch writes into a tensor under `no_grad` without telling its history: the tensor has the new value
    and still the gradient of what it was.
    """
    operator = define(
        "with_history",
        "(Tensor value, Tensor history) -> Tensor",
        lambda value, history: torch.empty_like(value),
        lambda ctx, g: (None, g),
    )
    lowering(operator)(_with_history)
    return operator


@jax.custom_jvp
def _with_history(value: Any, history: Any) -> Any:
    del history
    return value


@_with_history.defjvp
def _with_history_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]


_CONSTANTS: list[torch.Tensor] = []
_NUMBERS: dict[Any, int] = {}


def constant_number(tensor: torch.Tensor) -> int:
    """The number of a constant with these values, the same for equal ones."""
    host = tensor.detach().cpu().contiguous()
    values = host.reshape(-1).view(torch.uint8).numpy().tobytes()
    key = (host.dtype, tuple(host.shape), values)
    if key not in _NUMBERS:
        _NUMBERS[key] = len(_CONSTANTS)
        _CONSTANTS.append(host)
    return _NUMBERS[key]


@cache
def constant() -> Any:
    """`number -> Tensor`: a tensor made in the body of a higher-order operator, which torch cannot lift."""

    def fake(number: int) -> torch.Tensor:
        return _CONSTANTS[number].clone()

    operator = define("constant", "(int number) -> Tensor", fake, lambda ctx, g: None)
    lowering(operator)(lambda number: to_jax(_CONSTANTS[number]))
    return operator


@cache
def gradient() -> Any:
    """`(outputs, inputs, seeds, batched) -> gradients`: what `torch.autograd.grad` inside forward returns.

    It has no lowering of its own: `interpret` differentiates the nodes between the inputs and the
    outputs. With `batched`, seeds and gradients have a further dim in front.
    """

    def fake(outputs: Any, inputs: Any, seeds: Any, batched: bool) -> list[torch.Tensor]:
        del outputs
        return [torch.empty_like(x).expand(*seeds[0].shape[: int(batched)], *x.shape).clone() for x in inputs]

    def remember(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.tensors = inputs[:3]

    def connected(ctx: Any, *_: Any) -> Any:
        return (*([torch.zeros_like(x) for x in part] for part in ctx.tensors), None)

    operator = torch.library.custom_op(
        f"{NAMESPACE}::gradient",
        fake,
        mutates_args=(),
        schema="(Tensor[] outputs, Tensor[] inputs, Tensor[] seeds, bool batched) -> Tensor[]",
    )
    operator.register_fake(fake)
    operator.register_autograd(connected, setup_context=remember)
    operator.register_vmap(_mapped_gradient)
    lowering(operator._opoverload)(_left_to_interpret)
    return operator._opoverload


def _mapped_gradient(info: Any, in_dims: Any, outputs: Any, inputs: Any, seeds: Any, batched: bool) -> Any:
    """Under torch.vmap: examples do not see each other, so all of them are differentiated at once."""
    of_outputs, of_inputs, of_seeds, _ = in_dims
    if all(dim is None for dim in (*of_outputs, *of_inputs)):
        assert not batched, "seeds are batched once"
        moved = [_with_dim(s, dim, 0, info.batch_size) for s, dim in zip(seeds, of_seeds, strict=True)]
        return gradient()(outputs, inputs, moved, True), [0] * len(inputs)
    if any(dim is None for dim in of_inputs):
        raise BridgeError(
            message(
                "a gradient under torch.vmap is taken with respect to a tensor that vmap does not map.",
                hint="pass it to the mapped function with in_dims=0, expanded over the batch",
            )
        )
    outputs = [_with_dim(y, dim, 0, info.batch_size) for y, dim in zip(outputs, of_outputs, strict=True)]
    place = int(batched)
    moved = [_with_dim(s, dim, place, info.batch_size) for s, dim in zip(seeds, of_seeds, strict=True)]
    gradients = gradient()(outputs, inputs, moved, batched)
    return gradients, [dim + place for dim in of_inputs]


def _with_dim(x: torch.Tensor, dim: int | None, place: int, size: int) -> torch.Tensor:
    return (
        x.unsqueeze(place).expand(*x.shape[:place], size, *x.shape[place:])
        if dim is None
        else x.movedim(dim, place)
    )


def _left_to_interpret(*_: Any) -> Any:
    raise AssertionError("interpret computes gradients itself")


def is_gradient(operator: Any) -> bool:
    """Whether an operator is `gradient()`."""
    return gradient.cache_info().currsize > 0 and operator is gradient()
