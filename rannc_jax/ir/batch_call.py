"""One equation under analysis, in both traces, with what rules ask about it.

The first witness lives here: `row_dim` compares the two shapes of a value. Rules are functions from a
`Call` to the flows of its outputs; they are kept in `RULES` by primitive name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from rannc_jax.contract import COUPLED_SCOPE, SEPARABLE_SCOPE
from rannc_jax.ir.batch_flow import Coupled, Flow, Kind, Site
from rannc_jax.ir.batch_info import CouplingKind, RowLayout, RowMask


@dataclass(slots=True)
class Findings:
    """What the analysis collects on its way.

    Args:
        couplings: (kind, site) pairs, in no order.
        masks: sums over rows. unmaskable: equations that sum rows in a way padded rows leak into.
        random: row-wise draws. unspreadable: see `BatchInfo`.
        guesses: chosen layouts of random draws whose own shape does not say.
        reread: guesses that turned out wrong: the analysis starts again with them.
    """

    rows: int
    twin_rows: int
    guesses: dict[int, RowLayout] = field(default_factory=dict)
    reread: dict[int, RowLayout] = field(default_factory=dict)
    couplings: set[tuple[CouplingKind, Site]] = field(default_factory=set)
    masks: dict[tuple[int, int], RowMask] = field(default_factory=dict)
    unmaskable: set[int] = field(default_factory=set)
    random: dict[int, RowLayout] = field(default_factory=dict)
    unspreadable: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Call:
    """An equation, its twin, and the flows of its operands.

    `equation` is the index of the top-level equation it is in, `top` whether it is that one, `marked`
    whether it is under the name scope of `separable`, `siblings` the equations it is one of.
    """

    findings: Findings
    eqn: jex.JaxprEqn
    twin: jex.JaxprEqn
    flows: list[Flow]
    equation: int
    top: bool
    marked: bool
    run: Callable[..., list[Flow]]
    siblings: Sequence[jex.JaxprEqn]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def site(self) -> Site:
        return Site(self.equation, self.name, *where(self.eqn, self.siblings))

    def shape(self, operand: int) -> tuple[int, ...]:
        return self.eqn.invars[operand].aval.shape

    def out_shape(self, output: int = 0) -> tuple[int, ...]:
        return self.eqn.outvars[output].aval.shape

    def row_dim(self, output: int = 0) -> tuple[int, int] | None:
        """The first witness: (dim, multiple) of the rows in an output; None if it has none."""
        return row_dim(self.eqn.outvars[output].aval, self.twin.outvars[output].aval, self.findings)

    def guessed(self, output: int = 0) -> RowLayout | None:
        """The layout that the first witness sees, taking rows as the outermost part of their dim."""
        found = self.row_dim(output)
        return None if found is None else RowLayout(found[0], 1, found[1])

    def full(self, operand: int, sizes: Sequence[int], twin_sizes: Sequence[int], dim: int) -> bool:
        """Is the whole of `dim` of the operand taken, in both traces?"""
        mine, other = self.eqn.invars[operand].aval.shape, self.twin.invars[operand].aval.shape
        return sizes[dim] == mine[dim] and twin_sizes[dim] == other[dim]

    def report(self, kind: CouplingKind, sites: frozenset[Site]) -> None:
        if not self.marked:
            self.findings.couplings.update((kind, site) for site in (sites or {self.site}))

    def mask(self, operand: int, layout: RowLayout | None) -> None:
        """Rows of this operand are summed here."""
        if not self.top or layout is None:
            self.findings.unmaskable.add(self.equation)
        else:
            key = (self.equation, operand)
            self.findings.masks[key] = RowMask(equation=key[0], operand=operand, layout=layout)

    def unspreadable(self) -> None:
        self.findings.unspreadable.add(self.equation)

    def layout(self, rank: int | None = None) -> tuple[RowLayout | None, bool]:
        """Where the rows of same-shaped operands lie, and whether that is only a guess.

        `rank` is that of the operands; the output's by default.
        """
        rank = len(self.out_shape()) if rank is None else rank
        having = [f for f in self.flows if f.layout is not None]
        if any(len(a.aval.shape) not in (0, rank) for a in self.eqn.invars):
            raise Coupled
        firm = [f for f in having if not f.loose]
        if not firm:
            return (having[0].layout, True) if having else (self.guessed(), True)
        if len({f.layout for f in firm}) == 1:
            return firm[0].layout, False
        known = {f.layout for f in firm if not f.origin}
        if len(known) == 1:
            layout = known.pop()
            self.findings.reread.update({o: layout for f in firm for o in f.origin if layout})
        raise Coupled


Rule = Callable[[Call], Sequence[Flow]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for primitives of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


def where(eqn: jex.JaxprEqn, siblings: Sequence[jex.JaxprEqn]) -> tuple[str, str]:
    """Module path and source line of an equation.

    Functions that JAX keeps traced (`jnp.sort`) have no line of the user's: the last line before is told.
    """
    path = str(eqn.source_info.name_stack)
    source = source_info_util.summarize(eqn.source_info)
    if "<unknown" not in source and source:
        return path, source
    position = next(i for i, other in enumerate(siblings) if other is eqn)
    for other in reversed(siblings[:position]):
        source = source_info_util.summarize(other.source_info)
        if "<unknown" not in source and source:
            return path, f"near {source}"
    return path, ""


def is_marked(eqn: jex.JaxprEqn) -> bool:
    """Is the equation under the name scope of `separable`?"""
    return SEPARABLE_SCOPE in str(eqn.source_info.name_stack)


def is_coupled(eqn: jex.JaxprEqn) -> bool:
    """Is the equation under the name scope of `coupled`?"""
    return COUPLED_SCOPE in str(eqn.source_info.name_stack)


def row_dim(aval: Any, twin: Any, findings: Findings) -> tuple[int, int] | None:
    """(dim, multiple) where two traces of a value differ in proportion to the rows.

    Raises:
        Coupled: sizes differ in another way, or in several dims.
    """
    differing = [d for d, (a, b) in enumerate(zip(aval.shape, twin.shape, strict=True)) if a != b]
    if not differing:
        return None
    if len(differing) > 1:
        raise Coupled
    dim = differing[0]
    multiple, rest = divmod(aval.shape[dim], findings.rows)
    if rest or twin.shape[dim] != multiple * findings.twin_rows:
        raise Coupled
    return dim, multiple


def is_key(aval: Any) -> bool:
    """Is it an array of typed PRNG keys?"""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def opened(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A jaxpr and the values of its constants, closed or not."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def value_flow(value: Any, twin: Any, findings: Findings) -> Flow:
    """The flow of a literal or constant, from its values in both traces."""
    if hasattr(value, "dtype") and is_key(value):
        return Flow()
    mine, other = np.asarray(value), np.asarray(twin)
    if mine.shape != other.shape:
        return _sized_flow(mine, other, findings)
    if value is twin or np.array_equal(mine, other, equal_nan=mine.dtype.kind == "f"):
        scalar = mine.shape == () and mine.dtype.kind in "biuf"
        constant = float(mine) if scalar else None
        numbers = None if constant is None else (constant, constant)
        integral = constant is not None and constant.is_integer()
        return Flow(constant=constant, numbers=numbers, integral=integral)
    numbers = (float(mine), float(other)) if mine.shape == () and mine.dtype.kind in "biuf" else None
    for power in (1, -1, 2, -2):
        factor = (findings.twin_rows / findings.rows) ** power
        if np.allclose(mine.astype(float) * factor, other.astype(float), rtol=1e-6, atol=0):
            return Flow(power=power, numbers=numbers, integral=mine.dtype.kind in "iu")
    return Flow(varies=True, numbers=numbers)


def _sized_flow(mine: np.ndarray, other: np.ndarray, findings: Findings) -> Flow:
    """A constant whose shape depends on the rows."""
    mixed = Flow(kind=Kind.MIXED, pending=True)
    try:
        found = row_dim(mine, other, findings)
    except (Coupled, ValueError):
        return mixed
    assert found is not None
    dim, multiple = found
    row = mine.take([0], axis=dim)
    if (mine == row).all() and (other == row).all():
        return Flow(layout=RowLayout(dim, 1, multiple), loose=multiple > 1)
    if mine.ndim == multiple == 1 and all((a == np.arange(a.size)).all() for a in (mine, other)):
        return Flow(kind=Kind.INDEX, layout=RowLayout(0), integral=True)
    return mixed


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum,
    "min": np.minimum, "neg": np.negative, "sqrt": np.sqrt, "gt": np.greater, "ge": np.greater_equal,
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def folded(call: Call) -> Flow | None:
    """Arithmetic on numbers known in both traces, such as `rows - 1 > 0`; None if it is not that."""
    compute = ARITHMETIC.get(call.name)
    if compute is None or call.out_shape() != () or any(f.numbers is None for f in call.flows):
        return None
    if call.name == "div" and call.eqn.outvars[0].aval.dtype.kind in "iu":
        return None
    pairs = zip(*(f.numbers for f in call.flows if f.numbers is not None), strict=True)
    with np.errstate(all="ignore"):
        mine, other = (compute(*operands) for operands in pairs)
    return value_flow(mine, other, call.findings)
