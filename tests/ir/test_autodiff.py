"""Forward, residuals, backward: gradients are JAX's own, and what the runtime holds is not kept twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rannc_jax import Remat
from rannc_jax.ir.autodiff import differentiate, stage_function
from rannc_jax.ir.slice import avals, blocks_of, slice_nodes
from tests.ir.tools import graph_of

KEY = jax.random.key(0)
X, W, V, B = (
    jax.random.normal(k, s)
    for k, s in zip(jax.random.split(KEY, 4), [(8, 6), (6, 6), (6, 6), (6,)], strict=True)
)


def shapes(values):
    return [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in values]


def check(fn, values, wrt, cotangents):
    """The split function's gradients equal those of the whole."""
    diff = differentiate(fn, shapes(values), wrt=wrt, cotangents=cotangents)
    outs, residuals = diff.forward(values)
    for a, b in zip(outs, fn(values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert [(r.shape, r.dtype) for r in residuals] == [(r.shape, r.dtype) for r in diff.residuals]
    given = [jnp.ones_like(outs[k]) for k in cotangents]
    got = diff.backward(
        [values[i] for i in diff.held], [outs[k] for k in diff.kept_outputs], residuals, given
    )
    expected = jax.grad(
        lambda chosen: sum(
            jnp.sum(fn([chosen[wrt.index(i)] if i in wrt else x for i, x in enumerate(values)])[k])
            for k in cotangents
        )
    )([values[i] for i in wrt])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return diff


def weights_among(diff):
    return [r.shape for r in diff.residuals if r.shape in ((6, 6), (36,))]


def test_inputs_are_held_not_kept():
    diff = check(lambda v: [jnp.exp(v[0] @ v[1]) @ v[2]], [X, W, V], [0, 1, 2], [0])
    assert diff.held == (0, 1, 2)
    assert not weights_among(diff)
    assert len(diff.residuals) == 1  # the exponential


def test_results_that_leave_the_stage_are_not_kept_twice():
    diff = check(lambda v: [jnp.exp(v[0] @ v[1])], [X, W], [0, 1], [0])
    assert diff.kept_outputs == (0,)
    assert diff.residuals == ()


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.T,
        lambda w: w.reshape(36).reshape(6, 6),
        lambda w: w[None][0],
        lambda w: w[:6],
        lambda w: w,
    ],
)
def test_views_of_weights_are_made_again(view):
    diff = check(lambda v: [jnp.sin(v[0] @ view(v[1]))], [X, W], [0, 1], [0])
    assert not weights_among(diff)
    assert 1 in diff.held


def test_only_what_is_asked_for_is_differentiated():
    diff = check(lambda v: [v[0] @ v[1], jnp.sin(v[0]) @ v[2]], [X, W, V], [1], [0])
    assert diff.wrt == (1,)
    assert diff.held == (0,)
    assert diff.residuals == ()


def test_inputs_that_nothing_reads_have_zero_gradients():
    check(lambda v: [v[0] @ v[1]], [X, W, V], [1, 2], [0])


def test_integers_pass_and_outputs_without_cotangents_too():
    def fn(v):
        h = v[0] @ v[1]
        return [h, jnp.argmax(h, -1), jnp.sum(h), v[2] + 1]

    check(fn, [X, W, jnp.arange(3)], [0, 1], [0, 2])


def test_an_output_may_be_an_input_or_come_twice():
    def fn(v):
        h = jnp.tanh(v[0] @ v[1])
        return [h, h, v[0]]

    check(fn, [X, W], [0, 1], [0, 1, 2])


def network(params, batch):
    h = batch["x"]
    for w in (params["w"], params["v"].T):
        h = jax.nn.gelu(h @ w + params["b"])
    return jnp.mean(h**2)


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_remat_changes_what_is_kept_and_never_the_gradient(remat, num_blocks):
    params, batch = {"b": B, "v": V, "w": W}, {"x": X}
    graph = graph_of(network, params, batch)
    part = slice_nodes(graph, range(len(graph.nodes)), [0])
    blocks = blocks_of(graph, part, [list(b) for b in np.array_split(range(len(graph.nodes)), num_blocks)])
    fn = stage_function(graph.program, part, blocks, remat)
    flat = jax.tree.leaves((params, batch))
    values = [flat[v] for v in part.inputs]
    position = len(part.outputs)
    diff = check(lambda v: fn(v), values, list(range(len(values))), [position])
    assert avals(graph.program, part.inputs) == shapes(values)
    assert not weights_among(diff)
    kept = sum(int(np.prod(r.shape)) for r in diff.residuals)
    if num_blocks == 1 and remat is Remat.RECOMPUTE:
        assert kept == 0
    if num_blocks == 1 and remat is Remat.SAVE_MATMULS:
        assert kept == 2 * 48  # the two products
    if remat is Remat.SAVE_ALL:
        assert kept > 2 * 48


def test_products_inside_a_scan_are_kept_a_step():
    def fn(params, batch):
        def body(h, _):
            return jnp.tanh(jnp.sin(h @ params)), None

        return jnp.mean(jax.lax.scan(body, batch["x"], None, length=2)[0] ** 2)

    params, batch = W, {"x": X}
    graph = graph_of(fn, params, batch)
    part = slice_nodes(graph, range(len(graph.nodes)), [0])
    blocks = blocks_of(graph, part, [range(len(graph.nodes))])
    values = [params, X]
    kept = {}
    for remat in Remat:
        stage = stage_function(graph.program, part, blocks, remat)
        diff = check(stage, values, [0, 1], [len(part.outputs)])
        kept[remat] = sum(int(np.prod(r.shape)) for r in diff.residuals)
        assert not [r for r in diff.residuals if r.shape == params.shape]
    assert kept[Remat.RECOMPUTE] < kept[Remat.SAVE_MATMULS] < kept[Remat.SAVE_ALL]
