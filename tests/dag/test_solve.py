"""The graph door against published optima, against every assignment of small graphs, and on its mistakes."""

import json
from pathlib import Path

import numpy as np
import pytest

import rannc_jax
from rannc_jax import CostError, CostGraph, GraphEdge, GraphNode, InfeasibleError, PlanError
from rannc_jax.cli import main
from rannc_jax.dag.groups import make_groups
from rannc_jax.dag.ideals import orders, prefixes
from rannc_jax.dag.line import Line
from rannc_jax.dag.loads import LoadTable
from tests.dag import brute

DATA = Path(__file__).parent / "data"

# Optima of the authors' own program; None where it found the problem infeasible.
OPTIMA = {
    "bert24_inference": (47.479, 24.9169, 17.7899, 14.2039),
    "bert24_training": (109.918, 58.5458, 41.7458, 33.3788),
    "resnet50_inference": (101.281, 50.9899, 34.2229, 26.7612),
    "resnet50_training": (None, 117.296, 80.4549, 59.1656),
    "operator_bert_l-3_inference": (33.9891, 27.9186, 27.9186, 27.9186),
}
CELLS = [(name, k, best) for name, row in OPTIMA.items() for k, best in zip((2, 4, 6, 8), row, strict=True)]


@pytest.mark.parametrize(("name", "num_devices", "optimum"), CELLS)
def test_public_graphs_are_solved_to_their_published_optimum(name, num_devices, optimum):
    graph = rannc_jax.load_graph(DATA / f"{name}.json")
    if optimum is None:
        with pytest.raises(InfeasibleError, match="infeasible"):
            rannc_jax.solve_graph(graph, num_devices)
        return
    plan = rannc_jax.solve_graph(graph, num_devices)
    assert plan.objective == pytest.approx(optimum, rel=2e-5)  # six digits are published
    assert plan.is_optimal
    assert max(brute.loads_of(graph, plan.devices, num_devices)) == pytest.approx(plan.objective)


@pytest.mark.parametrize("name", list(OPTIMA))
def test_without_all_ideals_public_graphs_are_solved_nearly_as_well(name):
    graph = rannc_jax.load_graph(DATA / f"{name}.json")
    plan = rannc_jax.solve_graph(graph, 6, most_ideals=10)
    assert plan.objective <= 1.02 * OPTIMA[name][2]
    assert plan.lower_bound <= OPTIMA[name][2] * (1 + 2e-5)


@pytest.mark.parametrize("seed", range(8))
def test_loads_along_one_order_are_those_between_its_ideals(seed):
    groups = make_groups(brute.random_graph(seed, trains=seed % 2 == 1))
    for order in orders(groups, (), 6, seed):
        line, table = Line(groups, order, range(len(order) + 1)), LoadTable(groups, prefixes(order))
        assert line.ideals == table.ideals
        every = np.arange(len(line.ideals))
        assert line.loads(every, slice(None)) == pytest.approx(table.loads(every, slice(None)))


def test_a_long_chain_is_cut_where_it_is_best():
    """More groups than places are priced at once: they close in on the cuts."""
    seconds = [1.0 + (i * 7919 % 13) for i in range(1250)]
    heavy = {i: 0.01 if i % 97 == 3 else 2.0 for i in range(1249)}  # cheap edges are rare
    graph = CostGraph(
        nodes=tuple(GraphNode(id=i, seconds=s) for i, s in enumerate(seconds)),
        edges=tuple(GraphEdge(source=i, target=i + 1, seconds=s) for i, s in heavy.items()),
    )
    plan = rannc_jax.solve_graph(graph, 4, most_ideals=100)
    exact = rannc_jax.solve_graph(graph, 4)
    assert exact.is_optimal
    assert plan.objective <= exact.objective * 1.0005


def check_against_brute_force(seed, most_ideals=6000):
    graph = brute.random_graph(seed, trains=seed % 2 == 1)
    num_devices = 2 + seed % 3 // 2
    for num_microbatches in (None, 1, 5):
        expected = brute.best(graph, num_devices, num_microbatches)
        objective = "max_load" if num_microbatches is None else "step_time"
        if expected is None:
            with pytest.raises(InfeasibleError):
                rannc_jax.solve_graph(graph, num_devices, objective, num_microbatches=num_microbatches)
            continue
        plan = rannc_jax.solve_graph(
            graph, num_devices, objective, num_microbatches=num_microbatches, most_ideals=most_ideals
        )
        assert plan.lower_bound <= expected * (1 + 1e-9) + 1e-12
        assert plan.objective >= expected * (1 - 1e-9) - 1e-12
        if most_ideals > 10:
            assert plan.objective == pytest.approx(expected)
            assert plan.is_optimal
        assert brute.allowed(graph, dict(plan.devices))
        loads = brute.loads_of(graph, plan.devices, num_devices)
        assert loads[: len(plan.loads)] == pytest.approx(plan.loads)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_graphs_are_solved_as_well_as_by_trying_everything(first):
    for seed in range(first, first + 20):
        check_against_brute_force(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 500, 20))
def test_more_random_graphs_are_solved_as_well_as_by_trying_everything(first):
    for seed in range(first, first + 20):
        check_against_brute_force(seed)


def chain(seconds, **more):
    nodes = tuple(GraphNode(id=k, seconds=s) for k, s in enumerate(seconds))
    edges = tuple(GraphEdge(source=k, target=k + 1, seconds=0.1) for k in range(len(seconds) - 1))
    return CostGraph(nodes=nodes, edges=edges, **more)


def test_a_wide_graph_gets_a_good_answer_with_a_stated_gap():
    branches = [[GraphNode(id=(b, k), seconds=1 + (b * k) % 3) for k in range(12)] for b in range(8)]
    edges = [
        GraphEdge(source=branch[k].id, target=branch[k + 1].id, seconds=0.01)
        for branch in branches
        for k in range(11)
    ]
    graph = CostGraph(nodes=tuple(node for branch in branches for node in branch), edges=tuple(edges))
    plan = rannc_jax.solve_graph(graph, 8)
    assert plan.objective <= 1.1 * plan.lower_bound
    assert plan.seconds < 60


def test_an_idle_device_is_left_idle_where_sending_costs_more():
    graph = CostGraph(
        nodes=tuple(GraphNode(id=k, seconds=1.0) for k in range(4)),
        edges=tuple(GraphEdge(source=k, target=k + 1, seconds=9.0) for k in range(3)),
    )
    plan = rannc_jax.solve_graph(graph, 3)
    assert set(plan.devices.values()) == {0}
    assert plan.objective == 4


def test_what_is_on_a_cycle_of_classes_shares_a_device():
    nodes = [GraphNode(id=k, seconds=1.0, colocation="x" if k in (0, 2) else None) for k in range(4)]
    graph = CostGraph(nodes=tuple(nodes), edges=chain([1] * 4).edges)
    plan = rannc_jax.solve_graph(graph, 4)
    assert plan.devices[0] == plan.devices[1] == plan.devices[2]


def test_an_empty_graph_needs_no_device():
    plan = rannc_jax.solve_graph(CostGraph(nodes=(), edges=()), 2)
    assert (plan.objective, dict(plan.devices), plan.is_optimal) == (0.0, {}, True)


def test_mistakes_in_a_graph_are_all_listed():
    with pytest.raises(CostError, match="4 mistakes") as caught:
        CostGraph(
            nodes=(GraphNode(id="a", seconds=-1.0), GraphNode(id="a", seconds=float("nan"))),
            edges=(GraphEdge(source="a", target="b"),),
        )
    assert "there is no node 'b'" in str(caught.value)
    with pytest.raises(PlanError, match="num_devices=0"):
        rannc_jax.solve_graph(chain([1]), 0)
    with pytest.raises(PlanError, match='"max_load", "step_time"'):
        rannc_jax.solve_graph(chain([1]), 1, "speed")


def test_mistakes_in_a_file_are_all_listed(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text('{"nodes": [{"id": 1}, 3, {"id": 2, "fpgaLatency": "fast"}], "edges": 5}')
    with pytest.raises(CostError, match="4 mistakes") as caught:
        rannc_jax.load_graph(path)
    assert "nodes[0].fpgaLatency: missing" in str(caught.value)
    path.write_text("{")
    with pytest.raises(CostError, match="is not a JSON file"):
        rannc_jax.load_graph(path)
    with pytest.raises(CostError, match="there is no graph file"):
        rannc_jax.load_graph(tmp_path / "other.json")


def test_the_command_prints_a_device_for_every_node(capsys):
    path = DATA / "bert24_training.json"
    assert main(["plan", "--graph", str(path), "--devices", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["objective"] == pytest.approx(58.5458, rel=2e-5)
    assert answer["proven"]
    ids = {str(node["id"]) for node in json.loads(path.read_text())["nodes"]}
    assert answer["devices"].keys() == ids
    assert main(["plan", "--graph", str(path), "--devices", "4"]) == 0
    assert "proved to be the best" in capsys.readouterr().out


def test_the_command_says_infeasible(capsys):
    path = DATA / "resnet50_training.json"
    assert main(["plan", "--graph", str(path), "--devices", "2", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["feasible"]
    assert "infeasible" in answer["reason"]
