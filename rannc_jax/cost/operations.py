"""A program as a flat list of operations that can be priced: bodies that run once are opened.

Values keep their program ids; values inside opened bodies get new ids after them. jit, custom_jvp,
custom_vjp and checkpoint bodies are opened, because XLA fuses through them; loops keep their bodies,
opened the same way; a custom_vjp that is an attention stays whole, because it runs as one kernel.
Both traces of a function open to the same list, so an operation is priced at any number of rows by
the line through its two measurements.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from rannc_jax.cost import flops, primitives
from rannc_jax.cost.flops import Fusion, Work
from rannc_jax.errors import CostError, message
from rannc_jax.ir.trace import Program, aval_bytes

NO_VALUE = -1
"""Stands for literals and small constants, which cost nothing to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One primitive application.

    Args:
        eqn: the equation.
        equation: index of the top-level equation it belongs to.
        reads: value ids, one an operand, `NO_VALUE` for literals.
        writes: value ids, one an output.
        region: index into `Operations.regions` of the innermost checkpoint or custom_vjp around it, or -1.
        bodies: loops only: the opened bodies and how often each runs.
        attention: a whole custom_vjp that computes attention.
        custom_jvp: it lies in the body of a custom_jvp, whose rule is not the primitives' own.
    """

    eqn: jex.JaxprEqn
    equation: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    region: int = -1
    bodies: tuple[tuple["Operations", int], ...] = ()
    attention: bool = False
    custom_jvp: bool = False

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def is_matmul(self) -> bool:
        """A matrix product, convolution or attention: what `Remat.SAVE_MATMULS` saves."""
        return (
            self.attention or self.name in primitives.MATMULS | primitives.CONVOLUTIONS | primitives.ATTENTION
        )

    def work(self) -> Work:
        """What it costs; see `flops.work`."""
        if not self.attention:
            return flops.work(self.eqn)
        edge = flops.work(self.eqn)
        products = [
            eqn for eqn in _deep(self.eqn) if eqn.primitive.name in primitives.MATMULS | primitives.ATTENTION
        ]
        return Work(
            flops=flops.equation_flops(self.eqn),
            unit=flops.matmul_unit(products[0]),
            reads=edge.reads,
            writes=edge.writes,
            fusion=Fusion.WHOLE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A checkpoint or custom_vjp whose body was opened: it is differentiated as a whole."""

    recomputes: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Operations:
    """An opened jaxpr. `avals` are indexed by value id, the first `num_inputs` are its inputs."""

    operations: list[Operation] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    num_inputs: int = 0

    def nbytes(self) -> np.ndarray:
        """Bytes of every value, int64 [values]."""
        sizes = (aval_bytes(a) if hasattr(a, "shape") else 0 for a in self.avals)
        return np.fromiter(sizes, np.int64, len(self.avals))


def open_program(program: Program) -> Operations:
    """Open a program; value ids below `len(program.vars)` are the program's own."""
    return _Opener().run(program.jaxpr.jaxpr, [v.aval for v in program.vars], dict(program.value_ids))


def open_jaxpr(jaxpr: jex.Jaxpr) -> Operations:
    """Open a jaxpr by itself: inputs are numbered first, then the outputs of its equations."""
    numbered = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return _Opener().run(jaxpr, [v.aval for v in numbered], {v: i for i, v in enumerate(numbered)})


def differentiable(aval: Any) -> bool:
    """Values of this type have cotangents."""
    return hasattr(aval, "dtype") and jax.dtypes.issubdtype(aval.dtype, np.inexact)


class _Opener:
    """Walks a jaxpr, keeping one numbering for everything that runs once."""

    def __init__(self) -> None:
        self.out = Operations()

    def run(self, jaxpr: jex.Jaxpr, avals: list[Any], ids: dict[jex.Var, int]) -> Operations:
        self.out.avals = avals
        self.out.num_inputs = len(jaxpr.invars)
        self.aliases: dict[int, int] = {}
        for index, eqn in enumerate(jaxpr.eqns):
            self.add(eqn, index, ids, -1, False)
        self.out.outputs = tuple(self.read(atom, ids) for atom in jaxpr.outvars)
        return self.out

    def read(self, atom: Any, ids: dict[jex.Var, int]) -> int:
        value = NO_VALUE if isinstance(atom, jex.Literal) else ids.get(atom, NO_VALUE)
        return self.aliases.get(value, value)

    def add(
        self, eqn: jex.JaxprEqn, equation: int, ids: dict[jex.Var, int], region: int, custom: bool
    ) -> None:
        reads = tuple(self.read(atom, ids) for atom in eqn.invars)
        writes = tuple(ids[v] for v in eqn.outvars)
        name = eqn.primitive.name
        attention = name in primitives.CUSTOM_VJPS and is_attention(eqn)
        inner = () if attention else flops.bodies(eqn)
        if name in primitives.TRANSPARENT and inner:
            if name in primitives.CHECKPOINTS | primitives.CUSTOM_VJPS and region < 0:
                self.out.regions.append(
                    Region(recomputes=name in primitives.CHECKPOINTS, reads=reads, writes=writes)
                )
                region = len(self.out.regions) - 1
            custom = custom or name == "custom_jvp_call"
            self.splice(inner[0].jaxpr, reads, writes, equation, region, custom)
            return
        bodies = tuple((open_jaxpr(body.jaxpr), body.times) for body in inner)
        self.out.operations.append(
            Operation(
                eqn=eqn,
                equation=equation,
                reads=reads,
                writes=writes,
                region=region,
                bodies=bodies,
                attention=attention,
                custom_jvp=custom,
            )
        )

    def splice(
        self,
        jaxpr: jex.Jaxpr,
        reads: Sequence[int],
        writes: Sequence[int],
        equation: int,
        region: int,
        custom: bool,
    ) -> None:
        """Add a body's equations in place of the equation around it."""
        ids = dict(zip(jaxpr.invars, reads, strict=True))
        inside = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        for atom, value in zip(jaxpr.outvars, writes, strict=True):
            if not isinstance(atom, jex.Literal) and atom in inside and atom not in ids:
                ids[atom] = value
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                if var not in ids:
                    ids[var] = len(self.out.avals)
                    self.out.avals.append(var.aval)
            self.add(eqn, equation, ids, region, custom)
        for atom, value in zip(jaxpr.outvars, writes, strict=True):
            source = self.read(atom, ids)
            if source != value:
                self.aliases[value] = source


def is_attention(eqn: jex.JaxprEqn) -> bool:
    """A custom_vjp whose body multiplies twice with an exponential between, or calls cuDNN's attention."""
    names = [inner.primitive.name for inner in _deep(eqn)]
    if any(name in primitives.ATTENTION for name in names):
        return True
    products = [i for i, name in enumerate(names) if name in primitives.MATMULS]
    return len(products) == 2 and any(name in ("exp", "exp2") for name in names[products[0] : products[1]])


def _deep(eqn: jex.JaxprEqn) -> Iterator[jex.JaxprEqn]:
    """Every equation without bodies in an equation, in order."""
    inner = flops.bodies(eqn)
    if not inner:
        yield eqn
    for body in inner:
        for nested in body.jaxpr.eqns:
            yield from _deep(nested)


@dataclass(frozen=True, slots=True)
class Line:
    """The line through the measurements of two traces: `at(rows) = fixed + slope * rows`.

    `fixed` and `slope` may be numbers or equal-shaped arrays.
    """

    fixed: Any
    slope: Any

    @classmethod
    def through(cls, rows: tuple[int, int], first: Any, second: Any) -> "Line":
        """The line with `first` at `rows[0]` and `second` at `rows[1]`; constant if the rows are equal."""
        if rows[0] == rows[1]:
            return cls(first, first * 0)
        slope = (second - first) / (rows[1] - rows[0])
        return cls(first - slope * rows[0], slope)

    def __add__(self, other: "Line") -> "Line":
        return Line(self.fixed + other.fixed, self.slope + other.slope)

    def at(self, rows: int) -> Any:
        """Value at a number of rows, never below zero."""
        value = np.maximum(self.fixed + self.slope * rows, 0)
        return value if value.ndim else float(value)


@dataclass(frozen=True, eq=False)
class Twins:
    """The same function opened at two numbers of rows, with everything measured twice.

    Args:
        first, second: the opened traces; equal lists but for sizes.
        rows: their numbers of rows.
    """

    first: Operations
    second: Operations
    rows: tuple[int, int]

    def __post_init__(self) -> None:
        if [op.name for op in self.first.operations] != [op.name for op in self.second.operations]:
            raise CostError(
                message(
                    "the function does not do the same work at two numbers of rows.",
                    f"{len(self.first.operations)} operations at {self.rows[0]} rows, "
                    f"{len(self.second.operations)} at {self.rows[1]}",
                    hint="remove Python branches on the batch size, or plan at a fixed one.",
                )
            )

    @functools.cached_property
    def works(self) -> tuple[list[Work], list[Work]]:
        """Work of every operation in each trace."""
        return [op.work() for op in self.first.operations], [op.work() for op in self.second.operations]

    @functools.cached_property
    def nbytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of every value in each trace."""
        return self.first.nbytes(), self.second.nbytes()

    @functools.cached_property
    def bodies(self) -> dict[int, list[tuple["Twins", int]]]:
        """Loop operations: their bodies at both numbers of rows, and how often they run."""
        pairs = zip(self.first.operations, self.second.operations, strict=True)
        return {
            index: [
                (Twins(a, b, self.rows), times)
                for (a, times), (b, _) in zip(one.bodies, two.bodies, strict=True)
            ]
            for index, (one, two) in enumerate(pairs)
            if one.bodies
        }

    @functools.cached_property
    def consumers(self) -> dict[int, list[int]]:
        """Value id -> operations that read it, ascending."""
        found: dict[int, list[int]] = {}
        for index, op in enumerate(self.first.operations):
            for value in dict.fromkeys(op.reads):
                found.setdefault(value, []).append(index)
        return found

    def line(self, first: Any, second: Any) -> Line:
        """A line through two measurements."""
        return Line.through(self.rows, first, second)


def gradients(ops: Operations, seeds: set[int], wanted: set[int]) -> set[int]:
    """Values that get a cotangent: they depend on `seeds` and `wanted` depends on them, differentiably."""
    reached = set(seeds)
    for op in ops.operations:
        if op.name != "stop_gradient" and any(v in reached for v in op.reads):
            reached.update(v for v in op.writes if differentiable(ops.avals[v]))
    useful = set(wanted)
    for op in reversed(ops.operations):
        if op.name != "stop_gradient" and any(v in useful and v in reached for v in op.writes):
            useful.update(v for v in op.reads if v != NO_VALUE and differentiable(ops.avals[v]))
    return reached & useful


def body_gradients(body: Operations) -> set[int]:
    """Values of a loop's body that get a cotangent, when any of its floats does."""
    inputs = {v for v in range(body.num_inputs) if differentiable(body.avals[v])}
    return gradients(body, inputs, {v for v in body.outputs if v != NO_VALUE})
