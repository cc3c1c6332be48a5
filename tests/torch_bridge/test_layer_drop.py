"""Branches on a random draw: none at all where the rate is 0."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from torch_bridge import BridgeError, convert


class LayerDrop(nn.Module):
    """Skips layers as speech encoders do."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers, self.rate = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), rate

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            skip = self.training and torch.rand([]) < self.rate
            if not skip:
                x = torch.tanh(layer(x))
        return x


def test_layers_that_are_never_dropped_are_no_branch() -> None:
    module = LayerDrop(0.0).train()
    converted = convert(module, (torch.randn(3, 4),))
    x = torch.randn(5, 4)
    got, _ = converted.apply(converted.params, {}, jnp.asarray(x.numpy()))
    np.testing.assert_allclose(got, module(x).detach(), rtol=1e-5, atol=1e-6)


def test_layers_that_may_be_dropped_are_refused_with_the_line() -> None:
    with pytest.raises(BridgeError, match=r"skip = self.training|if not skip"):
        convert(LayerDrop(0.2).train(), (torch.randn(3, 4),))
    convert(LayerDrop(0.2).eval(), (torch.randn(3, 4),))


def test_other_comparisons_of_a_draw_are_left_alone() -> None:
    class Masked(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.where(torch.rand([]) < 0.5, x, -x), torch.where(torch.rand(3, 4) < 0.0, x, -x)

    converted = convert(Masked(), (torch.randn(3, 4),))
    assert any("lt" in str(node.operator) for node in converted.programs.first.graph.nodes)
