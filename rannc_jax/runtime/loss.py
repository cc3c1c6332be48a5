"""How the losses and auxiliary outputs of microbatches and replicas become those of the step.

Parts combine as sum(g(w_i) * loss_i) / g(sum(w_i)); a part of weight 0 is removed by selection, so a
microbatch without a single label leaves no NaN behind. Mean losses weigh every part by its rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rannc_jax.ir.batch import LossKind, LossRule, RowLayout
from rannc_jax.ir.evaluate import evaluate
from rannc_jax.ir.trace import Program

Scalar = Callable[[Any], Any]


def divisor_function(program: Program, rule: LossRule) -> Scalar:
    """The function g of `LossRule`: the identity, or max(w, 1) and the like."""
    if rule.weight is None or rule.divisor is None or rule.weight == rule.divisor:
        return lambda w: w
    definer = {v: e for e in range(len(program.eqns)) for v in program.writes(e)}
    path: set[int] = set()
    stack = [rule.divisor]
    while stack:
        v = stack.pop()
        e = definer.get(v)
        if v != rule.weight and e is not None and e not in path:
            path.add(e)
            stack += program.reads(e)
    weight, divisor = program.vars[rule.weight], program.vars[rule.divisor]

    def apply(w: Any) -> Any:
        env: dict[Any, Any] = dict(zip(program.jaxpr.jaxpr.constvars, program.jaxpr.consts, strict=True))
        env[weight] = jnp.asarray(w).astype(weight.aval.dtype)
        evaluate([(e, program.eqns[e]) for e in sorted(path)], env)
        return env[divisor]

    return apply


def total_loss(rule: LossRule, divisor: Scalar) -> Callable[..., tuple[Any, Any, Any]]:
    """`(losses, weights) -> (loss, scale, total weight)`, scalars of float32 or the losses' wider dtype.

    `losses` and `weights` are sequences of [parts] arrays, one a microbatch; weights of a SUM are not
    read. `scale` turns summed gradients into those of the loss.
    """

    def run(losses: Sequence[Any], weights: Sequence[Any]) -> tuple[Any, Any, Any]:
        wide = jnp.promote_types(losses[0].dtype, jnp.float32)
        parts = jnp.concatenate([x.astype(wide) for x in losses])
        if rule.kind is LossKind.SUM:
            return jnp.sum(parts), jnp.ones((), wide), jnp.float32(1)
        raw = jnp.concatenate([w.astype(jnp.float32) for w in weights])
        factor = jax.vmap(lambda w: jnp.asarray(divisor(w), wide))(raw)
        total = jnp.asarray(divisor(jnp.sum(raw)), wide)
        summed = jnp.sum(jnp.where(raw > 0, factor * parts, 0))
        return summed / total, 1 / total, jnp.sum(raw)

    return run


def combine_rows(parts: Sequence[Any], layout: RowLayout, rows: int | None) -> Any:
    """Concatenate the rows of microbatches in order; `rows` cuts padding off."""
    joined = jnp.concatenate(list(parts), axis=layout.dim) if len(parts) > 1 else parts[0]
    if rows is not None:
        joined = jax.lax.slice_in_dim(joined, 0, rows * layout.inner, axis=layout.dim)
    return joined


def combine_free(parts: Sequence[Any], weights: Any) -> Any:
    """Average batch-free floats by the weights of their microbatches; stack everything else.

    Args:
        parts: one value a microbatch.
        weights: float32 [num_microbatches].
    """
    stacked = jnp.stack(list(parts))
    if not jnp.issubdtype(stacked.dtype, jnp.inexact):
        return stacked
    shape = (-1,) + (1,) * (stacked.ndim - 1)
    share = (weights / jnp.sum(weights)).reshape(shape).astype(stacked.dtype)
    return jnp.sum(jnp.where(share > 0, share * stacked, 0), axis=0)
