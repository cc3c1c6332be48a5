"""What typical mistakes print: what is wrong, the user's line, the way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_bridge import BridgeError, convert


class Branch(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.mean() > 0:
            return x
        return -x


class Loop(nn.Module):
    def forward(self, x: Any) -> Any:
        while x.norm() < 10:
            x = x * 2
        return x


class Check(nn.Module):
    def forward(self, x: Any) -> Any:
        assert (x < 100).all(), "too large"
        return x


class Size(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.zeros(int(x.abs().max()))


class Numpy(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.from_numpy(x.detach().numpy() * 2)


class Format(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * float(f"{x.sum():.2f}")


class Mask(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[x > 0]


class Nonzero(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.nonzero(x).float()


class Unique(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.unique(x.long())


class OneHot(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.one_hot(x.long())


class Cuda(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.cuda()


class Raises(nn.Module):
    def forward(self, x: Any) -> Any:
        raise ValueError("an error of its own")


class Shapes(nn.Module):
    def forward(self, x: Any) -> Any:
        return x @ torch.ones(7, 7)


IN_PYTHON, SHAPE = "needs the value of a tensor in Python", "shape depends on the values"
CASES: list[tuple[Callable[[], nn.Module], str, str, str]] = [
    (Branch, IN_PYTHON, "if x.mean() > 0", "torch.where"),
    (Loop, IN_PYTHON, "while x.norm() < 10", "scan for a loop"),
    (Check, IN_PYTHON, "assert (x < 100).all()", "keep it a tensor"),
    (Size, IN_PYTHON, "torch.zeros(int(x.abs().max()))", "keep it a tensor"),
    (Numpy, IN_PYTHON, "x.detach().numpy()", "keep it a tensor"),
    (Format, IN_PYTHON, 'float(f"{x.sum():.2f}")', "keep it a tensor"),
    (Mask, SHAPE, "x[x > 0]", "torch.where(mask, x, fill)"),
    (Nonzero, SHAPE, "torch.nonzero(x)", "keep the shape"),
    (Unique, SHAPE, "torch.unique(x.long())", "keep the shape"),
    (OneHot, "number of classes", "F.one_hot(x.long())", "num_classes"),
    (Raises, "forward raises an error", "an error of its own", "see whether the module runs"),
    (Shapes, "cannot follow", "x @ torch.ones(7, 7)", "see whether the module runs"),
]


@pytest.mark.parametrize("make, what, line, way_out", CASES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_mistake_is_told_with_its_line_and_the_way_out(
    make: Callable[[], nn.Module], what: str, line: str, way_out: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BridgeError) as caught:
        convert(make(), (torch.ones(4, 3),))
    text = str(caught.value)
    first, *_, last = text.splitlines()
    assert what in first
    assert line in text
    assert "test_export_errors.py" in text
    assert last.startswith("  try: ")
    assert way_out in last
    assert "def forward" not in capfd.readouterr().err  # torch prints the graph it had so far


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the tensor does move")
def test_moving_to_a_gpu_in_forward_is_told() -> None:
    with pytest.raises(
        BridgeError, match=r"moves a tensor to a GPU(.|\n)*x\.cuda\(\)(.|\n)*try: leave devices"
    ):
        convert(Cuda(), (torch.ones(4, 3),))


def test_a_number_taken_out_for_a_log_does_no_harm() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[Any] = []

        def forward(self, x: Any) -> Any:
            self.log.append(x.sum().item())
            return x * 2

    converted = convert(Logs(), (torch.ones(4, 3),))
    assert float(converted.apply({}, {}, torch.ones(2, 3))[0].sum()) == 12.0


def test_lazy_parameters_are_told() -> None:
    with pytest.raises(BridgeError, match="lazy parameters"):
        convert(nn.LazyLinear(3), (torch.ones(4, 3),))
