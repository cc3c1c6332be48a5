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
) -> tuple[int, int] | None:
    """(number of microbatches, rows of each) for a batch, as near to the plan's number as it goes.

    The largest number up to the plan's whose microbatches divide by every stage's replicas; where rows
    may be padded and that makes smaller microbatches (which is what the plan has memory for), the plan's
    own number with padding. None if nothing divides and rows may not be padded.
    """
    unit = int(np.lcm.reduce(np.asarray(replicas)))
    counts = range(min(num_microbatches, batch_rows), 0, -1)
    whole = next((c for c in counts if batch_rows % c == 0 and (batch_rows // c) % unit == 0), None)
    padded = -(-batch_rows // (num_microbatches * unit)) * unit
    if pad and (whole is None or padded < batch_rows // whole):
        return -(-batch_rows // padded), padded
    return None if whole is None else (whole, batch_rows // whole)


def _slice(leaf: Any, dim: int, start: int, stop: int) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf[(slice(None),) * dim + (slice(start, stop),)]
    return jax.lax.slice_in_dim(leaf, start, stop, axis=dim)
