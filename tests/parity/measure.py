"""How equality is measured: deviations of one outcome from another, and what they may be.

Gradients relative to the norm of the whole gradient, and leaf by leaf above a floor (below it a leaf is
rounding noise, such as the bias of attention keys, whose true gradient is zero); parameters after SGD
relative to their own norm, after Adam relative to the distance travelled, since Adam moves by the sign
of a gradient however small; the loss relative to itself.
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from tests.parity.oracle import Outcome

FLOOR = 1e-6  # of the norm of the whole gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviations:
    """Relative deviations; NaN and infinity count as infinite.

    Args:
        loss: of the first batch and of every step, the largest.
        gradient: over the whole tree.
        gradient_leaf: the largest of a leaf above the floor.
        parameters: after the last step: of a leaf relative to itself (SGD), or over the leaves above
            the floor relative to the distance travelled (Adam).
        model_state, aux: the largest of a leaf.
    """

    loss: float
    gradient: float
    gradient_leaf: float
    parameters: float
    model_state: float
    aux: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


LIMITS = {
    "sgd": Deviations(
        loss=1e-5, gradient=1e-4, gradient_leaf=1e-4, parameters=1e-5, model_state=1e-5, aux=1e-5
    ),
    "adam": Deviations(
        loss=1e-5, gradient=1e-4, gradient_leaf=1e-4, parameters=1e-3, model_state=1e-5, aux=1e-5
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Deviations, and what is wrong with them in words ("" parts: nothing).

    Args:
        deviations: see `Deviations`.
        below_floor: paths of the leaves whose reference gradient is below the floor.
        problems: empty if the outcomes are equal.
    """

    deviations: Deviations
    below_floor: tuple[str, ...]
    problems: tuple[str, ...]


def compare(got: Outcome, expected: Outcome, start: Any, optimizer: str) -> Comparison:
    """Measure an outcome against the reference.

    Args:
        got: of the runtime.
        expected: of one device.
        start: the parameters both began with.
        optimizer: "sgd" or "adam": how parameters are measured.
    """
    shapes = _shape_problems(got, expected)
    if shapes:
        nothing = Deviations(**dict.fromkeys(Deviations.__dataclass_fields__, np.inf))
        return Comparison(deviations=nothing, below_floor=(), problems=shapes)
    floor = FLOOR * norm(expected.grads)
    above = {path: norm(leaf) > floor for path, leaf in leaves(expected.grads)}
    gradient = _leaf_deviations(got.grads, expected.grads)
    own = _leaf_deviations(got.params, expected.params)
    worst = {
        "loss": max(
            _relative(a, b)
            for a, b in zip((got.loss, *got.losses), (expected.loss, *expected.losses), strict=True)
        ),
        "gradient": _relative(got.grads, expected.grads),
        "gradient_leaf": max(d for path, d in gradient.items() if above[path]),
        "parameters": max(own.values()) if optimizer == "sgd" else _of_distance(got, expected, start, above),
        "model_state": max(
            [
                *_leaf_deviations(got.first_state, expected.first_state).values(),
                *_leaf_deviations(got.model_state, expected.model_state).values(),
            ],
            default=0.0,
        ),
        "aux": max(_leaf_deviations(got.aux, expected.aux).values(), default=0.0),
    }
    found = Deviations(**worst)
    limits = LIMITS[optimizer].as_dict()
    problems = [
        f"{name}: {value:.2e} > {limits[name]:.0e}" for name, value in worst.items() if value > limits[name]
    ]
    problems += [
        f"gradient of {path}: {d:.2e}"
        for path, d in gradient.items()
        if above[path] and d > limits["gradient_leaf"]
    ]
    below = tuple(path for path, is_above in above.items() if not is_above)
    return Comparison(deviations=found, below_floor=below, problems=tuple(problems))


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) pairs."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def norm(tree: Any) -> float:
    """Euclidean norm over all leaves, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree))))


def _relative(got: Any, expected: Any) -> float:
    """||got - expected|| / ||expected||; an expected 0 takes nothing but 0."""
    difference = norm(
        jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), got, expected)
    )
    if not np.isfinite(difference):
        return float("inf")
    size = norm(expected)
    return difference / size if size else (float("inf") if difference else 0.0)


def _leaf_deviations(got: Any, expected: Any) -> dict[str, float]:
    pairs = zip(leaves(got), jax.tree.leaves(expected), strict=True)
    return {path: _relative(a, b) for (path, a), b in pairs}


def _of_distance(got: Outcome, expected: Outcome, start: Any, above: dict[str, bool]) -> float:
    """Deviation of the parameters over the distance they travelled, without the leaves below the floor."""
    chosen = [
        (a, b, c)
        for (path, a), b, c in zip(
            leaves(got.params), jax.tree.leaves(expected.params), jax.tree.leaves(start), strict=True
        )
        if above[path]
    ]
    travelled = norm([np.asarray(b, np.float64) - np.asarray(c, np.float64) for _, b, c in chosen])
    missed = norm([np.asarray(a, np.float64) - np.asarray(b, np.float64) for a, b, _ in chosen])
    return missed / travelled if np.isfinite(missed) and travelled else float("inf")


def _shape_problems(got: Outcome, expected: Outcome) -> tuple[str, ...]:
    """Trees, shapes or dtypes that are not those of the reference."""
    problems = []
    for name in Outcome.__dataclass_fields__:
        a, b = getattr(got, name), getattr(expected, name)
        if jax.tree.structure(a) != jax.tree.structure(b):
            problems.append(f"{name}: structure {jax.tree.structure(a)}, expected {jax.tree.structure(b)}")
            continue
        for (path, x), y in zip(leaves(a), jax.tree.leaves(b), strict=True):
            if x.shape != y.shape or x.dtype != y.dtype:
                problems.append(f"{name}{path}: {x.dtype}{x.shape}, expected {y.dtype}{y.shape}")
    return tuple(problems)
