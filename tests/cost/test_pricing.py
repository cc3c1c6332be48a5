"""The cost table of a graph: state, values, ties, prices; and that blocks add up to the whole."""

import time
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from rannc_jax.cluster import ClusterSpec, DeviceGroup
from rannc_jax.contract import LossOut, Remat
from rannc_jax.cost import device_preset, link_preset, node_seconds, open_graph, price, pricing
from rannc_jax.errors import CostError, PlanError
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.partition.atomic import atoms, check_colocation
from rannc_jax.partition.block import coarsen
from tests.cost import networks
from tests.cost.networks import graph_of, shape

DEVICE = device_preset("h200")
CLUSTER = ClusterSpec(
    groups=(DeviceGroup(device=DEVICE, count_per_host=2),),
    intra_host=link_preset("nvlink4"),
    inter_host=link_preset("net100g"),
)
ROWS = 16


def attention_graph() -> Graph:
    return graph_of(networks.attention_loss, networks.attention_params(), networks.attention_batch())


def adam_bytes(graph: Graph) -> dict[int, int]:
    inputs = enumerate(graph.program.inputs)
    return {v: 2 * graph.program.nbytes(v) for v, leaf in inputs if leaf.role is Role.PARAM}


def by_layer(graph: Graph) -> list[list[int]]:
    """One block for each of embedding, layer 0, layer 1, head."""
    names = ("embedding", "layer/0", "layer/1")
    blocks: list[list[int]] = [[], [], [], []]
    for index, node in enumerate(graph.nodes):
        where = next((i for i, name in enumerate(names) if node.path.startswith(name)), 3)
        blocks[where].append(index)
    return blocks


def table_of(graph: Graph, blocks, **keywords):
    return price(graph, blocks, CLUSTER, optimizer_bytes=adam_bytes(graph), **keywords)


def test_parameters_are_counted_once_and_ties_apart():
    graph = attention_graph()
    table = table_of(graph, by_layer(graph))
    (tie,) = table.ties
    assert (tie.path, tie.blocks) == ("params['embedding']", (0, 3))
    assert tie.state.parameters == tie.state.gradients == 128 * 64 * 4
    layer = (4 * 64 * 64 + 2 * 64 * 256 + 64) * 4
    assert [b.state.parameters for b in table.blocks] == [0, layer, layer, 0]
    assert table.blocks[1].state.optimizer == 2 * layer
    assert [b.path for b in table.blocks] == ["embedding", "layer/0", "layer/1", "head"]


def test_what_nothing_reads_and_state_of_nobody_is_counted_too():
    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    params = {"w": shape(64, 64), "unread": shape(1000, 64)}
    graph = graph_of(loss, params, {"x": shape(ROWS, 64)})
    half = len(graph.nodes) // 2
    table = table_of(graph, [range(half), range(half, len(graph.nodes))], shared_optimizer_bytes=12_345)
    first, last = (block.state for block in table.blocks)
    assert first.parameters + last.parameters == (64 + 1000) * 64 * 4
    assert first.optimizer + last.optimizer == 2 * (64 + 1000) * 64 * 4 + 12_345
    assert first.parameters >= 1000 * 64 * 4
    assert last.optimizer >= 12_345
    assert first.gradients + last.gradients == 64 * 64 * 4


def test_values_between_blocks_have_bytes_by_rows():
    graph = attention_graph()
    values = table_of(graph, by_layer(graph)).values
    assert [(v.producer, v.consumers) for v in values] == [(0, (1,)), (1, (2,)), (2, (3,))]
    assert all(v.bytes_per_row == 32 * 64 * 4 and v.fixed_bytes == 0 and v.needs_grad for v in values)


def test_equal_layers_cost_the_same():
    graph = attention_graph()
    table = table_of(graph, by_layer(graph))
    assert table.price(1, ROWS, DEVICE) == table.price(2, ROWS, DEVICE)


def test_copies_of_a_block_are_priced_once_and_as_if_alone():
    graph = graph_of(networks.mlp_loss, networks.mlp_params(depth=6), networks.mlp_batch())
    layers = [[n for n, node in enumerate(graph.nodes) if f"layer/{i}" in node.path] for i in range(6)]
    blocks = [*layers, [n for n, node in enumerate(graph.nodes) if not node.path]]
    opened = open_graph(graph)
    shared = pricing._shared(opened, blocks, None)
    assert (
        len({id(block) for block in shared}) == 3
    )  # the first has no cotangent to give, the last is the loss
    for block, nodes in zip(shared, blocks, strict=True):
        alone = pricing._Block(opened, tuple(nodes), None)
        for remat in Remat:
            assert block.kernels.backward_s(DEVICE, 8, remat) == alone.kernels.backward_s(DEVICE, 8, remat)
            assert block.residual_bytes[remat] == alone.residual_bytes[remat]
            assert block.working_bytes(remat, 8) == alone.working_bytes(remat, 8)
        assert block.kernels.forward_s(DEVICE, 8) == alone.kernels.forward_s(DEVICE, 8)
        assert block.unfused_bytes == alone.unfused_bytes


def test_prices_grow_with_rows_and_modes_trade_time_for_memory():
    graph = attention_graph()
    table = table_of(graph, by_layer(graph))
    few, many = (table.price(1, rows, DEVICE) for rows in (4, 4096))
    assert many.forward_s > few.forward_s
    for priced in (few, many):
        assert priced.backward_s[Remat.RECOMPUTE] > priced.backward_s[Remat.SAVE_MATMULS] > priced.forward_s
        kept = [priced.residual_bytes[remat] for remat in Remat]
        assert kept == sorted(kept, reverse=True)
        assert kept[-1] > 0  # the block's input
    held = [p.residual_bytes[Remat.RECOMPUTE] for p in (few, many)]
    assert held == [4 * 32 * 64 * 4, 4096 * 32 * 64 * 4]


def test_blocks_add_up_to_the_whole_but_for_what_the_cuts_store():
    graph = attention_graph()
    parts = table_of(graph, by_layer(graph))
    whole = table_of(graph, [list(range(len(graph.nodes)))])
    rows = 1024
    forward = sum(parts.price(b, rows, DEVICE).forward_s for b in range(4))
    assert forward == pytest.approx(whole.price(0, rows, DEVICE).forward_s, rel=0.05)
    assert forward >= whole.price(0, rows, DEVICE).forward_s * 0.999
    seconds = node_seconds(open_graph(graph), DEVICE, rows)
    backward = whole.price(0, rows, DEVICE).backward_s[Remat.SAVE_MATMULS]
    accumulate = 3 * whole.blocks[0].state.gradients / DEVICE.bytes_per_s
    expected = whole.price(0, rows, DEVICE).forward_s + backward - accumulate
    # Clones (index arithmetic here) belong to no single node.
    assert 0.98 * expected < seconds.sum() <= expected


def test_an_exact_oracle_of_residuals_is_preferred():
    graph = attention_graph()
    asked = []

    def oracle(nodes, remat, rows):
        asked.append((remat, rows))
        return 1000 * rows

    blocks = by_layer(graph)
    table = table_of(graph, blocks, residuals=oracle)
    priced = table.price(1, ROWS, DEVICE)
    held = ROWS * 32 * 64 * 4
    assert priced.residual_bytes == dict.fromkeys(Remat, 1000 * ROWS + held)
    table.price(1, 2 * ROWS, DEVICE)
    assert sorted(asked, key=str) == sorted(((r, n) for r in Remat for n in (4, 8)), key=str)


def test_casts_of_parameters_are_prologue_and_their_cotangents_wait_in_float32():
    def loss(params, batch):
        weight = params["w"].astype(jnp.bfloat16)
        return jnp.mean((batch.astype(jnp.bfloat16) @ weight).astype(jnp.float32) ** 2)

    graph = graph_of(loss, {"w": shape(64, 64)}, shape(4, 64))
    table = table_of(graph, [list(range(len(graph.nodes)))])
    state = table.blocks[0].state
    assert (state.parameters, state.gradients) == (64 * 64 * 4, 64 * 64 * 4)
    assert state.prologue == 64 * 64 * 2  # the cast; its cotangent takes the place of the gradient
    assert table.price(0, ROWS, DEVICE).once_s > 0


def test_frozen_leaves_are_constants_without_gradients():
    def loss(params, batch, *, frozen):
        return jnp.mean((jnp.tanh(batch @ frozen["w"]) @ params["w"]) ** 2)

    graph = graph_of(loss, {"w": shape(64, 64)}, shape(4, 64), frozen={"w": shape(64, 64)})
    table = table_of(graph, [list(range(len(graph.nodes)))])
    state = table.blocks[0].state
    assert (state.parameters, state.gradients, state.constants) == (16384, 16384, 16384)


def test_a_forward_only_program_has_no_backward_and_keeps_nothing():
    def apply(params, x):
        return jnp.tanh(x @ params["w"]) @ params["w"]

    graph = graph_of(apply, {"w": shape(64, 64)}, shape(4, 64), is_loss=False)
    table = price(graph, [list(range(len(graph.nodes)))], CLUSTER, optimizer_bytes={})
    priced = table.price(0, ROWS, DEVICE)
    assert priced.forward_s > 0
    assert set(priced.backward_s.values()) == {0.0}
    assert set(priced.residual_bytes.values()) == {0}
    assert table.blocks[0].state.gradients == 0


def test_blocks_that_miss_a_node_are_refused():
    graph = attention_graph()
    with pytest.raises(CostError, match="every node once"):
        table_of(graph, [[0]])


def test_written_state_apart_from_its_reader_is_refused():
    def loss(params, batch, *, model_state):
        x = (batch - model_state["mean"]) @ params["w"]
        state = {"mean": 0.9 * model_state["mean"] + 0.1 * batch.mean(axis=0)}
        return LossOut(jnp.mean(x**2), model_state=state)

    graph = graph_of(loss, {"w": shape(8, 8)}, shape(4, 8), model_state={"mean": shape(8)})
    check_colocation(graph)
    leaves = list(zip(graph.program.outputs, graph.outputs, strict=True))
    writer = next(node for leaf, node in leaves if leaf.kind is OutputKind.MODEL_STATE)
    stranger = next(n for n in range(len(graph.nodes)) if n != writer)
    state = next(v for v, leaf in enumerate(graph.program.inputs) if leaf.role is Role.MODEL_STATE)
    nodes = list(graph.nodes)
    nodes[stranger] = replace(nodes[stranger], inputs=(*nodes[stranger].inputs, state))
    with pytest.raises(PlanError, match="written by node"):
        check_colocation(replace(graph, nodes=tuple(nodes)))


def test_a_deep_transformer_is_cut_between_layers_and_priced_in_seconds():
    graph = graph_of(networks.attention_loss, networks.attention_params(depth=48), networks.attention_batch())
    start = time.perf_counter()
    opened = open_graph(graph)
    seconds = node_seconds(opened, DEVICE, 4096)
    blocks = coarsen(
        atoms(graph, seconds, 4096), max_blocks=24, seconds_per_byte=1 / CLUSTER.intra_host.bytes_per_s
    )
    table = table_of(graph, [block.nodes for block in blocks], opened=opened)
    for block in range(len(blocks)):
        for rows in (4, 64, 4096):
            table.price(block, rows, DEVICE)
    assert time.perf_counter() - start < 5
    place = {n: i for i, block in enumerate(blocks) for n in block.nodes}
    halves = [f"layer/{i}/{part}" for i in range(48) for part in ("attention", "mlp")]
    for half in halves:
        assert len({place[n] for n, node in enumerate(graph.nodes) if node.path.startswith(half + "/")}) <= 1
    weights = np.asarray([seconds[list(block.nodes)].sum() for block in blocks])
    assert weights.max() < 1.3 * weights.mean()
