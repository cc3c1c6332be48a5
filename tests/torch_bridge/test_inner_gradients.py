"""Gradients that forward itself takes, and the gradients of those, against torch."""

from typing import Any

import pytest
import torch

from tests.torch_bridge.oracle import assert_same_functions
from torch_bridge import BridgeError, convert


def force(x: Any, w: Any) -> Any:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(torch.tanh(x @ w).square().sum(), x, create_graph=True)
    return g @ w


def detached_force(x: Any, w: Any) -> Any:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(torch.tanh(x @ w).sum(), x)
    return g * x


def along_the_way(x: Any, w: Any) -> Any:
    x = x.clone().requires_grad_()
    y = torch.tanh(x @ w)
    z = y @ w
    of_x, of_y = torch.autograd.grad(z.sum(), (x, y), create_graph=True)
    (twice,) = torch.autograd.grad(of_x.square().sum(), x, create_graph=True)
    return of_x, of_y * y, twice


def with_seeds(x: Any, w: Any) -> Any:
    x = x.clone().requires_grad_()
    y = torch.sin(x @ w)
    unused = torch.ones(2, requires_grad=True)
    g, none = torch.autograd.grad(
        y, (x, unused), grad_outputs=2 * torch.ones_like(y), allow_unused=True, create_graph=True
    )
    assert none is None
    return g


def batched_seeds(x: Any, w: Any) -> Any:
    row = x[0].clone().requires_grad_()
    y = torch.tanh(row @ w)
    return torch.autograd.grad(y, row, grad_outputs=torch.eye(3), is_grads_batched=True, create_graph=True)[0]


def func_parameters(x: Any, w: Any) -> Any:
    def loss(p: Any, x: Any) -> Any:
        return torch.func.functional_call(torch.nn.Linear(3, 3, bias=False), p, (x,)).square().sum()

    g = torch.func.grad(loss)({"weight": w}, x)
    return loss({"weight": w - 0.1 * g["weight"]}, x)


def func_aux(x: Any, w: Any) -> Any:
    g, (value, aux) = torch.func.grad_and_value(
        lambda w, x: ((x @ w).square().sum(), x * 2), argnums=(0, 1), has_aux=True
    )(w, x)
    return g, value, aux


def func_vjp(x: Any, w: Any) -> Any:
    y, pull = torch.func.vjp(lambda x, w: torch.tanh(x @ w), x, w)
    return y, pull(y)


FUNCTIONS = {
    f.__name__: f
    for f in (
        force,
        detached_force,
        along_the_way,
        with_seeds,
        batched_seeds,
        func_parameters,
        func_aux,
        func_vjp,
    )
} | {
    "jacrev": lambda x, w: torch.func.jacrev(lambda w: (w * w).sum(0))(w) * x[0],
    "mapped grad": lambda x, w: torch.vmap(torch.func.grad(lambda r: torch.tanh(r @ w).square().sum()))(x),
    "of each example": lambda x, w: torch.vmap(
        torch.func.grad(lambda w, r: torch.tanh(r @ w).square().sum()), (None, 0)
    )(w, x),
    "mapped jacrev": lambda x, w: torch.vmap(torch.func.jacrev(lambda r: torch.tanh(r @ w)))(x),
    "mapped hessian": lambda x, w: torch.vmap(torch.func.hessian(lambda r: torch.tanh(r @ w).sum()))(x),
    "jacfwd": lambda x, w: torch.func.jacfwd(lambda w: torch.tanh(x @ w).sum(0))(w),
    "derivative of a gradient": lambda x, w: torch.func.jvp(
        torch.func.grad(lambda w: torch.tanh(x @ w).square().sum()), (w,), (w.cos(),)
    ),
    "jvp": lambda x, w: torch.func.jvp(lambda x: torch.tanh(x @ w), (x,), (torch.ones_like(x),)),
}


def test_inner_gradients_and_their_gradients_are_torchs() -> None:
    assert_same_functions(FUNCTIONS, (torch.randn(4, 3), torch.randn(3, 3)))


class Unconnected(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        return torch.autograd.grad(x.sum(), other)[0]


def test_torchs_own_error_tells_of_an_unconnected_input() -> None:
    with pytest.raises(BridgeError, match="not have been used in the graph"):
        convert(Unconnected(), (torch.ones(2, 3),))


class SharedUnderVmap(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = torch.ones(3, requires_grad=True)
        return torch.vmap(lambda r: torch.autograd.grad((r * w).sum(), w)[0])(x)


def test_a_gradient_of_what_vmap_does_not_map_is_refused() -> None:
    with pytest.raises(BridgeError, match="vmap does not map"):
        convert(SharedUnderVmap(), (torch.ones(2, 3),))
