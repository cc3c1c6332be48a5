"""The batch analysis against numbers: parts of a batch combined by the rule equal the whole, or not."""

import pytest

from rannc_jax.ir.batch import CouplingKind, LossKind
from tests.ir import batch_zoo as zoo
from tests.ir.batch_tools import Case, combined, gap, look, value_and_grad

# JAX wants debug information for every jaxpr that is put together by hand.
pytestmark = pytest.mark.filterwarnings("ignore:core.Jaxpr is missing a DebugInfo:DeprecationWarning")

PARTS = (4, 2)  # of unequal size, so that a mean of means is not a mean
EVEN = (3, 3)


def name(case: Case) -> str:
    return case.fn.__name__


@pytest.mark.parametrize("case", zoo.SEPARABLE, ids=name)
def test_parts_of_a_separable_batch_combine_into_the_whole(case: Case) -> None:
    program, info = look(case)
    assert info.couplings == ()
    assert info.loss is not None
    assert info.loss.kind is case.kind
    assert bool(info.unspreadable) is case.unspreadable
    assert gap(combined(case, program, info.loss, PARTS), value_and_grad(case, case.batch)) < 1e-5


@pytest.mark.parametrize("case", zoo.COUPLED, ids=name)
def test_rows_that_see_each_other_are_reported_and_really_do(case: Case) -> None:
    program, info = look(case)
    assert info.loss is not None
    assert any(c.kind is CouplingKind.OTHER for c in info.couplings)
    assert gap(combined(case, program, info.loss, EVEN), value_and_grad(case, case.batch)) > 1e-4


@pytest.mark.parametrize("case", zoo.STATISTICS, ids=name)
def test_batch_normalisation_is_reported_as_statistics_only(case: Case) -> None:
    program, info = look(case)
    assert info.loss is not None
    assert {c.kind for c in info.couplings} == {CouplingKind.BATCH_STATISTICS}
    assert {c.primitive for c in info.couplings} == {"reduce_sum"}
    assert info.row_masks is None
    assert gap(combined(case, program, info.loss, EVEN), value_and_grad(case, case.batch)) > 1e-4


@pytest.mark.parametrize("case", zoo.INEXACT, ids=name)
def test_losses_without_an_exact_rule_are_means_of_means(case: Case) -> None:
    program, info = look(case)
    assert info.couplings == ()
    assert info.loss is not None
    assert info.loss.kind is LossKind.MEAN_OF_MEANS
    assert gap(combined(case, program, info.loss, EVEN), value_and_grad(case, case.batch)) > 1e-4
