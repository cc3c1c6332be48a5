"""Attention: values and gradients against torch, what it saves, and its dropout."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.torch_bridge.oracle import assert_same_functions
from tests.torch_bridge.test_operators import seeded
from torch_bridge import attention as module
from torch_bridge import cudnn
from torch_bridge.attention import RESIDUAL, Settings, attention
from torch_bridge.random import row_seeds

sdpa = F.scaled_dot_product_attention


def test_attention_matches_torch_with_every_kind_of_mask() -> None:
    q, k, v, bias = seeded((2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 3), (2, 1, 6, 5))
    k2, v2 = seeded((2, 2, 5, 8), (2, 2, 5, 3))
    assert_same_functions(
        {
            "plain": lambda q, k, v, b, k2, v2: sdpa(q, k, v),
            "scale": lambda q, k, v, b, k2, v2: sdpa(q, k, v, scale=0.3),
            "causal": lambda q, k, v, b, k2, v2: sdpa(q, k, v, is_causal=True),
            "causal longer keys": lambda q, k, v, b, k2, v2: sdpa(q[:, :, :3], k, v, is_causal=True),
            "boolean": lambda q, k, v, b, k2, v2: sdpa(q, k, v, b > 0),
            "boolean 2d": lambda q, k, v, b, k2, v2: sdpa(q, k, v, b[0, 0] > 0),
            "bias with gradient": lambda q, k, v, b, k2, v2: sdpa(q, k, v, b),
            "bias per head": lambda q, k, v, b, k2, v2: sdpa(q, k, v, b[:1].expand(1, 4, 6, 5)),
            "grouped queries": lambda q, k, v, b, k2, v2: sdpa(q, k2, v2, enable_gqa=True),
            "three dims": lambda q, k, v, b, k2, v2: sdpa(q[0], k[0], v[0]),
            "five dims": lambda q, k, v, b, k2, v2: sdpa(q[None], k[None], v[None], b[None]),
        },
        [q, k, v, bias, k2, v2],
    )


def test_a_query_that_may_attend_to_nothing_gives_zero_and_finite_gradients() -> None:
    q, k, v = (jnp.asarray(x.numpy()) for x in seeded((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4)))
    allowed = jnp.array([[[[True, True, False], [False, False, False]]]])

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(attention(q, k, v, allowed=allowed, settings=Settings(scale=0.5)) ** 2)

    out = attention(q, k, v, allowed=allowed, settings=Settings(scale=0.5))
    assert not np.any(out[0, 0, 1])
    assert np.any(out[0, 0, 0])
    assert all(np.all(np.isfinite(g)) for g in jax.grad(total, (0, 1, 2))(q, k, v))


def test_no_matrix_of_queries_by_keys_is_saved() -> None:
    shape = (2, 3, 16, 4)
    q = jnp.ones(shape)
    settings = Settings(scale=1.0, causal=True, keep=0.5)
    seeds = row_seeds(jax.random.key(0), 2)
    _, pull = jax.vjp(lambda q, k, v: attention(q, k, v, seeds=seeds, settings=settings), q, q, q)
    saved = [x.shape for x in jax.tree.leaves(pull) if hasattr(x, "shape")]
    assert saved
    assert not [s for s in saved if s[-2:] == (16, 16)]


def test_output_and_logsumexp_carry_the_residual_name() -> None:
    q = jnp.ones((1, 1, 4, 2))
    jaxpr = jax.make_jaxpr(jax.grad(lambda q: jnp.sum(attention(q, q, q, settings=Settings(scale=1.0)))))(q)
    names = [e.params["name"] for e in jaxpr.jaxpr.eqns if e.primitive.name == "name"]
    assert names == [RESIDUAL, RESIDUAL]


def test_dropout_keeps_the_mean_and_depends_on_each_rows_seed_alone() -> None:
    q = jnp.zeros((8, 2, 16, 4))
    v = jnp.ones((8, 2, 16, 4))
    settings = Settings(scale=1.0, keep=0.75)
    seeds = row_seeds(jax.random.key(1), 8)
    out = attention(q, q, v, seeds=seeds, settings=settings)
    assert abs(float(out.mean()) - 1.0) < 0.03
    assert float(out.std()) > 0.0
    part = attention(q[3:5], q[3:5], v[3:5], seeds=seeds[3:5], settings=settings)
    np.testing.assert_array_equal(part, out[3:5])


def test_the_backward_uses_the_same_dropped_weights_as_the_forward() -> None:
    q, k, v = (jnp.asarray(x.numpy()) for x in seeded((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)))
    seeds = row_seeds(jax.random.key(2), 2)
    direction = [jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in (q, k, v)]

    def total(step: jax.Array) -> jax.Array:
        moved = [x + step * d for x, d in zip((q, k, v), direction, strict=True)]
        return jnp.sum(jnp.sin(attention(*moved, seeds=seeds, settings=Settings(scale=0.5, keep=0.6))))

    step = 1e-2
    slope = (total(jnp.array(step)) - total(jnp.array(-step))) / (2 * step)
    assert float(jax.grad(total)(jnp.array(0.0))) == pytest.approx(float(slope), rel=1e-2)


def test_half_precision_matches_torch_within_its_rounding() -> None:
    q, k, v = (x.bfloat16() for x in seeded((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)))
    want = sdpa(q.float(), k.float(), v.float()).numpy()
    arrays = [jnp.asarray(x.float().numpy(), jnp.bfloat16) for x in (q, k, v)]
    got = attention(*arrays, settings=Settings(scale=8**-0.5))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2)


def test_the_torch_oracle_agrees_that_hidden_rows_are_zero() -> None:
    q, k, v = seeded((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    allowed = torch.tensor([[True, True, False], [False, False, False]])
    assert not sdpa(q, k, v, allowed)[0, 0, 1].any()


def test_masks_of_every_rank_and_heads_of_every_kind_match_torch() -> None:
    q, k, v, bias = seeded((2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 3), (2, 4, 6, 5))
    holes = torch.where(torch.arange(6)[:, None] == 2, -torch.inf, 0.0)
    assert_same_functions(
        {
            "mask of keys": lambda q, k, v, b: sdpa(q, k, v, b[0, 0, :1] > -1, enable_gqa=True),
            "mask of rows and keys": lambda q, k, v, b: sdpa(q, k, v, b[:, :1, :1] > -1, enable_gqa=True),
            "mask of heads": lambda q, k, v, b: sdpa(q, k, v, b[0] > 0, enable_gqa=True),
            "bias of heads": lambda q, k, v, b: sdpa(q, k, v, b[0], enable_gqa=True),
            "bias of rows and heads": lambda q, k, v, b: sdpa(q, k, v, b, enable_gqa=True),
            "bias that hides whole queries": lambda q, k, v, b: sdpa(q, k, v, b + holes, enable_gqa=True),
            "causal groups": lambda q, k, v, b: sdpa(q, k, v, is_causal=True, enable_gqa=True),
            "one head for all": lambda q, k, v, b: sdpa(q, k[:, :1], v[:, :1], enable_gqa=True),
            "two dims": lambda q, k, v, b: sdpa(q[0, 0], k[0, 0], v[0, 0]),
            "five dims": lambda q, k, v, b: sdpa(q[None], q[:, None], q[None], b[0, :, :, :1] > -9),
        },
        [q, k, v, bias],
    )


def test_large_scores_in_float16_stay_finite() -> None:
    q = jnp.full((1, 1, 4, 64), 30.0, jnp.float16)
    out, pull = jax.vjp(lambda q: attention(q, q, q, settings=Settings(scale=1.0)), q)
    assert float(30.0 * 30 * 64) > float(jnp.finfo(jnp.float16).max) / 2
    np.testing.assert_array_equal(out, q)
    assert np.all(np.isfinite(pull(out)[0]))


def fused_stand_in(query: Any, key: Any, value: Any, bias: Any, mask: Any, **settings: Any) -> jax.Array:
    """What `jax.nn.dot_product_attention` does for cuDNN, in its layout and with its kind of residuals."""
    assert settings.pop("implementation") == "cudnn"
    kind = Settings(scale=settings.pop("scale"), causal=settings.pop("is_causal"))
    assert not settings
    lowest = cudnn._LOWEST[np.dtype(query.dtype)]
    if mask is not None:  # finite, as for cuDNN: a row without keys gets the mean of all values
        hidden = jnp.where(mask, 0.0, lowest).astype(query.dtype)
        bias = hidden if bias is None else bias + hidden
    lengths = query.shape[1], key.shape[1]
    assert bias is None or bias.shape[2:] == lengths, "cuDNN takes no broadcast in these dims"
    swap = partial(jnp.swapaxes, axis1=1, axis2=2)

    @jax.custom_vjp
    def fused(q: Any, k: Any, v: Any, b: Any) -> Any:
        return forward(q, k, v, b)[0]

    def forward(q: Any, k: Any, v: Any, b: Any) -> Any:
        out, logsumexp = module._forward_by_xla(kind, swap(q), swap(k), swap(v), b, None)
        return swap(out), (q, k, v, b, logsumexp, swap(out))

    def backward(saved: Any, cotangent: Any) -> Any:
        q, k, v, b, logsumexp, out = saved
        *three, to_bias = module._backward(
            kind, swap(q), swap(k), swap(v), b, None, swap(out), logsumexp, swap(cotangent)
        )
        return (*map(swap, three), to_bias)

    fused.defvjp(forward, backward)
    return fused(query, key, value, bias)


@pytest.fixture
def fused_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in takes cuDNN's place, for programs compiled for this machine."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", fused_stand_in)
    monkeypatch.setattr(cudnn, "PLATFORM", "cpu")
    monkeypatch.setattr(cudnn, "_has_device", lambda: True)
    cudnn._passes.cache_clear()
    yield
    cudnn._passes.cache_clear()


def both_kernels(operands: dict[str, Any], settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(values: dict[str, Any]) -> Any:
        moving = {k: v for k, v in values.items() if v.dtype != bool}

        def loss(moving: Any) -> Any:
            out = attention(**{**values, **moving}, settings=settings)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

        return jax.grad(loss, has_aux=True)(moving)

    fused = jax.jit(run)(operands)
    with monkeypatch.context() as patch:
        patch.setattr(cudnn, "takes", lambda *_: False)
        plain = jax.jit(lambda values: run(values))(operands)
    return fused, plain


@pytest.mark.parametrize("kind", ["plain", "causal", "grouped", "holes", "keys", "bias", "infinite bias"])
@pytest.mark.usefixtures("fused_kernels")
def test_fused_kernels_are_wired_to_the_same_result(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = 2 if kind == "grouped" else 4
    length = 6 if kind == "causal" else 8
    q, k, v, bias = (
        jnp.asarray(x.numpy(), jnp.bfloat16)
        for x in seeded((2, 4, 6, 8), (2, heads, length, 8), (2, heads, length, 8), (1, 4, 6, length))
    )
    operands: dict[str, Any] = {"query": q, "key": k, "value": v}
    if kind == "holes":
        operands["allowed"] = (bias > 0).at[:, :, 2].set(False)
    if kind == "keys":
        operands["allowed"] = bias[:, :1, :1] > 0
    if "bias" in kind:
        operands["bias"] = bias.at[:, :, 1].set(-jnp.inf) if kind == "infinite bias" else bias
    settings = Settings(scale=0.3, causal=kind == "causal")
    given = [operands.get(name) for name in ("query", "key", "value", "bias", "allowed")]
    assert cudnn.takes(settings, *given, None)
    fused, plain = both_kernels(operands, settings, monkeypatch)
    for got, want in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        assert np.all(np.isfinite(got))
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("fused_kernels")
def test_what_fused_kernels_would_compute_otherwise_is_left_to_xla() -> None:
    q, k, bias = jnp.ones((1, 2, 6, 8), jnp.bfloat16), jnp.ones((1, 2, 4, 8), jnp.bfloat16), jnp.ones((6, 6))
    mask, plain = bias[None, None] > 0, Settings(scale=1.0)
    causal = Settings(scale=1.0, causal=True)
    seeds = row_seeds(jax.random.key(0), 1)
    assert cudnn.takes(plain, q, q, q, None, None, None)
    assert cudnn.takes(causal, q, q, q, None, None, None)
    refused = {
        "float32": (plain, *(x.astype(jnp.float32) for x in (q, q, q)), None, None, None),
        "dropout": (Settings(scale=1.0, keep=0.5), q, q, q, None, None, seeds),
        "causal, other lengths": (causal, q, k, k, None, None, None),
        "causal with a mask": (causal, q, q, q, None, mask, None),
        "a wider bias": (plain, q, q, q, bias[None, None].astype(jnp.float32), None, None),
    }
    assert not [name for name, given in refused.items() if cudnn.takes(*given)]


@pytest.mark.usefixtures("fused_kernels")
def test_the_same_two_values_are_saved_whichever_kernel_runs() -> None:
    q = jnp.ones((2, 2, 6, 8), jnp.bfloat16)
    _, pull = jax.vjp(lambda q: attention(q, q, q, settings=Settings(scale=1.0)), q)
    saved = sorted((x.shape, str(x.dtype)) for x in jax.tree.leaves(pull) if x is not q)
    assert saved == [((2, 2, 6), "float32"), ((2, 2, 6, 8), "bfloat16")]


def test_without_a_gpu_the_program_holds_no_choice() -> None:
    q = jnp.ones((1, 1, 4, 8), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda q: attention(q, q, q, settings=Settings(scale=1.0)))(q)
    on_gpu = jax.default_backend() == "gpu"
    assert ("cond" in str(jaxpr)) == on_gpu
