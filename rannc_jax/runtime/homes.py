"""Which stage every value of a whole-tree program belongs to, its *home*, found by dataflow.

Optimizers are written over the whole parameter tree, yet almost every equation touches the leaves of
one stage. A home is a stage, SHARED (follows from scalar state and from values of several stages, so
all stages may need it), or FREE (follows from constants alone and may be computed anywhere). Values of
at most `EXCHANGE_ELEMENTS` elements may be sent to other stages; an equation that joins more than that
from two stages cannot be cut. The invariant kept here: after `split_conditionals` every equation,
`cond` included, has one home.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from rannc_jax.errors import PlanError, message
from rannc_jax.ir.evaluate import bind, read

FREE = -2
SHARED = -1

# Below about 4 KiB a transfer costs its latency alone; scalars of a few hundred leaves, stacked, fit.
EXCHANGE_ELEMENTS = 1024

Home = int
Homes = dict[jex.Var, Home]

_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint"}


def is_small(aval: Any) -> bool:
    """Whether a value of this type may be sent between stages during an update."""
    return int(np.prod(aval.shape, dtype=np.int64)) <= EXCHANGE_ELEMENTS


@dataclass
class Rule:
    """How homes combine.

    Homes from `num_stages` on are *probes*: inputs whose home is asked for. What stages they meet is
    noted in `met`; `probe_shapes` limits that to operands that still have the probe's own shape.

    Args:
        num_stages: number of stages.
        probe_shapes: probe -> shape of the input.
        met: probe -> stages whose values were combined with it.
        num_joins: how many equations combined small values of several stages.
    """

    num_stages: int
    probe_shapes: Mapping[Home, tuple[int, ...]] = field(default_factory=dict)
    met: dict[Home, set[Home]] = field(default_factory=dict)
    num_joins: int = 0

    def combine(self, eqn: jex.JaxprEqn, operands: Iterable[tuple[Home, Any]], destination: int) -> Home:
        """The home of what `eqn` computes from operands of these homes and types.

        `destination` says in which stages it matters (see `reach`). A small value of one stage that meets
        a SHARED one stays there only if nobody else waits for the result: so the terms of a global sum
        go to the hub once, instead of the sum going from stage to stage.

        Raises:
            PlanError: operands of several stages are too large to be sent.
        """
        pairs = list(operands)
        homes = {home for home, _ in pairs}
        probes = {home for home in homes if home >= self.num_stages}
        stages = {home for home in homes if 0 <= home < self.num_stages}
        for home, aval in pairs:
            if home in probes and aval.shape == self.probe_shapes[home]:
                self.met.setdefault(home, set()).update(stages)
        if not stages and probes:
            return min(probes)
        if not stages:
            return SHARED if SHARED in homes else FREE
        large = {home for home, aval in pairs if home in stages and not is_small(aval)}
        if len(large) > 1:
            raise PlanError(_cannot_cut(eqn, sorted(large)))
        if len(stages) == 1 and (large or SHARED not in homes or destination == reach(*stages)):
            return stages.pop()
        self.num_joins += 1
        return large.pop() if large else SHARED


def _cannot_cut(eqn: jex.JaxprEqn, stages: list[Home]) -> str:
    operands = ", ".join(v.aval.str_short() for v in eqn.invars if not isinstance(v, jex.Literal))
    return message(
        f"the optimizer cannot be cut: its `{eqn.primitive.name}` joins whole arrays of stages "
        f"{', '.join(map(str, stages))}.",
        f"operands: {operands if len(operands) < 200 else operands[:200] + ' ...'}",
        f"where: {source_info_util.summarize(eqn.source_info)}",
        hint="a transformation that treats every leaf on its own and joins them by sums only "
        "(optax.flatten off, another method instead of L-BFGS; slices of a stacked leaf count as leaves of "
        "their own), num_stages=1, or "
        "optimizer=optax.identity() with step.value_and_grad and an update of your own.",
    )


def reach(*homes: Home) -> int:
    """A set of homes as bits: where a value, or what follows from it, ends up."""
    return functools.reduce(operator.or_, (1 << (home - FREE) for home in homes), 0)


def destinations(jaxpr: jex.Jaxpr, results: Sequence[int]) -> Mapping[jex.Var, int]:
    """The `reach` of every variable, given that of the results."""
    reached: dict[jex.Var, int] = defaultdict(int)

    def add(atom: Any, bits: int) -> None:
        if not isinstance(atom, jex.Literal):
            reached[atom] |= bits

    for atom, bits in zip(jaxpr.outvars, results, strict=True):
        add(atom, bits)
    for eqn in reversed(jaxpr.eqns):
        outs = [reached[var] for var in eqn.outvars]
        bits = functools.reduce(operator.or_, outs, 0)
        if eqn.primitive.name != "cond":
            for atom in eqn.invars:
                add(atom, bits)
            continue
        add(eqn.invars[0], bits)
        for branch in eqn.params["branches"]:
            inner = destinations(branch.jaxpr, outs)
            for atom, var in zip(eqn.invars[1:], branch.jaxpr.invars, strict=True):
                add(atom, inner[var])
    return reached


def propagate(jaxpr: jex.Jaxpr, inputs: Sequence[Home], results: Sequence[int], rule: Rule) -> Homes:
    """The home of every variable of a jaxpr whose calls are inlined.

    Args:
        jaxpr: the program.
        inputs: home of every input.
        results: `reach` of every output.
        rule: how homes combine.
    """
    reached = destinations(jaxpr, results)
    homes: Homes = dict.fromkeys(jaxpr.constvars, FREE)
    homes.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        outs = [reached[var] for var in eqn.outvars]
        if eqn.primitive.name == "cond":
            found = _cond_homes(eqn, [home_of(homes, atom) for atom in eqn.invars], outs, rule)
        else:
            operands = [(home_of(homes, atom), atom.aval) for atom in eqn.invars]
            home = rule.combine(eqn, operands, functools.reduce(operator.or_, outs, 0))
            found = [home] * len(outs)
        homes.update(zip(eqn.outvars, found, strict=True))
    return homes


def home_of(homes: Mapping[jex.Var, Home], atom: Any) -> Home:
    """The home of an operand; literals are free."""
    return FREE if isinstance(atom, jex.Literal) else homes[atom]


def _cond_homes(
    eqn: jex.JaxprEqn, operands: Sequence[Home], results: Sequence[int], rule: Rule
) -> list[Home]:
    """Output by output: what the branches say, and the predicate."""
    cases: list[list[tuple[Home, Any]]] = [[(operands[0], eqn.invars[0].aval)] for _ in eqn.outvars]
    for branch in eqn.params["branches"]:
        homes = propagate(branch.jaxpr, operands[1:], results, rule)
        for case, atom in zip(cases, branch.jaxpr.outvars, strict=True):
            case.append((home_of(homes, atom), atom.aval))
    return [rule.combine(eqn, case, bits) for case, bits in zip(cases, results, strict=True)]


def inline(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Open every call, in branches of conditionals too. Nothing is differentiated after this."""

    def run(*args: Any) -> list[Any]:
        return _run_inlined(closed, args)

    return _retrace(run, closed)


def _run_inlined(closed: jex.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    env = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args], strict=True))
    for eqn in closed.jaxpr.eqns:
        values = [read(env, atom) for atom in eqn.invars]
        inner = _called(eqn)
        if inner is not None:
            outs = _run_inlined(inner, values)
        elif eqn.primitive.name == "cond":
            branches = [inline(branch) for branch in eqn.params["branches"]]
            outs = _switch(values[0], [jex.jaxpr_as_fun(branch) for branch in branches], values[1:])
        else:
            outs = bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return outputs(env, closed.jaxpr.outvars)


def _called(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The program that a call equation stands for."""
    if eqn.primitive.name not in _CALLS:
        return None
    inner = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params)
    return inner if isinstance(inner, jex.ClosedJaxpr) else jex.ClosedJaxpr(inner, ())


def split_conditionals(
    closed: jex.ClosedJaxpr, inputs: Sequence[Home], results: Sequence[int], num_stages: int
) -> jex.ClosedJaxpr:
    """Replace each `cond` whose outputs have several homes by one `cond` a home, with the same predicate.

    A conditional in which values of several stages are joined (clipping by global norm under
    gradient accumulation, say) cannot be split: the stages must meet inside. Its branches are all
    computed and the results selected, which gives the same values.

    Args:
        closed: calls inlined.
        inputs: home of every input.
        results: `reach` of every output.
        num_stages: number of stages.
    """
    if not any(eqn.primitive.name == "cond" for eqn in closed.jaxpr.eqns):
        return closed

    def run(*args: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        homes = propagate(jaxpr, inputs, results, Rule(num_stages))
        reached = destinations(jaxpr, results)
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
        for eqn in jaxpr.eqns:
            values = [read(env, atom) for atom in eqn.invars]
            if eqn.primitive.name == "cond":
                operands = [home_of(homes, atom) for atom in eqn.invars]
                outs = _split_cond(
                    values,
                    _split_branches(eqn, operands, [reached[var] for var in eqn.outvars], num_stages),
                    [homes[var] for var in eqn.outvars],
                )
            else:
                outs = bind(eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return outputs(env, jaxpr.outvars)

    return _retrace(run, closed)


def _split_branches(
    eqn: jex.JaxprEqn, operands: Sequence[Home], results: Sequence[int], num_stages: int
) -> tuple[list[jex.ClosedJaxpr], bool]:
    """The branches with their own conditionals split, and whether stages meet in one of them."""
    rule = Rule(num_stages)
    branches: list[jex.ClosedJaxpr] = []
    for branch in eqn.params["branches"]:
        branches.append(split_conditionals(branch, operands[1:], results, num_stages))
        propagate(branches[-1].jaxpr, operands[1:], results, rule)
    return branches, rule.num_joins > 0


def _split_cond(
    values: Sequence[Any], split: tuple[list[jex.ClosedJaxpr], bool], homes: Sequence[Home]
) -> list[Any]:
    index, *operands = values
    branches, stages_meet = split
    if stages_meet:
        cases = [jex.jaxpr_as_fun(branch)(*operands) for branch in branches]
        which = index if len(branches) > 2 else index > 0
        return [jax.lax.select_n(which, *case) for case in zip(*cases, strict=True)]
    outs: list[Any] = [None] * len(homes)
    for home in dict.fromkeys(homes):
        wanted = [position for position, other in enumerate(homes) if other == home]
        pruned = [_pruned(branch, wanted) for branch in branches]
        used = sorted(set().union(*(needs for needs, _ in pruned)))
        fns = [_on_operands(run, used) for _, run in pruned]
        group = _switch(index, fns, [operands[position] for position in used])
        for position, out in zip(wanted, group, strict=True):
            outs[position] = out
    return outs


def _pruned(
    branch: jex.ClosedJaxpr, wanted: Sequence[int]
) -> tuple[set[int], Callable[[Mapping[int, Any]], list[Any]]]:
    """The operands that some outputs of a branch need, and a function from those to the outputs."""
    jaxpr = branch.jaxpr
    roots = [jaxpr.outvars[position] for position in wanted]
    eqns, needed = backward_slice(jaxpr.eqns, roots, lambda _: False)
    positions = {position for position, var in enumerate(jaxpr.invars) if var in needed}

    def run(operands: Mapping[int, Any]) -> list[Any]:
        env = dict(zip(jaxpr.constvars, branch.consts, strict=True))
        env.update({jaxpr.invars[position]: operands[position] for position in positions})
        for index in eqns:
            eqn = jaxpr.eqns[index]
            outs = bind(eqn, [read(env, atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return outputs(env, roots)

    return positions, run


def backward_slice(
    eqns: Sequence[jex.JaxprEqn], roots: Iterable[Any], stop: Callable[[jex.Var], bool]
) -> tuple[list[int], dict[jex.Var, None]]:
    """The equations that `roots` need, ascending, and all variables on the way (an ordered set).

    Variables for which `stop` holds are had from elsewhere: their equations are not followed.
    """
    needed: dict[jex.Var, None] = {}
    kept: list[int] = []

    def need(atoms: Iterable[Any]) -> None:
        needed.update((atom, None) for atom in atoms if not isinstance(atom, jex.Literal))

    need(roots)
    for index in reversed(range(len(eqns))):
        if any(var in needed and not stop(var) for var in eqns[index].outvars):
            kept.append(index)
            need(eqns[index].invars)
    return kept[::-1], needed


def outputs(env: Mapping[jex.Var, Any], atoms: Iterable[Any]) -> list[Any]:
    """The values of a jaxpr's results. Literals get their own dtype: traced bare they would be weak."""
    return [
        jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, jex.Literal) else env[atom]
        for atom in atoms
    ]


def _on_operands(
    run: Callable[[Mapping[int, Any]], list[Any]], used: Sequence[int]
) -> Callable[..., list[Any]]:
    return lambda *operands: run(dict(zip(used, operands, strict=True)))


def _switch(index: Any, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> list[Any]:
    return list(jax.lax.switch(index, list(branches), *operands))


def _retrace(run: Callable[..., list[Any]], closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    specs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(run)(*specs)
