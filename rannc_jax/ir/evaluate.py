"""Run equations of a jaxpr, with a say for whoever needs one equation done differently.

Hooks replace single equations (random bits rewritten per row, rows masked, values named for
rematerialisation); everything else is bound again as it was, with its source lines and name scopes.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from jax.extend import core as jex
from jax.extend import source_info_util

Hook = Callable[[jex.JaxprEqn, Sequence[Any]], Sequence[Any]]
Env = MutableMapping[jex.Var, Any]


def read(env: Mapping[jex.Var, Any], atom: Any) -> Any:
    """The value of an operand."""
    return atom.val if isinstance(atom, jex.Literal) else env[atom]


def bind(eqn: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply one equation to values; always a list of outputs."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack):
        out = eqn.primitive.bind(*subfuns, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def evaluate(
    eqns: Iterable[tuple[int, jex.JaxprEqn]], env: Env, hooks: Mapping[int, Hook] | None = None
) -> None:
    """Run equations in order, reading and extending `env`.

    Args:
        eqns: (equation index, equation) pairs in topological order.
        env: variable -> value; must hold every free variable. Extended in place.
        hooks: equation index -> replacement, given the equation and its operand values.
    """
    hooks = hooks or {}
    for index, eqn in eqns:
        values = [read(env, atom) for atom in eqn.invars]
        outs = hooks[index](eqn, values) if index in hooks else bind(eqn, values)
        for var, out in zip(eqn.outvars, outs, strict=True):
            env[var] = out
