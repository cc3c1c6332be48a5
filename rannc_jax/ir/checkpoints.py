"""Move a checkpoint around a loop over layers inside it, so that the layers can be opened.

`jax.checkpoint(stack_of_layers)` is one piece that keeps its inputs and computes everything again. Around
each layer, and around what lies before and after the loop, checkpoints with the same policy give the same
numbers; the values between layers are kept.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from rannc_jax.ir.evaluate import bind, evaluate, read
from rannc_jax.ir.flatten import flatten, scope

CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def body_of(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """What a checkpoint computes, flat."""
    return flatten(jex.ClosedJaxpr(eqn.params["jaxpr"], ()))


def inside_out(eqn: jex.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of a checkpoint whose scans have it in their bodies instead."""
    body = body_of(eqn)
    jaxpr = body.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*body.consts, *operands], strict=True))
    wrap = _wrapper(eqn)
    runs = itertools.groupby(enumerate(jaxpr.eqns), key=lambda pair: pair[1].primitive.name == "scan")
    with scope(eqn):
        for is_scan, run in runs:
            eqns = list(run)
            if is_scan:
                evaluate([(k, _with_body(one, wrap)) for k, one in eqns], env)
            else:
                _piece(jaxpr, eqns, env, wrap)
    return [read(env, atom) for atom in jaxpr.outvars]


def _wrapper(eqn: jex.JaxprEqn) -> Wrap:
    policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
    return lambda fn: jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)


def _with_body(scan: jex.JaxprEqn, wrap: Wrap) -> jex.JaxprEqn:
    """A scan with a checkpoint around its body, which may have one of its own already."""
    body = scan.params["jaxpr"]
    if any(one.primitive.name in CHECKPOINTS for one in flatten(body).jaxpr.eqns):
        return scan
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in body.in_avals]
    return scan.replace(params={**scan.params, "jaxpr": jax.make_jaxpr(wrap(jex.jaxpr_as_fun(body)))(*specs)})


def _piece(
    jaxpr: jex.Jaxpr, eqns: Sequence[tuple[int, jex.JaxprEqn]], env: dict[Any, Any], wrap: Wrap
) -> None:
    """Run equations between two scans under a checkpoint of their own."""
    made = dict.fromkeys(v for _, one in eqns for v in one.outvars)
    needs = dict.fromkeys(_variables(a for _, one in eqns for a in one.invars))
    needs = [v for v in needs if v not in made]
    last = eqns[-1][0]
    later = {*_variables(jaxpr.outvars), *_variables(a for one in jaxpr.eqns[last + 1 :] for a in one.invars)}
    gives = [v for v in made if v in later]

    def run(*values: Any) -> list[Any]:
        inner = dict(zip(needs, values, strict=True))
        for _, one in eqns:
            outs = bind(one, [read(inner, a) for a in one.invars])
            inner.update(zip(one.outvars, outs, strict=True))
        return [inner[v] for v in gives]

    env.update(zip(gives, wrap(run)(*(env[v] for v in needs)), strict=True))


def _variables(atoms: Iterable[Any]) -> list[jex.Var]:
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]
