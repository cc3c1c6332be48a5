"""Blocks are convex, balanced, cut between modules, and found fast."""

import time

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_jax.errors import PlanError
from rannc_jax.partition.atomic import Atoms, AtomValue
from rannc_jax.partition.block import coarsen


def random_atoms(seed: int, count: int, reach: int = 12, depth: int = 1) -> Atoms:
    """A DAG like a network's: mostly local edges, a few long ones, a few values that many read."""
    random = np.random.default_rng(seed)
    values = []
    for producer in range(count - 1):
        span = count - producer - 1
        near = producer + 1 + random.integers(0, min(reach, span), size=random.integers(1, 4))
        far = producer + 1 + random.integers(0, span, size=int(random.random() < 0.05) * 3)
        consumers = tuple(sorted({*near.tolist(), *far.tolist()}))
        values.append(
            AtomValue(producer=producer, consumers=consumers, nbytes=float(random.integers(1, 1000)))
        )
    seconds = np.where(random.random(count) < 0.3, random.random(count) * 1e-3, 1e-7)
    paths = tuple("/".join(["layer", str(i * 10 // count), str(i % 3)][:depth]) for i in range(count))
    return Atoms(seconds=tuple(seconds.tolist()), paths=paths, values=tuple(values))


def chain(seconds, paths=None) -> Atoms:
    values = tuple(AtomValue(producer=i, consumers=(i + 1,), nbytes=1.0) for i in range(len(seconds) - 1))
    return Atoms(seconds=tuple(seconds), paths=tuple(paths or [""] * len(seconds)), values=values)


def weights(atoms: Atoms, blocks) -> list[float]:
    return [sum(atoms.seconds[n] for n in block.nodes) for block in blocks]


def assert_partition_in_topological_order(atoms: Atoms, blocks) -> None:
    place = {node: i for i, block in enumerate(blocks) for node in block.nodes}
    assert sorted(place) == list(range(len(atoms.seconds)))
    assert sum(len(block.nodes) for block in blocks) == len(atoms.seconds)
    for value in atoms.values:
        assert all(place[value.producer] <= place[consumer] for consumer in value.consumers)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 150),
    max_blocks=st.integers(1, 12),
    reach=st.integers(1, 40),
    depth=st.integers(0, 3),
)
def test_no_path_leaves_a_block_and_comes_back(seed, count, max_blocks, reach, depth):
    atoms = random_atoms(seed, count, reach, depth)
    blocks = coarsen(atoms, max_blocks=max_blocks)
    assert_partition_in_topological_order(atoms, blocks)
    assert len(blocks) <= max_blocks
    # networkx is the oracle: contracting convex sets leaves no cycle.
    graph = nx.DiGraph((v.producer, c) for v in atoms.values for c in v.consumers)
    graph.add_nodes_from(range(count))
    quotient = nx.quotient_graph(graph, [set(block.nodes) for block in blocks], create_using=nx.DiGraph)
    assert nx.is_directed_acyclic_graph(quotient)


def test_equal_chains_are_cut_evenly():
    atoms = chain([1e-3] * 960)
    found = weights(atoms, coarsen(atoms, max_blocks=32))
    assert len(found) == 32
    assert max(found) < 1.1 * 0.03


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_a_random_network_are_balanced(seed):
    atoms = random_atoms(seed, 2000)
    found = weights(atoms, coarsen(atoms, max_blocks=16))
    assert max(found) < 1.5 * sum(found) / 16


def test_five_thousand_atoms_take_less_than_three_seconds():
    atoms = random_atoms(7, 5000)
    start = time.perf_counter()
    coarsen(atoms)
    assert time.perf_counter() - start < 3


def transformer(num_layers: int) -> Atoms:
    """Per layer: norm, three projections, scores, output, add, norm, two products, add; a residual stream."""
    seconds, paths, values, stream = [0.1], ["embedding"], [], 0

    def add(work, path, *reads):
        seconds.append(work)
        paths.append(path)
        for read in reads:
            values.append((read, len(seconds) - 1))
        return len(seconds) - 1

    for layer in range(num_layers):
        here = f"encoder/layer/{layer}"
        norm = add(0.05, f"{here}/norm1", stream)
        query, key, value = (add(1.0, f"{here}/attention/{n}", norm) for n in "qkv")
        scores = add(0.7, f"{here}/attention", query, key, value)
        out = add(1.0, f"{here}/attention/o", scores)
        stream = add(0.05, here, stream, out)
        norm = add(0.05, f"{here}/norm2", stream)
        up = add(4.0, f"{here}/mlp/up", norm)
        down = add(4.0, f"{here}/mlp/down", up)
        stream = add(0.05, here, stream, down)
    add(0.5, "head", stream)
    consumers: dict[int, list[int]] = {}
    for producer, consumer in values:
        consumers.setdefault(producer, []).append(consumer)
    return Atoms(
        seconds=tuple(s * 1e-3 for s in seconds),
        paths=tuple(paths),
        values=tuple(AtomValue(producer=p, consumers=tuple(c), nbytes=1e6) for p, c in consumers.items()),
    )


@pytest.mark.parametrize(("num_layers", "max_blocks"), [(24, 24), (24, 12), (96, 32), (96, 48)])
def test_cuts_fall_between_the_layers_of_a_transformer(num_layers, max_blocks):
    atoms = transformer(num_layers)
    blocks = coarsen(atoms, max_blocks=max_blocks)
    assert_partition_in_topological_order(atoms, blocks)
    place = {node: i for i, block in enumerate(blocks) for node in block.nodes}
    for layer in range(num_layers):
        inside = {place[i] for i, path in enumerate(atoms.paths) if f"layer/{layer}/" in path + "/"}
        assert len(inside) == 1, f"layer {layer} is cut"
    assert max(weights(atoms, blocks)) < 1.2 * sum(atoms.seconds) / max_blocks


def test_a_block_is_called_after_the_deepest_module_that_holds_it():
    blocks = coarsen(transformer(24), max_blocks=26)
    assert "encoder/layer/3" in [block.path for block in blocks]


def test_a_boundary_prefers_the_thin_side_of_a_wide_value():
    thin = Atoms(
        seconds=(1e-3, 1e-3, 1e-3, 1e-3),
        paths=("",) * 4,
        values=(
            AtomValue(producer=0, consumers=(1,), nbytes=1e3),
            AtomValue(producer=1, consumers=(2,), nbytes=1e9),
            AtomValue(producer=2, consumers=(3,), nbytes=1e9),
        ),
    )
    blocks = coarsen(thin, max_blocks=2)
    assert [block.nodes for block in blocks] == [(0,), (1, 2, 3)]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(20, 120), max_blocks=st.integers(1, 8))
def test_named_cuts_are_honoured(seed, count, max_blocks):
    atoms = random_atoms(seed, count, depth=2)
    cuts = ("layer/3", "layer/7")
    blocks = coarsen(atoms, max_blocks=max_blocks, cuts=cuts)
    assert_partition_in_topological_order(atoms, blocks)
    firsts = [next(i for i, path in enumerate(atoms.paths) if path.startswith(cut)) for cut in cuts]
    assert set(firsts) <= {min(block.nodes) for block in blocks}
    for first in firsts:
        for block in blocks:
            assert not (min(block.nodes) < first <= max(block.nodes))


def test_a_cut_that_names_nothing_lists_the_nearest_modules():
    with pytest.raises(PlanError, match="encoder/layer/1"):
        coarsen(transformer(3), cuts=("encoder/layers/1",))


def test_atoms_out_of_order_are_refused():
    with pytest.raises(PlanError, match="topological"):
        Atoms(
            seconds=(1.0, 1.0),
            paths=("", ""),
            values=(AtomValue(producer=1, consumers=(0,), nbytes=1.0),),
        )
