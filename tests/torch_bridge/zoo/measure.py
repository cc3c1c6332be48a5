"""Deviations of named values from torch's, and whether they are more than rounding.

Limits are those of tests/parity/measure.py, all relative to norms. A value beyond its limit is held
against torch's own rounding: its deviation from the same network in float64.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

LIMITS = {"outputs": 1e-5, "loss": 1e-5, "gradient": 1e-4, "parameter": 1e-5, "state": 1e-5}
TREE = 1e-4  # of the gradient as a whole
FLOOR = 1e-6  # of the norm of the whole gradient: leaves below are rounding noise
# Two float32 computations that round differently may lie this many times torch's own error apart.
NOISE = 5.0
Values = dict[tuple[Any, ...], Any]


def compare(got: Values, wanted: Values, exact: Callable[[], Values]) -> tuple[list[str], dict[str, Any]]:
    """(problems, largest deviation of each kind). `exact` computes `wanted` in float64, if need be."""
    problems = shape_problems(got, wanted)
    if problems:
        return problems, {}
    gradients = {name: value for name, value in wanted.items() if name[0] == "gradient"}
    whole = norm(list(gradients.values()))
    deviations = {name: _deviation(got[name], wanted[name]) for name in wanted if name in got}
    for name in gradients:
        if norm([wanted[name]]) <= FLOOR * whole:  # true zeros: rounding of the whole is their measure
            deviations[name] = _distance(got[name], wanted[name]) / whole if whole else deviations[name]
    beyond = [name for name, d in deviations.items() if not d <= LIMITS[name[0]]]
    largest: dict[str, Any] = {}
    for name, deviation in deviations.items():
        largest[name[0]] = max(largest.get(name[0], 0.0), deviation)
    tree = norm([_difference(got[name], wanted[name]) for name in gradients]) / whole if whole else 0.0
    largest["gradient of all"] = tree
    if not beyond:
        return [], largest
    try:
        reference = exact()
    except Exception as error:  # a network with float32 written into it
        reference, why = {}, f" (no float64: {type(error).__name__})"
    else:
        why = ""
    for name in beyond:
        noise = NOISE * _deviation(wanted[name], reference[name]) if name in reference else 0.0
        if name[0] == "gradient" and norm([wanted[name]]) <= FLOOR * whole and name in reference:
            noise = NOISE * _distance(wanted[name], reference[name]) / whole
        if not deviations[name] <= max(noise, LIMITS[name[0]]):
            problems.append(
                f"{' '.join(map(str, name))}: {deviations[name]:.2e} > {max(noise, LIMITS[name[0]]):.1e}{why}"
            )
        else:
            largest["within torch's own rounding"] = largest.get("within torch's own rounding", 0) + 1
    return problems, largest


def shape_problems(got: Values, wanted: Values) -> list[str]:
    """Values that are missing, or have another shape, or another kind of dtype."""
    problems = []
    for name, want in wanted.items():
        label = " ".join(map(str, name))
        if name not in got:
            if name[0] != "state" and not (name[0] in ("gradient", "parameter") and not want.any()):
                problems.append(f"{label}: missing")
        elif got[name].shape != want.shape:
            problems.append(f"{label}: shape {got[name].shape}, torch {want.shape}")
        elif _kind(got[name]) != _kind(want):
            problems.append(f"{label}: dtype {got[name].dtype}, torch {want.dtype}")
    extra = [name for name in got if name not in wanted and name[0] == "outputs"]
    return problems + [f"{' '.join(map(str, name))}: torch has none" for name in extra]


def norm(parts: list[Any]) -> float:
    """Euclidean norm of several arrays together."""
    return float(np.sqrt(sum(np.sum(np.square(np.abs(_wide(x)))) for x in parts)))


def _deviation(got: Any, want: Any) -> float:
    distance, size = _distance(got, want), norm([np.nan_to_num(_wide(want), posinf=0, neginf=0)])
    if not distance:
        return 0.0
    return distance / size if size else distance


def _distance(got: Any, want: Any) -> float:
    if np.issubdtype(want.dtype, np.integer) or want.dtype == bool:
        return float("inf") if np.any(got != want) else 0.0
    difference = norm([_difference(got, want)])
    return difference if np.isfinite(difference) else float("inf")


def _difference(got: Any, want: Any) -> Any:
    a, b = _wide(got), _wide(want)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities and NaN that agree
    return np.where(same, 0.0, a - np.where(same, 0.0, b))


def _wide(x: Any) -> Any:
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def _kind(x: Any) -> str:
    return "f" if x.dtype.name in ("bfloat16", "float16") else x.dtype.kind
