"""Residuals by rule against what jax.vjp really keeps, and live bytes of small programs."""

import math

import jax
import jax.numpy as jnp
import pytest

from rannc_jax.contract import Remat
from rannc_jax.cost.fusion import fuse
from rannc_jax.cost.memory import attention_scores, peak_bytes, residual_bytes, residuals
from rannc_jax.cost.operations import Twins, gradients, open_jaxpr
from rannc_jax.ir.autodiff import differentiate
from tests.cost import networks
from tests.cost.networks import shape


def opened(fn, params, batch_at, rows=(4, 8)):
    ops = [open_jaxpr(jax.make_jaxpr(fn)(params, batch_at(n)).jaxpr) for n in rows]
    twins = Twins(*ops, rows)
    count = len(jax.tree.leaves(params))
    active = gradients(twins.first, set(range(count)), set(twins.first.outputs))
    return twins, active


def estimate(fn, params, batch_at, remat, rows):
    twins, active = opened(fn, params, batch_at)
    group = range(len(twins.first.operations))
    kept = residuals(twins, group, remat, active, range(twins.first.num_inputs))
    return residual_bytes(twins, kept).at(rows)


def really_kept(fn, params, batch) -> int:
    """Bytes that the runtime keeps: the leaves of the vjp without inputs, results and their views."""
    leaves, tree = jax.tree.flatten((params, batch))

    def flat(values):
        return [fn(*jax.tree.unflatten(tree, values))]

    wrt = range(len(jax.tree.leaves(params)))
    kept = differentiate(flat, leaves, wrt=wrt, cotangents=[0]).residuals
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in kept)


CASES = {
    "mlp": (networks.mlp_loss, networks.mlp_params(), networks.mlp_batch),
    "attention": (networks.attention_loss, networks.attention_params(), networks.attention_batch),
}


@pytest.mark.parametrize("name", CASES)
def test_residuals_by_rule_are_within_a_fiftieth_of_what_the_vjp_keeps(name):
    fn, params, batch_at = CASES[name]
    rows = 16
    actual = really_kept(fn, params, batch_at(rows))
    assert estimate(fn, params, batch_at, Remat.SAVE_ALL, rows) == pytest.approx(actual, rel=0.02)


ELEMENTWISE = {
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "log1p": lambda x: jnp.log1p(jnp.abs(x) + 1.0),
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "square": lambda x: x**2,
    "max": lambda x: jnp.maximum(x, x[:, ::-1]),
    "clip": lambda x: jax.lax.clamp(-1.0, x, 1.0),
    "quotient": lambda x: x / (1.0 + x * x),
    "sum": lambda x: x.sum(axis=1, keepdims=True) + x,
    "sort": lambda x: jnp.sort(x, axis=1),
    "norm": lambda x: x * jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + 1e-6),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.cos(jnp.tanh(x)))),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_rule_of_every_kind_of_primitive_is_within_a_fiftieth(name):
    inner = ELEMENTWISE[name]

    def fn(params, x):
        return jnp.sum(inner((x + params[0]) @ params[1]))

    params = [shape(1, 64), shape(64, 256)]
    actual = really_kept(fn, params, shape(16, 64))
    found = estimate(fn, params, lambda n: shape(n, 64), Remat.SAVE_ALL, 16)
    assert found == pytest.approx(actual, rel=0.02)


def test_saving_products_keeps_neither_scores_nor_elementwise_results():
    fn, params, batch_at = CASES["attention"]
    twins, active = opened(fn, params, batch_at)
    group = range(len(twins.first.operations))
    scores = attention_scores(twins, group)
    assert len(scores) == len(params["layers"])
    kept = residuals(twins, group, Remat.SAVE_MATMULS, active, range(twins.first.num_inputs))
    makers = {v: op.name for op in twins.first.operations for v in op.writes}
    assert {makers[v] for v in kept} == {"dot_general"}
    written = {v for i in scores for v in twins.first.operations[i].writes}
    assert not written & set(kept)


def test_modes_keep_less_and_less():
    fn, params, batch_at = CASES["attention"]
    everything, products, nothing = (estimate(fn, params, batch_at, remat, 16) for remat in Remat)
    assert everything > 1.5 * products > 0
    assert nothing == 0


def test_a_product_that_only_adds_to_the_output_is_not_kept():
    def fn(params, x):
        return x + jnp.tanh(x @ params[0]) @ params[1]

    params = [shape(32, 32), shape(32, 32)]
    kept = estimate(fn, params, lambda n: shape(n, 32), Remat.SAVE_MATMULS, 16)
    assert kept == 16 * 32 * 4  # the first product alone


def test_an_attention_with_its_own_derivative_keeps_result_and_logsumexp():
    def plain(query):
        weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", query, query))
        return jnp.einsum("bts,bsd->btd", weights, query)

    attention = jax.custom_vjp(plain)
    attention.defvjp(lambda q: (plain(q), q), lambda q, g: (g,))

    def fn(params, x):
        return jnp.sum(attention(x @ params[0]) ** 2)

    kept = estimate(fn, [shape(16, 16)], lambda n: shape(n, 64, 16), Remat.SAVE_MATMULS, 4)
    values, statistic = 4 * 64 * 16 * 4, 4 * 64 * 4
    assert kept == 2 * values + statistic  # the projection, the attention, its logsumexp


def test_a_scan_keeps_its_residuals_for_every_turn():
    def fn(turns):
        def loss(params, x):
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ params[0]), None), x, None, length=turns)[0].sum()

        return loss

    few, many = (
        estimate(fn(turns), [shape(32, 32)], lambda n: shape(n, 32), Remat.SAVE_ALL, 16) for turns in (2, 20)
    )
    assert many == pytest.approx(10 * few, rel=0.02)


def peak(fn, *dims):
    def trace(rows):
        return open_jaxpr(jax.make_jaxpr(fn)(*(shape(rows, d) for d in dims)).jaxpr)

    twins = Twins(trace(4), trace(8), (4, 8))
    group = range(len(twins.first.operations))
    fused = fuse(twins, group, twins.first.outputs)
    return peak_bytes(twins, fused, range(twins.first.num_inputs), twins.first.outputs)


def test_live_bytes_peak_where_most_stored_values_overlap():
    def chain(x):
        for _ in range(5):
            x = jnp.sort(x, axis=1)  # never fused: each result is stored
        return x

    size = 16 * 100 * 4
    assert peak(chain, 100).at(16) == 2 * size  # one being read, one being written

    def fan(x):
        parts = [jnp.sort(x, axis=1) for _ in range(5)]
        return sum(jnp.cumsum(part, axis=1) for part in parts)

    assert peak(fan, 100).at(16) >= 5 * size


def test_fused_values_never_live_in_memory():
    assert peak(lambda x: jnp.sin(jnp.cos(jnp.tanh(x))), 100).at(16) == 16 * 100 * 4
