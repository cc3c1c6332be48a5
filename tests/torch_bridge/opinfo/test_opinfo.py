"""A guard for what passes: operators of every family, first sample, values and gradients."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from jax import lax

from tests.torch_bridge.opinfo.judge import judge, samples
from tests.torch_bridge.opinfo.outcome import PASSES, Outcome
from torch_bridge.lowerings import registry

pytest.importorskip("expecttest", reason="PyTorch's operator database needs it")
# The database and the operators under test warn about themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

OPERATORS = """addmm.decomposed cholesky_solve cov cross div.floor_rounding fft.ihfft frac as_strided_copy
    grid_sampler_3d histogramdd index_put item linalg.eig linalg.lstsq linalg.pinv linalg.tensorinv logdet
    logspace.tensor_overload lu_solve masked.prod multinomial native_batch_norm nn.functional.conv2d
    nn.functional.ctc_loss nn.functional.gaussian_nll_loss nn.functional.glu nn.functional.grid_sample
    nn.functional.nll_loss nn.functional.pad.reflect norm ormqr round.decimals_3 scatter_reduce.prod
    _segment_reduce.lengths softmax.with_dtype special.airy_ai special.laguerre_polynomial_l
    special.log_ndtr triangular_solve _upsample_bilinear2d_aa""".split()


@cache
def _database() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}


def _first_verdict(name: str) -> Any:
    op = _database()[name]
    return judge(op, next(samples(op, torch.float32, 1)))


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_of_the_database_matches_torch(name: str) -> None:
    verdict = _first_verdict(name)
    assert verdict.outcome in PASSES, f"{verdict.outcome.value}: {verdict.detail}"


@pytest.mark.parametrize(
    "wrong, outcome",
    [
        (lambda x: x + 1, Outcome.WRONG_VALUE),
        (lambda x: lax.stop_gradient(x - jnp.trunc(x)), Outcome.WRONG_GRADIENT),
    ],
)
def test_the_judge_sees_a_wrong_lowering(
    wrong: Callable[[Any], Any], outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = registry.Lowering(function=wrong, random=registry.never)
    monkeypatch.setitem(registry._LOWERINGS, torch.ops.aten.frac.default, broken)
    assert _first_verdict("frac").outcome is outcome
