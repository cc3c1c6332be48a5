"""Fingerprints, and finding the blocks of a plan again."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

from rannc_jax import PlanError
from rannc_jax.ir.match import (
    anchor_print,
    block_coordinates,
    check_identity,
    find_stages,
    identity_print,
    program_print,
)
from rannc_jax.plan import Block, Stage
from tests.ir.tools import BATCH, PARAMS, graph_of, node_names, program_of, shape, two_layers
from tests.plan.plans import small_plan


def rewritten(params, batch):
    """The same products and parameters between other equations."""
    h = jnp.tanh((batch["x"] * 1.0) @ params["a"])
    error = h @ params["b"] - batch["y"]
    return jnp.mean(error * error)


def plan_of(graph, cuts):
    """A plan with one block a stage, cut before these nodes."""
    edges = [0, *cuts, len(graph.nodes)]
    parts = [range(a, b) for a, b in itertools.pairwise(edges)]
    coordinates = block_coordinates(graph, parts)
    return dataclasses.replace(
        small_plan(),
        identity=identity_print(graph.program),
        program=program_print(graph.program),
        anchors=anchor_print(graph),
        blocks=tuple(Block(path="", equations=e, anchors=a) for e, a in coordinates),
        stages=tuple(Stage(blocks=(i,), devices=(i,)) for i in range(len(parts))),
        crossings=(),
        ties=(),
    )


def test_identity_is_paths_shapes_and_dtypes_but_not_the_number_of_rows():
    mine = identity_print(program_of(two_layers, PARAMS, BATCH))
    assert mine == identity_print(program_of(rewritten, PARAMS, BATCH))
    assert mine == identity_print(program_of(two_layers, PARAMS, {"x": shape(4, 4), "y": shape(4, 3)}))
    for params, batch in (
        ({**PARAMS, "c": shape(1)}, BATCH),
        (PARAMS, {**BATCH, "z": shape(8)}),
        ({"a": shape(4, 6), "b": shape(6, 3)}, BATCH),
        ({"a": shape(4, 5, dtype=jnp.bfloat16), "b": shape(5, 3, dtype=jnp.bfloat16)},
         {"x": shape(8, 4, dtype=jnp.bfloat16), "y": shape(8, 3, dtype=jnp.bfloat16)}),
    ):  # fmt: skip
        assert identity_print(program_of(two_layers, params, batch)) != mine


def test_program_and_anchors_change_with_what_they_stand_for():
    one, other = graph_of(two_layers, PARAMS, BATCH), graph_of(rewritten, PARAMS, BATCH)
    assert program_print(one.program) != program_print(other.program)
    assert program_print(one.program) == program_print(one.twin)
    assert anchor_print(one) == anchor_print(other)
    third = graph_of(lambda p, b: two_layers(p, b) + jnp.sum(p["a"] @ p["b"]), PARAMS, BATCH)
    assert anchor_print(one) != anchor_print(third)  # one more equation reads parameters
    swapped = graph_of(
        lambda p, b: two_layers({"a": p["b"], "b": p["a"]}, b), {"a": shape(5, 3), "b": shape(4, 5)}, BATCH
    )
    assert anchor_print(swapped) != anchor_print(one)


def test_blocks_are_found_by_their_equations():
    graph = graph_of(two_layers, PARAMS, BATCH)
    stages, same = find_stages(graph, plan_of(graph, [2, 3]))
    assert same
    assert stages == (((0, 1),), ((2,),), (tuple(range(3, len(graph.nodes))),))


def test_blocks_are_found_by_their_anchors_in_another_program():
    graph = graph_of(two_layers, PARAMS, BATCH)
    other = graph_of(rewritten, PARAMS, BATCH)
    stages, same = find_stages(other, plan_of(graph, [2]))
    assert not same
    assert sorted(n for blocks in stages for block in blocks for n in block) == list(range(len(other.nodes)))
    stage_of = {n: s for s, blocks in enumerate(stages) for block in blocks for n in block}
    products = [n for n, name in enumerate(node_names(other)) if name == "dot_general"]
    assert [stage_of[n] for n in products] == [0, 1]
    assert all(stage_of[edge.producer] <= stage_of[c] for edge in other.edges for c in edge.consumers)


def test_a_program_with_other_anchors_is_another_model():
    plan = plan_of(graph_of(two_layers, PARAMS, BATCH), [2])
    deeper = graph_of(lambda p, b: two_layers(p, b) + jnp.mean(b["x"] @ p["a"]), PARAMS, BATCH)
    with pytest.raises(PlanError, match="the plan belongs to another model") as error:
        find_stages(deeper, plan)
    assert plan.anchors in str(error.value)
    assert "make a new plan" in str(error.value)


def test_other_arguments_are_another_model_and_are_listed():
    plan = plan_of(graph_of(two_layers, PARAMS, BATCH), [2])
    check_identity(program_of(two_layers, PARAMS, BATCH), plan)
    with pytest.raises(PlanError, match="made for another model") as error:
        check_identity(program_of(two_layers, {"a": shape(4, 6), "b": shape(6, 3)}, BATCH), plan)
    assert "params['a']: float32[4, 6]" in str(error.value)
    assert plan.identity in str(error.value)
