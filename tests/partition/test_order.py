"""Ideals and orders, with networkx and plain subsets as oracles."""

import itertools
import random

import networkx as nx

from rannc_jax.partition.order import ideals, members, orders
from tests.partition.random_cases import random_table


def test_ideals_are_the_sets_closed_under_predecessors():
    for seed in range(30):
        rng = random.Random(seed)
        table = random_table(rng, rng.randint(1, 7), chain=False)
        num_blocks = len(table.blocks)
        edges = [(v.producer, c) for v in table.values for c in v.consumers]
        closed = {
            sum(1 << block for block in subset)
            for size in range(num_blocks + 1)
            for subset in itertools.combinations(range(num_blocks), size)
            if all(a in subset for a, b in edges if b in subset)
        }
        found = ideals(num_blocks, table.values, limit=1000)
        assert found is not None
        assert set(found) == closed
        assert [mask.bit_count() for mask in found] == sorted(mask.bit_count() for mask in found)


def test_too_many_ideals_are_not_listed():
    assert ideals(12, (), limit=100) is None


def test_every_order_is_topological_and_a_chain_has_one():
    for seed in range(30):
        rng = random.Random(seed)
        table = random_table(rng, rng.randint(1, 9), chain=seed % 2 == 0)
        graph = nx.DiGraph([(v.producer, c) for v in table.values for c in v.consumers])
        graph.add_nodes_from(range(len(table.blocks)))
        for order in orders(len(table.blocks), table.values):
            position = {block: at for at, block in enumerate(order)}
            assert sorted(order) == list(range(len(table.blocks)))
            assert all(position[a] < position[b] for a, b in graph.edges)


def test_members_of_a_mask_ascend():
    assert members(0b1011) == (0, 1, 3)
