"""Are two traces of a function, at two numbers of rows, the same program?"""

from typing import Any

from jax.extend import core as jex
from jax.extend import source_info_util

from rannc_jax.errors import TraceError, message
from rannc_jax.ir.batch_call import opened
from rannc_jax.ir.batch_rules_nested import inner_jaxprs
from rannc_jax.ir.trace import Program


def check_same_sequence(program: Program, twin: Program) -> None:
    """Refuse two traces that differ in more than sizes and numbers.

    Raises:
        TraceError: naming the first equation that differs.
    """
    if program.rows == twin.rows:
        raise ValueError("the two traces need different numbers of rows")
    _compare(program.jaxpr.jaxpr, twin.jaxpr.jaxpr, program.rows, twin.rows, "")


def _compare(mine: Any, other: Any, rows: int, twin_rows: int, within: str) -> None:
    numbers, twin_numbers = _numbered(mine), _numbered(other)
    for index, (eqn, twin) in enumerate(zip(mine.eqns, other.eqns, strict=False)):
        same = (
            eqn.primitive.name == twin.primitive.name
            and _wiring(eqn, numbers) == _wiring(twin, twin_numbers)
            and len(eqn.outvars) == len(twin.outvars)
            and all(len(a.aval.shape) == len(b.aval.shape) for a, b in _pairs(eqn, twin))
        )
        inner, twin_inner = inner_jaxprs(eqn), inner_jaxprs(twin)
        if not same or len(inner) != len(twin_inner):
            raise _differs(
                f"{eqn.primitive.name} at {rows} rows, {twin.primitive.name} at {twin_rows} rows",
                f"equation {index}{within}",
                source_info_util.summarize(eqn.source_info),
            )
        for a, b in zip(inner, twin_inner, strict=True):
            inside = f"{within} inside {eqn.primitive.name} (equation {index})"
            _compare(opened(a)[0], opened(b)[0], rows, twin_rows, inside)
    if len(mine.eqns) != len(other.eqns) or len(mine.outvars) != len(other.outvars):
        raise _differs(
            f"{len(mine.eqns)} equations at {rows} rows, {len(other.eqns)} at {twin_rows} rows{within}"
        )


def _differs(*where: str) -> TraceError:
    return TraceError(
        message(
            "the function does different work for different numbers of batch rows.",
            *where,
            hint="no Python branch or loop on the batch size inside the function; pad the batch instead",
        )
    )


def _numbered(jaxpr: Any) -> dict[Any, int]:
    order = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return {var: i for i, var in enumerate(order)}


def _wiring(eqn: jex.JaxprEqn, numbers: dict[Any, int]) -> list[int]:
    return [-1 if isinstance(atom, jex.Literal) else numbers[atom] for atom in eqn.invars]


def _pairs(eqn: jex.JaxprEqn, twin: jex.JaxprEqn) -> list[tuple[Any, Any]]:
    pairs = zip([*eqn.invars, *eqn.outvars], [*twin.invars, *twin.outvars], strict=True)
    return [(a, b) for a, b in pairs if hasattr(a.aval, "shape")]
