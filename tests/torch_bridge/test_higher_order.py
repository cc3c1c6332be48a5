"""cond, scan, while_loop, map, flex_attention: values, gradients, randomness, batch sizes, names."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._pytree import tree_map

from tests.torch_bridge.oracle import assert_same_functions, loss_and_gradients
from torch_bridge import BridgeError, convert


def both_branches(x: Any, w: Any) -> Any:
    def choose(sign: float) -> Any:
        return torch.cond((sign * x.square()).sum() > 0, lambda x: x @ w, lambda x: (x * w[0]).sin(), (x,))

    return choose(1.0), choose(-1.0)


def nested_branches(x: Any, w: Any) -> Any:
    def inner(x: Any) -> Any:
        return torch.cond(x.mean() > 0, lambda x: (x @ w, x.sum()), lambda x: (x * 2, x.mean()), (x,))

    return torch.cond(x.square().sum() > 0, inner, lambda x: inner(-x), (x,))


def barriers_in_a_branch(x: Any, w: Any) -> Any:
    def branch(x: Any) -> Any:
        with torch.no_grad():
            y = x @ w
        return y * x + (x @ w).detach() * w[0]

    return torch.cond(x.square().sum() > 0, branch, lambda x: x * 1.0, (x,))


def constants_in_a_branch(x: Any, w: Any) -> Any:
    def branch(x: Any) -> Any:
        return x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3)

    return torch.cond(x.square().sum() > 0, branch, lambda x: x * 1.0, (x,))


def _scan(step: Any, carry: Any, x: torch.Tensor, reverse: bool = False) -> Any:
    """In torch itself a plain loop: the gradients of torch 2.11's own scan are wrong."""
    if torch.compiler.is_exporting():
        return scan(step, carry, x, reverse=reverse)
    results = []
    for row in x.flip(0) if reverse else x:
        carry, result = step(carry, row)
        results.append(result)
    order = reversed(results) if reverse else results
    return carry, tree_map(lambda *rows: torch.stack(rows), *order)


def recurrent(x: Any, w: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        state = torch.tanh(carry @ w + row)
        return state, state.clone()

    return _scan(step, torch.zeros(3), x)


def reversed_with_trees(x: Any, w: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        return (carry[0] + row @ w, carry[1] * 0.5), {"k": row + 1, "c": carry[0] * 1.0}

    return _values(_scan(step, (torch.zeros(3), torch.ones(3)), x, reverse=True))


def _values(tree: Any) -> list[Any]:
    carry, results = tree
    return [*carry, results["c"], results["k"]]


def looped(x: Any, w: Any) -> Any:
    steps, value = while_loop(
        lambda i, v: v.abs().sum() < 500,
        lambda i, v: (i + 1, v * 1.5 + v.sign()),
        (torch.tensor(0), x.detach()),
    )
    return steps, value @ w


def loop_that_is_detached(x: Any, w: Any) -> Any:
    (value,) = while_loop(lambda v: v.abs().sum() < 500, lambda v: (v * 2 + v.sign(),), (x @ w,))
    return value.detach() * w[0]


def mapped(x: Any, w: Any) -> Any:
    def branching(row: Any) -> Any:
        return torch.cond(row.sum() > 0, lambda r: r @ w, lambda r: r.sin(), (row,))

    return torch_map(lambda row, w: torch.tanh(row @ w), x, w), torch_map(branching, x)


def associative(x: Any, w: Any) -> Any:
    return associative_scan(lambda a, b: a * b, x @ w, 0, combine_mode="generic")


HIGHER_ORDER = {
    f.__name__: f
    for f in (
        both_branches,
        nested_branches,
        barriers_in_a_branch,
        constants_in_a_branch,
        recurrent,
        reversed_with_trees,
        looped,
        mapped,
        associative,
    )
}


def test_higher_order_operators_have_torchs_values_and_gradients() -> None:
    assert_same_functions(HIGHER_ORDER, (torch.randn(4, 3), torch.randn(3, 3)))


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def test_the_gradient_of_a_while_loop_is_refused_only_where_it_is_asked_for() -> None:
    def loop(module: Calls, x: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda v: v.abs().sum() < 50, lambda v: (module.linear(v) + 9,), (x,))[0].sum()

    converted = convert(Calls(loop), (torch.ones(2, 3),))
    assert float(converted.loss_fn(converted.params, converted.batch)) > 0
    with pytest.raises(BridgeError, match=r"gradient of a while_loop(.|\n)*use torch's scan"):
        loss_and_gradients(converted, converted.batch)
    detached = convert(Calls(lambda m, x: loop(m, x).detach() * m.linear(x).sum()), (torch.ones(2, 3),))
    assert np.any(loss_and_gradients(detached, detached.batch)[1]["linear.weight"])


def test_a_loop_may_count_in_python_integers() -> None:
    def loop(module: Calls, x: torch.Tensor) -> Any:
        return while_loop(lambda i, v: i < 5, lambda i, v: (i + 1, v * 2), (0, x))[1]

    converted = convert(Calls(loop), (torch.ones(2, 3),))
    np.testing.assert_array_equal(converted.apply(converted.params, {}, jnp.ones((3, 3)))[0], 32.0)


def test_sizes_inside_bodies_follow_the_batch() -> None:
    def body(module: Calls, x: torch.Tensor) -> Any:
        def step(carry: Any, row: Any) -> Any:
            state = module.linear(carry).reshape(x.shape[0] * 3).reshape(x.shape[0], 3) + row
            return state, state * (x.shape[0] - 1)

        return scan(step, torch.zeros_like(x), torch.stack([x, x * 2, x * 3]))

    module = Calls(body)
    converted = convert(module, (torch.randn(4, 3),))
    assert converted.one_export
    for rows in (1, 3, 8):
        x = torch.randn(rows, 3)
        for got, want in zip(converted.apply(converted.params, {}, x)[0], module(x), strict=True):
            np.testing.assert_allclose(got, want.detach(), rtol=1e-5, atol=1e-5)


def test_every_step_and_branch_draws_its_own_numbers_from_the_key() -> None:
    def body(module: Calls, x: torch.Tensor) -> Any:
        def branch(x: Any) -> Any:
            return F.dropout(x, 0.5)

        dropped = torch.cond(x.sum() > 0, branch, lambda x: x * 1.0, (x,))
        return dropped, scan(lambda c, row: (c * 1.0, F.dropout(row, 0.5)), x.sum(0), x)[1]

    converted = convert(Calls(body), (torch.ones(4, 200),))
    run = jax.jit(lambda key: converted.apply(converted.params, {}, jnp.ones((4, 200)), rng=key)[0])
    dropped, rows = run(jax.random.key(0))
    assert abs(float((dropped == 0).mean()) - 0.5) < 0.06
    assert len({row.tobytes() for row in np.asarray(rows)}) == 4
    again = run(jax.random.key(0))
    np.testing.assert_array_equal(again[0], dropped)
    np.testing.assert_array_equal(again[1], rows)
    assert not np.array_equal(run(jax.random.key(1))[1], rows)
    with pytest.raises(BridgeError, match="no key"):
        converted.apply(converted.params, {}, jnp.ones((4, 200)))


def test_a_loop_that_draws_has_another_key_in_every_step() -> None:
    def body(module: Calls, x: torch.Tensor) -> Any:
        def step(i: Any, total: Any, last: Any) -> Any:
            drawn = torch.rand_like(last)
            return i + 1, total + (drawn == last).sum(), drawn

        return while_loop(lambda i, t, v: i < 4, step, (torch.tensor(0), torch.tensor(0), x))[1]

    converted = convert(Calls(body), (torch.zeros(2, 3),))
    assert int(converted.apply(converted.params, {}, jnp.zeros((2, 3)), rng=jax.random.key(0))[0]) == 0


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.inner, lambda x: -x, (x,))


def test_a_branch_in_a_submodule_is_named_by_its_path() -> None:
    converted = convert(nn.Sequential(nn.Tanh(), Branching()), (torch.ones(2, 3),))
    jaxpr = jax.make_jaxpr(lambda p, x: converted.apply(p, {}, x)[0])(converted.params, jnp.ones((2, 3)))
    (branch,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "cond"]
    assert str(branch.source_info.name_stack) == "1"


def _reference(q: Any, k: Any, v: Any, score: Any, mask: Any, scale: float) -> Any:
    """flex_attention in the open (torch has no gradient of it on the host)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    at = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    scores = torch.where(mask(*at), score(scores, *at), -torch.inf)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.where(dead, 0.0, torch.softmax(torch.where(dead, 0.0, scores), -1))
    sums = torch.where(dead[..., 0], -torch.inf, torch.logsumexp(torch.where(dead, 0.0, scores), -1))
    return weights @ v, sums


def _attends(q: Any, k: Any, v: Any, score: Any, mask: Any, scale: float) -> Any:
    if not torch.compiler.is_exporting():
        return _reference(q, k, v, score, mask, scale)
    blocks = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device="cpu")
    options = {"score_mod": score, "block_mask": blocks, "scale": scale, "enable_gqa": True}
    return flex_attention(q, k, v, **options), flex_attention(q, k, v, **options, return_lse=True)[1]


def _case(score: Callable[..., Any], mask: Callable[..., Any]) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, table: Any) -> Any:
        return _attends(q, k, v, lambda *at: score(table, *at), mask, 0.4)

    return run


FLEX = {
    "plain": _case(lambda t, s, b, h, q, k: s, lambda b, h, q, k: q >= 0),
    "causal with one row that sees nothing": _case(
        lambda t, s, b, h, q, k: s, lambda b, h, q, k: (q >= k) & (q != 2)
    ),
    "relative bias that learns": _case(
        lambda t, s, b, h, q, k: s + t[h, q - k + 4], lambda b, h, q, k: (q - k).abs() < 3
    ),
    "soft cap": _case(lambda t, s, b, h, q, k: 2 * torch.tanh(s / 2) + h * b, lambda b, h, q, k: q >= k),
    "product with what learns": _case(
        lambda t, s, b, h, q, k: s * t[h, k], lambda b, h, q, k: (b == 0) | (q >= k)
    ),
}


@pytest.mark.parametrize(
    "names",
    [
        ("causal with one row that sees nothing", "relative bias that learns"),
        pytest.param(("plain", "soft cap", "product with what learns"), marks=pytest.mark.slow),
    ],
)
def test_flex_attention_is_attention_with_its_score_and_mask(names: tuple[str, ...]) -> None:
    tensors = (torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(4, 9))
    assert_same_functions({name: FLEX[name] for name in names}, tensors)


def test_flex_attention_saves_no_scores() -> None:
    case = FLEX["soft cap"]
    tensors = (torch.randn(2, 2, 64, 8),) * 3 + (torch.randn(2, 9),)
    converted = convert(_Only(lambda *t: case(*t)[0]), tensors, batch_dims=(None,) * 4)
    arrays = [jnp.asarray(t.numpy()) for t in tensors]
    _, pull = jax.eval_shape(lambda *a: jax.vjp(lambda *a: converted.apply({}, {}, *a)[0], *a), *arrays)
    saved = [leaf.shape for leaf in jax.tree.leaves(pull)]
    assert (2, 2, 64, 64) not in saved


class _Only(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)
