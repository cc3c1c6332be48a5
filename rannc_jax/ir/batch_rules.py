"""Rules for work that goes element by element and for work that only moves elements."""

import itertools
from dataclasses import replace
from math import prod

import numpy as np

from rannc_jax.ir import batch_flow as algebra
from rannc_jax.ir.batch_call import Call, rule
from rannc_jax.ir.batch_flow import Coupled, Flow, Kind, moved
from rannc_jax.ir.batch_info import RowLayout

BENDING = """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex cos cosh
    digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow
    is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min ne nextafter not one_minus_square or
    polygamma population_count pow
    regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square tan tanh xor zeta
"""
LINEAR = """
    neg copy reduce_precision real imag conj stop_gradient device_put sharding_constraint name
"""


def placed(call: Call, flow: Flow) -> list[Flow]:
    """The outcome of element-by-element work, with the rows where the operands have them."""
    layout, loose = call.layout()
    confirmed = any(f.layout is not None and not f.loose and not f.origin for f in call.flows)
    return [spread(flow, layout, loose, frozenset() if confirmed else flow.origin)]


def spread(flow: Flow, layout: RowLayout | None, loose: bool, origin: frozenset[int] = frozenset()) -> Flow:
    """A flow with its layout; only values that are the same in every row may have a loose one."""
    alike = flow.kind is Kind.FREE or flow.reduced
    return replace(flow, layout=layout, loose=loose and alike and layout is not None, origin=origin)


@rule(*BENDING.split())
def _bend(call: Call) -> list[Flow]:
    first = call.flows[0]
    if call.name == "lt" and first.kind is Kind.INDEX and call.flows[1].zero:
        return [Flow(layout=first.layout, constant=0.0, integral=True)]
    flow = algebra.bend(call, *call.flows)
    if call.name in ("lt", "eq", "ne", "gt", "max"):
        flow = _compared(call, flow)
    return placed(call, flow)


def _compared(call: Call, flow: Flow) -> Flow:
    """Comparisons with a number, and max(w, 1), keep what a guarded divisor needs."""
    left, right = call.flows
    constant, other = (left.constant, right) if right.constant is None else (right.constant, left)
    if constant is None or flow.kind is not Kind.STATISTIC or flow.root is None:
        return flow
    if call.name == "max":
        small = constant <= 1e-6 or (constant <= 1 and other.integral)
        pure = other.kind is Kind.SUM and constant >= 0
        return replace(flow, guard=pure, additive=pure and small)
    above = "gt" if other is left else "lt"
    test = {"eq": "zero", "ne": "nonzero", above: "nonzero"}.get(call.name)
    return replace(flow, zero_test=test) if constant == 0 and other.kind is Kind.SUM else flow


@rule(*LINEAR.split())
def _linear(call: Call) -> list[Flow]:
    (flow,) = call.flows
    if call.name == "neg":
        if flow.kind is Kind.INDEX or flow.columns:
            raise Coupled
        flow = replace(flow, constant=None, ident=None, root=None, guard=False, zero_test=None)
    elif call.name == "stop_gradient":
        flow = replace(flow, param=False)
    return [flow]


@rule("optimization_barrier")
def _barrier(call: Call) -> list[Flow]:
    return list(call.flows)


@rule("convert_element_type")
def _convert(call: Call) -> list[Flow]:
    (flow,) = call.flows
    old, new = (np.dtype(v.aval.dtype) for v in (call.eqn.invars[0], call.eqn.outvars[0]))
    keeps = old.kind in "biu" or new.kind not in "biu"
    if keeps and not (new.kind == "b" and old.kind != "b"):
        return [flow]
    return placed(call, algebra.bend(call, flow))


@rule("bitcast_convert_type", "random_wrap", "random_unwrap", "random_clone")
def _bitcast(call: Call) -> list[Flow]:
    (flow,) = call.flows
    bent = algebra.bend(call, flow)
    if flow.layout is not None and flow.layout.dim >= min(len(call.shape(0)), len(call.out_shape())):
        raise Coupled
    return [replace(bent, layout=flow.layout, loose=flow.loose)]


@rule("add", "sub", "add_any", "add_jaxvals")
def _add(call: Call) -> list[Flow]:
    left, right = call.flows
    same = _row_numbers_kept(call, 0.0)
    if same is not None:
        return [same]
    if call.name == "sub" and left.zero:
        right = replace(right, constant=None, root=None)
    return placed(call, replace(algebra.add(call, left, right), constant=None))


def _row_numbers_kept(call: Call, neutral: float) -> Flow | None:
    """0 + arange(rows) and 1 * arange(rows) are still the numbers of the rows."""
    left, right = call.flows
    if right.kind is Kind.FREE and right.constant == neutral and left.kind is Kind.INDEX:
        return left
    if left.kind is Kind.FREE and left.constant == neutral and right.kind is Kind.INDEX:
        return None if call.name == "sub" else right
    return None


@rule("mul")
def _multiply(call: Call) -> list[Flow]:
    same = _row_numbers_kept(call, 1.0)
    if same is not None:
        return [same]
    return placed(call, algebra.multiply(call, *call.flows))


@rule("div")
def _divide(call: Call) -> list[Flow]:
    if np.dtype(call.eqn.outvars[0].aval.dtype).kind in "iu":
        return placed(call, algebra.bend(call, *call.flows))
    return placed(call, algebra.divide(call, *call.flows))


@rule("select_n")
def _select(call: Call) -> list[Flow]:
    which, *cases = call.flows
    if which.kind is Kind.FREE and which.constant is not None and not which.varies:
        return [cases[int(which.constant)]]
    return placed(call, algebra.select(call, which, tuple(cases)))


@rule("broadcast_in_dim")
def _broadcast(call: Call) -> list[Flow]:
    flow = call.flows[0]
    dims = call.params["broadcast_dimensions"]
    if flow.layout is None:
        layout = call.guessed()
        return [replace(flow, layout=layout, loose=layout is not None)]
    return [algebra.at(flow, int(dims[flow.layout.dim]))]


@rule("reshape")
def _reshape(call: Call) -> list[Flow]:
    flow = call.flows[0]
    if flow.layout is None or call.params.get("dimensions") is not None:
        if flow.layout is not None or call.row_dim() is not None:
            raise Coupled
        return [flow]
    found = call.row_dim()
    if found is None:
        raise Coupled
    shape, new = call.shape(0), call.out_shape()
    layout = reshaped(flow.layout, shape, new, found[0], call.findings.rows)
    free = flow.loose or flow.origin
    if layout is None and free:
        for other in _splits(flow.layout):
            layout = reshaped(other, shape, new, found[0], call.findings.rows)
            if layout is not None:
                if flow.origin:
                    call.findings.reread.update(dict.fromkeys(flow.origin, other))
                    raise Coupled
                break
    if layout is None:
        raise Coupled
    return [moved(flow, layout, loose=flow.loose and new[found[0]] == shape[flow.layout.dim])]


def _splits(layout: RowLayout) -> list[RowLayout]:
    multiple = layout.outer * layout.inner
    outers = [n for n in range(1, multiple + 1) if multiple % n == 0]
    return [RowLayout(layout.dim, outer, multiple // outer) for outer in outers]


def reshaped(
    layout: RowLayout, shape: tuple[int, ...], new: tuple[int, ...], dim: int, rows: int
) -> RowLayout | None:
    """Where the rows lie after a reshape, if they lie in `dim` of the new shape; None if they cannot.

    In memory a value is [outer, rows, inner]; so it is in the new shape, with dims before and after.
    """
    before = prod(shape[: layout.dim]) * layout.outer
    after = prod(shape[layout.dim + 1 :]) * layout.inner
    outer, outer_rest = divmod(before, prod(new[:dim]))
    inner, inner_rest = divmod(after, prod(new[dim + 1 :]))
    if outer_rest or inner_rest or outer * rows * inner != new[dim]:
        return None
    return RowLayout(dim, outer, inner)


@rule("transpose")
def _transpose(call: Call) -> list[Flow]:
    flow = call.flows[0]
    if flow.layout is None:
        return [flow]
    dim = list(call.params["permutation"]).index(flow.layout.dim)
    return [algebra.at(flow, dim)]


@rule("squeeze")
def _squeeze(call: Call) -> list[Flow]:
    flow, dropped = call.flows[0], call.params["dimensions"]
    return [shifted(flow, dropped)]


def shifted(flow: Flow, dropped: tuple[int, ...]) -> Flow:
    """The same rows with dims missing."""
    if flow.layout is None:
        return flow
    if flow.layout.dim in dropped:
        raise Coupled
    dim = flow.layout.dim - sum(d < flow.layout.dim for d in dropped)
    return algebra.at(flow, dim)


def joined(call: Call, *flows: Flow) -> Flow:
    """Values side by side: the scale must be one. Layouts are the caller's business."""
    flow = algebra.any_of(call, *flows)
    return replace(flow, ident=None, root=None, guard=False, zero_test=None)


@rule("concatenate")
def _concatenate(call: Call) -> list[Flow]:
    dim = call.params["dimension"]
    if any(f.kind is Kind.INDEX or f.columns for f in call.flows):
        return [_index_columns(call, dim)]
    flow = joined(call, *call.flows)
    having = [f.layout for f in call.flows if f.layout is not None]
    if any(h.dim == dim for h in having):
        if len(having) != len(call.flows) or len({(h.dim, h.inner) for h in having}) > 1:
            raise Coupled
        return [moved(flow, replace(having[0], outer=sum(h.outer for h in having)))]
    return [spread(flow, *call.layout())]


@rule("stack")
def _stack(call: Call) -> list[Flow]:
    axis = call.params["axis"]
    if any(f.kind is Kind.INDEX or f.columns for f in call.flows):
        raise Coupled
    flow = joined(call, *call.flows)
    if all(f.layout is None for f in call.flows):
        layout = call.guessed()
        return [spread(flow, layout, layout is not None)]
    layout, loose = call.layout(len(call.shape(0)))
    assert layout is not None
    return [spread(flow, replace(layout, dim=layout.dim + (layout.dim >= axis)), loose)]


@rule("tile")
def _tile(call: Call) -> list[Flow]:
    flow = call.flows[0]
    if flow.kind is Kind.INDEX or flow.columns:
        raise Coupled
    flow = joined(call, flow)
    if flow.layout is None:
        layout = call.guessed()
        return [spread(flow, layout, layout is not None)]
    if call.params["reps"] != call.twin.params["reps"]:
        raise Coupled  # rows in two dims
    times = call.params["reps"][flow.layout.dim]
    return [moved(flow, replace(flow.layout, outer=flow.layout.outer * times))]


def _index_columns(call: Call, dim: int) -> Flow:
    """Row numbers beside other indices, as in x[arange(rows), labels]."""
    if dim != len(call.out_shape()) - 1 or any(f.layout and f.layout.dim == dim for f in call.flows):
        raise Coupled
    layout, _ = call.layout()
    plain = [f for f in call.flows if f.kind is not Kind.INDEX]
    if any(f.kind not in (Kind.FREE, Kind.ROWS) or not f.plain for f in plain):
        raise Coupled
    columns: set[int] = set()
    start = 0
    for operand, flow in enumerate(call.flows):
        size = call.shape(operand)[dim]
        if flow.kind is Kind.INDEX:
            columns |= set(range(start, start + size))
        columns |= {start + c for c in flow.columns}
        start += size
    flow = algebra.blend(Kind.ROWS, *call.flows, columns=frozenset(columns))
    return replace(flow, layout=layout, origin=frozenset())


@rule("pad")
def _pad(call: Call) -> list[Flow]:
    flow, filling = call.flows
    if flow.layout is not None and tuple(call.params["padding_config"][flow.layout.dim]) != (0, 0, 0):
        raise Coupled
    return [replace(joined(call, flow, filling), layout=flow.layout, origin=frozenset())]


@rule("slice")
def _slice(call: Call) -> list[Flow]:
    flow = call.flows[0]
    if flow.columns:
        raise Coupled
    if flow.layout is None:
        return [replace(flow, constant=None)]
    dim = flow.layout.dim
    strides = call.params["strides"]
    if strides is not None and strides[dim] != 1:
        raise Coupled
    span = [(c.params["start_indices"][dim], c.params["limit_indices"][dim]) for c in (call.eqn, call.twin)]
    return [cut(call, flow, span[0], span[1])]


def cut(call: Call, flow: Flow, span: tuple[int, int], twin_span: tuple[int, int]) -> Flow:
    """Part of the dim that rows lie in: whole blocks of all rows, or nothing that has a name."""
    layout = flow.layout
    assert layout is not None
    block, twin_block = (n * layout.inner for n in (call.findings.rows, call.findings.twin_rows))
    mine = [divmod(edge, block) for edge in span]
    other = [divmod(edge, twin_block) for edge in twin_span]
    if mine != other or any(rest for _, rest in mine):
        raise Coupled
    outer = mine[1][0] - mine[0][0]
    if outer == layout.outer:
        return flow
    if flow.kind is Kind.INDEX:
        raise Coupled
    return moved(flow, replace(layout, outer=outer))


@rule("split", "unstack")
def _split(call: Call) -> list[Flow]:
    flow, axis = call.flows[0], call.params["axis"]
    if flow.columns:
        raise Coupled
    flow = replace(flow, constant=None, ident=None, guard=False, zero_test=None)
    if call.name == "unstack":
        return [shifted(flow, (axis,))] * len(call.eqn.outvars)
    if flow.layout is None or flow.layout.dim != axis:
        return [flow] * len(call.eqn.outvars)
    edges = [np.cumsum([0, *c.params["sizes"]]).tolist() for c in (call.eqn, call.twin)]
    spans = zip(*(itertools.pairwise(e) for e in edges), strict=True)
    return [cut(call, flow, mine, other) for mine, other in spans]


@rule("dynamic_slice")
def _dynamic_slice(call: Call) -> list[Flow]:
    flow, *starts = call.flows
    if any(s.kind is not Kind.FREE or not s.plain for s in starts) or flow.columns:
        raise Coupled
    sizes = [c.params["slice_sizes"] for c in (call.eqn, call.twin)]
    if flow.layout is not None and not call.full(0, sizes[0], sizes[1], flow.layout.dim):
        raise Coupled
    return [replace(flow, constant=None, ident=None)]


@rule("dynamic_update_slice")
def _dynamic_update_slice(call: Call) -> list[Flow]:
    flow, update, *starts = call.flows
    if any(s.kind is not Kind.FREE or not s.plain for s in starts):
        raise Coupled
    joint = joined(call, flow, update)
    layouts = {f.layout for f in (flow, update) if f.layout is not None}
    if not layouts:
        return [joint]
    if flow.loose and update.layout is not None:
        layouts = {update.layout}
    elif update.loose and flow.layout is not None:
        layouts = {flow.layout}
    layout = layouts.pop()
    sizes = [c.invars[1].aval.shape for c in (call.eqn, call.twin)]
    if layouts or not call.full(0, sizes[0], sizes[1], layout.dim):
        raise Coupled
    return [moved(joint, layout)]


@rule("rev")
def _rev(call: Call) -> list[Flow]:
    flow = call.flows[0]
    if flow.columns or (flow.layout is not None and flow.layout.dim in call.params["dimensions"]):
        raise Coupled
    return [flow]


@rule("iota")
def _iota(call: Call) -> list[Flow]:
    layout = call.guessed()
    if layout is None:
        return [Flow(integral=True)]
    if layout.dim != call.params["dimension"]:
        return [Flow(layout=layout, loose=layout.inner > 1, integral=True)]
    if layout.inner > 1:
        raise Coupled
    return [Flow(kind=Kind.INDEX, layout=layout, integral=True)]
