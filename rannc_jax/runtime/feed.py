"""Cut a batch into microbatches and put each part where it is read.

Rows stay in order: microbatch i holds rows [i * n, (i + 1) * n). Where the rows do not divide, the
last microbatches are filled up with copies of the last row, which the programs keep out of the loss.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def microbatch(leaf: Any, dim: int | None, index: int, rows: int) -> Any:
    """Rows [index * rows, (index + 1) * rows) of a batch leaf, filled up with its last row.

    Args:
        leaf: numpy or jax array.
        dim: that carries the rows; None: the whole leaf.
        index: of the microbatch.
        rows: of a microbatch.
    """
    if dim is None:
        return leaf
    total = leaf.shape[dim]
    start, stop = min(index * rows, total), min((index + 1) * rows, total)
    if stop - start == rows:
        return leaf if rows == total else _slice(leaf, dim, start, stop)
    missing = rows - (stop - start)
    last = _slice(leaf, dim, total - 1, total)
    parts = [_slice(leaf, dim, start, stop), *[last] * missing]
    join = np.concatenate if isinstance(leaf, np.ndarray) else jnp.concatenate
    return join(parts, axis=dim)


def valid_rows(batch_rows: int, index: int, rows: int) -> np.ndarray:
    """bool [rows]: which rows of a microbatch are not padding."""
    return np.arange(index * rows, (index + 1) * rows) < batch_rows


def part_weights(batch_rows: int, index: int, rows: int, parts: int) -> np.ndarray:
    """float32 [parts]: the share of each replica's rows that are not padding."""
    return valid_rows(batch_rows, index, rows).reshape(parts, -1).mean(axis=1).astype(np.float32)


def microbatch_rows(
    batch_rows: int, num_microbatches: int, replicas: Sequence[int], *, pad: bool
) -> tuple[int, int]:
    """(number of microbatches, rows of each) for a batch, as near to the plan's number as it goes.

    Without padding the largest number up to the plan's whose microbatches divide by every stage's
    replicas; with padding the plan's own where nothing divides.

    Raises:
        ValueError: nothing divides and rows may not be padded.
    """
    for count in range(min(num_microbatches, batch_rows), 0, -1):
        if batch_rows % count == 0 and all((batch_rows // count) % r == 0 for r in replicas):
            return count, batch_rows // count
    if not pad:
        raise ValueError(f"{batch_rows} rows do not divide by replicas {tuple(replicas)}")
    unit = int(np.lcm.reduce(np.asarray(replicas)))
    rows = -(-batch_rows // (num_microbatches * unit)) * unit
    return -(-batch_rows // rows), rows


def _slice(leaf: Any, dim: int, start: int, stop: int) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf[(slice(None),) * dim + (slice(start, stop),)]
    return jax.lax.slice_in_dim(leaf, start, stop, axis=dim)
