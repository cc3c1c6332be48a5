"""How one value depends on the rows of the batch, finely enough to know what a loss is.

A `Flow` is the abstract value of the batch analysis. Apart from where rows lie it keeps a *scale*: a value
equals (row by row, or summed over rows) something times `rows ** power`, divided by `divisor`. A mean over
rows is a sum of power -1; a masked mean is a sum with a divisor. The functions of this file are the
algebra: they say what adding, multiplying or bending flows gives, and raise `Coupled` when rows would see
each other in a way that has no name.
"""

import enum
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rannc_jax.ir.batch_info import CouplingKind, RowLayout


class Kind(enum.Enum):
    """FREE: the same in every row, or without rows. INDEX: the number of the row. ROWS: row by row.
    SUM: linear in a sum over rows. STATISTIC: another function of sums over rows. MIXED: all else."""

    FREE = "free"
    INDEX = "index"
    ROWS = "rows"
    SUM = "sum"
    STATISTIC = "statistic"
    MIXED = "mixed"


REDUCED = (Kind.SUM, Kind.STATISTIC)


class Coupled(Exception):
    """Raised by a rule: rows see each other here, or it cannot be excluded."""


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """An equation, for people: the top-level index, and what it is (or what is inside it)."""

    equation: int
    primitive: str
    path: str
    source: str


@dataclass(frozen=True, slots=True)
class Divisor:
    """What a sum is divided by: value `value` = g(value `weight`), or unnamed where an id is missing.

    `additive`: g(w) adds up over parts with w > 0, so that batch-free terms may be added to the loss.
    `linear`: g(w) grows as w does.
    """

    weight: int | None
    value: int | None
    root: int | None
    param: bool
    additive: bool
    linear: bool
    site: Site | None

    @property
    def named(self) -> bool:
        return self.weight is not None and self.value is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The abstract value of one variable.

    Args:
        layout: where rows lie in the shape, None if nowhere. FREE, SUM and STATISTIC values with a
            layout are the same in every row.
        loose: `outer` and `inner` of the layout are a guess, any would do.
        power, divisor: the scale; `varies` if it depends on the number of rows otherwise.
        data: depends on the batch. param: a gradient may flow back to a parameter.
        integral: whole numbers. constant: the number it is everywhere. numbers: of a FREE scalar, what
            it is in the two traces.
        affine: batch-free terms of the same degree were added to a SUM.
        several: a SUM of means over different things.
        steady: a STATISTIC of means and ratios alone, which does not grow with the number of rows.
        ident: id of the scalar this is (a copy of). root: id of the sum that this is a function of.
        guard: a STATISTIC such as max(root, 1). additive: see `Divisor`. zero_test: a comparison of
            `root` with 0: is it true for "zero" or for "nonzero"?
        sources: the reductions over rows this comes from. cause: the first bend of a STATISTIC.
        columns: a ROWS array of indices whose columns `columns` of the last dim are the row's number.
        shuffled: an INDEX or row order that was permuted at random.
        origin: random draws whose layout is a guess (equation indices).
        pending: a MIXED value without data: couples as soon as it meets data.
    """

    kind: Kind = Kind.FREE
    layout: RowLayout | None = None
    loose: bool = False
    power: int = 0
    varies: bool = False
    divisor: Divisor | None = None
    data: bool = False
    param: bool = False
    integral: bool = False
    constant: float | None = None
    numbers: tuple[float, float] | None = None
    affine: bool = False
    several: bool = False
    steady: bool = False
    ident: int | None = None
    root: int | None = None
    guard: bool = False
    additive: bool = False
    zero_test: str | None = None
    sources: frozenset[Site] = frozenset()
    cause: Site | None = None
    columns: frozenset[int] = frozenset()
    shuffled: bool = False
    origin: frozenset[int] = frozenset()
    pending: bool = False

    @property
    def zero(self) -> bool:
        return self.constant == 0.0

    @property
    def reduced(self) -> bool:
        return self.kind in REDUCED

    @property
    def scale(self) -> tuple[int, bool, Divisor | None]:
        return self.power, self.varies, self.divisor

    @property
    def plain(self) -> bool:
        """Scale 1, so that any function of it is as good as it is."""
        return self.scale == (0, False, None)

    @property
    def degree(self) -> int | None:
        """The power of the number of rows with which it grows; None if unknown."""
        if self.kind is Kind.SUM:
            if self.several or self.divisor is None:
                return 0 if self.several else self.power + 1
            return self.power if self.divisor.linear else None
        if self.kind is Kind.STATISTIC:
            return 0 if self.steady else None
        return self.power

    @property
    def steady_reduced(self) -> bool:
        return self.degree == 0 and not self.varies

    @property
    def pure_root(self) -> bool:
        """A function of the one sum `root`."""
        if self.root is None or self.varies or self.several:
            return False
        return self.kind is Kind.STATISTIC or (
            self.kind is Kind.SUM and self.power == 0 and self.divisor is None and not self.affine
        )


class Reporter(Protocol):
    """What the algebra needs of the equation it works for."""

    @property
    def site(self) -> Site: ...
    def report(self, kind: CouplingKind, sites: frozenset[Site]) -> None: ...


def blend(kind: Kind, *flows: Flow, **fields: Any) -> Flow:
    """A flow of this kind made of others: what they share is kept, layout and scale are not."""
    base: dict[str, Any] = {
        "data": any(f.data for f in flows),
        "param": any(f.param for f in flows),
        "integral": all(f.integral for f in flows),
        "sources": frozenset().union(*(f.sources for f in flows)),
        "shuffled": any(f.shuffled for f in flows),
        "origin": frozenset().union(*(f.origin for f in flows)),
    }
    return Flow(kind=kind, **{**base, **fields})


def moved(flow: Flow, layout: RowLayout | None, **fields: Any) -> Flow:
    """The same values in another shape."""
    return replace(flow, **{"layout": layout, "origin": frozenset(), "loose": False, **fields})


def at(flow: Flow, dim: int) -> Flow:
    """The same values with their rows in another dim."""
    if flow.layout is None or flow.layout.dim == dim:
        return flow
    return replace(flow, layout=replace(flow.layout, dim=dim), origin=frozenset())


def _refuse(*flows: Flow) -> None:
    if any(f.kind is Kind.MIXED or f.kind is Kind.INDEX or f.columns for f in flows):
        raise Coupled


def shared_root(flows: tuple[Flow, ...]) -> int | None:
    """The sum that all of these are functions of, if it is one."""
    reduced = [f for f in flows if f.reduced]
    others = [f for f in flows if not f.reduced]
    roots = {f.root for f in reduced if f.pure_root}
    if len(roots) != 1 or not all(f.pure_root for f in reduced) or not all(f.plain for f in others):
        return None
    return roots.pop()


def statistic(call: Reporter, *flows: Flow, **fields: Any) -> Flow:
    """Any function of sums over rows."""
    _refuse(*flows)
    return blend(
        Kind.STATISTIC,
        *flows,
        **{
            "steady": all(f.degree == 0 for f in flows),
            "varies": any(f.varies for f in flows),
            "root": shared_root(flows),
            "cause": next((f.cause for f in flows if f.cause), call.site),
            "integral": False,
            **fields,
        },
    )


def meet(call: Reporter, *flows: Flow) -> Flow:
    """Sums over rows flow back into rows: batch statistics, if they do not grow with the batch."""
    _refuse(*flows)
    reduced = [f for f in flows if f.reduced]
    if not all(f.plain for f in flows if not f.reduced) or not all(f.steady_reduced for f in reduced):
        raise Coupled
    call.report(CouplingKind.BATCH_STATISTICS, frozenset().union(*(f.sources for f in reduced)))
    return blend(Kind.ROWS, *flows, sources=frozenset(), data=True)


def bend(call: Reporter, *flows: Flow) -> Flow:
    """Any function that works element by element."""
    _refuse(*flows)
    kinds = {f.kind for f in flows}
    if Kind.ROWS in kinds:
        if kinds & set(REDUCED):
            return meet(call, *flows)
        if not all(f.plain for f in flows):
            raise Coupled
        return blend(Kind.ROWS, *flows, integral=False)
    if kinds & set(REDUCED):
        return statistic(call, *flows)
    return blend(Kind.FREE, *flows, varies=not all(f.plain for f in flows), integral=False)


def add(call: Reporter, left: Flow, right: Flow) -> Flow:
    """Sum or difference."""
    _refuse(left, right)
    for zero, other in ((left, right), (right, left)):
        if zero.zero and zero.kind is Kind.FREE:
            fields = {"ident": None, "zero_test": None, "constant": other.constant}
            return replace(other, integral=other.integral and zero.integral, **fields)
    kinds = {left.kind, right.kind}
    if Kind.ROWS in kinds:
        if kinds & set(REDUCED):
            return meet(call, left, right)
        if left.scale != right.scale:
            raise Coupled
        return _scaled(blend(Kind.ROWS, left, right), left)
    if Kind.STATISTIC in kinds:
        return statistic(call, left, right)
    if kinds == {Kind.FREE}:
        same = left.scale == right.scale
        return blend(Kind.FREE, left, right, power=left.power if same else 0, varies=not same or left.varies)
    return _add_sums(call, left, right)


def _scaled(flow: Flow, like: Flow, **fields: Any) -> Flow:
    return replace(flow, **{"power": like.power, "varies": like.varies, "divisor": like.divisor, **fields})


def _add_sums(call: Reporter, left: Flow, right: Flow) -> Flow:
    """SUM + SUM or SUM + FREE."""
    varies = left.varies or right.varies
    if Kind.FREE in (left.kind, right.kind):
        total = right if left.kind is Kind.FREE else left
        if varies or left.degree != right.degree:
            return statistic(call, left, right)
        return _scaled(blend(Kind.SUM, left, right), total, affine=True, several=total.several)
    affine = left.affine or right.affine
    if left.scale == right.scale and not (left.several or right.several):
        return _scaled(blend(Kind.SUM, left, right), left, affine=affine)
    if left.degree == 0 and right.degree == 0 and not varies:
        return blend(Kind.SUM, left, right, several=True, affine=affine)
    return statistic(call, left, right)


def multiply(call: Reporter, left: Flow, right: Flow) -> Flow:
    """Product, element by element or bilinear."""
    _refuse(left, right)
    kinds = {left.kind, right.kind}
    if kinds & set(REDUCED):
        if Kind.ROWS in kinds:
            return meet(call, left, right)
        if Kind.FREE not in kinds or Kind.STATISTIC in kinds:
            return statistic(call, left, right)
        total, factor = (right, left) if left.kind is Kind.FREE else (left, right)
        if total.several and not factor.plain:
            return statistic(call, left, right)
        return _times(blend(Kind.SUM, left, right), total, factor.power, factor.varies)
    if left.divisor and right.divisor:
        raise Coupled
    return blend(
        Kind.ROWS if Kind.ROWS in kinds else Kind.FREE,
        left,
        right,
        power=left.power + right.power,
        varies=left.varies or right.varies,
        divisor=left.divisor or right.divisor,
    )


def _times(flow: Flow, total: Flow, power: int, varies: bool) -> Flow:
    """`total` times something batch-free."""
    return _scaled(
        flow,
        total,
        power=total.power + power,
        varies=total.varies or varies,
        affine=total.affine,
        several=total.several,
        root=total.root,
    )


def divide(call: Reporter, left: Flow, right: Flow) -> Flow:
    """Quotient; recognises what a loss is divided by."""
    _refuse(left, right)
    if right.kind is Kind.FREE:
        flipped = replace(right, power=-right.power, constant=None, integral=False)
        return replace(multiply(call, left, flipped), integral=False)
    if right.kind is Kind.ROWS:
        if left.reduced:
            return meet(call, left, right)
        if right.divisor is not None and right.divisor != left.divisor:
            raise Coupled
        divisor = None if right.divisor else left.divisor
        varies = left.varies or right.varies
        power = left.power - right.power
        return blend(Kind.ROWS, left, right, power=power, varies=varies, divisor=divisor, integral=False)
    return _divide_by_sum(call, left, right)


def _divide_by_sum(call: Reporter, left: Flow, right: Flow) -> Flow:
    usable = right.kind is Kind.SUM or right.pure_root
    unsuited = left.affine or left.several or left.divisor or right.affine or right.several
    if right.divisor is not None and right.divisor == left.divisor and not unsuited:
        unsuited, usable = False, True
    if not usable or unsuited or left.varies or right.varies or right.divisor:
        if left.kind is Kind.ROWS:
            return meet(call, left, right)
        return statistic(call, left, right)
    if left.kind is Kind.STATISTIC or (left.kind is Kind.FREE and left.layout is None):
        return statistic(call, left, right)
    divisor = _divisor(call, right)
    power = left.power - (right.power if right.kind is Kind.SUM else 0)
    kind = Kind.ROWS if left.kind in (Kind.ROWS, Kind.FREE) else Kind.SUM
    return blend(kind, left, right, power=power, divisor=divisor, integral=False)


def _divisor(call: Reporter, flow: Flow) -> Divisor:
    """A sum (or a function of one) as something to divide by."""
    if flow.kind is Kind.SUM:
        weight = flow.ident if flow.power == 0 and flow.ident is not None else flow.root
        value, additive, linear = weight, True, True
    else:
        weight, value, additive, linear = flow.root, flow.ident, flow.additive, flow.guard
    named = weight is not None and value is not None
    return Divisor(weight, value, flow.root, flow.param, additive, linear, None if named else call.site)


def select(call: Reporter, which: Flow, cases: tuple[Flow, ...]) -> Flow:
    """One of the cases, as `which` says."""
    if which.kind is Kind.FREE and which.constant is not None and not which.varies:
        return cases[int(which.constant)]
    if which.kind is Kind.FREE and which.plain:
        return replace(any_of(call, *cases), zero_test=None)
    if which.kind is Kind.ROWS and which.plain and not which.columns:
        if any(f.reduced for f in cases):
            return meet(call, which, *cases)
        chosen = any_of(call, *cases)
        if chosen.kind is Kind.INDEX or chosen.columns:
            raise Coupled
        joint = blend(Kind.ROWS, which, *cases, integral=all(f.integral for f in cases))
        return _scaled(joint, chosen)
    if which.reduced and len(cases) == 2:
        return _guarded(call, which, cases[0], cases[1])
    return bend(call, which, *cases)


def any_of(call: Reporter, *cases: Flow) -> Flow:
    """One of several values, or values side by side: as a sum of them, the scale must be one."""
    chosen = cases[0]
    for case in cases[1:]:
        if case != chosen:
            chosen = replace(add(call, chosen, case), constant=None)
    return chosen


def _guarded(call: Reporter, which: Flow, false: Flow, true: Flow) -> Flow:
    """where(w > 0, a, b): a ratio kept from dividing by zero, or a divisor kept from being zero."""
    regular, empty = (true, false) if which.zero_test == "nonzero" else (false, true)
    if which.zero_test and empty.zero and empty.kind is Kind.FREE:
        same = regular.divisor is not None and regular.divisor.root == which.root
        if regular.kind is Kind.SUM and same and not regular.affine and not regular.several:
            return replace(regular, data=True)
    if any(f.kind is Kind.ROWS for f in (false, true)):
        return meet(call, which, false, true)
    additive = bool(which.zero_test) and regular.kind is Kind.SUM and empty.kind is Kind.FREE
    bent = statistic(call, which, false, true)
    known = bent.root is not None
    return replace(bent, additive=additive and known, guard=additive and known)
