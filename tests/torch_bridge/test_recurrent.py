"""Recurrent layers against torch: outputs, states and gradients, without unrolling time."""

from collections.abc import Callable

import jax
import pytest
import torch

import torch_bridge
from tests.torch_bridge.oracle import assert_same_gradients, loss_and_gradients
from torch_bridge.tensors import to_jax

LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "lstm": lambda: torch.nn.LSTM(3, 4),
    "two layers, both directions": lambda: torch.nn.LSTM(
        3, 4, num_layers=2, bidirectional=True, batch_first=True
    ),
    "projected without biases": lambda: torch.nn.LSTM(3, 4, proj_size=2, bias=False, batch_first=True),
    "gru": lambda: torch.nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "tanh": lambda: torch.nn.RNN(3, 4, batch_first=True),
    "relu": lambda: torch.nn.RNN(3, 4, nonlinearity="relu", bias=False, batch_first=True),
}


class Summed(torch.nn.Module):
    """A recurrent layer with a loss of its output and its states."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, states = self.layer(x)
        states = states if isinstance(states, tuple) else (states,)
        return out.square().sum() + sum(s.sin().sum() for s in states)


@pytest.mark.parametrize("name", LAYERS)
def test_a_recurrent_layer_and_its_gradients_match_torch(name: str) -> None:
    torch.manual_seed(0)
    module = Summed(LAYERS[name]())
    x = torch.randn(2, 5, 3)
    converted = torch_bridge.convert(module, (x,), batch_dims=(None,))
    want = module(x)
    want.backward()
    loss, gradients, _ = loss_and_gradients(converted, (to_jax(x),))
    assert float(loss) == pytest.approx(want.item(), rel=1e-5)
    assert_same_gradients(gradients, module)


def test_time_is_a_loop_and_not_unrolled() -> None:
    x = torch.randn(2, 50, 3)
    converted = torch_bridge.convert(torch.nn.LSTM(3, 4, batch_first=True), (x,), batch_dims=(None,))
    jaxpr = jax.make_jaxpr(lambda a: converted.apply(converted.params, converted.buffers, a)[0])(to_jax(x))
    assert "scan" in str(jaxpr)
    assert len(jaxpr.eqns) < 60


def test_dropout_between_layers_needs_a_key_and_changes_with_it() -> None:
    x = torch.randn(4, 6, 3)
    converted = torch_bridge.convert(
        torch.nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True).train(), (x,), batch_dims=(None,)
    )

    def output(seed: int) -> jax.Array:
        key = jax.random.key(seed)
        return converted.apply(converted.params, converted.buffers, to_jax(x), rng=key)[0][0]

    assert (output(0) == output(0)).all()
    assert not (output(0) == output(1)).all()
    with pytest.raises(torch_bridge.errors.BridgeError, match="key"):
        converted.apply(converted.params, converted.buffers, to_jax(x))
