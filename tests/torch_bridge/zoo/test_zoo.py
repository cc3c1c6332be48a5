"""The zoo in pytest: a few networks of each kind on every change, all of them as slow tests."""

import pytest
import torch

from tests.torch_bridge.zoo import judge as judging
from tests.torch_bridge.zoo.__main__ import modes
from tests.torch_bridge.zoo.catalogue import SPECIMENS
from tests.torch_bridge.zoo.judge import FINE, Outcome, judge
from torch_bridge.lowerings import registry

# Networks and torch.export warn about themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = {
    "u-net": "train",
    "gru": "eval",
    "multihead attention": "train",
    "index_put": "train",
    "cross entropy": "train",
    "graph network": "train",
    "point network": "eval",
    "stochastic depth": "dropout",
}


@pytest.mark.parametrize("name", QUICK)
def test_a_specimen_agrees_with_torch(name: str) -> None:
    record = judge(SPECIMENS[name], QUICK[name])
    assert record["outcome"] == Outcome.PASSED, record["detail"]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SPECIMENS))
def test_every_specimen_agrees_with_torch_or_is_refused_by_its_export(name: str) -> None:
    specimen = SPECIMENS[name]
    records = [judge(specimen, mode) for mode in modes(specimen)]
    assert all(record["outcome"] in FINE for record in records), records


@pytest.mark.parametrize("kind", ["value", "gradient"])
def test_the_judge_sees_a_wrong_lowering(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax import lax
    from jax import numpy as jnp

    wrong = {"value": lambda x: jnp.tanh(x) * 1.0001, "gradient": lambda x: lax.stop_gradient(jnp.tanh(x))}
    broken = registry.Lowering(function=wrong[kind], random=registry.never)
    monkeypatch.setitem(registry._LOWERINGS, torch.ops.aten.tanh.default, broken)
    record = judge(SPECIMENS["tied linear"], "train")
    assert record["outcome"] == Outcome.DIFFERS
    assert ("outputs" if kind == "value" else "gradient") in record["detail"]


def test_a_conversion_that_fails_on_its_own_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._LOWERINGS, torch.ops.aten.tanh.default)
    monkeypatch.setattr("torch_bridge.decompose.decomposition", lambda op: None)
    record = judge(SPECIMENS["tied linear"], "train")
    assert record["outcome"] == Outcome.NOT_CONVERTED
    assert judging.refusal(torch.nn.Linear(2, 2), (torch.ones(1, 2),), {}) == ""
