"""Nodes, clones and prologue: what may be cut, what is copied, what runs once a step."""

import jax
import jax.numpy as jnp
import pytest

from rannc_jax import LossOut, Weighted
from tests.ir.tools import BATCH, PARAMS, graph_of, names, node_names, shape, two_layers


def test_nodes_are_in_topological_order_and_edges_join_them():
    graph = graph_of(two_layers, PARAMS, BATCH)
    assert node_names(graph)[:3] == ["dot_general", "tanh", "dot_general"]
    made = set()
    for n, node in enumerate(graph.nodes):
        reads = {edge.value for edge in graph.edges if n in edge.consumers}
        assert reads <= made
        made |= {v for e in node.equations for v in graph.program.writes(e)}
    for edge in graph.edges:
        assert all(edge.producer < c for c in edge.consumers)
        assert edge.needs_grad
    assert graph.outputs == (len(graph.nodes) - 1,)


def test_every_live_equation_is_node_clone_or_prologue():
    def fn(params, batch):
        scaled = params["a"] * 2
        mask = batch["x"] > 0
        noise = jnp.sin(jnp.arange(4.0))
        h = jnp.where(mask, batch["x"] + noise, 0) @ scaled
        return jnp.mean((h @ params["b"].T.T - batch["y"]) ** 2)

    graph = graph_of(fn, PARAMS, BATCH)
    nodes = {e for node in graph.nodes for e in node.equations}
    clones = {e for node in graph.nodes for e in node.clones}
    assert nodes | clones | set(graph.prologue) == set(range(len(graph.program.eqns)))
    assert not nodes & clones
    assert not nodes & set(graph.prologue)
    assert names(graph.program, graph.prologue) == ["mul"]
    assert {"gt", "iota", "sin"} <= set(names(graph.program, sorted(clones)))
    assert "transpose" in names(graph.program, sorted(clones))  # a view of a parameter


def test_prologue_reads_count_as_inputs_of_the_nodes_that_need_them():
    def fn(params, batch):
        return jnp.mean((batch["x"] @ (params["a"] * params["scale"])) ** 2)

    graph = graph_of(fn, {"a": shape(4, 5), "scale": shape()}, {"x": shape(8, 4)})
    product = graph.nodes[node_names(graph).index("dot_general")]
    paths = [graph.program.inputs[v].path for v in product.inputs]
    assert paths == ["params['a']", "params['scale']", "batch['x']"]
    assert len(product.prologue) == 1


def test_masks_and_positions_are_cloned_into_every_consumer():
    def fn(params, batch):
        keep = batch["x"] > 0
        h = jnp.where(keep, batch["x"], 0) @ params["a"]
        return jnp.mean(jnp.where(keep, h, 0) ** 2)

    graph = graph_of(fn, {"a": shape(4, 4)}, {"x": shape(8, 4)})
    gt = names(graph.program).index("gt")
    assert sum(gt in node.clones for node in graph.nodes) == 2


def test_costly_work_on_the_batch_alone_is_a_node():
    def fn(params, batch):
        return jnp.mean((jax.lax.sort(batch["x"], dimension=1) @ params) ** 2)

    assert node_names(graph_of(fn, shape(8, 2), {"x": shape(8, 8)}))[0] == "sort"


def test_gradients_flow_where_parameters_are_upstream():
    def fn(params, batch):
        table = jax.lax.dot(batch["x"], batch["x"].T)
        h = batch["x"] @ params["a"]
        chosen = jnp.argmax(h, -1)
        return jnp.sum(h * 2) + jnp.sum(table) + jnp.sum(params["b"][chosen % 5])

    graph = graph_of(fn, PARAMS, {"x": shape(8, 4)})
    flowing = {graph.program.eqns[e].primitive.name for e in range(len(graph.program.eqns))
               for v in graph.program.writes(e) if v in graph.flows}  # fmt: skip
    assert "argmax" not in flowing
    table = graph.program.writes(names(graph.program).index("dot_general"))[0]
    assert table not in graph.flows


def test_readers_and_writers_of_a_state_share_a_node():
    def fn(params, batch, *, model_state):
        h = batch["x"] @ params["a"]
        old = model_state["mean"]
        shifted = jnp.tanh(h - old)
        out = shifted @ params["b"]
        return LossOut(loss=jnp.mean(out**2), model_state={"mean": 0.9 * old + 0.1 * jnp.mean(h, 0)})

    graph = graph_of(fn, PARAMS, {"x": shape(8, 4)}, model_state={"mean": shape(5)})
    state = next(v for v, leaf in enumerate(graph.program.inputs) if "mean" in leaf.path)
    assert sum(state in node.inputs for node in graph.nodes) == 1


def test_an_unwritten_state_is_read_anywhere():
    def fn(params, batch, *, model_state):
        h = (batch["x"] * model_state) @ params["a"]
        return LossOut(loss=jnp.mean((h[:, :4] * model_state) ** 2), model_state=model_state)

    graph = graph_of(fn, PARAMS, {"x": shape(8, 4)}, model_state=shape(4))
    state = next(v for v, leaf in enumerate(graph.program.inputs) if leaf.path == "model_state")
    assert sum(state in node.inputs for node in graph.nodes) == 2


def test_loss_and_weight_are_made_together():
    def fn(params, batch):
        h = batch["x"] @ params["a"]
        weight = jnp.sum(jax.nn.sigmoid(batch["y"] @ batch["y"].T))
        return Weighted(jnp.sum(h**2) / weight, weight)

    graph = graph_of(fn, {"a": shape(4, 5)}, {"x": shape(8, 4), "y": shape(8, 3)})
    loss, weight = graph.outputs
    assert loss == weight


@pytest.mark.parametrize(
    "fn", [lambda p, b: jnp.sum(b * p), lambda p, b: (jnp.sum(b * p), {"b": b, "one": 1})]
)
def test_outputs_that_no_node_makes_have_none(fn):
    graph = graph_of(fn, shape(), shape(8))
    assert graph.outputs[0] is not None
    assert all(node is None for node in graph.outputs[1:])


def test_a_long_chain_is_sorted_without_recursion():
    def fn(params, batch):
        for _ in range(1500):
            batch = batch * params
        return jnp.sum(batch)

    assert len(graph_of(fn, shape(), shape(8)).nodes) == 1501
