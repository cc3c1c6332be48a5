"""How equations treat arrays that are given in slices along a dim: a rule a primitive, on shapes alone.

A rule says which operands are sliced along which dim, the parameters of the equation for one slice, and
where the results have the slices, or how they are combined. A primitive without a rule, or a rule that
finds none, looks at the whole array.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from rannc_jax.ir.batch_rules import BENDING, LINEAR

ELEMENTWISE = frozenset(
    f"{BENDING} {LINEAR} add sub mul div add_any select_n convert_element_type".split()
) - {"sharding_constraint", "device_put"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Each:
    """How an equation is applied to every slice.

    Args:
        dims: by operand: the dim that is sliced, None for operands every slice reads whole.
        params: of the equation for one slice.
        dim: where the results have the slices; None if they are combined.
        combine: adds up, say, the results of the slices.
    """

    dims: tuple[int | None, ...]
    params: dict[str, Any]
    dim: int | None
    combine: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An equation with one result, as a rule sees it.

    Args:
        name: of the primitive.
        params: of the equation.
        shapes: by operand; not those of the equation where slices have slices.
        dims: by operand: the dim along which it is given in slices, None if it is given whole.
    """

    name: str
    params: dict[str, Any]
    shapes: Sequence[Sequence[int]]
    dims: tuple[int | None, ...]

    @property
    def dim(self) -> int:
        """The dim of the first operand that is given in slices."""
        return next(d for d in self.dims if d is not None)

    def length(self, dims: Sequence[int | None]) -> int:
        """How many slices there are along `dims`; an operand of size 1 there goes with all of them."""
        return max(shape[d] for shape, d in zip(self.shapes, dims, strict=True) if d is not None)


Rule = Callable[[Call], Each | None]


def each(call: Call) -> Each | None:
    """How an equation treats slices; None if it looks at the whole."""
    rule = _elementwise if call.name in ELEMENTWISE else _RULES.get(call.name)
    return None if rule is None else rule(call)


def _elementwise(call: Call) -> Each | None:
    found = tuple(call.dim if shape else None for shape in call.shapes)  # numbers go with every slice
    return Each(dims=found, params=call.params, dim=call.dim)


def _without(numbers: Sequence[int], dim: int) -> tuple[int, ...]:
    """Dims of an array counted in its slices, which lack `dim`; `dim` itself is left out."""
    return tuple(n - (n > dim) for n in numbers if n != dim)


def _dropped(items: Sequence[Any], position: int) -> tuple[Any, ...]:
    return (*items[:position], *items[position + 1 :])


def _transpose(call: Call) -> Each | None:
    dim = call.dim
    order = call.params["permutation"]
    params = {**call.params, "permutation": _without(order, dim)}
    return Each(dims=(dim,), params=params, dim=tuple(order).index(dim))


def _broadcast(call: Call) -> Each | None:
    dim = call.dim
    shape, places = call.params["shape"], call.params["broadcast_dimensions"]
    if len(call.shapes) > 1 or shape[places[dim]] != call.shapes[0][dim]:
        return None
    out = places[dim]
    params = {
        **call.params,
        "shape": _dropped(shape, out),
        "broadcast_dimensions": _without(_dropped(places, dim), out),
    }
    return Each(dims=(dim,), params=params, dim=out)


def _reshape(call: Call) -> Each | None:
    dim = call.dim
    old, new = call.shapes[0], call.params["new_sizes"]
    if len(call.shapes) > 1 or call.params["dimensions"] is not None:
        return None
    before = _size(old[:dim])
    out = next((k for k, n in enumerate(new) if n == old[dim] and _size(new[:k]) == before), None)
    if out is None:
        return None
    return Each(dims=(dim,), params={**call.params, "new_sizes": _dropped(new, out)}, dim=out)


def _size(sizes: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, sizes, 1)


def _squeeze(call: Call) -> Each | None:
    dim = call.dim
    gone = call.params["dimensions"]
    params = {**call.params, "dimensions": _without(gone, dim)}
    if dim in gone:  # a stack of one slice
        return Each(dims=(dim,), params=params, dim=None, combine=lambda one, other: one)
    return Each(dims=(dim,), params=params, dim=dim - sum(g < dim for g in gone))


def _slice(call: Call) -> Each | None:
    dim = call.dim
    start, limit, steps = (call.params[k] for k in ("start_indices", "limit_indices", "strides"))
    if start[dim] != 0 or limit[dim] != call.shapes[0][dim] or (steps and steps[dim] != 1):
        return None
    params = {
        **call.params,
        "start_indices": _dropped(start, dim),
        "limit_indices": _dropped(limit, dim),
        "strides": steps and _dropped(steps, dim),
    }
    return Each(dims=(dim,), params=params, dim=dim)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": lax.add,
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
    "reduce_xor": lax.bitwise_xor,
}


def _reduce(call: Call) -> Each | None:
    dim = call.dim
    axes = call.params["axes"]
    params = {**call.params, "axes": _without(axes, dim)}
    if dim in axes:
        combine = _COMBINE.get(call.name)
        return None if combine is None else Each(dims=(dim,), params=params, dim=None, combine=combine)
    return Each(dims=(dim,), params=params, dim=dim - sum(a < dim for a in axes))


def _dot_general(call: Call) -> Each | None:
    (left_sum, right_sum), (left_batch, right_batch) = call.params["dimension_numbers"]
    which = 0 if call.dims[0] is not None else 1
    dim, batch, summed = call.dim, (left_batch, right_batch)[which], (left_sum, right_sum)[which]
    found: list[int | None] = [None, None]
    found[which] = dim
    if dim in summed:
        return None
    if dim in batch:
        out = list(batch).index(dim)
        found = [left_batch[out], right_batch[out]]
        left_batch, right_batch = _dropped(left_batch, out), _dropped(right_batch, out)
    elif call.dims[1 - which] is not None:
        return None  # both are stacked, each along a dim of its own
    else:
        free = [d for d in range(len(call.shapes[which])) if d not in (*batch, *summed)]
        ahead = 0 if which == 0 else len(call.shapes[0]) - len(left_sum) - len(left_batch)
        out = len(batch) + ahead + free.index(dim)
    sides = [(left_sum, left_batch), (right_sum, right_batch)]
    renamed = [
        tuple(tuple(n - (d is not None and n > d) for n in part) for part in side)
        for side, d in zip(sides, found, strict=True)
    ]
    numbers = ((renamed[0][0], renamed[1][0]), (renamed[0][1], renamed[1][1]))
    return Each(dims=tuple(found), params={**call.params, "dimension_numbers": numbers}, dim=out)


_RULES: dict[str, Rule] = {
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "slice": _slice,
    "dot_general": _dot_general,
    "argmax": _reduce,
    "argmin": _reduce,
    **dict.fromkeys(_COMBINE, _reduce),
}
