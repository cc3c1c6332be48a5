"""What one device computes, written without anything of the runtime.

Where rows do not see each other and nothing is random, the whole batch is one `jax.value_and_grad`.
Otherwise the same microbatches run one after another, each with its own key and scaled by its share of
the weight; a part of weight 0 is left out.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rannc_jax import LossOut, Weighted
from tests.parity.models import Model

SEED = 7


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a few steps from the same start gave, on the host.

    Args:
        loss, grads, aux, first_state: of the first batch, before any update (the last is the model state).
        losses: of every step.
        params, model_state: after the last step.
    """

    loss: Any
    grads: Any
    aux: Any
    first_state: Any
    losses: tuple[Any, ...]
    params: Any
    model_state: Any


def reference(
    model: Model, optimizer: optax.GradientTransformation, num_microbatches: int, num_steps: int
) -> Outcome:
    """Train on one device."""
    params, state, opt_state = model.params, model.model_state, optimizer.init(model.params)
    losses, first = [], None
    for number in range(num_steps):
        loss, grads, aux, state = loss_and_grads(model, params, state, num_microbatches, number)
        first = first or {"loss": loss, "grads": grads, "aux": aux, "first_state": state}
        losses.append(loss)
        updates, opt_state = jax.jit(optimizer.update)(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert first is not None
    outcome = Outcome(**first, losses=tuple(losses), params=params, model_state=state)
    return Outcome(**jax.tree.map(np.asarray, vars(outcome)))


def loss_and_grads(
    model: Model, params: Any, state: Any, num_microbatches: int, number: int
) -> tuple[Any, Any, Any, Any]:
    """(loss, gradients, aux, model state) of step `number`."""
    parts = split(model.batch, num_microbatches)
    if not model.in_parts:
        (loss, _), grads = _value_and_grad(model)(params, model.batch, {"frozen": model.frozen})
        outs = [_value_and_grad(model)(params, part, {"frozen": model.frozen})[0][1] for part in parts]
        return loss, grads, _join([out.aux for out in outs]), None
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), 1), number)
    weights = [1.0 if model.weight is None else model.weight(part) for part in parts]
    total = 1.0 if model.weight is None else sum(weights)
    loss, grads, auxes = jnp.float32(0), jax.tree.map(jnp.zeros_like, params), []
    for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        given = {"rng": jax.random.fold_in(key, index), "model_state": state, "frozen": model.frozen}
        (part_loss, out), part_grads = _value_and_grad(model)(params, part, given)
        state = out.model_state
        auxes.append(out.aux)
        if weight:
            loss = loss + weight / total * part_loss
            grads = jax.tree.map(lambda g, x, w=weight / total: g + w * x, grads, part_grads)
    return loss, grads, _join(auxes), state


def split(batch: Any, count: int) -> list[Any]:
    """The microbatches of a batch, rows in order."""

    def part(index: int) -> Any:
        def rows(leaf: Any) -> Any:
            size = leaf.shape[0] // count
            return leaf[index * size : (index + 1) * size]

        return jax.tree.map(rows, batch)

    return [part(index) for index in range(count)]


@functools.cache
def _value_and_grad(model: Model) -> Any:
    """`(params, batch, given) -> ((loss, LossOut), grads)`, compiled once a shape."""

    def run(params: Any, batch: Any, given: Any) -> tuple[Any, LossOut]:
        out = model.loss_fn(params, batch, **{name: given[name] for name in model.takes})
        if isinstance(out, LossOut):
            return out.loss, out
        return (out.loss if isinstance(out, Weighted) else out), LossOut(loss=None)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def _join(parts: list[Any]) -> Any:
    """Rows in order; the mean of batch-free floats (parts here weigh the same); others stacked."""

    def leaf(*values: Any) -> Any:
        if values[0].ndim:
            return jnp.concatenate(values)
        stacked = jnp.stack(values)
        return jnp.mean(stacked) if jnp.issubdtype(stacked.dtype, jnp.floating) else stacked

    return jax.tree.map(leaf, *parts)
