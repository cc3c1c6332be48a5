"""What forward writes: inputs, buffers, parameters, attributes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.torch_bridge.oracle import assert_same_gradients, loss_and_gradients
from torch_bridge import BridgeError, convert


class Codebook(nn.Module):
    """Exponential averages, a cumulative average, a counter, an assigned buffer, spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = parametrizations.spectral_norm(nn.Linear(3, 3))
        self.norm = nn.BatchNorm1d(3, momentum=None)
        self.register_buffer("codes", torch.randn(5, 3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.encode(x))
        nearest = torch.cdist(y, self.codes).argmin(-1)
        quantised = self.codes[nearest]
        with torch.no_grad():
            hits = nn.functional.one_hot(nearest, 5).to(y.dtype)
            self.codes.mul_(0.9).add_(0.1 * hits.t() @ y)
            self.codes[0] += 1.0
        self.mean = 0.5 * self.mean + 0.5 * y.mean(0).detach()
        self.seen += x.shape[0]
        return ((y + (quantised - y).detach()) * (self.mean + 2) + self.codes[0]).square().sum()


def test_buffers_take_the_values_that_torch_gives_them_over_two_steps() -> None:
    module = Codebook()
    x = torch.randn(6, 3)
    converted = convert(module, (x,))
    state = converted.model_state
    assert {"codes", "mean", "seen", "norm.num_batches_tracked", "norm.running_var"} <= set(state)
    for _ in range(2):
        module.zero_grad()
        loss, gradients, state = loss_and_gradients(converted, converted.batch, model_state=state)
        want = module(x)
        want.backward()
        assert float(loss) == pytest.approx(want.item(), rel=1e-4)
        assert_same_gradients(gradients, module)
        for name, value in state.items():
            wanted = dict(module.named_buffers())[name]
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5, err_msg=name)


class Writes(nn.Module):
    def __init__(self, write: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.plain = torch.ones(3)
        self.count = 0
        self.register_buffer("table", torch.zeros(2))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x)
        return self.linear(x)


def _new_parameter(module: Writes, x: torch.Tensor) -> None:
    module.linear.weight = nn.Parameter(module.linear.weight * 2)


def _plain_tensor(module: Writes, x: torch.Tensor) -> None:
    module.plain.add_(1)


def _reshaped(module: Writes, x: torch.Tensor) -> None:
    module.table = torch.zeros(5)


@pytest.mark.parametrize(
    "write, words",
    [
        (_new_parameter, "assigns linear.weight, a parameter"),
        (_plain_tensor, "plain attribute of a module"),
        (_reshaped, "assigns the buffer table a tensor of another shape"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(write: Callable[..., Any], words: str) -> None:
    with pytest.raises(BridgeError, match=words):
        convert(Writes(write), (torch.ones(2, 3),))


class WritesParameters(nn.Module):
    """Short rows, a weight clamped through .data, one made new; a frozen one follows that."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = (
            nn.Embedding(6, 3, max_norm=0.7),
            nn.Linear(3, 3),
            nn.Linear(3, 3),
        )
        self.average = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.first.weight.data.clamp_(-0.2, 0.2)
        self.second.weight.data = self.second.weight.data * 0.9
        with torch.no_grad():
            self.average.mul_(0.5).add_(self.second.weight, alpha=0.5)
        return (self.second(self.first(self.table(ids)).tanh()) @ self.average).square().sum()


def test_the_optimizer_goes_on_from_what_forward_writes_of_a_parameter() -> None:
    torch.manual_seed(0)
    module = WritesParameters()
    first = {name: value.clone() for name, value in module.state_dict().items()}
    ids = torch.tensor([[0, 1], [1, 2], [5, 1]])
    converted = convert(module, (ids,))
    assert "average" in converted.model_state
    assert not converted.frozen
    params, state = converted.params, converted.model_state
    torchs, ours = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9), optax.sgd(0.05, momentum=0.9)
    optimizer_state = ours.init(params)
    for _ in range(3):
        torchs.zero_grad()
        wanted = module(ids)
        wanted.backward()
        loss, gradients, state = loss_and_gradients(
            replace(converted, params=params), converted.batch, model_state=state
        )
        assert float(loss) == pytest.approx(wanted.item(), rel=1e-4)
        assert_same_gradients(gradients, module)
        torchs.step()
        updates, optimizer_state = ours.update(gradients, optimizer_state)
        params = optax.apply_updates(params, updates)
    saved = converted.to_state_dict(params, state)
    for name, wanted in module.state_dict().items():
        np.testing.assert_allclose(saved[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)
    again = replace(converted, params=params, model_state=state).from_state_dict(first)
    for name, wanted in first.items():
        np.testing.assert_array_equal(again.to_state_dict(again.params)[name], wanted)


def _counts(module: Writes, x: torch.Tensor) -> None:
    module.count += 1


def test_a_python_attribute_that_forward_changes_is_reported() -> None:
    module = Writes(_counts)
    with pytest.warns(UserWarning, match="forward changes count; the converted module keeps the old value"):
        convert(module, (torch.ones(2, 3),))


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x[:, 0].zero_()
        z = y * 1
        z[:, 1:] += x[:, :2]
        z.t()[0].mul_(3)
        y.add_(1)
        return z, x.add_(y), y


def test_written_inputs_are_read_as_written_and_never_leak_into_the_outputs() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    converted = convert(InPlace(), (x.clone(), y.clone()))
    given = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())
    got, _ = jax.jit(lambda x, y: converted.apply({}, {}, x, y))(*given)
    for a, b in zip(got, InPlace()(x.clone(), y.clone()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.utils.weight_norm(nn.Linear(3, 3)),
        lambda: torch.nn.utils.spectral_norm(nn.Linear(3, 3)),
        lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated:FutureWarning")
def test_parametrised_weights_have_torchs_gradients(make: Callable[[], nn.Module]) -> None:
    module, x, y = make(), torch.randn(4, 3), torch.randn(4, 3)
    converted = convert(module, (x, y), loss=lambda out, y: (out * y).sum())
    extra = {"model_state": converted.model_state} if converted.model_state else {}
    _, gradients, _ = loss_and_gradients(converted, converted.batch, **extra)
    (module(x) * y).sum().backward()
    assert_same_gradients(gradients, module)


SEEN: list[torch.Tensor] = []


class Collects(nn.Module):
    """Installs a hook in its first forward, notes so, and returns what the hook has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.installed = False

    def forward(self, x: Any) -> Any:
        if not self.installed:
            self.linear.register_forward_hook(lambda module, args, out: SEEN.append(out))
            self.installed = True
        SEEN.clear()
        return self.linear(x), tuple(SEEN)


def test_hooks_that_forward_installs_are_not_left_behind() -> None:
    module, x = Collects(), torch.randn(3, 3)
    converted = convert(module, (x,))
    assert not module.linear._forward_hooks
    assert not module.installed
    for rows in (3, 5):
        (_, seen), _ = converted.apply(converted.params, converted.buffers, jnp.ones((rows, 3)))
        assert [value.shape for value in seen] == [(rows, 3)]
    assert len(module(x)[1]) == 1
