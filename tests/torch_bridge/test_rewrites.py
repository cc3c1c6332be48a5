"""What torch.export cannot follow as it stands: rewritten while exporting, or refused in time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import torch_bridge
from tests.torch_bridge.oracle import Calls, assert_same_functions
from tests.torch_bridge.test_operators import seeded


def test_ctc_loss_matches_torch_with_repeats_and_lengths_and_in_every_reduction() -> None:
    (x,) = seeded((9, 4, 5))
    # A repeat, a full width, one label, none.
    labels = torch.tensor([[1, 1, 2], [3, 4, 1], [2, 9, 9], [9, 9, 9]])
    row = torch.tensor([1, 1, 2, 3, 4, 1, 2])
    times, lengths = torch.tensor([9, 7, 5, 6]), torch.tensor([3, 3, 1, 0])

    def loss(target: str, **options: Any) -> Any:
        def call(x: torch.Tensor, labels: Any, row: Any, times: Any, lengths: Any) -> torch.Tensor:
            chosen = row if target == "row" else labels
            return functional.ctc_loss(x.log_softmax(-1), chosen, times, lengths, **options)

        return call

    cases = {way: loss("padded", reduction=way) for way in ("none", "mean", "sum")}
    cases["labels in a row"] = loss("row", reduction="none")
    assert_same_functions(cases, [x, labels, row, times, lengths])


def test_ctc_loss_of_a_path_that_does_not_exist_is_infinite_or_zero_as_asked() -> None:
    (x,) = seeded((3, 2, 4))
    labels = torch.tensor([[1, 1, 2], [1, 2, 3]])
    times: Any = [3, 3]
    lengths: Any = [3, 3]

    def loss(zero: bool) -> Any:
        return lambda x, labels: functional.ctc_loss(
            x.log_softmax(-1), labels, times, lengths, reduction="none", zero_infinity=zero
        )

    assert_same_functions({"zero": loss(True)}, [x, labels])
    converted = torch_bridge.convert(Calls([loss(False)]), (x, labels), batch_dims=(None, None))
    (losses,), _ = converted.apply({}, {}, jnp.asarray(x.numpy()), jnp.asarray(labels.numpy()))
    assert losses[0] == jnp.inf
    assert jnp.isfinite(losses[1])


@pytest.mark.filterwarnings("ignore:cov:UserWarning")
def test_statistics_that_check_their_weights_match_torch() -> None:
    x, y = seeded((3, 6), (6,))
    counts = torch.tensor([1, 2, 0, 3, 1, 1])
    assert_same_functions(
        {
            "cov": lambda x, y, n: torch.cov(x),
            "cov of a vector": lambda x, y, n: torch.cov(y),
            "cov uncorrected": lambda x, y, n: x.cov(correction=0),
            "cov with frequencies": lambda x, y, n: torch.cov(x, fweights=n),
            "cov with weights": lambda x, y, n: torch.cov(x, fweights=n, aweights=y.detach().abs()),
            "corrcoef": lambda x, y, n: torch.corrcoef(x),
            "combinations": lambda x, y, n: torch.combinations(y, 3),
            "combinations with repeats": lambda x, y, n: torch.combinations(y, 2, with_replacement=True),
            "gaussian_nll_loss": lambda x, y, n: functional.gaussian_nll_loss(x, y, x.detach() ** 2),
            "gaussian_nll_loss, one variance a row": lambda x, y, n: functional.gaussian_nll_loss(
                x, y, x[:, 0] ** 2, full=True, reduction="none"
            ),
        },
        [x, y, counts],
    )


@pytest.mark.parametrize("driver", ["gels", "gelsy", None])
def test_least_squares_match_torch_for_tall_and_wide_matrices(driver: str | None) -> None:
    tall, wide, b = seeded((2, 5, 3), (3, 5), (2, 5, 2))
    assert_same_functions(
        {
            "tall": lambda tall, wide, b: list(torch.linalg.lstsq(tall, b, driver=driver)),
            "wide": lambda tall, wide, b: list(torch.linalg.lstsq(wide, b[0, :3], driver=driver)),
            "a vector": lambda tall, wide, b: torch.linalg.lstsq(tall, b[..., 0], driver=driver).solution,
        },
        [tall, wide, b],
        tolerance=1e-3,
    )


def test_least_squares_whose_residuals_depend_on_the_rank_are_refused() -> None:
    module = Calls([lambda a, b: torch.linalg.lstsq(a, b, driver="gelsd").solution])
    with pytest.raises(torch_bridge.BridgeError, match=r"driver='gelsd'[\s\S]*try: driver='gelsy'"):
        torch_bridge.convert(module, tuple(seeded((5, 3), (5, 2))))


@pytest.mark.parametrize(
    "select",
    [lambda x: x[x > 0], lambda x: x.nonzero(), torch.unique, lambda x: x[x > 0].flip(0).sum()],
)
def test_a_shape_that_depends_on_values_is_refused_at_convert_with_the_line(select: Any) -> None:
    with pytest.raises(
        torch_bridge.BridgeError, match=r"depends on the values[\s\S]*oracle\.py:\d+[\s\S]*try"
    ):
        torch_bridge.convert(Calls([select]), tuple(seeded((5,))))


def test_a_number_taken_out_of_a_tensor_stays_an_array() -> None:
    def scaled(x: torch.Tensor) -> list[Any]:
        largest = x.abs().max().item()
        return [x / largest + 2 * x.long().sum().item(), largest, x.argmax().item()]

    (x,) = seeded((3, 4))
    converted = torch_bridge.convert(Calls([scaled]), (x,), batch_dims=(None,))
    ((values, largest, position),), _ = jax.jit(converted.apply)({}, {}, jnp.asarray(x.numpy()))
    want = scaled(x)
    np.testing.assert_allclose(values, want[0], rtol=1e-6)
    np.testing.assert_allclose(largest, want[1], rtol=1e-6)
    assert position.dtype == jnp.int32
    assert int(position) == want[2]


def test_a_number_taken_out_of_a_tensor_has_no_gradient() -> None:
    x = seeded((3, 4))[0].requires_grad_()
    assert_same_functions({"item": lambda x: x * x.abs().max().item()}, [x])


def test_an_inverse_inside_a_composite_operator_leaves_no_token_behind() -> None:
    (x,) = seeded((4, 2, 2))
    x = x + 2 * torch.eye(4).reshape(4, 2, 2)
    assert_same_functions({"tensorinv": lambda x: torch.linalg.tensorinv(x, ind=1)}, [x], tolerance=1e-3)
