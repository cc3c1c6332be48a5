"""A converted Hugging Face model, cut and trained here, is the one that PyTorch trains unsplit."""

from typing import Any

import pytest

from rannc_jax import Remat
from tests.parity.cases import Case
from tests.parity.measure import compare
from tests.parity.play import NUM_STEPS, begin, run

pytestmark = pytest.mark.torch

FACTORS = ("replicas", "num_microbatches", "schedule", "remat", "optimizer")
PLANS: dict[str, tuple[Any, ...]] = {
    "replicas": ((2,), 1, "gpipe", Remat.SAVE_ALL, "sgd"),
    "uneven": ((3, 1), 4, "1f1b", Remat.SAVE_MATMULS, "adam"),
    "deep": ((2, 2, 2, 2), 4, "1f1b", Remat.RECOMPUTE, "sgd"),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet"])
def test_a_converted_model_trains_as_in_pytorch(name: str, plan: str) -> None:
    from tests.parity.torch_models import torch_model, torch_outcome

    model = torch_model(name)
    case = Case(model=name, dropout=False, **dict(zip(FACTORS, PLANS[plan], strict=True)))
    step = begin(case, model.converted)
    got = run(step, step.init(), model.converted.batch)
    expected = torch_outcome(name, case.optimizer, case.num_microbatches, NUM_STEPS)
    comparison = compare(got, expected, model.converted.params, case.optimizer)
    assert comparison.problems == ()
    assert all(model.is_zero(path) for path in comparison.below_floor)
    assert len(comparison.below_floor) <= 2
