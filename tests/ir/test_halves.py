"""A backward in two halves: together they are the whole, and no matrix product is done twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

from rannc_jax.ir.halves import halve

N, LAYERS = 4, 3
X, W, V = (jax.random.normal(k, (N, N)) / 2 for k in jax.random.split(jax.random.key(0), 3))
S = jnp.stack([W, V, W @ V])


def layer(x, w):
    return jnp.tanh(x @ w) @ (w * 2.0)


def deep(x, w, v, s):
    return layer(layer(x, w), v)


def tied(x, w, v, s):
    return layer(layer(layer(x, w), v), w) + x


def recomputed(x, w, v, s):
    block = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    return block(block(x, w), v)


def looped(x, w, v, s):
    return jax.lax.scan(lambda c, each: (layer(c, each) + c @ v, None), x, s)[0]


def looped_twice(x, w, v, s):
    """Two scans with one body, one of them backwards in its own direction."""

    def body(c, each):
        return jnp.sin(c @ each), c @ each

    c, ys = jax.lax.scan(body, x, s)
    c, more = jax.lax.scan(body, c, s, reverse=True)
    return c + jnp.sum(ys * more, 0)


def nested(x, w, v, s):
    def outer(c, each):
        c, _ = jax.lax.scan(lambda d, inner: (jnp.tanh(d @ inner @ each), None), c, s)
        return c, None

    return jax.lax.scan(jax.checkpoint(outer), x, s)[0]


def wholly_known(x, w, v, s):
    """A conditional is one unit of work: what it makes for later is handed over."""
    return jax.lax.cond(jnp.sum(x) > 0, lambda: layer(x, w), lambda: layer(x, v)) @ w


FUNCTIONS = (deep, tied, recomputed, looped, looped_twice, nested, wholly_known)


def backward(fn):
    """(the backward as a program of residuals and a cotangent, residuals, cotangent, avals)."""
    out, pull = jax.vjp(fn, X, W, V, S)
    leaves, tree = jax.tree.flatten(pull)
    run = jax.make_jaxpr(lambda leaves, ct: tree.unflatten(leaves)(ct))(leaves, out)
    return run, [*leaves, jnp.cos(out)]


def dots(jaxpr):
    """Matrix products, those of bodies once."""
    found = 0
    for eqn in jaxpr.eqns:
        found += eqn.primitive.name == "dot_general"
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                found += dots(inner) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_the_halves_make_what_the_whole_makes_with_as_many_matrix_products(fn):
    closed, args = backward(fn)
    halves = halve(closed, [0])
    first = jax.make_jaxpr(halves.first)([args[i] for i in halves.first_reads])
    second = jax.make_jaxpr(halves.second)([args[i] for i in halves.second_reads], halves.frontier)
    assert dots(first.jaxpr) + dots(second.jaxpr) == dots(closed.jaxpr)
    assert dots(first.jaxpr) > 0

    @jax.jit
    def both(args):
        (to_input,), frontier = halves.first([args[i] for i in halves.first_reads])
        rest = halves.second([args[i] for i in halves.second_reads], frontier)
        return [to_input, *rest], frontier

    got, frontier = both(args)
    assert [(x.shape, x.dtype) for x in frontier] == [(x.shape, x.dtype) for x in halves.frontier]
    for a, b in zip(got, jax.jit(jex.jaxpr_as_fun(closed))(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_two_scans_with_one_body_keep_their_values_apart():
    def body(c, each):
        h = jnp.tanh(c @ each)
        return h, h @ h

    def run(x, s):
        c, ys = jax.lax.scan(body, x, s)
        c, more = jax.lax.scan(body, c, s)
        return c, ys, more

    closed = jax.make_jaxpr(run)(X, S)
    bodies = [eqn.params["jaxpr"].jaxpr for eqn in closed.eqns]
    assert bodies[0] is bodies[1]
    halves = halve(closed, [0])
    (first,), frontier = halves.first([(X, S)[i] for i in halves.first_reads])
    rest = halves.second([(X, S)[i] for i in halves.second_reads], frontier)
    for a, b in zip([first, *rest], run(X, S), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_later_half_of_a_chain_of_layers_has_the_products_of_the_weights():
    closed, args = backward(deep)
    halves = halve(closed, [0])
    second = jax.make_jaxpr(halves.second)([args[i] for i in halves.second_reads], halves.frontier)
    assert dots(second.jaxpr) == dots(closed.jaxpr) // 2 == 4


def test_cheap_values_are_made_again_unless_more_memory_would_be_kept_for_them():
    def run(x, big, w, g):
        h = jnp.tanh(x)  # of a value that the weight's gradient reads: made again
        r = jnp.sum(big, 0)  # of a larger one: handed over
        return (g @ w) * h * r, h.T @ (g * r), x

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((N, N), (9, N, N), (N, N), (N, N))]
    closed = jax.make_jaxpr(run)(*shapes)
    handed = halve(closed, [0])
    assert [x.shape for x in handed.frontier] == [(N, N)]
    assert handed.second_reads == (0, 3)
    kept = halve(closed, [0], kept=[1])  # it stays in memory anyway
    assert kept.frontier == ()
    assert kept.second_reads == (0, 1, 3)


def test_what_only_one_half_needs_is_nothing_to_the_other():
    closed = jax.make_jaxpr(lambda a, b: (jnp.sin(a), jnp.cos(b)))(X, W)
    halves = halve(closed, [1])
    assert (halves.first_reads, halves.second_reads, halves.frontier) == ((1,), (0,), ())
