"""Attention: values and gradients against torch, what it saves, and its dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.torch_bridge.oracle import assert_same_functions
from tests.torch_bridge.test_operators import seeded
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
