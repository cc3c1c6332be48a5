"""Tensors whose sizes depend on values: computed with room for the most rows, equal to torch in all else."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.torch_bridge.oracle import assert_same_functions
from torch_bridge import BridgeError, convert
from torch_bridge.tensors import to_jax

# x: [4, 6, 3], y: the same, ids: [4, 6] in 0..2
Case = Callable[[Any, Any, Any], Any]


def _rows(x: Any, y: Any, ids: Any) -> tuple[Any, Any, Any]:
    keep = ids > 0
    return x[keep], y[keep], ids[keep]


def _index_of_none(x: Any) -> Any:
    return x[torch.zeros_like(x, dtype=torch.bool)]


def _entropy(p: Any) -> Any:
    return (p * p.log()).sum(0)


def _negative(logp: Any) -> Any:
    return (logp.exp() * logp).sum(0)


def _accuracy(x: Any, y: Any, ids: Any) -> Any:
    keep = ids > 0
    with torch.no_grad():
        right = (x[keep].argmax(-1) == ids[keep]).float().mean() + y[keep].sum()
    return right * x[keep].sum() + (x[keep] * 2).masked_fill_(y[keep] > 0, 0.5).sum()


REDUCED: dict[str, Case] = {
    "sum": lambda x, y, ids: x[ids > 0].sum(),
    "mean": lambda x, y, ids: x[x > 0].mean(),
    "mean of losses": lambda x, y, ids: ((x - y) ** 2).mean(-1)[ids > 0].mean(),
    "mean of a dim": lambda x, y, ids: x[ids > 0].mean(0, keepdim=True),
    "mean of another dim": lambda x, y, ids: x[ids > 0].mean(-1).square().sum(),
    "over the number of rows": lambda x, y, ids: x[ids > 0].sum() / x[ids > 0].shape[0],
    "over all elements": lambda x, y, ids: x[ids > 0].sum() / x[ids > 0].numel() + x[ids > 0].size(0) * 2,
    "var": lambda x, y, ids: x[ids > 0].var(0),
    "std": lambda x, y, ids: x[ids > 0].std(0, unbiased=False),
    "largest": lambda x, y, ids: [*x[ids > 0].max(0), x[ids > 0].amin(), x[x < 0].max(), x[x > 0].argmin()],
    "tied": lambda x, y, ids: torch.where(x > 0.5, 0.5 + 0 * x, x)[ids > 0].amax((0, 1)),
    "any, all": lambda x, y, ids: [(x[ids > 0] > 0).any(0), (x[ids > 0] > -9).all(), (x[ids > 0] > 0).sum()],
    "prod": lambda x, y, ids: x[x > 1].prod(),
    "norm": lambda x, y, ids: x[ids > 0].norm() + torch.linalg.vector_norm(y[ids > 0], dim=0).sum(),
    "softmax": lambda x, y, ids: (x[ids > 0].softmax(0) * y[ids > 0]).sum(0),
    "logarithms": lambda x, y, ids: x[x > 0].log().sum() + x[x > 0].sqrt().mean(),
    "entropy": lambda x, y, ids: [_entropy(x[ids > 0].softmax(0)), _negative(x[ids > 0].log_softmax(0))],
    "three best": lambda x, y, ids: x[ids > 0, 0].topk(3).values + x[ids > 0].sort(-1).values.mean(),
    "running sum": lambda x, y, ids: x[ids > 0].cumsum(0).square().mean(),
    "joined": lambda x, y, ids: torch.cat([x[ids > 0], y[0], y[ids > 1] * 2]).std(0),
    "masked_select": lambda x, y, ids: x.masked_select((ids > 0)[..., None]).square().mean(),
}
PRODUCTS: dict[str, Case] = {
    "linear": lambda x, y, ids: F.linear(x[ids > 0], y[0, :3]).tanh().mean(0),
    "over rows": lambda x, y, ids: x[ids > 0].T @ y[ids > 0],
    "einsum": lambda x, y, ids: torch.einsum("ni,nj->ij", x[ids > 0], y[ids > 0]),
    "pairs": lambda x, y, ids: _pairs(*_rows(x, y, ids)),
    "centred": lambda x, y, ids: (x[ids > 0] - x[ids > 0].mean(0)).square().sum(),
    "layer norm": lambda x, y, ids: F.layer_norm(x[ids > 0], (3,)).mul(y[ids > 0]).sum(),
    "reshaped": lambda x, y, ids: x[ids > 0].reshape(-1).view(-1, 3).unsqueeze(1).flatten(0, 1).mean(0),
    "counted": lambda x, y, ids: (torch.arange(x[ids > 0].shape[0])[:, None] * x[ids > 0]).sum(0),
    "of ones": lambda x, y, ids: (x[ids > 0] * x.new_ones(x[ids > 0].shape[0], 1)).sum(),
}


def _pairs(x: Any, y: Any, ids: Any) -> Any:
    scores = x @ y.T
    return (scores.softmax(-1) @ y).square().mean() + F.cross_entropy(y, ids) * scores.std()


def _elementwise(x: Any, y: Any, ids: Any) -> Any:
    x, y, _ = _rows(x, y, ids)
    losses = [F.mse_loss(x, y), F.l1_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y, reduction="sum")]
    return [
        *losses,
        F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        F.kl_div(x, y.softmax(-1), reduction="batchmean"),
    ]


LOSSES: dict[str, Case] = {
    "cross entropy": lambda x, y, ids: F.cross_entropy(x[ids > 0], ids[ids > 0]),
    "smoothed": lambda x, y, ids: F.cross_entropy(
        x[ids > 0], ids[ids > 0], weight=torch.tensor([1.0, 2, 3]), label_smoothing=0.1, reduction="sum"
    ),
    "nll": lambda x, y, ids: F.nll_loss(x.log_softmax(-1)[ids > 0], ids[ids > 0]),
    "of places": _elementwise,
    "under no_grad": _accuracy,
    "none reduced": lambda x, y, ids: F.mse_loss(x, y, reduction="none")[x > 0].mean(),
}


def _dispatched(x: Any, y: Any, ids: Any) -> Any:
    out = torch.zeros_like(x).flatten(0, 1)
    for number in range(3):
        (place,) = torch.where(ids.flatten() == number)
        out.index_add_(0, place, torch.tanh(x.flatten(0, 1)[place] * (number + 1)))
    return out


def _cut(x: Any, y: Any, ids: Any) -> Any:
    """Rows in the order of their experts, cut at how many each has, and put together again."""
    order, sizes = ids.flatten().argsort(stable=True), ids.flatten().bincount(minlength=3).tolist()
    parts = x.flatten(0, 1)[order].split(sizes)
    mixed = torch.cat([part.exp() @ y[n, :3] for n, part in enumerate(parts)])
    return mixed, torch.zeros_like(mixed).index_copy(0, order, mixed.softmax(0)), parts[1].mean(0)


def _counted(x: Any, y: Any, ids: Any) -> Any:
    """Lengths that are said, that torch finds out, and that the graph tells."""
    flat = ids.flatten()
    return [
        flat.bincount(minlength=4),
        flat.bincount(y.detach()[..., 0].flatten(), minlength=3),
        torch.bincount(flat) * x[0, 0],
        torch.bincount(x.topk(2).indices.flatten()).float().std(),
        torch.bincount(flat * 2 + 1).float()[flat].mean() + torch.bincount(flat % 2).sum() + x[0, flat].sum(),
        torch.bincount(torch.tensor([1, 4])),
    ]


def _known(x: Any, y: Any, ids: Any) -> Any:
    """Masks that no argument has a part in: their rows are so many, and may be returned."""
    even = torch.arange(6) % 2 == 0
    upper = torch.ones(6, 3).triu().bool()
    return x[:, even], F.conv1d(y[:, even].mT, x[:2, :3, :2]), x[:, upper], y[0].masked_select(upper).flip(0)


def _written(x: Any, y: Any, ids: Any) -> Any:
    out = y.clone()
    out[ids > 0] = x[ids > 0] * 2
    return out


def _written_by_index(x: Any, y: Any, ids: Any) -> Any:
    out, (row, column) = y.clone(), torch.nonzero(ids > 0, as_tuple=True)
    out[row, column] = x[row, column].exp()
    return out.index_put((row,), y[row, column, None], accumulate=True)


WRITTEN: dict[str, Case] = {
    "experts": _dispatched,
    "cut and joined": _cut,
    "counted": _counted,
    "known": _known,
    "back in place": _written,
    "back by index": _written_by_index,
    "masked_scatter": lambda x, y, ids: x.masked_scatter(ids[..., None] > 0, y[ids > 0] * 2),
    "scatter_add": lambda x, y, ids: torch.zeros(3).scatter_add(0, ids[ids > 0], x[ids > 0][:, 0]),
    "scatter_reduce": lambda x, y, ids: torch.zeros(3).scatter_reduce(
        0, ids[ids > 0], y[ids > 0][:, 0], "mean"
    ),
    "places": lambda x, y, ids: torch.nonzero(ids > 0).float().mean(0) + torch.argwhere(x > 0).sum(),
    "twice": lambda x, y, ids: x[ids > 0][x[ids > 0][:, 0] > 0].sum(),
    "nothing": lambda x, y, ids: _index_of_none(x).log().sum() + x[ids > 9].sum(),
    "nothing written": lambda x, y, ids: x.index_put(torch.where(ids > 9), y[ids > 9]),
}


def _tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 6, 3), torch.randn(4, 6, 3), torch.randint(0, 3, (4, 6))]


@pytest.mark.parametrize(
    "cases", [REDUCED, PRODUCTS, LOSSES, WRITTEN], ids=["reduced", "products", "losses", "written"]
)
def test_what_is_computed_of_rows_that_values_choose_equals_torch(cases: dict[str, Case]) -> None:
    assert_same_functions(cases, _tensors())


class Chosen(nn.Module):
    def forward(self, x: Any, keep: Any) -> Any:
        return x[keep].mean(0), x[keep].shape[0]


@pytest.mark.parametrize("rows", [2, 7])
def test_one_export_serves_every_number_of_rows(rows: int) -> None:
    converted = convert(Chosen(), (torch.randn(4, 3), torch.tensor([True, False, True, True])))
    assert converted.one_export
    x, keep = torch.randn(rows, 3), torch.arange(rows) % 3 == 1
    got, _ = converted.apply({}, {}, to_jax(x), to_jax(keep))
    np.testing.assert_allclose(got[0], x[keep].mean(0), rtol=1e-6)
    assert int(got[1]) == int(keep.sum())
    none, _ = converted.apply({}, {}, to_jax(x), jnp.zeros(rows, bool))
    assert np.isnan(none[0]).all()
    assert len(converted.programs.cache) == 1


REFUSED: dict[str, Case] = {
    "returned": lambda x, y, ids: x[ids > 0] * 2,
    "from the end": lambda x, y, ids: x[ids > 0][-1],
    "cut": lambda x, y, ids: x[ids > 0][1:].sum(),
    "turned round": lambda x, y, ids: x[ids > 0].flip(0).cumsum(0).sum(),
    "its keys": lambda x, y, ids: F.scaled_dot_product_attention(
        y[0][None], x[ids > 0][None], x[ids > 0][None]
    ),
    "its classes": lambda x, y, ids: F.cross_entropy(x[ids > 0][:, 0], torch.tensor(0)),
    "in order": lambda x, y, ids: x[ids > 0].sort(0).values.cumsum(0).mean(),
    "no room known": lambda x, y, ids: torch.bincount(ids.flatten()).float().mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_need_the_shape_itself_is_refused_with_the_line(name: str) -> None:
    class Refused(nn.Module):
        def forward(self, x: Any, y: Any, ids: Any) -> Any:
            return REFUSED[name](x, y, ids)

    with pytest.raises(BridgeError, match=r"depends on the values[\s\S]*test_bounded.py:\d+[\s\S]*try: keep"):
        convert(Refused(), tuple(_tensors()))
