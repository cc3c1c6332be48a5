"""PyTorch's own training loops, unchanged, on the runtime: losses and weights equal to PyTorch's."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.torch_bridge.drop_in import loops
from torch_bridge import RaNNCModule

Weights = Mapping[str, torch.Tensor]
# bfloat16 has 8 bits: one of them is 4e-3 of a loss and, in the first steps, a tenth of the way of a weight.
LOSSES, WEIGHTS = {"llama_bf16": 3e-2}, {"llama_bf16": 0.5}


class Recorder:
    """Wraps models and remembers the weights they started with, as the loops name them."""

    def __init__(self, wraps: bool) -> None:
        self.wraps = wraps
        self.start: dict[str, torch.Tensor] = {}

    def __call__(self, model: torch.nn.Module, optimizer: Any) -> torch.nn.Module:
        prefix = "d." if self.start else ""
        for name, value in model.state_dict().items():
            self.start.setdefault(prefix + name, value.detach().clone())
        if not self.wraps:
            return model
        has_statistics = any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
        return RaNNCModule(model, optimizer, num_stages=2, num_microbatches=1 if has_statistics else 2)


def distance(got: Weights, expected: Weights, start: Weights) -> float:
    """How far apart two sets of weights are, relative to the way they have come."""

    def norm(one: Weights, other: Weights) -> float:
        return sum(float((one[n].double() - other[n].double()).square().sum()) for n in expected) ** 0.5

    return norm(got, expected) / norm(expected, start)


@pytest.mark.parametrize(
    "loop", [*loops.QUICK, *(pytest.param(loop, marks=pytest.mark.slow) for loop in loops.SLOW)]
)
def test_a_loop_trains_as_pytorch_does(loop: Any) -> None:
    torch.manual_seed(0)
    expected, weights = loop(Recorder(wraps=False))
    torch.manual_seed(0)
    recorder = Recorder(wraps=True)
    losses, got = loop(recorder)
    tolerance = LOSSES.get(loop.__name__, 2e-4)
    assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert {name: value.dtype for name, value in got.items()} == {n: v.dtype for n, v in weights.items()}
    assert distance(got, weights, recorder.start) < WEIGHTS.get(loop.__name__, 1e-3)
