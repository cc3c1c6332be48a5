"""A choice by platform is read by its default branch: the same plan wherever it is made."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from rannc_jax.cost.flops import jaxpr_flops
from tests.ir import batch_zoo as zoo
from tests.ir.batch_tools import Case, look


def by_rows(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


def by_kernel(x: jax.Array) -> jax.Array:
    """Nothing is known about kernels; a sort over the batch stands for one."""
    return jnp.sort(x, 0)


def chosen(**by_platform: Any) -> Case:
    def fn(params: Any, batch: Any) -> Any:
        hidden = lax.platform_dependent(batch["x"], **by_platform)
        return jnp.mean((zoo.mlp(params, hidden) - batch["y"]) ** 2)

    return Case(fn=fn, params=zoo.MLP, batch=zoo.XY)


@pytest.mark.parametrize("platforms", [{"cuda": by_kernel}, {"tpu": by_kernel, "cuda": by_kernel}])
def test_a_kernel_of_one_platform_does_not_couple_rows(platforms: Any) -> None:
    assert look(chosen(default=by_rows, **platforms))[1].couplings == ()


def test_the_default_branch_does_couple_rows() -> None:
    assert look(chosen(default=by_kernel, cuda=by_rows))[1].couplings != ()


def test_every_branch_counts_where_none_is_the_default() -> None:
    assert look(chosen(cpu=by_rows, cuda=by_kernel))[1].couplings != ()


def test_work_is_that_of_the_default_branch() -> None:
    def twice(x: jax.Array) -> jax.Array:
        return x @ x @ x

    x = jnp.ones((4, 4))
    plain = jax.make_jaxpr(lambda x: x @ x)(x)
    choice = jax.make_jaxpr(lambda x: lax.platform_dependent(x, cuda=twice, default=lambda x: x @ x))(x)
    assert jaxpr_flops(choice.jaxpr) == pytest.approx(jaxpr_flops(plain.jaxpr), abs=1)
