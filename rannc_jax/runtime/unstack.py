"""A whole-tree program over stacked leaves as one over their slices, with the same numbers.

An optimizer is written over the user's tree, in which a leaf may be stacked over layers of several stages.
Traced once, its program is carried over to the slices (`ir/stacks.py`): work on elements goes slice by
slice, sums over a leaf become sums of sums. What looks at a whole leaf in another way gets the joined
array; where its slices live on several stages, cutting then says so.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex

from rannc_jax.ir.evaluate import read
from rannc_jax.ir.leaves import WHOLE, Slicing
from rannc_jax.ir.stacks import Call, Stack, apply, each, joined, slices_of

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


def result_slicings(jaxpr: jex.Jaxpr, ins: Slicings) -> list[Slicing]:
    """How the outputs come out of slice-by-slice work if the inputs are given so."""
    found: dict[jex.Var, Slicing] = dict.fromkeys(jaxpr.constvars, WHOLE)
    found.update(zip(jaxpr.invars, ins, strict=True))

    def of(atom: Any) -> Slicing:
        return WHOLE if isinstance(atom, jex.Literal) else found[atom]

    for eqn in jaxpr.eqns:
        given = [of(atom) for atom in eqn.invars]
        if eqn.primitive.name == "cond":
            outs = _cond_slicings(eqn, given)
        elif len(eqn.outvars) == 1:
            outs = [_slicing(eqn.primitive.name, eqn.params, [a.aval.shape for a in eqn.invars], given)]
        else:
            outs = [WHOLE] * len(eqn.outvars)
        found.update(zip(eqn.outvars, outs, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _cond_slicings(eqn: jex.JaxprEqn, given: Slicings) -> list[Slicing]:
    """Sliced as the first branch that slices it says."""
    cases = [result_slicings(branch.jaxpr, given[1:]) for branch in eqn.params["branches"]]
    return [next((s for s in case if s.dims), WHOLE) for case in zip(*cases, strict=True)]


def _slicing(
    name: str, params: dict[str, Any], shapes: Sequence[tuple[int, ...]], given: Slicings
) -> Slicing:
    if not any(slicing.dims for slicing in given):
        return WHOLE
    dims = tuple(slicing.dims[0] if slicing.dims else None for slicing in given)
    how = each(Call(name=name, params=params, shapes=tuple(shapes), dims=dims))
    if how is None or how.dim is None:
        return WHOLE
    length = next(shape[d] for shape, d in zip(shapes, how.dims, strict=True) if d is not None)
    inner_shapes, inner = [], []
    for shape, slicing, d in zip(shapes, given, how.dims, strict=True):
        followed = slicing.dims[:1] == (d,)
        inner.append(Slicing(dims=slicing.dims[1:], lengths=slicing.lengths[1:]) if followed else WHOLE)
        inner_shapes.append(shape if d is None else Slicing(dims=(d,), lengths=(length,)).part_shape(shape))
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
    outs = _cond_slicings(eqn, [WHOLE, *ins])
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
    inner = Slicing(dims=slicing.dims[1:], lengths=slicing.lengths[1:])
    return [part for one in slices_of(value, slicing.dims[0]) for part in _parts(one, inner)]
