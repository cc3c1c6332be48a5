"""A parallel step equals the step of one device: a part of the cross that covers every pair of factors.

The whole cross is `make parity`.
"""

import itertools

import pytest

from tests.parity.cases import ALL_CASES, FACTORS, Case, chosen, offloaded
from tests.parity.models import MODELS, model
from tests.parity.play import planned, play

CASES = chosen()


@pytest.mark.parametrize("case", [*CASES, *offloaded()], ids=str)
def test_a_parallel_step_equals_the_step_of_one_device(case: Case) -> None:
    comparison = play(case).comparison
    assert comparison.problems == ()
    assert set(comparison.below_floor) == set(model(case.model, case.dropout).zero_gradient)


def test_the_chosen_cases_cover_every_pair_of_factor_values() -> None:
    def pairs(cases: list[Case]) -> set[tuple[str, object, str, object]]:
        names = itertools.combinations(FACTORS, 2)
        return {(a, getattr(c, a), b, getattr(c, b)) for a, b in names for c in cases}

    assert pairs(CASES) == pairs(list(ALL_CASES))
    assert len(CASES) <= 60


def test_the_chosen_cases_are_the_same_every_time() -> None:
    assert chosen() == CASES
    assert len(set(map(str, ALL_CASES))) == len(ALL_CASES)


@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1, 1)], ids=["2 stages", "4 stages"])
@pytest.mark.parametrize("name", MODELS)
def test_every_stage_of_a_network_has_parameters(name: str, replicas: tuple[int, ...]) -> None:
    assert all(stage.memory_bytes["parameters"] for stage in planned(name, False, replicas).stages)


def test_skips_of_the_unet_reach_several_stages_and_pass_over_some() -> None:
    crossings = planned("unet", False, (1, 1, 1, 1)).crossings
    assert any(len(c.targets) > 1 and min(c.targets) > c.source + 1 for c in crossings)


def test_the_embedding_of_the_transformer_is_read_by_two_stages() -> None:
    (tie,) = planned("transformer", False, (1, 1)).ties
    assert (tie.path, len(tie.readers)) == ("params['embedding']", 2)
