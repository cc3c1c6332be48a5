"""Cutting batches: rows in order, padding at the end, as near to the plan as it goes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_jax.runtime.feed import microbatch, microbatch_rows, part_weights, valid_rows


@pytest.mark.parametrize("library", [np, jnp])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_hold_the_rows_in_order_and_copies_of_the_last_one(library, dim):
    leaf = np.moveaxis(np.arange(7 * 3 * 2).reshape(7, 3, 2), 0, dim)
    parts = [microbatch(library.asarray(leaf), dim, i, 3) for i in range(3)]
    assert all(part.shape[dim] == 3 for part in parts)
    joined = np.concatenate(parts, axis=dim)
    np.testing.assert_array_equal(np.take(joined, range(7), dim), leaf)
    for extra in (7, 8):
        np.testing.assert_array_equal(np.take(joined, extra, dim), np.take(leaf, 6, dim))


def test_a_part_may_be_padding_alone():
    np.testing.assert_array_equal(microbatch(np.arange(3), 0, 2, 2), [2, 2])


def test_leaves_without_rows_go_whole():
    leaf = np.arange(3)
    assert microbatch(leaf, None, 1, 2) is leaf
    assert microbatch(leaf, 0, 0, 3) is leaf


def test_valid_rows_and_shares():
    np.testing.assert_array_equal(valid_rows(5, 1, 4), [True, False, False, False])
    np.testing.assert_array_equal(part_weights(5, 1, 4, 2), [0.5, 0])
    np.testing.assert_array_equal(part_weights(8, 1, 4, 2), [1, 1])
    assert part_weights(5, 0, 4, 2).dtype == np.float32


@pytest.mark.parametrize(
    ("batch_rows", "wanted", "replicas", "pad", "expected"),
    [
        (8, 4, (1, 1), False, (4, 2)),
        (10, 4, (1, 1), False, (2, 5)),
        (10, 4, (1, 1), True, (4, 3)),
        (8, 4, (4, 1), True, (2, 4)),
        (3, 8, (1,), False, (3, 1)),
        (7, 2, (2, 1), True, (2, 4)),
        (1, 4, (2, 1), True, (1, 2)),
        (12, 4, (2, 3), True, (2, 6)),
    ],
)
def test_microbatches_are_as_near_to_the_plan_as_it_goes(batch_rows, wanted, replicas, pad, expected):
    assert microbatch_rows(batch_rows, wanted, replicas, pad=pad) == expected


def test_what_does_not_divide_and_may_not_be_padded_has_no_microbatches():
    assert microbatch_rows(7, 2, (2, 1), pad=False) is None


def test_the_last_batch_of_an_epoch_makes_no_larger_microbatches_than_planned():
    assert microbatch_rows(31, 4, (1,), pad=True) == (4, 8)
    assert microbatch_rows(127, 32, (1, 2), pad=True) == (32, 4)


@given(
    batch_rows=st.integers(1, 60),
    wanted=st.integers(1, 12),
    replicas=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_every_row_has_a_place_and_every_microbatch_a_row(batch_rows, wanted, replicas):
    count, rows = microbatch_rows(batch_rows, wanted, replicas, pad=True)
    assert 1 <= count <= max(wanted, 1)
    assert all(rows % r == 0 for r in replicas)
    assert (count - 1) * rows < batch_rows <= count * rows
    shares = [part_weights(batch_rows, i, rows, replicas[0]) for i in range(count)]
    assert abs(sum(float(s.sum()) for s in shares) * rows / replicas[0] - batch_rows) < 1e-3
