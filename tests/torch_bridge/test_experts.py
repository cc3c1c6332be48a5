"""Mixtures of experts: grouped products against torch, and which regroupings leave rows independent."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_bridge
from rannc_jax.contract import SEPARABLE_SCOPE
from rannc_jax.ir.batch import BatchInfo, analyse
from rannc_jax.ir.example import make_example, subject
from rannc_jax.ir.trace import trace
from tests.torch_bridge.oracle import (
    arrays,
    assert_same_functions,
    assert_same_gradients,
    loss_and_gradients,
)
from torch_bridge.grouped import SCOPE

transformers = pytest.importorskip("transformers")
WIDTH, EXPERTS = 8, 4


def test_grouped_products_match_torch_in_all_their_forms() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights, columns = (
        torch.randn(shape, generator=generator) for shape in ((16, WIDTH), (EXPERTS, WIDTH, 8), (WIDTH, 16))
    )
    offs = torch.tensor([3, 3, 8, 16], dtype=torch.int32)
    inner = torch.tensor([1, 4, 4, 8], dtype=torch.int32)

    def grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
        return F.grouped_mm(a.bfloat16(), b.bfloat16(), offs=offs).float()  # torch traces no other dtype

    assert_same_functions(
        {
            "rows in groups": lambda r, w, c: grouped(r, w, offs),
            "columns in groups": lambda r, w, c: grouped(w, c, offs),
            "the contracted dim in groups": lambda r, w, c: grouped(r, c[:, :8].contiguous(), inner),
            "one product a group": lambda r, w, c: grouped(w, w, None),
        },
        [rows, weights, columns],
        tolerance=2e-2,
    )


def mixtral(implementation: str) -> torch.nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, max_position_embeddings=16, num_local_experts=EXPERTS,
        num_experts_per_tok=2, pad_token_id=0, sliding_window=None, experts_implementation=implementation,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def analysed(converted: torch_bridge.JaxModule, batch: Any) -> BatchInfo:
    who = subject(converted.loss_fn, takes=converted.takes)
    example = make_example(who, converted.params, batch)
    return analyse(trace(who, example), trace(who, example, 2 * example.rows))


@pytest.mark.parametrize("implementation", ["grouped_mm", pytest.param("batched_mm", marks=pytest.mark.slow)])
def test_experts_equal_torch_and_leave_rows_independent(implementation: str) -> None:
    torch.manual_seed(0)
    module = mixtral(implementation).train()
    ids = torch.randint(1, 50, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    converted = torch_bridge.convert(module, kwargs=batch)
    assert converted.one_export
    for rows in (4, 3):
        module.zero_grad()
        part = {name: value[:rows] for name, value in batch.items()}
        loss, gradients, _ = loss_and_gradients(converted, arrays(part))
        want = module(**part).loss
        want.backward()
        assert float(loss) == pytest.approx(want.item(), rel=1e-5)
        assert_same_gradients(gradients, module)
    assert analysed(converted, arrays(batch)).couplings == ()


def test_an_argument_given_twice_stays_two_arguments() -> None:
    class Two(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - b

    x = torch.ones(3, 2)
    converted = torch_bridge.convert(Two(), (x, x))
    out, _ = converted.apply({}, {}, jnp.full((3, 2), 5.0), jnp.full((3, 2), 2.0))
    np.testing.assert_array_equal(out, 3.0)


class Mixture(torch.nn.Module):
    """Tokens go to one expert each; `finish` has everything that is known in sorted order."""

    def __init__(self, finish: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.finish = finish
        self.router = torch.nn.Linear(WIDTH, EXPERTS)
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.bias = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        expert = self.router(rows).argmax(-1)
        chosen, order = torch.sort(expert)
        counts = torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        out = F.grouped_mm(rows[order].bfloat16(), self.weight.bfloat16(), offs=ends) + self.bias[chosen]
        return self.finish(rows, out.tanh(), order, counts, chosen).square().mean()


def by_inverse(rows: torch.Tensor, out: torch.Tensor, order: torch.Tensor, *_: Any) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return rows + out[inverse]


def by_second_sort(rows: torch.Tensor, out: torch.Tensor, order: torch.Tensor, *_: Any) -> torch.Tensor:
    return out[torch.sort(order)[1]]


def by_adding(rows: torch.Tensor, out: torch.Tensor, order: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.zeros_like(rows).index_add(0, order, F.layer_norm(out, (WIDTH,)))


def meeting_other_rows(rows: torch.Tensor, out: torch.Tensor, order: torch.Tensor, *rest: Any) -> Any:
    return by_inverse(rows, out * rows, order)


def neighbours(rows: torch.Tensor, out: torch.Tensor, order: torch.Tensor, *rest: Any) -> torch.Tensor:
    return by_inverse(rows, out + torch.roll(out, 1, 0), order)


def balance(rows: torch.Tensor, out: torch.Tensor, order: torch.Tensor, counts: Any, _: Any) -> torch.Tensor:
    return by_inverse(rows, out, order) + counts.square().mean()


def order_leaves(rows: torch.Tensor, out: torch.Tensor, order: torch.Tensor, *_: Any) -> torch.Tensor:
    return by_inverse(rows, out, order) * order[:, None]


def never_back(rows: torch.Tensor, out: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows + out


def rows_as_a_table(rows: torch.Tensor, out: torch.Tensor, order: Any, _: Any, chosen: Any) -> torch.Tensor:
    return by_inverse(rows, out + rows[chosen], order)


def over_all(rows: torch.Tensor, out: torch.Tensor, order: torch.Tensor, *_: Any) -> torch.Tensor:
    return by_inverse(rows, out.softmax(0), order)


def look(finish: Callable[..., torch.Tensor]) -> tuple[bool, tuple[Any, ...], torch_bridge.JaxModule]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, WIDTH)
    converted = torch_bridge.convert(Mixture(finish), (x,))
    marked = any(SCOPE in node.path for node in converted.programs.first.graph.nodes)
    return marked, analysed(converted, (jnp.asarray(x.numpy()),)).couplings, converted


@pytest.mark.parametrize("finish", [by_inverse, by_second_sort, by_adding])
def test_rows_that_are_put_back_are_independent_and_halves_prove_it(finish: Any) -> None:
    marked, couplings, converted = look(finish)
    assert marked
    assert couplings == ()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, WIDTH)), jnp.float32)
    loss = jax.jit(lambda x: converted.loss_fn(converted.params, (x,)))
    np.testing.assert_allclose(loss(x), (loss(x[:2]) + loss(x[2:])) / 2, rtol=1e-4)


@pytest.mark.parametrize(
    "finish", [meeting_other_rows, neighbours, balance, order_leaves, never_back, over_all, rows_as_a_table]
)
def test_a_regrouping_that_lets_rows_meet_is_not_marked(finish: Any) -> None:
    marked, couplings, _ = look(finish)
    assert not marked
    assert couplings != ()


def test_both_packages_mean_the_same_scope() -> None:
    assert SCOPE == SEPARABLE_SCOPE
