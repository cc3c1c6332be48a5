"""One pass of the batch analysis over a program and its twin.

Every equation's rule proposes flows; `_checked` holds them against the shapes in both traces; what has no
rule, or does not fit, is MIXED, and is told as a coupling as soon as data is in it. Under the name scope
of `separable` the shapes alone decide, and nothing is told; under that of `coupled` all data is told.
"""

from dataclasses import replace
from typing import Any

from jax.extend import core as jex

# The rules register themselves on import.
from rannc_jax.ir import batch_rules, batch_rules_index, batch_rules_nested, batch_rules_reduce
from rannc_jax.ir.batch_call import (
    RULES,
    Call,
    Findings,
    folded,
    is_coupled,
    is_key,
    is_marked,
    row_dim,
    value_flow,
)
from rannc_jax.ir.batch_flow import Coupled, Flow, Kind
from rannc_jax.ir.batch_info import CouplingKind, RowLayout
from rannc_jax.ir.roles import Role
from rannc_jax.ir.trace import Program

RULE_MODULES = (batch_rules, batch_rules_index, batch_rules_nested, batch_rules_reduce)

OWN_RULE_FOR_MIXED = {
    "select_n",
    "jit",
    "pjit",
    "closed_call",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
}
KEEPS_IDENT = {"broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy", "stop_gradient"}


class BatchRun:
    """One pass over the equations."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.value_ids: dict[jex.Var, int] = {}

    def program(self, program: Program, twin: Program) -> dict[Any, Flow]:
        self.value_ids = program.value_ids
        core, other = program.jaxpr.jaxpr, twin.jaxpr.jaxpr
        values, twin_values = iter(program.const_values), iter(twin.const_values)
        env: dict[Any, Flow] = {}
        for var, leaf in zip(core.invars, program.inputs, strict=True):
            if leaf.role is Role.BATCH and leaf.batch_dim is not None:
                env[var] = Flow(kind=Kind.ROWS, layout=RowLayout(leaf.batch_dim), data=True)
            elif leaf.role is Role.CONST and program.const_values:
                env[var] = value_flow(next(values), next(twin_values), self.findings)
            else:
                env[var] = Flow(param=leaf.role is Role.PARAM)
            env[var] = _typed(env[var], var.aval)
        for var, mine, theirs in zip(core.constvars, program.jaxpr.consts, twin.jaxpr.consts, strict=True):
            env[var] = _typed(value_flow(mine, theirs, self.findings), var.aval)
        self.equations(core, other, env, None, False)
        return env

    def inner(
        self, core: Any, twin: Any, fixed: list[Flow], flows: list[Flow], equation: int, marked: bool
    ) -> list[Flow]:
        """The flows of an inner program's outputs."""
        invars = [*core.constvars, *core.invars]
        env: dict[Any, Flow] = dict(zip(invars, [*fixed, *flows], strict=True))
        self.equations(core, twin, env, equation, marked)
        return [self.read(env, a, b) for a, b in zip(core.outvars, twin.outvars, strict=True)]

    def read(self, env: dict[Any, Flow], atom: Any, twin: Any) -> Flow:
        if isinstance(atom, jex.Literal):
            return value_flow(atom.val, twin.val, self.findings)
        return env[atom]

    def equations(
        self, core: Any, twin: Any, env: dict[Any, Flow], equation: int | None, marked: bool
    ) -> None:
        for index, (eqn, other) in enumerate(zip(core.eqns, twin.eqns, strict=True)):
            call = Call(
                findings=self.findings,
                eqn=eqn,
                twin=other,
                flows=[self.read(env, a, b) for a, b in zip(eqn.invars, other.invars, strict=True)],
                equation=index if equation is None else equation,
                top=equation is None,
                marked=marked or is_marked(eqn),
                run=self.inner,
                siblings=core.eqns,
            )
            known = folded(call)
            if known is not None:
                env[eqn.outvars[0]] = _typed(known, eqn.outvars[0].aval)
                continue
            for output, flow in enumerate(self.outputs(call)):
                env[eqn.outvars[output]] = self.named(call, output, flow)

    def outputs(self, call: Call) -> list[Flow]:
        """The flows of an equation's outputs, checked against the first witness."""
        if is_coupled(call.eqn) and any(f.data for f in call.flows):
            call.report(CouplingKind.OTHER, frozenset({call.site}))
        count = len(call.eqn.outvars)
        mixed = any(f.kind is Kind.MIXED for f in call.flows)
        try:
            if mixed and call.name not in OWN_RULE_FOR_MIXED:
                raise Coupled
            flows: list[Flow | None] = list(RULES.get(call.name, _unknown)(call))
        except Coupled:
            flows = [None] * count
        checked = [_checked(call, i, flow) for i, flow in enumerate(flows)]
        known = any(f.kind is Kind.MIXED and not f.pending for f in call.flows)
        inside = any(f is not None and f.kind is Kind.MIXED for f in flows)
        fresh = any(f.kind is Kind.MIXED and not f.pending for f in checked)
        if fresh and not known and not inside:
            call.report(CouplingKind.OTHER, frozenset({call.site}))
        return checked

    def named(self, call: Call, output: int, flow: Flow) -> Flow:
        """Scalars at the top level carry their value id: a loss may be divided by them."""
        shape = call.out_shape(output)
        if call.name not in KEEPS_IDENT or shape == ():
            flow = replace(flow, ident=None) if flow.ident is not None else flow
        if call.name not in KEEPS_IDENT and flow.numbers is not None:
            flow = replace(flow, numbers=None)
        if not call.top or shape != () or not flow.reduced:
            return flow
        ident = self.value_ids[call.eqn.outvars[output]]
        if flow.kind is Kind.STATISTIC:
            return replace(flow, ident=ident)
        if flow.power or flow.divisor or flow.affine or flow.several or flow.varies:
            return flow
        same = call.name in KEEPS_IDENT and flow.root is not None
        return replace(flow, ident=ident, root=flow.root if same else ident)


def _unknown(call: Call) -> list[Flow]:
    """A primitive without a rule: harmless only if nothing of the batch goes in."""
    if any(f.kind is not Kind.FREE or f.layout is not None or not f.plain for f in call.flows):
        raise Coupled
    if batch_rules_nested.inner_jaxprs(call.eqn):
        raise Coupled
    return [Flow(param=any(f.param for f in call.flows))] * len(call.eqn.outvars)


def _checked(call: Call, output: int, flow: Flow | None) -> Flow:
    """Hold a rule's answer against the first witness."""
    aval = call.eqn.outvars[output].aval
    try:
        seen = row_dim(aval, call.twin.outvars[output].aval, call.findings)
        if flow is None or flow.kind is Kind.MIXED:
            raise Coupled
        lies = flow.layout
        if (lies is None) != (seen is None):
            raise Coupled
        if lies is not None and seen is not None and (lies.dim, lies.outer * lies.inner) != seen:
            raise Coupled
        if lies is None and flow.kind in (Kind.ROWS, Kind.INDEX):
            raise Coupled
        return _typed(flow, aval)
    except Coupled:
        return _typed(_mixed(call, output, flow), aval)


def _mixed(call: Call, output: int, flow: Flow | None) -> Flow:
    flows = call.flows if flow is None else [*call.flows, flow]
    data, param = any(f.data for f in flows), any(f.param for f in flows)
    if call.marked:
        try:
            guess = call.guessed(output)
        except Coupled:
            guess = None
        if guess is not None:
            return Flow(kind=Kind.ROWS, layout=guess, data=data, param=param)
        return Flow(kind=Kind.MIXED, data=data, param=param, pending=True)
    if flow is not None and flow.kind is Kind.MIXED:
        return replace(flow, data=flow.data, layout=None)
    return Flow(kind=Kind.MIXED, data=data, param=param, pending=not data)


def _typed(flow: Flow, aval: Any) -> Flow:
    """Whole numbers are integral, and no gradient flows through them."""
    if is_key(aval):
        return replace(flow, param=False, integral=False)
    if aval.dtype.kind in "biu":
        return replace(flow, param=False, integral=True)
    return flow
