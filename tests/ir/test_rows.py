"""Rows drawn and masked on their own equal the same rows of the whole, bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

from rannc_jax.ir.batch import RowLayout, RowMask
from rannc_jax.ir.evaluate import bind
from rannc_jax.ir.rows import random_rows_hook, row_mask_hook

LAYOUTS = [
    ((6,), RowLayout(0)),
    ((6, 5), RowLayout(0)),
    ((3, 6, 2), RowLayout(1)),
    ((24, 3), RowLayout(0, 1, 4)),
    ((2, 24), RowLayout(1, 2, 2)),
    ((2, 3, 12), RowLayout(2, 2, 1)),
]


def draw(shape: tuple[int, ...], width: int, key: Any) -> tuple[jex.JaxprEqn, Any]:
    jaxpr = jax.make_jaxpr(lambda k: jax.random.bits(k, shape, f"uint{width}"))(key)
    closed = jaxpr.eqns[0].params["jaxpr"] if jaxpr.eqns[0].primitive.name in ("jit", "pjit") else jaxpr
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "random_bits")
    return eqn, bind(eqn, [key])[0]


def rows_of(value: Any, layout: RowLayout, parts: int, part: int) -> np.ndarray:
    """The rows of one part, taken with numpy."""
    value = np.asarray(value)
    sizes = (layout.outer, parts, -1, layout.inner)
    before, after = value.shape[: layout.dim], value.shape[layout.dim + 1 :]
    split = value.reshape(*before, *sizes, *after)
    taken = np.take(split, part, axis=layout.dim + 1)
    return taken.reshape(*before, -1, *after)


def local(shape: tuple[int, ...], layout: RowLayout, parts: int) -> tuple[int, ...]:
    return (*shape[: layout.dim], shape[layout.dim] // parts, *shape[layout.dim + 1 :])


def check(key: Any, shape: tuple[int, ...], layout: RowLayout, width: int, parts: int) -> None:
    _, whole = draw(shape, width, key)
    eqn, _ = draw(local(shape, layout, parts), width, key)
    rows = shape[layout.dim] // (layout.outer * layout.inner) // parts

    @jax.jit
    def own(key: Any, part: Any) -> Any:
        return random_rows_hook(layout, rows, parts, part)(eqn, [key])[0]

    for part in range(parts):
        got = own(key, jnp.int32(part))
        assert got.dtype == whole.dtype
        np.testing.assert_array_equal(got, rows_of(whole, layout, parts, part))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
def test_bits_of_a_part_are_the_rows_of_the_whole_draw(
    shape: tuple[int, ...], layout: RowLayout, parts: int
) -> None:
    check(jax.random.key(7), shape, layout, 32, parts)


@pytest.mark.parametrize("width", [8, 16])
def test_narrow_bits_too(width: int) -> None:
    check(jax.random.key(7), (6, 5), RowLayout(0), width, 3)


def test_wide_bits_too() -> None:
    with jax.enable_x64(True):
        check(jax.random.key(7), (6, 5), RowLayout(0), 64, 3)


def test_other_generators_draw_in_full_and_keep_their_rows() -> None:
    check(jax.random.key(7, impl="rbg"), (6, 5), RowLayout(0), 32, 3)


def test_draws_without_partitionable_threefry_keep_their_rows() -> None:
    with jax.threefry_partitionable(False):
        check(jax.random.key(7), (6, 5), RowLayout(0), 32, 2)


def test_a_part_is_drawn_alone_not_cut_from_the_whole() -> None:
    eqn, _ = draw((2, 5), 32, jax.random.key(0))
    hook = random_rows_hook(RowLayout(0), 2, 3, jnp.int32(1))
    jaxpr = jax.make_jaxpr(lambda k: hook(eqn, [k]))(jax.random.key(0))
    assert max(v.aval.size for e in jaxpr.eqns for v in e.outvars) == 10


def test_several_keys_draw_their_own_rows() -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    draws = jax.vmap(lambda k: jax.random.bits(k, (6, 2)))
    whole = draws(keys)
    jaxpr = jax.make_jaxpr(jax.vmap(lambda k: jax.random.bits(k, (3, 2))))(keys)
    (eqn,) = (e for e in _all(jaxpr.jaxpr) if e.primitive.name == "random_bits")
    for part in range(2):
        got = random_rows_hook(RowLayout(1), 3, 2, jnp.int32(part))(eqn, [keys])[0]
        np.testing.assert_array_equal(got, rows_of(whole, RowLayout(1), 2, part))


def _all(jaxpr: Any) -> list[jex.JaxprEqn]:
    inner = [e.params["jaxpr"].jaxpr for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    return [*jaxpr.eqns, *(e for j in inner for e in _all(j))]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_keys_of_a_part_are_the_rows_of_all_keys(parts: int) -> None:
    key = jax.random.key(5)
    whole = jax.random.key_data(jax.random.split(key, 6))
    jaxpr = jax.make_jaxpr(lambda k: jax.random.split(k, 6 // parts))(key)
    (eqn,) = (e for e in _all(jaxpr.jaxpr) if e.primitive.name == "random_split")
    for part in range(parts):
        got = random_rows_hook(RowLayout(0), 6 // parts, parts, jnp.int32(part))(eqn, [key])[0]
        np.testing.assert_array_equal(jax.random.key_data(got), rows_of(whole, RowLayout(0), parts, part))


def test_rows_that_are_not_valid_do_not_count() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 3)), jnp.float32)
    layout = RowLayout(1, 2, 2)
    valid = jnp.asarray([True, False, True])
    jaxpr = jax.make_jaxpr(lambda x: x.sum())(x)
    (eqn,) = (e for e in _all(jaxpr.jaxpr) if e.primitive.name == "reduce_sum")
    spoilt = x.reshape(2, 2, 3, 2, 3).at[:, :, 1].set(jnp.nan).reshape(x.shape)
    mask = RowMask(equation=0, operand=0, layout=layout)
    expected = x.reshape(2, 2, 3, 2, 3)[:, :, jnp.asarray([0, 2])].sum()
    np.testing.assert_allclose(row_mask_hook(mask, valid)(eqn, [spoilt])[0], expected, rtol=1e-6)
    scaled = row_mask_hook(mask, valid, jnp.float32(1.5))(eqn, [spoilt])[0]
    np.testing.assert_allclose(scaled, 1.5 * expected, rtol=1e-6)
