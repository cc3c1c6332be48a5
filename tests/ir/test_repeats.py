"""Copies of a piece have one key; whatever changes its cost changes the key."""

import jax
import jax.numpy as jnp
import pytest

from rannc_jax.ir.repeats import Repeats
from tests.ir.tools import graph_of, shape

WIDTH, LAYERS = 6, 4


def block(p, x, scale=1.0):
    return x + scale * jnp.tanh(x @ p["up"]) @ p["down"]


def weights(hidden=12):
    return {"up": shape(WIDTH, hidden), "down": shape(hidden, WIDTH)}


def keys(body, layers=None, name="layer", frozen=None):
    """The key of every layer of a chain."""

    def fn(params, batch, frozen):
        x = jnp.cumsum(batch["x"] @ params["first"], -1)
        for i, p in enumerate(params["layers"]):
            with jax.named_scope(f"{name}/{i}"):
                x = body(i, p, x, frozen)
        return jnp.mean(x**2)

    layers = [weights() for _ in range(LAYERS)] if layers is None else layers
    params = {"first": shape(WIDTH, WIDTH), "layers": layers}
    frozen = {"unused": shape()} if frozen is None else frozen
    graph = graph_of(fn, params, {"x": shape(8, WIDTH)}, frozen=frozen)
    inputs = graph.program.inputs
    repeats = Repeats(graph, lambda v: inputs[v].role if v < len(inputs) else None)
    groups = [
        [n for n, node in enumerate(graph.nodes) if node.path.startswith(f"{name}/{i}")]
        for i in range(len(layers))
    ]
    return [repeats.key(group) for group in groups]


def test_copies_of_a_layer_have_one_key():
    assert len(set(keys(lambda i, p, x, _: block(p, x)))) == 1


def test_scalars_of_a_layer_do_not_count():
    assert len(set(keys(lambda i, p, x, _: block(p, x, 0.1 * (i + 1))))) == 1


def test_a_checkpoint_is_told_by_its_body():
    same = keys(lambda i, p, x, _: jax.checkpoint(block)(p, x))
    assert len(set(same)) == 1
    other = keys(
        lambda i, p, x, _: jax.checkpoint(lambda p, x: block(p, x) if i else x @ p["up"] @ p["down"])(p, x)
    )
    assert len(set(other)) == 2
    assert other[0] not in other[1:]


@pytest.mark.parametrize(
    "body",
    [
        lambda i, p, x, _: block(p, x) if i else jnp.sin(block(p, x)),
        lambda i, p, x, _: block(p, x if i else x.astype(jnp.bfloat16).astype(jnp.float32)),
        lambda i, p, x, _: block({"up": p["up"] if i else p["down"].T, "down": p["down"]}, x),
    ],
    ids=["another primitive", "another dtype", "other wires"],
)
def test_what_differs_has_another_key(body):
    found = keys(body)
    assert len(set(found)) == 2
    assert found[0] not in found[1:]


def test_another_dtype_of_a_weight_has_another_key():
    layers = [{"w": shape(WIDTH, WIDTH, dtype=d)} for d in (jnp.bfloat16, jnp.float16, jnp.bfloat16)]

    def mixed(i, p, x, _):  # a cast would be prologue, not part of the layer
        contracted = (((1,), (0,)), ((), ()))
        return jnp.tanh(jax.lax.dot_general(x, p["w"], contracted, preferred_element_type=jnp.float32))

    found = keys(mixed, layers)
    assert found[0] == found[2] != found[1]


def test_another_width_has_another_key():
    found = keys(lambda i, p, x, _: block(p, x), [weights(12), weights(10), weights(12)])
    assert found[0] == found[2] != found[1]


def test_frozen_operands_are_told_from_trained_ones():
    found = keys(lambda i, p, x, f: block(p if i else f, x) + jnp.mean(p["up"]), frozen=weights())
    assert found[0] not in found[1:]
