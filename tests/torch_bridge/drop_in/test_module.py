"""What `RaNNCModule` promises around the loop: gradients as torch has them, mistakes that say what to do."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_bridge import BridgeError, RaNNCModule
from torch_bridge.drop_in.device_tensor import DeviceTensor, plain


class Net(nn.Module):
    """Returns a loss and logits; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.second(torch.tanh(self.first(x)))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def made() -> tuple[Net, Net, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mine, reference = Net(), Net()
    reference.load_state_dict(mine.state_dict())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (mine, reference)]
    return mine, reference, *optimizers


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8), torch.randint(3, (8,))


def same_gradients(mine: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(mine.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(plain(p.grad), q.grad, rtol=1e-4, atol=1e-6)


def test_gradients_are_those_of_torch_however_backward_is_called() -> None:
    net, reference, optimizer, other = made()
    model: Any = RaNNCModule(net, optimizer)
    assert isinstance(next(iter(model.parameters())), nn.Parameter)
    x, y = batch()
    for m in (model, reference):
        (m(x, y)["loss"] / 2).backward()
        m(x, y)  # its gradients are dropped
        loss = m(x, y)["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    same_gradients(net, reference)
    assert isinstance(net.first.weight, DeviceTensor)
    assert net.unused.weight.grad is None

    for m, o in ((model, optimizer), (reference, other)):
        o.step()
        o.zero_grad()
        with torch.no_grad():
            m.first.weight.clamp_(-0.1, 0.1)  # through the wrapper, to the user's own parameter
            m.second.bias[0] = 0.5
        inputs = x.clone().requires_grad_()
        out = m(inputs, y)
        if m is model:
            with pytest.warns(UserWarning, match="runs twice"):
                (out["loss"] + out["logits"].square().mean()).backward()
            found = plain(inputs.grad)
        else:
            (out["loss"] + out["logits"].square().mean()).backward()
            torch.testing.assert_close(found, inputs.grad, rtol=1e-4, atol=1e-6)
    same_gradients(net, reference)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_an_optimizer_may_have_parameters_of_elsewhere_too() -> None:
    losses = []
    for wraps in (False, True):
        torch.manual_seed(0)
        net, extra = Net(), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([*net.parameters(), extra], lr=0.1)
        model: Any = RaNNCModule(net, optimizer) if wraps else net
        for _ in range(3):
            x, y = batch()
            loss = model(x, y)["loss"] + extra.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append([loss.item(), *extra.tolist()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# --- mistakes -------------------------------------------------------------------------------------


def test_a_model_is_wrapped_once() -> None:
    net, _, optimizer, _ = made()
    model = RaNNCModule(net, optimizer)
    for again in (net, model):
        with pytest.raises(BridgeError, match="wrapped already"):
            RaNNCModule(again, optimizer)


def test_an_optimizer_of_another_model_is_named() -> None:
    net, _, _, other = made()
    with pytest.raises(BridgeError, match="the optimizer's 6 parameters"):
        RaNNCModule(net, other)


def test_missing_keys_are_torchs_own_message() -> None:
    net, _, optimizer, _ = made()
    model = RaNNCModule(net, optimizer)
    values = model.state_dict()
    values.pop("first.weight")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "first.weight"'):
        model.load_state_dict(values)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


def test_a_branch_on_data_names_the_line() -> None:
    net = Branching()
    model = RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(BridgeError, match=r"test_module\.py"):
        model(torch.ones(4, 8))
