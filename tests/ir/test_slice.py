"""Slices: pieces of a program that, run one after the other, are the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rannc_jax.ir.slice import as_block_function, as_function, avals, blocks_of, prologue_slice, slice_nodes
from tests.ir.tools import graph_of, names, node_names


def fn(params, batch):
    w = params["a"] / jnp.linalg.norm(params["a"])
    keep = batch["x"] > 0
    h = jnp.tanh(jnp.where(keep, batch["x"], 0) @ w)
    chosen = jnp.argmax(h, -1)
    skip = h * 2
    h = jnp.sin(h @ params["b"]) + params["b"][chosen]
    return jnp.sum((jnp.where(keep, h[:, :4], 0) + skip[:, :4]) ** 2), {
        "labels": chosen,
        "x": batch["x"],
        "two": 2,
    }


def values():
    key = jax.random.key(0)
    params = {"a": jax.random.normal(key, (4, 5)), "b": jax.random.normal(key, (5, 5))}
    return params, {"x": jax.random.normal(key, (8, 4))}


def run_in_parts(graph, parts, flat):
    """Run slices in order; every value that one needs must be there."""
    program = graph.program
    env = dict(enumerate(flat))
    needed = sorted({v for part in parts for v in part.inputs if v >= len(flat)})
    made = {v for node in graph.nodes for e in node.equations for v in program.writes(e)}
    prologue = prologue_slice(graph, [v for v in needed if v not in made])
    env.update(
        zip(prologue.outputs, as_function(program, prologue)([env[v] for v in prologue.inputs]), strict=True)
    )
    results = {}
    for part in parts:
        outs = as_function(program, part)([env[v] for v in part.inputs])
        env.update(zip(part.outputs, outs[: len(part.outputs)], strict=True))
        results.update(zip(part.results, outs[len(part.outputs) :], strict=True))
    return results


def results_of(graph, cut, stages):
    """Program outputs by the stage that makes them; the last stage makes what no node does."""
    found = [[] for _ in stages]
    for k, node in enumerate(graph.outputs):
        found[
            len(stages) - 1 if node is None else next(s for s, nodes in enumerate(stages) if node in nodes)
        ].append(k)
    return found


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_slices_run_one_after_the_other_are_the_program(num_parts):
    params, batch = values()
    graph = graph_of(fn, params, batch)
    flat = jax.tree.leaves((params, batch))
    stages = [list(part) for part in np.array_split(range(len(graph.nodes)), num_parts)]
    wanted = results_of(graph, num_parts, stages)
    parts = [slice_nodes(graph, nodes, wanted[s]) for s, nodes in enumerate(stages)]
    got = run_in_parts(graph, parts, flat)
    expected = jax.tree.leaves(fn(params, batch))
    for k, value in enumerate(expected):
        np.testing.assert_allclose(got[k], value, rtol=1e-5)


def test_a_slice_reads_what_it_needs_and_gives_what_others_read():
    graph = graph_of(fn, *values())
    first = slice_nodes(graph, [0])
    assert "gt" in names(graph.program, first.equations)  # the mask is cloned
    later = {v for edge in graph.edges if edge.producer == 0 for v in [edge.value]}
    assert set(first.outputs) == later
    assert all(v < len(graph.program.inputs) or v not in first.outputs for v in first.inputs)


def test_extra_values_are_given_out_once():
    graph = graph_of(fn, *values())
    value = slice_nodes(graph, [0]).outputs[0]
    assert slice_nodes(graph, [0], extra=[value]).outputs.count(value) == 1


def test_blocks_of_a_part_run_to_the_same_values():
    params, batch = values()
    graph = graph_of(fn, params, batch)
    flat = jax.tree.leaves((params, batch))
    everything = list(range(len(graph.nodes)))
    part = slice_nodes(graph, everything, range(len(graph.outputs)))
    blocks = blocks_of(graph, part, [everything[:3], everything[3:6], everything[6:]])
    env = dict(enumerate(flat))
    prologue = prologue_slice(graph, [v for v in part.inputs if v >= len(flat)])
    env.update(
        zip(
            prologue.outputs,
            as_function(graph.program, prologue)([env[v] for v in prologue.inputs]),
            strict=True,
        )
    )
    calls = []

    def wrap(body):
        calls.append(body)
        return jax.checkpoint(body)

    run = as_block_function(graph.program, part, blocks, wrap)
    got = run([env[v] for v in part.inputs])
    expected = as_function(graph.program, part)([env[v] for v in part.inputs])
    assert len(calls) == 3
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_slice_serves_traces_of_other_rows():
    params, batch = values()
    graph = graph_of(fn, params, batch)
    part = slice_nodes(graph, range(len(graph.nodes)), [0])
    flat, twice = jax.tree.leaves((params, batch)), {"x": jnp.concatenate([batch["x"], batch["x"] + 1])}
    env = dict(enumerate(jax.tree.leaves((params, twice))))
    env.update((v, flat[0] / jnp.linalg.norm(flat[0])) for v in part.inputs if v >= len(flat))
    shapes = [aval.shape for aval in avals(graph.twin, part.inputs)]
    assert shapes == [env[v].shape for v in part.inputs]
    (got,) = as_function(graph.twin, part)([env[v] for v in part.inputs])
    np.testing.assert_allclose(got, fn(params, twice)[0], rtol=1e-5)


def test_hooks_replace_single_equations():
    params, batch = values()
    graph = graph_of(lambda p, b: jnp.sum(jnp.tanh(b["x"] @ p["a"])), params, batch)
    part = slice_nodes(graph, range(len(graph.nodes)), [0])
    tanh = names(graph.program).index("tanh")
    hooked = as_function(graph.program, part, {tanh: lambda eqn, values: [jnp.ones_like(values[0])]})
    flat = jax.tree.leaves((params, batch))
    assert float(hooked([flat[v] for v in part.inputs])[0]) == 8 * 5
    assert node_names(graph)[1] == "tanh"
