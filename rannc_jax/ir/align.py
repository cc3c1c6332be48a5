"""The same function traced with other rows: which of its equations and values are which.

Usually two traces are the same equations on other shapes. But code may look at sizes: `jnp.matmul`
squeezes a batch of one row away, `take_along_axis` treats size 1 apart. Then the traces are aligned:
equations that are alike are matched in order, values between them follow from how matched equations
are wired, and a slice is found again as everything between its inputs and its outputs.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from rannc_jax.errors import TraceError, message
from rannc_jax.ir.slice import Slice
from rannc_jax.ir.trace import Program, module_path, same_structure, source_line


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Aligned:
    """A trace and its correspondence to the one that was planned on.

    Args:
        base: the planned trace.
        program: the other one.
        values, equations: number in `base` -> number in `program`; None where they are the same.
    """

    base: Program
    program: Program
    values: dict[int, int] | None = None
    equations: dict[int, int] | None = None

    def value(self, value: int) -> int:
        """The value's number in this trace.

        Raises:
            TraceError: this trace has no such value.
        """
        if self.values is None:
            return value
        if value not in self.values:
            raise _lost(self, f"value {self.base.vars[value].aval.str_short()} is not there")
        return self.values[value]

    def equation(self, equation: int) -> int:
        """The equation's number in this trace.

        Raises:
            TraceError: this trace has no such equation.
        """
        if self.equations is None:
            return equation
        if equation not in self.equations:
            eqn = self.base.eqns[equation]
            raise _lost(self, f"{eqn.primitive.name} at {source_line(eqn)} is not there")
        return self.equations[equation]

    def slice(self, part: Slice) -> Slice:
        """A slice of the planned trace, in this trace.

        Raises:
            TraceError: a value at its border is missing here, or it needs more than it did.
        """
        if self.values is None:
            return part
        inputs = tuple(self.value(v) for v in part.inputs)
        outputs = tuple(self.value(v) for v in part.outputs)
        results = [v for k in part.results if (v := self.program.output_ids()[k]) is not None]
        effects = [self.equation(e) for e in part.equations if self.base.eqns[e].effects]
        equations = self._between(set(inputs), [*outputs, *results], effects)
        return Slice(equations=equations, inputs=inputs, outputs=outputs, results=part.results)

    def _between(self, inputs: set[int], wanted: Iterable[int], effects: Iterable[int]) -> tuple[int, ...]:
        program = self.program
        definer = {v: e for e in range(len(program.eqns)) for v in program.writes(e)}
        found = set(effects)
        stack = [*wanted, *(v for e in found for v in program.reads(e))]
        while stack:
            v = stack.pop()
            if v in inputs:
                continue
            e = definer.get(v)
            if e is None:
                raise _lost(self, f"{program.inputs[v].path} is read where it was not read before")
            if e not in found:
                found.add(e)
                stack += program.reads(e)
        return tuple(sorted(found))


def align(base: Program, program: Program) -> Aligned:
    """Find the equations and values of a trace in another one.

    Args:
        base: the trace that was planned on.
        program: the same function with other rows.

    Raises:
        TraceError: the two are different programs.

    Complexity: linear where the traces have the same structure; else that of `difflib` on the
    equations.
    """
    if same_structure(base, program):
        return Aligned(base=base, program=program)
    if len(base.inputs) != len(program.inputs) or len(base.outputs) != len(program.outputs):
        raise _lost(Aligned(base=base, program=program, values={}, equations={}), "the arguments differ")
    matcher = difflib.SequenceMatcher(None, _signs(base), _signs(program), autojunk=False)
    pairs = [(a + i, b + i) for a, b, size in matcher.get_matching_blocks() for i in range(size)]
    values = {i: i for i in range(len(base.inputs))}
    equations: dict[int, int] = {}
    for e, f in pairs:
        _match_operands(base, program, e, f, values)
        equations[e] = f
        values.update(zip(base.writes(e), program.writes(f), strict=True))
    for one, other in zip(base.output_ids(), program.output_ids(), strict=True):
        if one is not None and other is not None:
            values.setdefault(one, other)
    return Aligned(base=base, program=program, values=values, equations=equations)


def _match_operands(base: Program, program: Program, e: int, f: int, values: dict[int, int]) -> None:
    """Operands of matched equations correspond: learn those that were not known yet."""
    for one, other in zip(base.eqns[e].invars, program.eqns[f].invars, strict=True):
        u, v = base.value_id(one), program.value_id(other)
        same_kind = isinstance(one, jex.Literal) == isinstance(other, jex.Literal)
        known = None if u is None else values.get(u)
        if not same_kind or (u is None) != (v is None) or (known is not None and known != v):
            raise _lost(
                Aligned(base=base, program=program, values=values, equations={}),
                f"{base.eqns[e].primitive.name} at {source_line(base.eqns[e])} reads something else",
            )
        if u is not None and v is not None and known is None:
            values[u] = v


def _signs(program: Program) -> list[Any]:
    """What an equation looks like, apart from sizes."""
    return [
        (
            eqn.primitive.name,
            module_path(eqn),
            source_line(eqn),
            tuple((str(v.aval.dtype), len(v.aval.shape)) for v in eqn.outvars),
            tuple(len(getattr(a.aval, "shape", ())) for a in eqn.invars),
        )
        for eqn in program.eqns
    ]


def _lost(aligned: Aligned, what: str) -> TraceError:
    return TraceError(
        message(
            f"with {aligned.program.rows} rows the function is not what it is with {aligned.base.rows}.",
            what,
            hint="fewer microbatches or replicas, so that parts have more rows, or a function that does "
            "not look at the number of rows.",
        )
    )
