"""Where gradients stop: no_grad, detach, in-place writes, checkpoints, autocast; and what is refused."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.torch_bridge.oracle import (
    assert_same_functions,
    assert_same_gradients,
    loss_and_gradients,
)
from torch_bridge import BridgeError, convert


def inference(x: Any, w: Any) -> Any:
    with torch.inference_mode():
        y = x @ w
    return torch.tanh(x @ w) + y


@torch.inference_mode()
def _inferred(x: Any, w: Any) -> Any:
    return x @ w


def nested_switches(x: Any, w: Any) -> Any:
    with torch.set_grad_enabled(False):
        y = x @ w
        with torch.set_grad_enabled(True):
            z = x @ w
            with torch.no_grad():
                z = z + z @ w
        y = y + (y @ w) * z.detach()
    return y * z


def switch_as_function(x: Any, w: Any) -> Any:
    torch.set_grad_enabled(False)
    y = x @ w
    torch.set_grad_enabled(True)
    return y * x


def leaf_midway(x: Any, w: Any) -> Any:
    return (x @ w).detach().requires_grad_() @ w


def write_under_no_grad(x: Any, w: Any) -> Any:
    y = x @ w
    with torch.no_grad():
        y.mul_(2.0).add_(w[0])
    return torch.tanh(y @ w)


def write_to_a_view_under_no_grad(x: Any, w: Any) -> Any:
    y = x @ w
    with torch.no_grad():
        y[:, 0].mul_(2.0)
    return torch.tanh(y @ w)


def write_to_data(x: Any, w: Any) -> Any:
    y = torch.sin(x @ w)
    y.data.mul_(3.0)
    return y @ w


def assign_data(x: Any, w: Any) -> Any:
    y = torch.sin(x @ w)
    y.data = y.data * 3
    return y @ w


def detach_in_place(x: Any, w: Any) -> Any:
    y = torch.sin(x @ w)
    y.detach_()
    return y @ w


def write_through_detach(x: Any, w: Any) -> Any:
    y = torch.sin(x @ w)
    z = y.detach()
    z += 1
    return y @ w + z


def straight_through(x: Any, w: Any) -> Any:
    y = x @ w
    return (y + (y.round() - y).detach()) @ w


def views_under_no_grad(x: Any, w: Any) -> Any:
    y = x @ w
    with torch.no_grad():
        same, view, flat = y, w.t(), y.view(-1)
    return same * x, x @ view, flat * y.view(-1)


def nothing_to_convert(x: Any, w: Any) -> Any:
    y = torch.sin(x @ w)
    with torch.no_grad():
        same = y.float().contiguous()
        mean = F.dropout(y, 0.5, training=False).mean(0)
    return y * mean, same @ w


def enabled_inside(x: Any, w: Any) -> Any:
    with torch.no_grad():
        with torch.enable_grad():
            y = x @ w
        z = y * 2
        with torch.enable_grad():
            u = y * 3 + z * x
    return u


def not_reentrant(x: Any, w: Any) -> Any:
    return checkpoint(lambda x, *, scale: torch.tanh(x @ w) * scale, x, use_reentrant=False, scale=2.0)


def no_grad_in_a_checkpoint(x: Any, w: Any) -> Any:
    def body(x: Any) -> Any:
        with torch.no_grad():
            y = x @ w
        return (x @ w) * y

    return checkpoint(body, x, use_reentrant=False)


BARRIERS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        inference,
        nested_switches,
        switch_as_function,
        leaf_midway,
        write_under_no_grad,
        write_to_a_view_under_no_grad,
        write_to_data,
        assign_data,
        detach_in_place,
        write_through_detach,
        straight_through,
        views_under_no_grad,
        nothing_to_convert,
        enabled_inside,
        not_reentrant,
        no_grad_in_a_checkpoint,
    )
} | {"decorated": lambda x, w: torch.tanh(x @ w) + _inferred(x, w)}


def test_gradients_stop_where_they_do_in_torch() -> None:
    assert_same_functions(BARRIERS, (torch.randn(4, 3), torch.randn(3, 3)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (checkpoint(self.a, x, use_reentrant=True) + self.a(x)).square().sum()


@pytest.mark.parametrize("wants_gradient", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_reentrant_checkpoint_has_a_gradient_if_an_argument_wants_one(wants_gradient: bool) -> None:
    x, module = torch.randn(2, 3, requires_grad=wants_gradient), Checkpointed()
    converted = convert(module, (x,))
    _, gradients, _ = loss_and_gradients(converted, converted.batch)
    module(x).backward()
    assert_same_gradients(gradients, module)


class Mixed(nn.Module):
    """Regions of autocast on some device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.device = device

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = {}
        with torch.autocast(self.device, dtype=torch.bfloat16):
            out["linear"] = self.a(x)
            out["softmax"] = torch.softmax(out["linear"], -1)
            out["norm"] = F.layer_norm(out["linear"], (8,))
            out["gelu"] = F.gelu(out["linear"])
            out["joined"] = torch.cat([out["linear"], x])
            out["sum"] = out["linear"].sum(-1)
            with torch.autocast(self.device, enabled=False):
                out["full"] = self.b(x)
            with torch.no_grad():
                out["silent"] = self.b(x)
            out["loss"] = F.mse_loss(self.c(out["gelu"]) * out["silent"], out["full"])
        return out


def test_autocast_on_the_host_is_torchs_own() -> None:
    module, x = Mixed("cpu"), torch.randn(4, 8)
    converted = convert(module, (x,))
    outputs = converted.apply(converted.params, {}, x)[0]
    want = module(x)
    for name, value in want.items():
        assert str(outputs[name].dtype) == str(value.dtype).removeprefix("torch."), name
        np.testing.assert_allclose(
            np.asarray(outputs[name], np.float32), value.detach().float(), rtol=2e-2, atol=2e-2, err_msg=name
        )
    _, gradients, _ = loss_and_gradients(converted, converted.batch)
    want["loss"].backward()
    for name, parameter in module.named_parameters():
        wanted = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        close = np.linalg.norm(np.asarray(gradients[name]) - wanted) <= 0.05 * np.linalg.norm(wanted)
        assert close, name
    assert np.any(gradients["b.weight"])  # through `full`, not through `silent`


def test_autocast_for_a_gpu_follows_its_rules_although_the_example_lies_on_the_host() -> None:
    module, x = Mixed("cuda"), torch.randn(4, 8)
    converted = convert(module, (x,))
    outputs = converted.apply(converted.params, {}, x)[0]
    half = {name for name, value in outputs.items() if value.dtype == jax.numpy.bfloat16}
    assert half == {"linear", "gelu", "silent"}
    linear = (x.bfloat16() @ module.a.weight.bfloat16().t() + module.a.bias.bfloat16()).detach()
    np.testing.assert_allclose(
        np.asarray(outputs["softmax"]), torch.softmax(linear.float(), -1), rtol=1e-2, atol=1e-2
    )
    np.testing.assert_allclose(np.asarray(outputs["full"]), module.b(x).detach(), rtol=1e-5, atol=1e-6)
    assert not torch.is_autocast_enabled("cuda")


def _hooked_module() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_full_backward_hook(lambda *_: None)
    return module


def _hooked_parameter() -> nn.Module:
    module = nn.Linear(3, 3)
    module.weight.register_hook(lambda g: g * 2)
    return module


def _after_accumulation() -> nn.Module:
    module = nn.Linear(3, 3)
    module.weight.register_post_accumulate_grad_hook(lambda _: None)
    return module


@pytest.mark.parametrize("make", [_hooked_module, _hooked_parameter, _after_accumulation])
def test_backward_hooks_are_refused_by_name(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(BridgeError) as caught:
        convert(nn.Sequential(make()), (torch.ones(2, 3),))
    assert "backward hooks" in str(caught.value)
    assert "\n  0" in str(caught.value)
    assert "test_barriers.py" in str(caught.value)


class Does(nn.Module):
    def __init__(self, what: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.what(self, y)
        return y.sum()


@pytest.mark.parametrize(
    "what, words",
    [
        (lambda m, y: y.register_hook(lambda g: g * 2), "hook on a tensor's gradient"),
        (lambda m, y: y.sum().backward(), r"calls backward\(\)"),
        (lambda m, y: m.a.weight.requires_grad_(False), "requires_grad=False on a parameter"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_with_its_line(what: Callable[..., Any], words: str) -> None:
    with pytest.raises(BridgeError, match=words) as caught:
        convert(Does(what), (torch.ones(2, 3),))
    assert "test_barriers.py" in str(caught.value)
    assert "try: " in str(caught.value)


def test_forward_hooks_run() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module[0].register_forward_hook(lambda m, i, o: o * 2)
    module[2].register_forward_pre_hook(lambda m, i: (i[0] + 1,))
    x = torch.randn(2, 3)
    converted = convert(module, (x,))
    got = converted.apply(converted.params, {}, x)[0]
    np.testing.assert_allclose(got, module(x).detach(), rtol=1e-5, atol=1e-6)
