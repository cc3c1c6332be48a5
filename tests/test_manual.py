"""Fixing parts of a plan by the names of modules, at the front door; messages about what cannot be."""

import pytest

from rannc_jax import PlanError, Remat
from tests.messages import MISTAKES, layered, planned

WIDTHS = (1024,) * 5


def test_cuts_and_modes_are_fixed_by_the_names_of_modules():
    plan = planned(layered, WIDTHS, cuts=("layer_2",), remat={"layer_1": "recompute", -1: "save_all"})
    assert [stage.remat for stage in plan.stages] == [Remat.RECOMPUTE, Remat.SAVE_ALL]
    assert plan.blocks[plan.stages[1].blocks[0]].path == "layer_2"


def test_a_module_with_a_mode_of_its_own_is_parted_from_the_others():
    """Eight blocks would do; the module's ends become borders of blocks however few there are."""
    plan = planned(layered, (1024,) * 6, remat={"layer_2": "recompute"}, num_stages=3)
    held = [{plan.blocks[block].path for block in stage.blocks} for stage in plan.stages]
    remats = [stage.remat for stage, paths in zip(plan.stages, held, strict=True) if "layer_2" in paths]
    assert set(remats) == {Remat.RECOMPUTE}


TWO_MODES = "remat={'layer_1': 'recompute'} and remat={'layer_2': 'save_all'} cannot both hold"


@pytest.mark.parametrize(
    "mistake, words",
    [
        ("a model that cannot fit anywhere", ["too much (stage", "of usable memory per device"]),
        ("a layer larger than a device", ["'layer_1' (block 1 of 5) cannot be cut and alone needs"]),
        ("whole state where sharded state fits", ["try: sharding='zero", "(fits in "]),
        ("a cut where the program begins", ["cuts names 'embed'", "leave that cut out"]),
        ("a cut at a module that is not there", ["cuts names 'layer.2'", "nearest names: layer_2"]),
        ("two modes for modules that the cuts leave in one stage", [TWO_MODES, "a part in stage 1"]),
        ("two modes and a single stage", ["num_stages='auto' or remat='auto': then there are plans"]),
    ],
)
def test_what_cannot_be_is_said_with_the_way_out(mistake, words):
    with pytest.raises(PlanError) as caught:
        MISTAKES[mistake]()
    for part in words:
        assert part in str(caught.value)


def test_there_are_more_blocks_where_few_would_not_fit_or_stages_are_asked_for():
    mesh = {
        "version": 1,
        "devices": [{"kind": "cpu", "count_per_host": 40, "memory_gib": 0.0215, "memory_margin": 0}],
        "links": {"intra_host": {"kind": "host"}},
    }
    fixed = {"schedule": "1f1b", "replicas": 1, "num_microbatches": 2}
    plan = planned(layered, (1024,) * 41, mesh=mesh, **fixed)
    assert plan.num_stages == 40
