"""Lowerings of the operators that `torch_bridge.rewrites` puts into exported graphs."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from torch_bridge.lowerings.linalg import matrix_rank
from torch_bridge.lowerings.registry import lowering_by_name
from torch_bridge.lowerings.solve import pinv_tensor


@lowering_by_name("torch_bridge::least_squares")
def least_squares(a: Any, b: Any, rcond: float) -> tuple[Any, Any]:
    return pinv_tensor(a, rtol=rcond) @ b, matrix_rank(a, rtol=rcond)


@lowering_by_name("torch_bridge::counts")
def counts(x: Any, weights: Any, length: int) -> Any:
    """A value beyond the length, for which torch would make a longer result, spoils all of them."""
    amounts = 1 if weights is None else lax.stop_gradient(weights)
    dtype = jnp.int32 if weights is None else jnp.result_type(weights.dtype, jnp.float32)
    found = jnp.zeros(length, dtype).at[x].add(amounts, mode="drop")
    return jnp.where(jnp.all(x < length), found, -1 if weights is None else jnp.nan)


@lowering_by_name("torch_bridge::ctc_loss")
def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
    zero_infinity: bool,
) -> Any:
    """Graves et al. 2006, equations 6 and 7: alpha over the labels with blanks between, in logarithms.

    log_probs `[time, batch, classes]`; targets `[batch, most labels]`, or all of them in a row.
    """
    labels = targets if targets.ndim == 2 else _padded(targets, target_lengths)
    batch, most = labels.shape
    labels = jnp.where(jnp.arange(most) < target_lengths[:, None], labels, blank)
    # blank, label, blank, label, ..., blank
    path = jnp.full((batch, 2 * most + 1), blank, labels.dtype).at[:, 1::2].set(labels)
    skips = jnp.pad((path[:, 2:] != blank) & (path[:, 2:] != path[:, :-2]), ((0, 0), (2, 0)))
    emitted = jnp.take_along_axis(log_probs, path[None], 2)
    least = jnp.finfo(log_probs.dtype).min  # as -inf, but with a gradient
    start = jnp.where(jnp.arange(2 * most + 1) < 2, emitted[0], least)

    def step(alpha: Any, at: tuple[Any, Any]) -> tuple[Any, None]:
        time, here = at
        one, two = (jnp.pad(alpha, ((0, 0), (n, 0)), constant_values=least)[:, :-n] for n in (1, 2))
        arrived = jnp.logaddexp(jnp.logaddexp(alpha, one), jnp.where(skips, two, least)) + here
        going = (time < input_lengths)[:, None]
        return jnp.where(going, jnp.maximum(arrived, least), alpha), None

    alpha, _ = lax.scan(step, start, (jnp.arange(1, log_probs.shape[0]), emitted[1:]))
    last = 2 * target_lengths[:, None]
    ends = jnp.take_along_axis(alpha, jnp.concatenate([last, jnp.maximum(last - 1, 0)], 1), 1)
    ends = ends.at[:, 1].set(jnp.where(target_lengths > 0, ends[:, 1], least))
    total = jnp.logaddexp(ends[:, 0], ends[:, 1])
    impossible = total <= least / 2
    loss = jnp.where(impossible, 0.0 if zero_infinity else jnp.inf, -total)
    return loss + jnp.where(impossible, 0, _normalisation(log_probs, input_lengths))


def _normalisation(log_probs: Any, lengths: Any) -> Any:
    """Zero, with torch's gradient of it: exp(log_probs), as if they came straight from a log_softmax."""
    live = jnp.arange(log_probs.shape[0])[:, None] < lengths
    mass = jnp.sum(jnp.where(live[..., None], jnp.exp(log_probs), 0), (0, 2))
    return mass - lax.stop_gradient(mass)


def _padded(targets: Any, lengths: Any) -> Any:
    """Labels in a row as `[batch, labels in all]`; what is beyond a sequence's own is not read."""
    starts = jnp.cumsum(lengths) - lengths
    return jnp.take(targets, starts[:, None] + jnp.arange(targets.shape[0]), mode="clip")
