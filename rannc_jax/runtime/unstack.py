"""A whole-tree program over stacked leaves as one over their slices, with the same numbers.

An optimizer is written over the user's tree, in which a leaf may be stacked over layers of several stages.
Traced once, its program is carried over to the slices (`ir/stacks.py`): work on elements goes slice by
slice, sums over a leaf become sums of sums. What looks at a whole leaf in another way gets the joined
array; where its slices live on several stages, cutting then says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from rannc_jax.ir.evaluate import read
from rannc_jax.ir.leaves import WHOLE, Slicing
from rannc_jax.ir.stack_rules import Call, each
from rannc_jax.ir.stacks import Stack, apply, joined, slices_of

Slicings = Sequence[Slicing]


def unstacked(closed: jex.ClosedJaxpr, ins: Slicings, outs: Slicings) -> jex.ClosedJaxpr:
    """The program from the parts of its inputs to the parts of its outputs.

    Args:
        closed: with calls inlined.
        ins, outs: how each input is given and how each output is wanted.
    """
    if not any(slicing.dims for slicing in (*ins, *outs)):
        return closed

    def run(*parts: Any) -> list[Any]:
        results = _run(closed, _stacks(parts, ins))
        return [part for value, slicing in zip(results, outs, strict=True) for part in _parts(value, slicing)]

    specs = [
        jax.ShapeDtypeStruct(
            slicing.part_shape(aval.shape), aval.dtype, weak_type=getattr(aval, "weak_type", False)
        )
        for aval, slicing in zip(closed.in_avals, ins, strict=True)
        for _ in range(slicing.num_parts)
    ]
    return jax.make_jaxpr(run)(*specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How the outputs of a program come out, and what inputs given whole were seen together with.

    Args:
        results: by output.
        met: position of an input given whole -> slicing of an operand of its shape that it meets.
    """

    results: list[Slicing]
    met: dict[int, Slicing]


def find_slicings(jaxpr: jex.Jaxpr, ins: Slicings) -> Found:
    """How slice-by-slice work gives the outputs if the inputs are given so."""
    slicings: dict[jex.Var, Slicing] = dict.fromkeys(jaxpr.constvars, WHOLE)
    slicings.update(zip(jaxpr.invars, ins, strict=True))
    met: dict[Any, Slicing] = {}
    for eqn in jaxpr.eqns:
        given = [_of(slicings, atom) for atom in eqn.invars]
        if eqn.primitive.name == "cond":
            inner = _in_branches(eqn, given)
            outs, meetings = inner.results, {eqn.invars[k + 1]: s for k, s in inner.met.items()}
        elif len(eqn.outvars) == 1:
            shapes = [atom.aval.shape for atom in eqn.invars]
            outs = [_slicing(eqn.primitive.name, eqn.params, shapes, given)]
            meetings = {
                atom: outs[0]
                for atom in eqn.invars
                if outs[0].dims
                and not isinstance(atom, jex.Literal)
                and atom.aval.shape == eqn.outvars[0].aval.shape
            }
        else:
            outs, meetings = [WHOLE] * len(eqn.outvars), {}
        slicings.update(zip(eqn.outvars, outs, strict=True))
        for var, slicing in meetings.items():
            met.setdefault(var, slicing)
    return Found(
        results=[_of(slicings, atom) for atom in jaxpr.outvars],
        met={k: met[var] for k, var in enumerate(jaxpr.invars) if var in met and not ins[k].dims},
    )


def _of(slicings: Mapping[jex.Var, Slicing], atom: Any) -> Slicing:
    return WHOLE if isinstance(atom, jex.Literal) else slicings[atom]


def _in_branches(eqn: jex.JaxprEqn, given: Slicings) -> Found:
    """Sliced as the first branch that slices it says."""
    cases = [find_slicings(branch.jaxpr, given[1:]) for branch in reversed(eqn.params["branches"])]
    columns = zip(*(case.results for case in cases), strict=True)
    met = {k: slicing for case in cases for k, slicing in case.met.items()}
    return Found(results=[next((s for s in column if s.dims), WHOLE) for column in columns], met=met)


def _slicing(
    name: str, params: dict[str, Any], shapes: Sequence[tuple[int, ...]], given: Slicings
) -> Slicing:
    if not any(slicing.dims for slicing in given):
        return WHOLE
    dims = tuple(slicing.dims[0] if slicing.dims else None for slicing in given)
    call = Call(name=name, params=params, shapes=tuple(shapes), dims=dims)
    how = each(call)
    if how is None or how.dim is None:
        return WHOLE
    length = call.length(how.dims)
    inner_shapes, inner = [], []
    for shape, slicing, d in zip(shapes, given, how.dims, strict=True):
        followed = slicing.dims[:1] == (d,)
        inner.append(slicing.slice_slicing if followed else WHOLE)
        inner_shapes.append(shape if d is None else Slicing(dims=(d,), lengths=(1,)).part_shape(shape))
    rest = _slicing(name, how.params, inner_shapes, inner)
    return Slicing(dims=(how.dim, *rest.dims), lengths=(length, *rest.lengths))


# --- running ----------------------------------------------------------------------------------


def _run(closed: jex.ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *values], strict=True))
    for eqn in jaxpr.eqns:
        operands = [read(env, atom) for atom in eqn.invars]
        stacked = any(isinstance(value, Stack) for value in operands)
        outs = _cond(eqn, operands) if stacked and eqn.primitive.name == "cond" else apply(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def _cond(eqn: jex.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """A conditional over stacks is one over their slices."""
    index, values = joined(operands[0]), operands[1:]
    ins = [slicing_of(value) for value in values]
    outs = _in_branches(eqn, [WHOLE, *ins]).results
    branches = [jex.jaxpr_as_fun(unstacked(branch, ins, outs)) for branch in eqn.params["branches"]]
    parts = [part for value, slicing in zip(values, ins, strict=True) for part in _parts(value, slicing)]
    return _stacks(jax.lax.switch(index, branches, *parts), outs)


def slicing_of(value: Any) -> Slicing:
    """How a value is given."""
    if not isinstance(value, Stack):
        return WHOLE
    inner = {slicing_of(part) for part in value.slices}
    rest = inner.pop() if len(inner) == 1 else WHOLE
    return Slicing(dims=(value.dim, *rest.dims), lengths=(len(value.slices), *rest.lengths))


def _stacks(parts: Sequence[Any], slicings: Slicings) -> list[Any]:
    left = iter(parts)
    return [slicing.join([next(left) for _ in range(slicing.num_parts)], _as_stack) for slicing in slicings]


def _as_stack(rows: Sequence[Any], dim: int) -> Stack:
    return Stack(slices=tuple(rows), dim=dim)


def _parts(value: Any, slicing: Slicing) -> list[Any]:
    if not slicing.dims:
        return [joined(value)]
    rows = slices_of(value, slicing.dims[0])
    return [part for row in rows for part in _parts(row, slicing.slice_slicing)]
