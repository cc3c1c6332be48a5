"""Cross entropy: values and gradients against torch, and what it keeps for the backward."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_bridge
from tests.torch_bridge.oracle import assert_same_functions
from torch_bridge.lowerings.loss import NONE, cross_entropy

REDUCTIONS = ("none", "mean", "sum")
# reduction, label smoothing, class weights, ignored index: every pair of two settings at least once
SETTINGS = (
    ("none", 0.0, False, -100), ("mean", 0.0, False, 2), ("sum", 0.0, True, 2), ("none", 0.2, True, 2),
    ("mean", 0.2, True, -100), ("sum", 0.2, False, -100), ("mean", 0.0, True, -100),
)  # fmt: skip


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_class_targets_match_torch_with_every_setting() -> None:
    target, weight = torch.tensor([0, 3, -100, 2, 4]), torch.rand(5) + 0.1
    cases = {
        f"{reduction} {smoothing} {weighted} {ignored}": (
            lambda x, r=reduction, s=smoothing, w=weighted, i=ignored: F.cross_entropy(
                x, target.clamp(min=0) if i == 2 else target, weight if w else None,
                ignore_index=i, reduction=r, label_smoothing=s,
            )
        )
        for reduction, smoothing, weighted, ignored in SETTINGS
    }  # fmt: skip
    assert_same_functions(cases, [logits(5, 5)])


def test_class_targets_match_torch_in_images_and_in_single_rows() -> None:
    maps, weight = torch.randint(0, 3, (2, 4, 5)), torch.rand(3) + 0.1
    maps[0, 0] = -100
    assert_same_functions(
        {
            "image": lambda x, y: F.cross_entropy(x, maps),
            "image, weighted": lambda x, y: F.cross_entropy(x, maps, weight, reduction="none"),
            "image, smoothed": lambda x, y: F.cross_entropy(x, maps, weight, label_smoothing=0.1),
            "one row": lambda x, y: F.cross_entropy(y, torch.tensor(2)),
            "one row that is ignored": lambda x, y: F.cross_entropy(y, torch.tensor(-100), reduction="sum"),
        },
        [logits(2, 3, 4, 5), logits(3)],
    )


def test_probabilities_match_torch_and_have_gradients() -> None:
    weight = torch.rand(4) + 0.1
    assert_same_functions(
        {
            f"{reduction} {smoothing} {weighted}": (
                lambda x, y, r=reduction, s=smoothing, w=weighted: F.cross_entropy(
                    x, y.softmax(1), weight if w else None, reduction=r, label_smoothing=s
                )
            )
            for reduction, smoothing, weighted in itertools.product(REDUCTIONS, (0.0, 0.2), (False, True))
        }
        | {"image": lambda x, y: F.cross_entropy(x[..., None], y[..., None].softmax(1))},
        [logits(3, 4), logits(3, 4).flip(0)],
    )


def test_logits_of_minus_infinity_do_no_harm_where_they_are_not_the_target() -> None:
    x = logits(3, 4)
    x[:, 0] = -torch.inf
    target = torch.tensor([1, -100, 2])
    assert_same_functions({"hidden class": lambda x: F.cross_entropy(x, target)}, [x])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_logits_are_summed_in_float32_and_get_gradients_in_their_dtype(dtype: str) -> None:
    x, target = jnp.asarray(np.asarray(logits(64, 500)), dtype), jnp.arange(64)
    loss, gradient = jax.value_and_grad(lambda x: cross_entropy(x, target))(x)
    wide = torch.from_numpy(np.array(x.astype(jnp.float32))).requires_grad_()
    want = F.cross_entropy(wide, torch.arange(64))
    want.backward()
    assert (loss.dtype, gradient.dtype) == (jnp.float32, x.dtype)
    assert float(loss) == pytest.approx(want.item(), rel=1e-6)
    assert wide.grad is not None
    np.testing.assert_allclose(
        np.asarray(gradient, np.float32), wide.grad, rtol=2**-8, atol=float(jnp.finfo(dtype).tiny)
    )


def saved(function: Any, *inputs: Any) -> list[tuple[tuple[int, ...], str]]:
    """(shape, dtype) of what a function keeps for its backward, inputs left out."""
    _, pull = jax.vjp(function, *inputs)
    return [(x.shape, str(x.dtype)) for x in jax.tree.leaves(pull) if not any(x is y for y in inputs)]


ROWS, VOCAB = 6, 40


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_only_the_logits_and_one_number_a_row_are_kept(reduction: int, smoothing: float) -> None:
    x, target = jnp.ones((ROWS, VOCAB), jnp.bfloat16), jnp.arange(ROWS)
    kept = saved(lambda x: cross_entropy(x, target, None, reduction, -100, smoothing), x)
    assert not [shape for shape, _ in kept if VOCAB in shape]
    assert ((ROWS,), "float32") in kept


class Head(torch.nn.Module):
    """A head as in causal language models: logits are widened, labels shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, VOCAB, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(x).float()
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(scores.view(-1, VOCAB), labels.view(-1))


class Sliced(Head):
    """The older way: the last position is cut off."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(x)[:, :-1].float().contiguous()
        return F.cross_entropy(scores.reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("head", [Head, Sliced])
@pytest.mark.parametrize("how", ["autocast", "bfloat16 module"])
def test_widened_logits_are_not_kept_beside_the_narrow_ones(head: type[Head], how: str) -> None:
    torch.manual_seed(0)
    module = head().to(torch.bfloat16 if how == "bfloat16 module" else torch.float32)
    x = torch.randn(2, 3, 8).to(module.head.weight.dtype)
    labels = torch.randint(0, VOCAB, (2, 3))
    converted = torch_bridge.convert(module, (x, labels), precision="bf16" if how == "autocast" else None)
    batch = tuple(jnp.asarray(v) for v in jax.tree.leaves(converted.batch))
    kept = saved(lambda p: converted.loss_fn(p, batch), converted.params)
    wide = [(shape, dtype) for shape, dtype in kept if VOCAB in shape[-1:] and dtype == "float32"]
    assert not wide
    loss, gradients = jax.value_and_grad(converted.loss_fn)(converted.params, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        want = module(x, labels)
    want.backward()
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(want.item(), rel=2**-9)
    assert module.head.weight.grad is not None
    np.testing.assert_allclose(
        np.asarray(gradients["head.weight"], np.float32),
        module.head.weight.grad.float(),
        rtol=0.05,
        atol=2e-3,
    )


def test_logits_that_are_read_twice_stay_as_wide_as_they_are() -> None:
    class Twice(Head):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            scores = self.head(x).float()
            return F.cross_entropy(scores.view(-1, VOCAB), labels.view(-1)), scores

    module, x = Twice().bfloat16(), torch.randn(2, 3, 8).bfloat16()
    converted = torch_bridge.convert(module, (x, torch.ones(2, 3, dtype=torch.int64)))
    _, scores = converted.apply(converted.params, {}, *converted.batch)[0]
    assert scores.dtype == jnp.float32


def test_the_second_derivative_is_that_of_the_formula() -> None:
    x, target = jnp.asarray(np.asarray(logits(3, 4))), jnp.array([0, 2, 3])

    def plain(x: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.logsumexp(x, 1) - x[jnp.arange(3), target])

    def size(loss: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)

    np.testing.assert_allclose(
        size(lambda x: jnp.mean(cross_entropy(x, target, None, NONE))), size(plain), rtol=1e-5, atol=1e-7
    )
