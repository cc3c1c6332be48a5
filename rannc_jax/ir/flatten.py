"""One flat level of equations: inline `jit` and `closed_call`, drop what nothing reads.

`custom_jvp`, `custom_vjp`, `checkpoint`, `scan`, `while` and `cond` stay whole: opening a custom rule
before differentiation would change gradients (relu at 0 became 0.5), the others are units of work. (Scans
over layers are opened later: `scans`.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend import source_info_util

from rannc_jax.ir.evaluate import bind, read

_INLINE = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_CHECKPOINTS = dict.fromkeys(("checkpoint", "remat", "remat2"), "jaxpr")
_CALLS = {**_INLINE, **_CHECKPOINTS, "custom_jvp_call": "call_jaxpr"}


def flatten(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same function with every inline call opened, recursively, and dead equations removed."""
    return _opened(closed, _INLINE)


def open_calls(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Like `flatten`, for a program of which nothing is differentiated any more.

    Checkpoints and custom derivatives of forward mode are opened too; a custom_vjp stays one unit of work.
    """
    return _opened(closed, _CALLS)


def _opened(closed: jex.ClosedJaxpr, calls: Mapping[str, str]) -> jex.ClosedJaxpr:
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]

    def run(*args: Any) -> list[Any]:
        return _run(closed.jaxpr, closed.consts, args, calls)

    if any(eqn.primitive.name in calls for eqn in closed.jaxpr.eqns):
        closed = jax.make_jaxpr(run)(*avals)
    return drop_dead(closed)


def drop_dead(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Remove equations whose results nothing reads and that have no effect."""
    live = {v for v in closed.jaxpr.outvars if not isinstance(v, jex.Literal)}
    kept: list[jex.JaxprEqn] = []
    for eqn in reversed(closed.jaxpr.eqns):
        if eqn.effects or any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.update(v for v in eqn.invars if not isinstance(v, jex.Literal))
    kept.reverse()
    return jex.ClosedJaxpr(closed.jaxpr.replace(eqns=kept), closed.consts)


def _run(jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any], calls: Mapping[str, str]) -> list[Any]:
    env: dict[jex.Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        values = [read(env, atom) for atom in eqn.invars]
        inner = calls.get(eqn.primitive.name)
        if inner is None:
            outs = bind(eqn, values)
        else:
            body = eqn.params[inner]
            body, given = (body.jaxpr, body.consts) if isinstance(body, jex.ClosedJaxpr) else (body, ())
            with scope(eqn):
                outs = _run(body, given, values, calls)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def scope(eqn: jex.JaxprEqn) -> Any:
    """The name scopes around an inlined call, so that its equations keep their module path."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
