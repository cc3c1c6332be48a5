"""How a module meets other numbers of rows: two exports merged, symbolic sizes, or one export for each."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from torch_bridge import BridgeError, convert
from torch_bridge.dynamic import refuse_fixed_rows
from torch_bridge.program import Graph, Node, Ref
from torch_bridge.shapes import batch_dim_candidates


class Pairs(nn.Module):
    """Sizes that are no line in the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        rows = x.shape[0]
        y = self.body(x)
        return (y[:, None] * y[None]).reshape(rows * rows, -1), y[: rows // 2], torch.arange(rows)


class Branch(Pairs):
    """A branch that torch states as a range of rows, and one that it states as a condition."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x)[0]
        return (y + 1 if x.shape[0] > 3 else y - 1) * (2.0 if x.shape[0] % 2 == 0 else 3.0)


class Spelt(nn.Module):
    """A tensor written out at the number of rows, which no symbolic size can do."""

    def forward(self, x: Any) -> Any:
        return x + torch.tensor([float(i * i) for i in range(x.shape[0])])[:, None]


def assert_same_at(converted: Any, module: nn.Module, rows: int) -> None:
    x = torch.randn(rows, 4)
    got, _ = converted.apply(converted.params, {}, jnp.asarray(x.numpy()))
    want = module(x)
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for a, b in pairs:
        np.testing.assert_allclose(a, b.detach(), rtol=1e-5, atol=1e-6)


def test_sizes_that_follow_no_line_become_symbolic_in_one_export() -> None:
    module = Pairs()
    converted = convert(module, (torch.randn(4, 4),))
    assert converted.one_export
    assert "at 4 rows is" in (converted.programs.dynamic_reason or "none")
    for rows in (4, 5, 9):
        assert_same_at(converted, module, rows)
    assert len(converted.programs.cache) == 1


def test_another_length_has_symbolic_rows_as_well() -> None:
    class Lengths(nn.Module):
        def forward(self, x: Any) -> Any:
            return (x[:, None] * x[None]).reshape(x.shape[0] ** 2, -1).cumsum(-1)

    converted = convert(Lengths(), (torch.randn(3, 4),))
    for rows in (1, 5):
        x = torch.randn(rows, 7)
        got, _ = converted.apply({}, {}, jnp.asarray(x.numpy()))
        np.testing.assert_allclose(got, Lengths()(x), rtol=1e-5, atol=1e-6)
    assert len(converted.programs.cache) <= 3


def test_rows_beyond_what_torch_says_are_exported_on_their_own() -> None:
    module = Branch()
    converted = convert(module, (torch.randn(6, 4),))
    assert converted.programs.first.validity is not None
    for rows in (1, 2, 3, 6, 5, 8):
        assert_same_at(converted, module, rows)
    exported = {program.rows for program in converted.programs.cache.values() if not program.any_rows}
    assert exported == {1, 2, 3, 5}


def test_what_torch_refuses_to_make_symbolic_is_exported_again() -> None:
    converted = convert(Spelt(), (torch.randn(3, 4),))
    assert not converted.one_export
    assert "depends on the number of rows" in (converted.programs.reason or "")
    for rows in (1, 3, 5):
        assert_same_at(converted, Spelt(), rows)


def test_rows_that_torch_fixes_without_saying_so_are_seen() -> None:
    """Happens where in-place writes through several views meet (the zoo has such a network)."""

    def graph(shape: tuple[int, ...] | None) -> Graph:
        node = Node(
            operator=torch.ops.aten.view.default,
            args=(Ref(0), (7, 8)),
            kwargs={},
            path="",
            source="net.py:3",
            dtypes=(torch.float32,),
            shape=shape,
        )
        return Graph(num_inputs=1, nodes=(node,), outputs=(Ref(1),))

    refuse_fixed_rows(graph(None), rows=7)  # a symbolic size
    refuse_fixed_rows(graph((5, 8)), rows=7)
    with pytest.raises(BridgeError, match=r"torch fixes the rows in aten\.view\.default"):
        refuse_fixed_rows(graph((7, 8)), rows=7)


def test_a_module_that_cannot_be_exported_at_all_is_tried_once_or_twice() -> None:
    calls = []

    class Branches(nn.Module):
        def forward(self, x: Any) -> Any:
            calls.append(1)
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(ValueError, match="needs the value of a tensor"):
        convert(Branches(), (torch.randn(3, 4),))
    assert len(calls) <= 4  # a try runs forward twice: to look for blocks that repeat, and to export


@pytest.mark.parametrize(
    "shapes, dims",
    [
        (((4, 8), (4, 8), (4,)), (0, 0, 0)),
        (((10, 4, 12), (6, 4, 12)), (1, 1)),  # two sequences, sequence first
        (((4, 10, 12), (10, 10)), (0, None)),  # rows and a mask
        (((4, 10), (1, 10)), (0, None)),  # rows and positions
        (((4, 8), ()), (0, None)),
    ],
)
def test_the_first_guess_at_the_batch_dims(shapes: Any, dims: Any) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    assert next(batch_dim_candidates(tensors))[1] == dims


class Squeezed(nn.Module):
    """One row is a case apart, and both sizes of an export take the other branch."""

    def forward(self, x: Any) -> Any:
        y = x.squeeze()
        return y * 2 if len(x) > 1 else y[None] + x.sum(0)


def test_a_single_row_has_an_export_of_its_own() -> None:
    converted = convert(Squeezed(), (torch.randn(4, 4),))
    for rows in (2, 5, 1, 1):
        assert_same_at(converted, Squeezed(), rows)
    assert len(converted.programs.cache) == 2
