"""Rules for equations with programs inside, and for random numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend import core as jex

from rannc_jax.ir import batch_flow as algebra
from rannc_jax.ir.batch_call import Call, opened, rule, value_flow
from rannc_jax.ir.batch_flow import Coupled, Flow, Kind, blend, moved
from rannc_jax.ir.batch_info import CouplingKind, RowLayout
from rannc_jax.ir.loops import scan_counts
from rannc_jax.ir.platform import readable_branches

MAX_ROUNDS = 16  # a carry settles in a few rounds: every round can only lose knowledge


def run(call: Call, jaxpr: Any, twin: Any, flows: Sequence[Flow]) -> list[Flow]:
    """Analyse an inner program; its constants may come with it or as leading operands."""
    core, consts = opened(jaxpr)
    twin_core, twin_consts = opened(twin)
    fixed = [value_flow(a, b, call.findings) for a, b in zip(consts, twin_consts, strict=True)]
    return call.run(core, twin_core, fixed, list(flows), call.equation, call.marked)


@rule("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat", "custom_lin")
@rule("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
def _inner(call: Call) -> list[Flow]:
    name = next(n for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if n in call.params)
    return run(call, call.params[name], call.twin.params[name], call.flows)


def one_of(call: Call, flows: Sequence[Flow]) -> Flow:
    """The flow of a variable that is now this, now that."""
    first = flows[0]
    if all(f == first for f in flows):
        return first
    if any(f.kind is Kind.MIXED for f in flows):
        return _mixed(call, flows)
    firm = {f.layout for f in flows if not f.loose}
    try:
        joint = algebra.any_of(call, *flows)
        if len(firm) > 1 or joint.columns:
            raise Coupled
    except Coupled:
        return _mixed(call, flows)
    layout = next(iter(firm)) if firm else first.layout
    forgotten: dict[str, Any] = {"ident": None, "root": None, "guard": False, "zero_test": None}
    return replace(
        joint, layout=layout, loose=not firm, origin=frozenset(), additive=False, constant=None, **forgotten
    )


def _mixed(call: Call, flows: Sequence[Flow]) -> Flow:
    """Values that no longer have a name; told at once if data is among them."""
    data = any(f.data for f in flows)
    if data and not call.marked and not any(f.kind is Kind.MIXED and not f.pending for f in flows):
        call.report(CouplingKind.OTHER, frozenset({call.site}))
    return blend(Kind.MIXED, *flows, pending=not data or call.marked)


@rule("scan")
def _scan(call: Call) -> list[Flow]:
    num_consts, num_carry = scan_counts(call.params)
    consts, carry, xs = (
        call.flows[:num_consts],
        call.flows[num_consts : num_consts + num_carry],
        call.flows[num_consts + num_carry :],
    )
    if call.params["length"] != call.twin.params["length"]:
        return _row_by_row(call, consts, carry, xs)
    slices = [_slice(f) for f in xs]
    jaxpr, twin = call.params["jaxpr"], call.twin.params["jaxpr"]
    for _ in range(MAX_ROUNDS):
        out = run(call, jaxpr, twin, [*consts, *carry, *slices])
        joined = [one_of(call, pair) for pair in zip(carry, out[:num_carry], strict=True)]
        if joined == carry:
            return carry + [_stacked(f) for f in out[num_carry:]]
        carry = joined
    raise Coupled


def _slice(flow: Flow) -> Flow:
    if flow.layout is None:
        return replace(flow, constant=None, ident=None, guard=False, zero_test=None)
    if flow.layout.dim == 0 or flow.columns or flow.kind is Kind.MIXED:
        raise Coupled
    return algebra.at(flow, flow.layout.dim - 1)


def _stacked(flow: Flow) -> Flow:
    plain = replace(flow, constant=None, ident=None, root=None, guard=False, zero_test=None)
    return plain if flow.layout is None else algebra.at(plain, flow.layout.dim + 1)


def _row_by_row(call: Call, consts: list[Flow], carry: list[Flow], xs: list[Flow]) -> list[Flow]:
    """`jax.lax.map` over the batch: each round sees one row and what all rows share."""
    shared = all(f.kind is Kind.FREE and f.layout is None and f.plain for f in consts)
    one_row = all(f.layout == RowLayout(0) and f.kind in (Kind.FREE, Kind.ROWS) and f.plain for f in xs)
    if carry or not shared or not one_row or not xs or any(f.columns for f in xs):
        raise Coupled
    if not _same(opened(call.params["jaxpr"]), opened(call.twin.params["jaxpr"]), call):
        raise Coupled
    flow = blend(Kind.ROWS, *consts, *xs, integral=False, origin=frozenset())
    return [replace(flow, layout=RowLayout(0))] * len(call.eqn.outvars)


def _same(mine: Any, other: Any, call: Call) -> bool:
    """Are two inner programs the same, sizes and numbers included?"""
    consts = zip(mine[1], other[1], strict=True)
    if any(not value_flow(a, b, call.findings).plain or np.shape(a) != np.shape(b) for a, b in consts):
        return False
    for eqn, twin in zip(mine[0].eqns, other[0].eqns, strict=True):
        for a, b in zip([*eqn.invars, *eqn.outvars], [*twin.invars, *twin.outvars], strict=True):
            if a.aval.shape != b.aval.shape:
                return False
            if isinstance(a, jex.Literal) and not value_flow(a.val, b.val, call.findings).plain:
                return False
        for a, b in zip(inner_jaxprs(eqn), inner_jaxprs(twin), strict=True):
            if not _same(opened(a), opened(b), call):
                return False
    return True


def inner_jaxprs(eqn: jex.JaxprEqn) -> list[Any]:
    """The programs inside an equation, in the order of its parameters."""
    found: list[Any] = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex.Jaxpr | jex.ClosedJaxpr):
                found.append(item)
    return found


@rule("while")
def _while(call: Call) -> list[Flow]:
    params, twin = call.params, call.twin.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    consts, body_consts, carry = call.flows[:first], call.flows[first:second], call.flows[second:]
    for _ in range(MAX_ROUNDS):
        (goes_on,) = run(call, params["cond_jaxpr"], twin["cond_jaxpr"], [*consts, *carry])
        if goes_on.kind is not Kind.FREE or not goes_on.plain:
            raise Coupled
        out = run(call, params["body_jaxpr"], twin["body_jaxpr"], [*body_consts, *carry])
        joined = [one_of(call, pair) for pair in zip(carry, out, strict=True)]
        if joined == carry:
            return carry
        carry = joined
    raise Coupled


@rule("cond")
def _cond(call: Call) -> list[Flow]:
    which, *operands = call.flows
    if which.kind is not Kind.FREE or not which.plain:
        raise Coupled
    branches = zip(readable_branches(call.eqn), readable_branches(call.twin), strict=True)
    outs = [run(call, mine, other, operands) for mine, other in branches]
    return [one_of(call, cases) for cases in zip(*outs, strict=True)]


@rule("random_bits", "random_split")
def _draw(call: Call) -> list[Flow]:
    (key,) = call.flows
    if key.kind not in (Kind.FREE, Kind.ROWS) or not key.plain:
        raise Coupled
    if key.layout is not None:
        if str(call.eqn.invars[0].aval.dtype) != "key<fry>":
            call.unspreadable()  # other generators do not draw key by key
        return [replace(key, integral=True)]
    guess = call.guessed()
    if guess is None:
        return [Flow(integral=True, param=False)]
    layout = call.findings.guesses.get(call.equation, guess) if call.top else guess
    if not call.top:
        call.unspreadable()
        return [Flow(kind=Kind.ROWS, layout=layout, integral=True)]
    call.findings.random[call.equation] = layout
    origin = frozenset({call.equation}) if guess.inner > 1 else frozenset()
    return [Flow(kind=Kind.ROWS, layout=layout, integral=True, origin=origin)]


@rule("random_fold_in")
def _fold_in(call: Call) -> list[Flow]:
    key, number = call.flows
    layout, _ = call.layout()
    if key.kind not in (Kind.FREE, Kind.ROWS) or number.kind not in (Kind.FREE, Kind.ROWS, Kind.INDEX):
        raise Coupled
    if number.columns or not key.plain:
        raise Coupled
    if number.kind is Kind.INDEX or not number.plain:
        call.unspreadable()  # the number means another row, or another batch, elsewhere
    free = key.kind is Kind.FREE and number.kind is Kind.FREE
    flow = blend(Kind.FREE if free else Kind.ROWS, key, number, origin=frozenset(), integral=False)
    return [replace(flow, layout=layout)]


@rule("random_seed")
def _seed(call: Call) -> list[Flow]:
    bent = algebra.bend(call, *call.flows)
    return [replace(bent, layout=call.flows[0].layout)]


@rule("random_gamma")
def _gamma(call: Call) -> list[Flow]:
    key, shape = call.flows
    bent = algebra.bend(call, key, shape)
    layout = shape.layout or key.layout
    if layout is None:
        return [bent]
    call.unspreadable()
    return [moved(replace(bent, kind=Kind.ROWS), layout)]
