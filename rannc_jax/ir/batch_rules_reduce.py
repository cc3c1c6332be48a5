"""Rules for work that goes over whole dims: sums, scans, windows, sorts, matrices."""

from dataclasses import replace
from typing import Any

from rannc_jax.ir import batch_flow as algebra
from rannc_jax.ir.batch_call import Call, rule
from rannc_jax.ir.batch_flow import Coupled, Flow, Kind, moved
from rannc_jax.ir.batch_rules import shifted


@rule("reduce_sum")
def _sum(call: Call) -> list[Flow]:
    flow, axes = call.flows[0], call.params["axes"]
    flow = replace(flow, ident=None, constant=0.0 if flow.zero else None)
    if flow.layout is None or flow.layout.dim not in axes:
        _no_index(flow)
        if axes:
            flow = replace(flow, guard=False, zero_test=None)
        return [shifted(flow, axes)]
    return [total(call, flow, 0)]


def _no_index(flow: Flow) -> None:
    if flow.kind is Kind.INDEX or flow.columns:
        raise Coupled


def total(call: Call, flow: Flow, operand: int) -> Flow:
    """The sum over rows of a flow; it is zero where rows of this operand are."""
    _no_index(flow)
    if flow.kind is Kind.ROWS:
        call.mask(operand, call.flows[operand].layout)
        return moved(flow, None, kind=Kind.SUM, sources=flow.sources | {call.site})
    if flow.kind is Kind.STATISTIC:
        return moved(flow, None, steady=False, root=None, guard=False, zero_test=None)
    if flow.kind is Kind.SUM and flow.several:
        return algebra.statistic(call, moved(flow, None), Flow(power=1))
    return moved(flow, None, power=flow.power + 1, constant=0.0 if flow.zero else None)


@rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin")
def _extreme(call: Call) -> list[Flow]:
    flow, axes = call.flows[0], call.params["axes"]
    bent = algebra.bend(call, flow)
    if flow.layout is None or flow.layout.dim not in axes:
        return [shifted(replace(bent, layout=flow.layout, loose=flow.loose), axes)]
    call.findings.unmaskable.add(call.equation)
    if flow.kind is Kind.ROWS:
        sites = frozenset({call.site})
        return [moved(bent, None, kind=Kind.STATISTIC, sources=bent.sources | sites, cause=call.site)]
    same = call.name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or")
    return [moved(bent if same else replace(bent, varies=True, steady=False), None)]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(call: Call) -> list[Flow]:
    flow = call.flows[0]
    _along(flow, (call.params["axis"],))
    if call.name == "cumsum":
        return [replace(flow, constant=None)]
    return [_kept(call, flow)]


def _along(flow: Flow, axes: tuple[int, ...]) -> None:
    """Refuse work along the dim that rows lie in."""
    _no_index(flow)
    if flow.layout is not None and flow.layout.dim in axes:
        raise Coupled


def _kept(call: Call, *flows: Flow) -> Flow:
    """Something bent, with the layout of the first operand."""
    bent = algebra.bend(call, *flows)
    return replace(bent, layout=flows[0].layout, origin=frozenset())


@rule("sort")
def _sort(call: Call) -> list[Flow]:
    dim, num_keys = call.params["dimension"], call.params["num_keys"]
    layouts = {f.layout for f in call.flows if not f.loose}
    if any(f.layout is not None and f.layout.dim == dim for f in call.flows):
        return _shuffle(call, call.flows[:num_keys])
    if len(layouts) > 1:
        raise Coupled
    bent = algebra.bend(call, *call.flows)
    layout = layouts.pop() if layouts else call.guessed()
    return [replace(bent, layout=layout, origin=frozenset())] * len(call.flows)


def _shuffle(call: Call, keys: list[Flow]) -> list[Flow]:
    """Rows in random order: every example stays whole, but the order is one of all rows."""
    layouts = {f.layout for f in call.flows}
    if len(layouts) > 1 or not all(f.kind is Kind.ROWS and not f.data and f.plain for f in keys):
        raise Coupled
    call.unspreadable()
    sorted_keys = [Flow(kind=Kind.MIXED, pending=True)] * len(keys)
    return sorted_keys + [replace(f, shuffled=True, origin=frozenset()) for f in call.flows[len(keys) :]]


@rule("top_k", "approx_top_k")
def _top_k(call: Call) -> list[Flow]:
    flow = call.flows[0]
    axis = call.params.get("axis", call.params.get("reduction_dimension", -1))
    _along(flow, (axis % len(call.shape(0)),))
    return [_kept(call, flow)] * 2


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window_and", "reduce_window_or")
def _window(call: Call) -> list[Flow]:
    flow = call.flows[0]
    _no_index(flow)
    if flow.layout is not None:
        _untouched(call.params, flow.layout.dim)
    if call.name == "reduce_window_sum":
        return [replace(flow, constant=None)]
    return [_kept(call, flow)]


def _untouched(params: dict[str, Any], dim: int) -> None:
    """Refuse windows that reach over rows."""
    steps = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if any(params.get(step) is not None and params[step][dim] != 1 for step in steps):
        raise Coupled
    padding = params.get("padding")
    if padding is not None and tuple(padding[dim]) != (0, 0):
        raise Coupled


@rule("select_and_gather_add", "select_and_scatter_add")
def _window_pair(call: Call) -> list[Flow]:
    layouts = {f.layout for f in call.flows}
    if len(layouts) > 1:
        raise Coupled
    layout = layouts.pop()
    if layout is not None:
        _untouched(call.params, layout.dim)
    return [_kept(call, *call.flows)]


@rule("fft")
def _fft(call: Call) -> list[Flow]:
    flow, rank = call.flows[0], len(call.shape(0))
    _along(flow, tuple(range(rank - len(call.params["fft_lengths"]), rank)))
    return [replace(flow, constant=None, integral=False)]


@rule("cholesky", "triangular_solve", "lu", "qr", "eigh", "eig", "svd", "schur", "householder_product")
def _matrices(call: Call) -> list[Flow]:
    """Matrices in the last two dims, one for every index of the others."""
    bent = algebra.bend(call, *call.flows)
    having = {f.layout for f in call.flows if f.layout is not None}
    if not having:
        return [bent] * len(call.eqn.outvars)
    layout = having.pop()
    ranks = {len(v.aval.shape) for v in call.eqn.invars if len(v.aval.shape) >= 2}
    if having or layout.dim >= min(ranks) - 2 or any(f.layout is None for f in call.flows):
        raise Coupled
    return [replace(bent, layout=layout, origin=frozenset())] * len(call.eqn.outvars)


@rule("dot_general")
def _dot(call: Call) -> list[Flow]:
    (contract, batch) = call.params["dimension_numbers"]
    left, right = call.flows
    product = algebra.multiply(call, left, right)
    roles = [_dot_role(f, contract[i], batch[i]) for i, f in enumerate(call.flows)]
    if roles == [("", 0), ("", 0)]:
        return [replace(product, constant=None)]
    if roles[0][0] == roles[1][0] == "contract" and roles[0][1] == roles[1][1]:
        firm = [f for f in (left, right) if not f.loose]
        if len(_shares(firm)) > 1:
            raise Coupled
        if product.kind in (Kind.ROWS, Kind.FREE):
            return [total(call, product, 0 if left.kind is Kind.ROWS else 1)]
        raise Coupled
    if roles[0][0] == roles[1][0] == "batch" and roles[0][1] == roles[1][1]:
        firm = [f for f in (left, right) if not f.loose] or [left]
        if len(_shares(firm)) == 1:
            return [_relaid(product, firm[0], roles[0][1])]
        raise Coupled
    return [_dot_free(call, product, roles)]


def _shares(flows: list[Flow]) -> set[tuple[int, int] | None]:
    """How rows share their dim with other indices; the operands of a product may have it in any place."""
    return {None if f.layout is None else (f.layout.outer, f.layout.inner) for f in flows}


def _relaid(product: Flow, like: Flow, dim: int) -> Flow:
    assert like.layout is not None
    return moved(product, replace(like.layout, dim=dim), constant=None)


def _dot_role(flow: Flow, contract: Any, batch: Any) -> tuple[str, int]:
    """What the rows' dim of an operand is to a dot_general, and its position there."""
    if flow.layout is None:
        return "", 0
    dim = flow.layout.dim
    for role, dims in (("contract", contract), ("batch", batch)):
        if dim in dims:
            return role, list(dims).index(dim)
    others = [d for d in range(dim) if d not in contract and d not in batch]
    return "free", len(batch) + len(others)


def _dot_free(call: Call, product: Flow, roles: list[tuple[str, int]]) -> Flow:
    """Rows of one operand are rows of the result: batch dims, then left's, then right's dims."""
    (contract, batch) = call.params["dimension_numbers"]
    if roles[0][0] == "free" and roles[1][0] == "":
        return _relaid(product, call.flows[0], roles[0][1])
    if roles[1][0] == "free" and roles[0][0] == "":
        before = len(call.shape(0)) - len(contract[0]) - len(batch[0])
        return _relaid(product, call.flows[1], roles[1][1] + before)
    raise Coupled


@rule("conv_general_dilated")
def _convolution(call: Call) -> list[Flow]:
    image, kernel = call.flows
    product = replace(algebra.multiply(call, image, kernel), constant=None)
    if image.layout is None and kernel.layout is None:
        return [product]
    numbers = call.params["dimension_numbers"]
    if kernel.layout is not None or image.layout is None or image.layout.dim != numbers.lhs_spec[0]:
        raise Coupled
    if call.params["batch_group_count"] != 1:
        raise Coupled
    return [_relaid(product, image, numbers.out_spec[0])]
