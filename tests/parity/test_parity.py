"""A parallel step equals the step of one device: a part of the cross that covers every pair of factors.

The whole cross is `make parity`.
"""

import itertools

import pytest

from tests.parity.cases import ALL_CASES, FACTORS, Case, chosen
from tests.parity.models import model
from tests.parity.play import play

CASES = chosen()


@pytest.mark.parametrize("case", CASES, ids=str)
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
