"""autograd.Functions and custom operators that the user gives a JAX function for."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from tests.torch_bridge.oracle import assert_same_functions
from torch_bridge import BridgeError, UnsupportedOpError, convert, register_lowering


class Rounding(enum.Enum):
    UP = 1
    NEAREST = 2


class Round(torch.autograd.Function):
    """A backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, mode: Rounding, name: str, none: None) -> Any:
        ctx.scale = scale
        return torch.ceil(x * scale) if mode is Rounding.UP else torch.round(x * scale)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.scale * 3, None, None, None, None


@register_lowering(Round)
def _round(x: Any, scale: Any, mode: Rounding, name: str, none: None) -> Any:
    assert (name, none) == ("any", None)

    @jax.custom_vjp
    def rounded(x: Any) -> Any:
        return jnp.ceil(x * scale) if mode is Rounding.UP else jnp.round(x * scale)

    rounded.defvjp(lambda x: (rounded(x), None), lambda _, grad: (grad * scale * 3,))
    return rounded(x)


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        largest = x.argmax(-1)
        ctx.mark_non_differentiable(largest)
        ctx.save_for_backward(x, w)
        return x @ w, largest, w * 2

    @staticmethod
    def backward(ctx: Any, g: Any, _: Any, h: Any) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g + h * 2


register_lowering(Several)(lambda x, w: (x @ w, jnp.argmax(x, -1), w * 2))


@torch.library.custom_op("bridge_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("bridge_tests::plain", mutates_args=())
def plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@torch.library.custom_op("bridge_tests::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, factor: float) -> torch.Tensor:
    x.mul_(factor)
    return x.sum()


scaled.register_fake(lambda x, factor: torch.empty_like(x))
plain.register_fake(lambda x: torch.empty_like(x))
scale_.register_fake(lambda x, factor: x.new_empty(()))
scaled.register_autograd(
    lambda ctx, g: (g * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)
register_lowering(scaled)(lambda x, factor: x * factor)
register_lowering(torch.ops.bridge_tests.plain)(jnp.sin)
register_lowering(torch.ops.bridge_tests.scale_.default)(lambda x, factor: ((x * factor).sum(), x * factor))


def written_by_an_operator(x: Any, w: Any) -> Any:
    y = x.detach().clone()
    total = torch.ops.bridge_tests.scale_(y[:, 1:], 3.0)
    return y * total


FUNCTIONS = {
    "with fixed arguments": lambda x, w: Round.apply(x @ w, 4.0, Rounding.NEAREST, "any", None),
    "twice": lambda x, w: (
        Round.apply(Round.apply(x @ w, 4.0, Rounding.UP, "any", None), 0.5, Rounding.NEAREST, "any", None) @ w
    ),
    "several results": lambda x, w: Several.apply(x, w),
    "custom_op with autograd": lambda x, w: scaled(x @ w, 3.0),
    "custom_op without autograd": lambda x, w: plain(x.detach()) @ w,
    "custom_op that writes": written_by_an_operator,
}


def test_registered_functions_have_torchs_values_and_gradients() -> None:
    assert_same_functions(FUNCTIONS, (torch.randn(4, 3), torch.randn(3, 3)))


class ByRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Round.apply(x, float(x.shape[0]), Rounding.UP, "any", None)


def test_numbers_given_to_a_function_may_follow_the_batch() -> None:
    converted = convert(ByRows(), (torch.randn(3, 4),))
    for rows in (3, 7):
        x = torch.randn(rows, 4)
        np.testing.assert_allclose(converted.apply({}, {}, x)[0], ByRows()(x), rtol=1e-6)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


register_lowering(Dirty)(lambda x: x * 2)


class Applies(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x * 1.0)


def test_a_registered_function_that_writes_what_it_is_given_is_refused() -> None:
    with pytest.raises(BridgeError, match="writes into what it is given"):
        convert(Applies(Dirty), (torch.ones(2, 3),))


@torch.library.custom_op("bridge_tests::nobody_writes", mutates_args=("x",))
def nobody_writes(x: torch.Tensor) -> None:
    x.zero_()


class WritesUnknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        nobody_writes(y)
        return y


def test_a_writing_operator_without_a_lowering_is_named() -> None:
    with pytest.raises(UnsupportedOpError, match=r"no lowering for bridge_tests\.nobody_writes"):
        convert(WritesUnknown(), (torch.ones(2, 3),))


def test_what_is_no_operator_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match=r"torch\.autograd\.Function"):
        register_lowering(torch.tanh)
    with pytest.raises(TypeError, match="several overloads"):
        register_lowering(torch.ops.aten.add)


@torch.library.custom_op("bridge_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


noise.register_fake(lambda x: torch.empty_like(x))


@register_lowering(noise, random=True)
def _noise(x: Any, *, rng: Any) -> Any:
    return jax.random.uniform(rng, x.shape, x.dtype)


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [noise(x), noise(x)]


def test_a_registered_operator_may_draw_random_numbers() -> None:
    converted = convert(Noisy(), (torch.ones(2, 300),))
    a, b = converted.apply({}, {}, jnp.ones((4, 300)), rng=jax.random.key(0))[0]
    assert not np.array_equal(a, b)
    assert abs(float(a.mean()) - 0.5) < 0.05
