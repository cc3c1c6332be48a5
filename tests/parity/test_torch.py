"""A converted Hugging Face model, cut and trained here, is the one that PyTorch trains unsplit."""

from typing import Any

import pytest

from rannc_jax import Remat
from tests.parity.cases import Case
from tests.parity.measure import compare
from tests.parity.play import NUM_STEPS, begin, run

pytestmark = pytest.mark.torch

PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": (2,), "num_microbatches": 1, "schedule": "gpipe", "remat": Remat.SAVE_ALL},
    "uneven": {"replicas": (3, 1), "num_microbatches": 4, "schedule": "1f1b", "remat": Remat.SAVE_MATMULS},
    "deep": {"replicas": (2, 2, 2, 2), "num_microbatches": 4, "schedule": "1f1b", "remat": Remat.RECOMPUTE},
}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet"])
def test_a_converted_model_trains_as_in_pytorch(name: str, plan: str, optimizer: str) -> None:
    from tests.parity.torch_models import torch_model, torch_outcome

    model = torch_model(name)
    case = Case(model=name, dropout=False, optimizer=optimizer, **PLANS[plan])
    step = begin(case, model.converted)
    got = run(step, step.init(), model.converted.batch)
    expected = torch_outcome(name, optimizer, case.num_microbatches, NUM_STEPS)
    comparison = compare(got, expected, model.converted.params, optimizer)
    assert comparison.problems == ()
    assert all(model.is_zero(path) for path in comparison.below_floor)
    assert len(comparison.below_floor) <= 2
