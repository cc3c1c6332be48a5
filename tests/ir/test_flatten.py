"""Inlining: calls are opened, units of work stay whole, what nothing reads goes."""

import jax
import jax.numpy as jnp
import numpy as np

from rannc_jax.ir.flatten import drop_dead, flatten

X = jnp.arange(6.0).reshape(2, 3)


def primitives(closed):
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


def flat(fn, *args):
    closed = flatten(jax.make_jaxpr(fn)(*args))
    got = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
    for a, b in zip(got, jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    return closed


def test_nested_jit_is_opened():
    inner = jax.jit(lambda x: jnp.sin(x) * 2)
    closed = flat(jax.jit(lambda x: inner(inner(x)) + 1), X)
    assert primitives(closed) == ["sin", "mul", "sin", "mul", "add"]


def test_units_of_work_and_custom_rules_stay_whole():
    def fn(x):
        x = jax.nn.relu(x)
        x = jax.checkpoint(jnp.sin)(x)
        x, _ = jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)
        x = jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 10, lambda x: x + 1, x)

    found = primitives(flat(fn, X))
    assert [
        name for name in found if name in ("custom_jvp_call", "remat2", "checkpoint", "scan", "cond", "while")
    ] == [
        "custom_jvp_call",
        next(n for n in found if n in ("remat2", "checkpoint")),
        "scan",
        "cond",
        "while",
    ]
    assert "jit" not in found
    assert "pjit" not in found


def test_derivatives_at_ties_survive():
    closed = flat(lambda x: jnp.sum(jax.nn.relu(x)), X)
    slope = jax.grad(lambda x: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x)[0])(jnp.zeros((2, 3)))
    np.testing.assert_array_equal(slope, jnp.zeros((2, 3)))


def test_dead_equations_go_and_effects_stay():
    def fn(x):
        jnp.cos(x)
        jax.debug.print("{}", x[0, 0])
        return jnp.sin(x)

    found = primitives(flatten(jax.make_jaxpr(fn)(X)))
    assert "cos" not in found
    assert any("debug" in name for name in found)
    assert found[-1] == "sin"


def test_dropping_dead_equations_keeps_unused_inputs():
    closed = drop_dead(jax.make_jaxpr(lambda x, y: (x, jnp.sin(y))[0])(X, X))
    assert len(closed.jaxpr.invars) == 2
    assert primitives(closed) == []


def test_outputs_may_be_inputs_literals_and_repeated():
    closed = flatten(jax.make_jaxpr(jax.jit(lambda x: (x, x, 2.0, jnp.sin(x))))(X))
    assert len(closed.jaxpr.outvars) == 4
    assert primitives(closed) == ["sin"]


def test_name_scopes_of_calls_are_kept():
    inner = jax.jit(lambda x: jnp.sin(x))

    def fn(x):
        with jax.named_scope("here"):
            return inner(x)

    closed = flat(fn, X)
    assert str(closed.jaxpr.eqns[0].source_info.name_stack) == "here"


def test_a_thousand_nested_calls_do_not_exhaust_the_stack():
    def fn(x):
        for _ in range(1000):
            x = jax.jit(jnp.sin)(x)
        return x

    assert primitives(flatten(jax.make_jaxpr(fn)(X))) == ["sin"] * 1000
