"""Products whose operands hold the rows in different dims: attention is full of them."""

import jax
import jax.numpy as jnp
import pytest

from rannc_jax.ir import prepare
from rannc_jax.ir.example import make_example, subject


def couplings(fn, params, x):
    who = subject(fn, None, is_loss=True)
    return prepare(who, make_example(who, params, x)).info.couplings


def rows_first_and_second(params, x):
    left, right = x @ params, jnp.moveaxis(x, 0, 1)  # [rows, t, n] and [t, rows, n]
    return jax.lax.dot_general(left, right, (((2,), (2,)), ((0,), (1,)))).mean()


def attention(params, x):
    heads = (x @ params)[:, :, None, :]
    return jax.nn.dot_product_attention(heads, heads, heads, is_causal=True).mean()


@pytest.mark.parametrize("fn", [rows_first_and_second, attention])
def test_rows_may_sit_in_different_dims_of_a_product(fn) -> None:
    assert couplings(fn, jnp.ones((4, 4)), jnp.ones((8, 6, 4))) == ()


def test_a_product_over_the_rows_still_couples_them() -> None:
    def contrastive(params, x):
        y = (x @ params).reshape(x.shape[0], -1)
        return jax.nn.log_softmax(y @ y.T).mean()

    assert couplings(contrastive, jnp.ones((4, 4)), jnp.ones((8, 6, 4)))
