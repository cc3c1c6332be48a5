"""Values given as their slices: equations that treat every slice alike are applied slice by slice.

A `Stack` is an array that is never put together unless someone looks at it whole. Element-by-element work,
moves of other dims, reductions and products run on its slices one by one, with the same numbers as on the
whole; a reduction over the stacked dim combines what the slices give. Everything else gets the joined
array, so every equation has an answer and only the cost differs. Used on programs (layers of a `scan`)
and on optimizers (parameters whose slices live on different stages).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core as jex

from rannc_jax.ir.evaluate import bind
from rannc_jax.ir.flatten import scope
from rannc_jax.ir.stack_rules import Call, each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stack:
    """An array given by its slices along a dim, which the slices lack; a slice may be a Stack again.

    Args:
        slices: in order.
        dim: of the whole array.
    """

    slices: tuple[Any, ...]
    dim: int
    _whole: list[Any] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        inner = self.slices[0].shape
        return (*inner[: self.dim], len(self.slices), *inner[self.dim :])

    def whole(self) -> Any:
        """The joined array; made once."""
        if not self._whole:
            rows = [lax.expand_dims(joined(part), (self.dim,)) for part in self.slices]
            self._whole.append(lax.concatenate(rows, self.dim) if len(rows) > 1 else rows[0])
        return self._whole[0]


def joined(value: Any) -> Any:
    """The value as one array."""
    return value.whole() if isinstance(value, Stack) else value


def slice_of(value: Any, dim: int, index: int) -> Any:
    """A slice of a value along a dim, without that dim."""
    if isinstance(value, Stack) and value.dim == dim:
        return value.slices[index]
    whole = joined(value)
    return lax.squeeze(lax.slice_in_dim(whole, index, index + 1, axis=dim), (dim,))


def slices_of(value: Any, dim: int) -> list[Any]:
    """All slices of a value along a dim."""
    return [slice_of(value, dim, i) for i in range(value.shape[dim])]


def apply(eqn: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply an equation to values, slice by slice where it can be."""
    made = _made_of_slices(eqn, values)
    if made is not None:
        return [made]
    if not any(isinstance(value, Stack) for value in values):
        return bind(eqn, values)
    if eqn.primitive.name == "slice":
        chosen = _chosen(eqn, values[0])
        if chosen is not None:
            return [chosen]
    call = Call(
        name=eqn.primitive.name,
        params=eqn.params,
        shapes=tuple(np.shape(value) for value in values),
        dims=tuple(value.dim if isinstance(value, Stack) else None for value in values),
    )
    how = each(call) if len(eqn.outvars) == 1 else None
    if how is None:
        with scope(eqn):
            wholes = [joined(value) for value in values]
        return bind(eqn, wholes)
    count = call.length(how.dims)
    one = eqn.replace(params=how.params)
    results = []
    for i in range(count):
        pairs = zip(values, how.dims, strict=True)
        operands = [v if d is None else slice_of(v, d, min(i, v.shape[d] - 1)) for v, d in pairs]
        results.append(apply(one, operands)[0])
    if how.combine is not None:
        return [functools.reduce(how.combine, map(joined, results))]
    assert how.dim is not None
    return [Stack(slices=tuple(results), dim=how.dim)]


def _made_of_slices(eqn: jex.JaxprEqn, values: Sequence[Any]) -> Stack | None:
    """What joins values along a new dim, or along one of size 1, is a stack of them already."""
    if eqn.primitive.name == "stack":
        dim, slices = eqn.params["axis"], [joined(value) for value in values]
    elif eqn.primitive.name == "concatenate":
        dim = eqn.params["dimension"]
        if any(value.shape[dim] != 1 for value in values):
            return None
        slices = [slice_of(value, dim, 0) for value in values]
    else:
        return None
    whole = bind(eqn, [joined(value) for value in values])  # as it was, for those who look at the whole
    return Stack(slices=tuple(slices), dim=dim, _whole=whole)


def _chosen(eqn: jex.JaxprEqn, value: Stack) -> Stack | None:
    """A slice along the stacked dim alone is a choice of slices."""
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(start)
    d = value.dim
    kept = [(0, n, 1) for n in value.shape]
    kept[d] = (start[d], limit[d], steps[d])
    if list(zip(start, limit, steps, strict=True)) != kept:
        return None
    return Stack(slices=value.slices[start[d] : limit[d] : steps[d]], dim=d)
