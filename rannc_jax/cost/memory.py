"""Bytes of a group of operations: what is kept from forward to backward, and what lives meanwhile.

Residuals follow what `jax.vjp` keeps: a rule for every class of primitive says which operands, results
or masks its derivative needs, and only for operands whose gradient is asked. A value counts once;
parameters, other program inputs, prologue results and small constants are held anyway and not counted.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from rannc_jax.contract import Remat
from rannc_jax.cost import primitives
from rannc_jax.cost.flops import Fusion
from rannc_jax.cost.fusion import Fused
from rannc_jax.cost.operations import NO_VALUE, Line, Operation, Twins, body_gradients
from rannc_jax.ir.loops import scan_counts


@dataclass(frozen=True, slots=True)
class Temporary:
    """A residual that is no value of the program: number `position` of an operation's derivative rule.

    It has the shape of value `like` (without its last dim, if `statistic`) and that value's dtype
    unless `itemsize` says otherwise.
    """

    operation: int
    position: int
    like: int
    itemsize: int | None = None
    statistic: bool = False

    def nbytes(self, avals: Sequence[Any], nbytes: np.ndarray) -> int:
        """Its size in one of the two traces."""
        if self.like == NO_VALUE:
            return 0
        if self.itemsize is None:
            return int(nbytes[self.like])
        shape = avals[self.like].shape
        return math.prod(shape[:-1] if self.statistic else shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Stacked:
    """What a loop stacks up over its turns."""

    operation: int
    remat: Remat


Residual = int | Temporary | Stacked

_LINEAR = (
    primitives.VIEWS
    | primitives.MOVES
    | primitives.RANDOM
    | primitives.names("add sub neg add_any real imag conj complex reduce_sum cumsum slice reduce_window_sum")
)
_PRODUCTS = primitives.MATMULS | primitives.CONVOLUTIONS
_INDEXED = frozenset({"gather", "dynamic_slice", "dynamic_update_slice"}) | primitives.SCATTERS


def residuals(
    twins: Twins,
    group: Sequence[int],
    remat: Remat,
    gradients: Collection[int],
    held: Collection[int],
    stored: Collection[int] = (),
) -> list[Residual]:
    """What a group keeps besides the values it holds anyway.

    Args:
        twins: the opened program.
        group: operation indices, ascending.
        remat: what the group may keep.
        gradients: value ids that get a cotangent.
        held: value ids that are held anyway: parameters and other inputs, prologue, the group's inputs.
        stored: values that leave the group; whoever reads them holds them.

    Returns:
        Each residual once, in order.
    """
    keep = {Remat.SAVE_ALL: _everything, Remat.SAVE_MATMULS: _products, Remat.RECOMPUTE: _nothing}[remat]
    skip = {*held, *stored, NO_VALUE}
    found = keep(twins, group, gradients, held)
    return [value for value in dict.fromkeys(found) if value not in skip]


def residual_bytes(twins: Twins, kept: Collection[Residual]) -> Line:
    """Bytes of residuals, by rows."""
    total = [0.0, 0.0]
    stacked = Line(0.0, 0.0)
    for residual in kept:
        if isinstance(residual, Stacked):
            stacked += _stacked_bytes(twins, residual)
            continue
        for which, opened in enumerate((twins.first, twins.second)):
            sizes = twins.nbytes[which]
            size = sizes[residual] if isinstance(residual, int) else residual.nbytes(opened.avals, sizes)
            total[which] += int(size)
    return twins.line(*total) + stacked


def _stacked_bytes(twins: Twins, loop: Stacked) -> Line:
    """Constants of the loop are held; everything else that a turn keeps is stacked."""
    total = Line(0.0, 0.0)
    eqn = twins.first.operations[loop.operation].eqn
    constants = scan_counts(eqn.params)[0] if eqn.primitive.name == "scan" else 0
    for body, turns in twins.bodies[loop.operation]:
        group = range(len(body.first.operations))
        kept = residuals(body, group, loop.remat, body_gradients(body.first), range(constants))
        line = residual_bytes(body, kept)
        total += Line(turns * line.fixed, turns * line.slope)
    return total


def _nothing(*_: Any) -> list[Residual]:
    return []


def _products(
    twins: Twins, group: Sequence[int], gradients: Collection[int], held: Collection[int]
) -> list[Residual]:
    """Results of products, convolutions and attention that the rest can be made from again.

    Walks back from everything that derivative rules need and stops at these results (scores excepted),
    so a result that only adds to the output is not kept.
    """
    ops = twins.first.operations
    definer = {v: index for index in group for v in ops[index].writes}
    scores = attention_scores(twins, group)
    kept: dict[Residual, None] = {}
    stack: list[int] = []
    for residual in _everything(twins, group, gradients, held):
        if isinstance(residual, int):
            stack.append(residual)
        else:
            stack += (
                *ops[residual.operation].reads,
                residual.like if isinstance(residual, Temporary) else NO_VALUE,
            )
    seen: set[int] = set(held)
    while stack:
        value = stack.pop()
        index = definer.get(value)
        if index is None or value in seen:
            continue
        seen.add(value)
        op = ops[index]
        if op.is_matmul and index not in scores:
            kept[value] = None
            if op.attention:
                kept[_logsumexp(index, op)] = None
            continue
        if op.bodies and any(v in gradients for v in op.writes):
            kept[Stacked(index, Remat.SAVE_MATMULS)] = None
        stack += op.reads
    return list(kept)


def _logsumexp(index: int, op: Operation) -> Temporary:
    """What fused attention keeps besides its operands and results: float32, without the last dim."""
    return Temporary(index, 0, op.writes[0], 4, statistic=True)


def _everything(
    twins: Twins, group: Sequence[int], gradients: Collection[int], held: Collection[int]
) -> list[Residual]:
    """What every derivative rule needs; a checkpoint keeps its operands, a custom_vjp also its results."""
    kept: list[Residual] = []
    seen: set[int] = set()
    for index in group:
        op = twins.first.operations[index]
        if op.region < 0:
            if any(v in gradients for v in op.writes):
                kept += _rule(twins, index, op, gradients)
        elif op.region not in seen:
            seen.add(op.region)
            region = twins.first.regions[op.region]
            if any(v in gradients for v in region.writes):
                kept += region.reads if region.recomputes else (*region.reads, *region.writes)
    return kept


def attention_scores(twins: Twins, group: Sequence[int]) -> set[int]:
    """Matrix products whose result only feeds a softmax that feeds another batched product."""
    ops = twins.first.operations
    return {
        index
        for index in group
        if ops[index].name == "dot_general" and _batched(ops[index]) and _only_softmax(twins, index)
    }


def peak_bytes(twins: Twins, fused: Fused, held: Collection[int], escaping: Collection[int]) -> Line:
    """Largest sum of values that reach memory and are alive together in one forward.

    A value dies after the last kernel that reads it; values that leave the group live to the end.
    """
    ops = twins.first.operations
    last: dict[int, int] = {}
    for position, kernel in enumerate(fused.kernels):
        for index in kernel.members:
            for value in ops[index].reads:
                last[fused.source(value)] = position
    end = len(fused.kernels)
    last.update((fused.source(value), end) for value in escaping)
    peaks = (_walk(twins, fused, last, set(held), which) for which in (0, 1))
    return twins.line(*(float(peak) for peak in peaks))


def _walk(twins: Twins, fused: Fused, last: dict[int, int], held: set[int], which: int) -> int:
    ops, nbytes = twins.first.operations, twins.nbytes[which]
    dying: dict[int, list[int]] = {}
    alive = peak = 0
    for position, kernel in enumerate(fused.kernels):
        for value in ops[kernel.root].writes:
            if value in held:
                continue
            alive += int(nbytes[value])
            dying.setdefault(last.get(value, position), []).append(value)
        peak = max(peak, alive + _inside(twins, kernel.root, which))
        alive -= sum(int(nbytes[value]) for value in dying.get(position, ()))
    return peak


def _inside(twins: Twins, index: int, which: int) -> int:
    """What one turn of a loop has alive besides its results."""
    if index not in twins.bodies:
        return 0
    sizes = (body.nbytes[which][body.first.num_inputs :] for body, _ in twins.bodies[index])
    return max(int(size.max(initial=0)) * 2 for size in sizes)


def _rule(twins: Twins, index: int, op: Operation, gradients: Collection[int]) -> list[Residual]:
    """What the derivative of one operation needs, for the operands whose gradient is asked."""
    name = op.name
    active = [v in gradients for v in op.reads]
    if op.attention:
        return [*op.reads, *op.writes, _logsumexp(index, op)]
    if op.bodies:
        return [*op.reads, Stacked(index, Remat.SAVE_ALL)]
    if name in _LINEAR or not any(active):
        return []
    if name in _PRODUCTS:
        return [other for on, other in zip(active[:2], (op.reads[1], op.reads[0]), strict=True) if on]
    if name in _RULES:
        return _RULES[name](index, op, active)
    if name in primitives.ARITHMETIC | primitives.TRANSCENDENTAL:
        return _elementwise(index, op, active)
    if name in _INDEXED:
        return [v for v in op.reads if v != NO_VALUE and _is_integer(twins.first.avals[v])]
    return [*op.reads, *op.writes]


Rule = Callable[[int, Operation, list[bool]], list[Residual]]


# Shapes to ask JAX with: results and most operands are full; an operand may be one along some dims.
_SCALAR, _FULL, _THIN = (), (3, 5), (3, 1)


def _elementwise(index: int, op: Operation, active: list[bool]) -> list[Residual]:
    """What JAX itself keeps, found by differentiating the primitive at a tiny size."""
    if op.custom_jvp and op.name in ("max", "min"):
        return [Temporary(index, 0, op.writes[0], 1)]  # relu and its kind keep a bool mask
    whole = op.eqn.outvars[0].aval.shape
    shapes = [
        _SCALAR if a.aval.shape == () else _FULL if a.aval.shape == whole else _THIN for a in op.eqn.invars
    ]
    dtypes = [a.aval.dtype for a in op.eqn.invars]
    constant = [v == NO_VALUE for v in op.reads]
    params = tuple(sorted(op.eqn.params.items()))
    operands = tuple(zip(shapes, dtypes, constant, active, strict=True))
    thin = next((v for v, s in zip(op.reads, shapes, strict=True) if s == _THIN), NO_VALUE)
    kept: list[Residual] = []
    for position, (where, shape, itemsize) in enumerate(_asked(op.eqn.primitive, params, operands)):
        if where is None:
            like = op.writes[0] if shape == _FULL else thin
            kept.append(Temporary(index, position, like, itemsize))
        else:
            kept.append((*op.reads, op.writes[0])[where])
    return kept


@functools.lru_cache(maxsize=4096)
def _asked(
    primitive: jex.Primitive,
    params: tuple[tuple[str, Any], ...],
    operands: tuple[tuple[tuple[int, ...], Any, bool, bool], ...],
) -> tuple[tuple[int | None, tuple[int, ...], int], ...]:
    """Residuals of an elementwise primitive as (operand number or one more for the result, shape, itemsize).

    Of each operand `operands` says: shape, dtype, whether it is a constant, whether it wants a gradient.
    What derives from constants alone is made again for nothing and left out, and so are scalars.
    """
    chosen = [i for i, (*_, on) in enumerate(operands) if on]

    def whole(*values: Any) -> tuple[Any, list[Any]]:
        def apply(some: list[Any]) -> Any:
            full = [
                np.ones(s, d) if const else v for (s, d, const, _), v in zip(operands, values, strict=True)
            ]
            for i, x in zip(chosen, some, strict=True):
                full[i] = x
            return primitive.bind(*full, **dict(params))

        out, pull = jax.vjp(apply, [values[i] for i in chosen])
        return out, jax.tree.leaves(pull)

    core = jax.make_jaxpr(whole)(*(jax.ShapeDtypeStruct(s, d) for s, d, *_ in operands)).jaxpr
    varying = set(core.invars)
    for eqn in core.eqns:
        if any(not isinstance(a, jex.Literal) and a in varying for a in eqn.invars):
            varying.update(eqn.outvars)
    named = {v: i for i, v in enumerate((*core.invars, core.outvars[0]))}
    leaves = [a for a in core.outvars[1:] if not isinstance(a, jex.Literal) and a in varying]
    return tuple(
        (named.get(a), a.aval.shape, np.dtype(a.aval.dtype).itemsize)
        for a in dict.fromkeys(leaves)
        if a.aval.shape != _SCALAR
    )


def _reduced_extremum(index: int, op: Operation, active: list[bool]) -> list[Residual]:
    return [Temporary(index, 0, op.reads[0]), op.writes[0]]


def _sort(index: int, op: Operation, active: list[bool]) -> list[Residual]:
    return [Temporary(index, 0, op.writes[0], 4)]  # the permutation, int32


_RULES: dict[str, Rule] = {
    "reduce_max": _reduced_extremum,
    "reduce_min": _reduced_extremum,
    "sort": _sort,
    "top_k": _sort,
}


def _is_integer(aval: Any) -> bool:
    return bool(np.issubdtype(aval.dtype, np.integer))


def _batched(op: Operation) -> bool:
    return bool(op.eqn.params["dimension_numbers"][1][0])


def _only_softmax(twins: Twins, start: int) -> bool:
    ops, works = twins.first.operations, twins.works[0]
    members = set()
    frontier = [start]
    exponential = product = False
    while frontier:
        index = frontier.pop()
        for value in ops[index].writes:
            if value in twins.first.outputs:
                return False
            for reader in twins.consumers.get(value, ()):
                if reader in members:
                    continue
                op = ops[reader]
                if op.name == "dot_general" and _batched(op):
                    product = True
                    continue
                if works[reader].fusion is Fusion.WHOLE:
                    return False
                exponential |= op.name in ("exp", "exp2")
                members.add(reader)
                frontier.append(reader)
    return exponential and product
