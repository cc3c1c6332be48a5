"""A jaxpr as text that is equal for equal programs: primitives, parameters, types and wiring, no names.

Names of variables, functions and scopes, source lines and addresses of Python objects are left out, so
two layers of one network, or one network in two processes, have one text.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

_NAMES = frozenset({"name", "source_info", "debug_info", "name_stack"})


def program_text(closed: jex.ClosedJaxpr) -> str:
    """The text of a program, its constants' values included.

    Complexity: linear in the equations, bodies included.
    """
    constants = (_value(np.asarray(c)) if hasattr(c, "dtype") else repr(c) for c in closed.consts)
    return "\n".join([*_lines(closed.jaxpr), *constants])


def _lines(jaxpr: jex.Jaxpr) -> Iterator[str]:
    numbers: dict[jex.Var, int] = {}

    def read(atom: Any) -> str:
        if isinstance(atom, jex.Literal):
            return f"{_value(np.asarray(atom.val))}:{atom.aval.str_short()}"
        return str(numbers.setdefault(atom, len(numbers)))

    for var in (*jaxpr.constvars, *jaxpr.invars):
        yield f"{read(var)}:{var.aval.str_short()}"
    for eqn in jaxpr.eqns:
        operands = " ".join(map(read, eqn.invars))
        results = " ".join(f"{read(v)}:{v.aval.str_short()}" for v in eqn.outvars)
        yield f"{results} = {eqn.primitive.name}[{_parameter(eqn.params)}] {operands}"
    yield " ".join(map(read, jaxpr.outvars))


def _parameter(value: Any) -> str:
    if isinstance(value, jex.ClosedJaxpr):
        return "{" + program_text(value) + "}"
    if isinstance(value, jex.Jaxpr):
        return "{" + "\n".join(_lines(value)) + "}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_parameter(v)}" for k, v in sorted(value.items()) if k not in _NAMES)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "(" + ", ".join(map(_parameter, value)) + ")"
    if callable(value) and not isinstance(value, type):
        return "function"  # how to differentiate: the body is beside it
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def _value(array: np.ndarray) -> str:
    if array.size <= 16:
        return str(array.tolist())
    return f"{array.dtype}{array.shape}#{hash_bytes(array)}"


def hash_bytes(array: np.ndarray) -> str:
    """A digest of an array's contents."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
