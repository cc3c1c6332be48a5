"""Where the batch goes: which dims carry its rows, what the loss is over them, what couples them.

Two witnesses that must agree: the program traced at two numbers of rows (a dim that changes in
proportion carries the batch), and propagation rules per primitive. Where they do not agree, or no rule is
known, rows are taken to see each other: a false "coupled" costs speed, a false "separable" would be
silently another loss.
"""

from collections.abc import Iterable
from typing import Any

from jax.extend import core as jex

from rannc_jax.ir.batch_call import Findings, where
from rannc_jax.ir.batch_flow import Flow, Kind, Site
from rannc_jax.ir.batch_info import (
    BatchInfo,
    Coupling,
    CouplingKind,
    Dependence,
    LossKind,
    LossRule,
    RowLayout,
    RowMask,
)
from rannc_jax.ir.batch_run import BatchRun
from rannc_jax.ir.batch_twin import check_same_sequence
from rannc_jax.ir.loss_rule import MEAN_OF_MEANS, LossFinding, loss_rule, weighted_rule
from rannc_jax.ir.roles import OutputKind
from rannc_jax.ir.trace import Program

__all__ = [
    "BatchInfo",
    "Coupling",
    "CouplingKind",
    "Dependence",
    "LossKind",
    "LossRule",
    "RowLayout",
    "RowMask",
    "analyse",
]


def analyse(program: Program, twin: Program) -> BatchInfo:
    """Analyse a program with the help of a second trace of the same function with other rows.

    Raises:
        TraceError: the two traces are not the same sequence of equations.
    """
    check_same_sequence(program, twin)
    guesses: dict[int, RowLayout] = {}
    while True:
        findings = Findings(rows=program.rows, twin_rows=twin.rows, guesses=guesses)
        env = BatchRun(findings).program(program, twin)
        fresh = {k: v for k, v in findings.reread.items() if k not in guesses}
        if not fresh:
            return _conclude(program, findings, env)
        guesses = {**guesses, **fresh}


def _conclude(program: Program, findings: Findings, env: dict[Any, Flow]) -> BatchInfo:
    def flow_of(atom: Any) -> Flow:
        return env[atom] if not isinstance(atom, jex.Literal) else Flow()

    finding, loss_ids = _loss(program, env)
    couplings = set(findings.couplings)
    outvars = program.jaxpr.jaxpr.outvars
    for leaf, atom, value in zip(program.outputs, outvars, program.output_ids(), strict=True):
        found, unspreadable = _of_output(program, leaf.kind, flow_of(atom), value)
        couplings |= found
        findings.unspreadable |= unspreadable
    live = _upstream(program, [i for i in program.output_ids() if i is not None])
    couplings = {(kind, site) for kind, site in couplings if site.equation in live}
    if finding is not None and finding.coupled and loss_ids:
        couplings |= _loss_coupling(program, flow_of(program.vars[loss_ids[0]]), loss_ids[0], couplings)
    upstream = _upstream(program, loss_ids)
    maskable = not couplings and not (findings.unmaskable & upstream)
    masks = [m for (eqn, _), m in sorted(findings.masks.items()) if eqn in upstream]
    flows = [env[var] for var in program.vars]
    return BatchInfo(
        layouts=tuple(f.layout for f in flows),
        dependence=tuple(_dependence(f) for f in flows),
        loss=None if finding is None else finding.rule,
        couplings=_ordered(couplings),
        row_masks=tuple(masks) if maskable else None,
        random={i: layout for i, layout in sorted(findings.random.items()) if i in live},
        unspreadable=tuple(sorted((findings.unspreadable | _tied(program, env)) & live)),
        reductions={i: name for i, f in enumerate(flows) if (name := _reduction(f)) is not None},
    )


def _loss(program: Program, env: dict[Any, Flow]) -> tuple[LossFinding | None, list[int]]:
    """The rule, and the value ids of loss and weight."""
    found = {
        leaf.kind: (atom, program.value_id(atom))
        for leaf, atom in zip(program.outputs, program.jaxpr.jaxpr.outvars, strict=True)
        if leaf.kind in (OutputKind.LOSS, OutputKind.WEIGHT)
    }
    if OutputKind.LOSS not in found:
        return None, []
    ids = [i for _, i in found.values() if i is not None]
    atom, _ = found[OutputKind.LOSS]
    loss = Flow() if isinstance(atom, jex.Literal) else env[atom]
    if OutputKind.WEIGHT not in found:
        finding = loss_rule(loss)
        return (finding if _computable(program, finding.rule) else MEAN_OF_MEANS), ids
    atom, weight_id = found[OutputKind.WEIGHT]
    weight = Flow() if isinstance(atom, jex.Literal) else env[atom]
    return weighted_rule(loss, weight, weight_id), ids


def _computable(program: Program, rule: LossRule) -> bool:
    """Is the divisor a function of the weight and numbers alone?"""
    if rule.divisor is None or rule.divisor == rule.weight:
        return True
    stack, seen = [rule.divisor], {rule.weight}
    while stack:
        value = stack.pop()
        if value in seen or value is None:
            continue
        if value < len(program.inputs):
            return False
        seen.add(value)
        producer = next(i for i in range(len(program.eqns)) if value in program.writes(i))
        stack += program.reads(producer)
    return True


Found = set[tuple[CouplingKind, Site]]


def _of_output(program: Program, kind: OutputKind, flow: Flow, value: int | None) -> tuple[Found, set[int]]:
    """Couplings that only show where a value leaves the program, and equations that tie it to one place."""
    site = None if value is None else _producer(program, value)
    if site is None or kind in (OutputKind.LOSS, OutputKind.WEIGHT):
        return set(), set()
    told = flow.kind is Kind.MIXED and not flow.pending
    whole: Found = {(CouplingKind.OTHER, s) for s in (flow.sources or {site})}
    if kind is OutputKind.MODEL_STATE:
        if flow.kind is Kind.FREE:
            return set(), set() if flow.plain else {site.equation}
        if not flow.reduced or flow.degree != 0:
            return set() if told else whole, set()
        statistics: Found = {(CouplingKind.BATCH_STATISTICS, s) for s in flow.sources}
        return statistics, {s.equation for s in flow.sources} if flow.varies else set()
    positional = flow.kind in (Kind.MIXED, Kind.INDEX) and not told
    if positional or flow.columns or (flow.kind is Kind.ROWS and not flow.plain):
        return whole, set()
    mean = flow.kind is Kind.SUM and flow.scale == (-1, False, None)
    if kind is OutputKind.OUTPUT and flow.reduced and not mean:
        return whole, set()
    return set(), set()


def _producer(program: Program, value: int) -> Site | None:
    """The equation that defines a value; None for inputs."""
    for index, eqn in enumerate(program.eqns):
        if any(program.value_ids[v] == value for v in eqn.outvars):
            return Site(index, eqn.primitive.name, *where(eqn, program.eqns))
    return None


def _loss_coupling(program: Program, loss: Flow, value: int, known: Found) -> Found:
    """Why the loss must be computed whole."""
    upstream = _upstream(program, [value])
    if any(kind is CouplingKind.OTHER and site.equation in upstream for kind, site in known):
        return set()
    site = loss.cause or min(loss.sources, default=None) or _producer(program, value)
    return set() if site is None else {(CouplingKind.OTHER, site)}


def _upstream(program: Program, values: Iterable[int]) -> set[int]:
    """Equations that some of these values depend on."""
    wanted, equations = set(values), set()
    for index in reversed(range(len(program.eqns))):
        if wanted.intersection(program.writes(index)):
            equations.add(index)
            wanted.update(program.reads(index))
    return equations


def _tied(program: Program, env: dict[Any, Flow]) -> set[int]:
    """Equations whose values hold a sum or a number of rows of one part, and lie in rows or parameters.

    A stage with other replicas would take such a value for one of its own parts.
    """
    return {
        index
        for index, eqn in enumerate(program.eqns)
        for flow in map(env.__getitem__, eqn.outvars)
        if (flow.layout is not None and flow.reduced)
        or (flow.kind is Kind.ROWS and not flow.plain)
        or (flow.kind is Kind.FREE and flow.param and not flow.plain)
    }


def _reduction(flow: Flow) -> str | None:
    if flow.kind is not Kind.SUM or flow.layout is not None or flow.several:
        return None
    names: dict[tuple[int, bool, object], str] = {(0, False, None): "sum", (-1, False, None): "mean"}
    return names.get(flow.scale)


def _dependence(flow: Flow) -> Dependence:
    if flow.kind is Kind.MIXED or flow.kind is Kind.INDEX or flow.columns:
        return Dependence.COUPLED if flow.kind is Kind.MIXED else Dependence.ROWS
    if flow.reduced:
        return Dependence.REDUCED
    return Dependence.ROWS if flow.kind is Kind.ROWS and flow.data else Dependence.FREE


def _ordered(found: Found) -> tuple[Coupling, ...]:
    def order(item: tuple[CouplingKind, Site]) -> tuple[Site, str]:
        return item[1], item[0].value

    return tuple(
        Coupling(kind=kind, equation=s.equation, primitive=s.primitive, path=s.path, source=s.source)
        for kind, s in sorted(found, key=order)
    )
