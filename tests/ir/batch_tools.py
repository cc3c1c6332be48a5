"""Numeric judge of the batch analysis: evaluate a loss on parts and on the whole, and compare."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rannc_jax.ir.batch import BatchInfo, LossKind, LossRule, analyse
from rannc_jax.ir.evaluate import evaluate
from rannc_jax.ir.example import make_example, subject
from rannc_jax.ir.trace import Program, as_loss_out, trace
from rannc_jax.runtime.loss import divisor_function


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss function with arguments. `separable`: what the analysis has to say.

    `kind` is the expected rule; `statistics` means couplings of the kind BATCH_STATISTICS alone.
    """

    fn: Callable[..., Any]
    params: Any
    batch: Any
    kind: LossKind = LossKind.MEAN
    coupled: bool = False
    statistics: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)
    batch_dims: Any = "auto"
    unspreadable: bool = False


def look(case: Case) -> tuple[Program, BatchInfo]:
    """Trace a case at its rows and at twice as many, and analyse it."""
    who = subject(case.fn)
    example = make_example(who, case.params, case.batch, batch_dims=case.batch_dims, **case.keywords)
    program, twin = trace(who, example), trace(who, example, 2 * example.rows)
    return program, analyse(program, twin)


def parts_of(case: Case, sizes: tuple[int, ...]) -> list[Any]:
    """The batch cut into parts with these numbers of rows."""
    who = subject(case.fn)
    example = make_example(who, case.params, case.batch, batch_dims=case.batch_dims, **case.keywords)
    leaves, tree = jax.tree.flatten(case.batch)
    edges = np.cumsum([0, *sizes])
    parts = []
    for start, stop in itertools.pairwise(edges):
        cut = [
            leaf if dim is None else jax.lax.slice_in_dim(jnp.asarray(leaf), int(start), int(stop), axis=dim)
            for leaf, dim in zip(leaves, example.batch_dims, strict=True)
        ]
        parts.append(tree.unflatten(cut))
    return parts


def value_and_grad(case: Case, batch: Any) -> tuple[Any, Any]:
    """Loss and gradient of the user's function on a batch."""

    def loss(params: Any) -> Any:
        return as_loss_out(case.fn(params, batch, **case.keywords)).loss

    return jax.jit(jax.value_and_grad(loss))(case.params)


def evaluated(program: Program, inputs: Sequence[Any], hooks: Any = None) -> list[Any]:
    """Every value of a program, by value id."""

    def run(inputs: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(program.jaxpr.jaxpr.constvars, program.jaxpr.consts, strict=True))
        env.update(zip(program.jaxpr.jaxpr.invars, inputs, strict=True))
        evaluate(list(enumerate(program.eqns)), env, hooks)
        return [env[var] for var in program.vars]

    return jax.jit(run)(list(inputs))


def weight_of(case: Case, rule: LossRule, batch: Any, rows: int) -> Any:
    """The value of the rule's weight on a part."""
    who = subject(case.fn)
    example = make_example(who, case.params, batch, batch_dims=case.batch_dims, **case.keywords)
    program = trace(who, example, rows)
    keywords = [case.keywords.get(k) for k in ("frozen", "model_state")]
    flat = jax.tree.leaves((case.params, *keywords, batch, case.keywords.get("rng")))
    assert rule.weight is not None
    return evaluated(program, [*flat, *program.const_values])[rule.weight]


def combined(case: Case, program: Program, rule: LossRule, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Loss and gradient of the whole, from those of the parts, by the rule."""
    parts = parts_of(case, sizes)
    results = [value_and_grad(case, part) for part in parts]
    if rule.kind is LossKind.SUM:
        factors, total = [1.0] * len(parts), 1.0
    elif rule.kind is LossKind.WEIGHTED:
        g = divisor_function(program, rule)
        weights = [weight_of(case, rule, part, n) for part, n in zip(parts, sizes, strict=True)]
        factors = [float(g(w)) if w > 0 else 0.0 for w in weights]
        total = float(g(sum(weights[1:], weights[0])))
    else:
        factors, total = list(map(float, sizes)), float(sum(sizes))
    kept = [(f, r) for f, r in zip(factors, results, strict=True) if f > 0]

    def mix(*leaves: Any) -> Any:
        return sum(f * np.asarray(x, np.float64) for (f, _), x in zip(kept, leaves, strict=True)) / total

    return jax.tree.map(mix, *(r for _, r in kept))


def gap(mine: Any, whole: Any) -> float:
    """The largest difference of two (loss, gradient) pairs, relative to the size of each leaf."""

    def relative(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.max(np.abs(a - b), initial=0) / (np.max(np.abs(b), initial=0) + 1e-3))

    return max(jax.tree.leaves(jax.tree.map(relative, mine, whole)))
