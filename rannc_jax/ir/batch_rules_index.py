"""Rules for gather and scatter: indices that point into the batch, and indices that are the batch's."""

from dataclasses import replace

from rannc_jax.ir import batch_flow as algebra
from rannc_jax.ir.batch_call import Call, rule
from rannc_jax.ir.batch_flow import Coupled, Flow, Kind, blend, moved
from rannc_jax.ir.batch_info import RowLayout
from rannc_jax.ir.batch_rules import joined
from rannc_jax.ir.batch_rules_reduce import total


def _index_ok(flow: Flow) -> None:
    if flow.kind not in (Kind.FREE, Kind.ROWS, Kind.INDEX) or not flow.plain:
        raise Coupled


def _own_rows(indices: Flow, column: int | None) -> bool:
    """Do the indices say, in this column, "my own row"?"""
    return column is not None and (indices.kind is Kind.INDEX or column in indices.columns)


def _pure(indices: Flow) -> bool:
    return indices.kind is not Kind.INDEX and not indices.columns


def _linear_in(call: Call, operand: Flow, indices: Flow) -> Flow:
    """Elements of `operand` chosen by `indices`."""
    if operand.kind is Kind.INDEX or operand.columns:
        raise Coupled
    as_index = replace(indices, kind=Kind.ROWS if not _pure(indices) else indices.kind, columns=frozenset())
    if as_index.kind is Kind.ROWS and operand.reduced:
        return algebra.meet(call, operand, as_index)
    kind = operand.kind if as_index.kind is Kind.FREE else Kind.ROWS
    flow = blend(kind, operand, as_index, integral=operand.integral, param=operand.param)
    kept = {name: getattr(operand, name) for name in ("power", "varies", "divisor", "affine", "several")}
    if operand.kind is Kind.STATISTIC:
        kept |= {"steady": operand.steady, "cause": operand.cause}
    return replace(flow, **kept)


@rule("gather")
def _gather(call: Call) -> list[Flow]:
    operand, indices = call.flows
    _index_ok(indices)
    flow = _linear_in(call, operand, indices)
    numbers = call.params["dimension_numbers"]
    rank = len(call.out_shape())
    batch_positions = [d for d in range(rank) if d not in numbers.offset_dims]
    if operand.layout is None:
        if not _pure(indices):
            raise Coupled  # row numbers into a table: the value depends on where a row lies
        return [_at_index(flow, indices, batch_positions)]
    dim = operand.layout.dim
    if dim in numbers.operand_batching_dims:
        partner = numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(dim)]
        if not _pure(indices) or indices.layout is None or indices.layout.dim != partner:
            raise Coupled
        if not (indices.loose or operand.loose or indices.layout == replace(operand.layout, dim=partner)):
            raise Coupled
        firm = indices.layout if operand.loose else replace(operand.layout, dim=partner)
        return [moved(flow, replace(firm, dim=batch_positions[partner]))]
    column = list(numbers.start_index_map).index(dim) if dim in numbers.start_index_map else None
    if _own_rows(indices, column):
        return [_own_row(call, flow, operand, indices, batch_positions)]
    sizes = [c.params["slice_sizes"] for c in (call.eqn, call.twin)]
    if (
        indices.layout is not None
        or not call.full(0, sizes[0], sizes[1], dim)
        or dim in numbers.collapsed_slice_dims
    ):
        raise Coupled
    window = [d for d in range(len(call.shape(0))) if d not in numbers.collapsed_slice_dims]
    window = [d for d in window if d not in numbers.operand_batching_dims]
    return [moved(flow, replace(operand.layout, dim=numbers.offset_dims[window.index(dim)]))]


def _at_index(flow: Flow, indices: Flow, positions: list[int]) -> Flow:
    """A table read by indices: rows are where the indices have them."""
    if indices.layout is None:
        return moved(flow, None)
    if indices.layout.dim >= len(positions):
        raise Coupled
    return moved(flow, replace(indices.layout, dim=positions[indices.layout.dim]), loose=indices.loose)


def _own_row(call: Call, flow: Flow, operand: Flow, indices: Flow, positions: list[int]) -> Flow:
    """x[arange(rows), ...]: every row reads from itself (or, if shuffled, from a random row)."""
    one = RowLayout(0)
    assert operand.layout is not None
    if indices.layout is None or replace(indices.layout, dim=0) != one:
        raise Coupled
    if replace(operand.layout, dim=0) != one or indices.layout.dim >= len(positions):
        raise Coupled
    if indices.shuffled:
        call.unspreadable()
    return moved(flow, RowLayout(positions[indices.layout.dim]))


@rule("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter-mul", "scatter_min", "scatter_max")
def _scatter(call: Call) -> list[Flow]:
    operand, indices, updates = call.flows
    _index_ok(indices)
    adds = call.name in ("scatter-add", "scatter_add")
    numbers = call.params["dimension_numbers"]
    where = [d for d in range(len(call.shape(2))) if d not in numbers.update_window_dims]
    if operand.layout is None or operand.loose:
        table = _scatter_into_table(call, where)
        if table is not None:
            return [table]
    layout = operand.layout
    if layout is None:
        raise Coupled
    bending = call.name not in ("scatter", "scatter-add", "scatter_add")
    joint = algebra.bend(call, operand, updates) if bending else joined(call, operand, updates)
    if adds and operand.zero:
        joint = replace(joint, constant=None)
    extra = replace(indices, kind=Kind.FREE if indices.kind is Kind.FREE else Kind.ROWS, columns=frozenset())
    flow = _linear_in(call, joint, extra) if joint.kind is not Kind.MIXED else joint
    if not _scatter_by_row(call, layout, where):
        raise Coupled
    return [moved(flow, layout)]


def _scatter_by_row(call: Call, layout: RowLayout, where: list[int]) -> bool:
    """Does every row's update go to that row?"""
    _, indices, updates = call.flows
    numbers = call.params["dimension_numbers"]
    dim, one = layout.dim, replace(layout, dim=0)

    def lies(flow: Flow, expected: int) -> bool:
        found = flow.layout
        return found is not None and found.dim == expected and (flow.loose or replace(found, dim=0) == one)

    if dim in numbers.operand_batching_dims:
        partner = numbers.scatter_indices_batching_dims[list(numbers.operand_batching_dims).index(dim)]
        return _pure(indices) and lies(indices, partner) and lies(updates, where[partner])
    if dim in numbers.scatter_dims_to_operand_dims:
        column = list(numbers.scatter_dims_to_operand_dims).index(dim)
        if _own_rows(indices, column) and not indices.shuffled and one == RowLayout(0):
            assert indices.layout is not None
            place = indices.layout.dim
            return dim in numbers.inserted_window_dims and place < len(where) and lies(updates, where[place])
    if not _pure(indices) or indices.layout is not None or dim in numbers.inserted_window_dims:
        return False
    window = [d for d in range(len(call.shape(0))) if d not in numbers.inserted_window_dims]
    window = [d for d in window if d not in numbers.operand_batching_dims]
    place = numbers.update_window_dims[window.index(dim)]
    sizes = [c.invars[2].aval.shape for c in (call.eqn, call.twin)]
    full = sizes[0][place] == call.shape(0)[dim] and sizes[1][place] == call.twin.invars[0].aval.shape[dim]
    return full and lies(updates, place)


def _scatter_into_table(call: Call, where: list[int]) -> Flow | None:
    """Updates of all rows summed into a table (counts, segment sums); None if there are no such rows."""
    operand, indices, updates = call.flows
    if operand.layout is not None:
        return None
    if indices.layout is None and updates.layout is None:
        if not _pure(indices):
            raise Coupled
        linear = call.name in ("scatter", "scatter-add", "scatter_add")
        joint = joined(call, operand, updates) if linear else algebra.bend(call, operand, updates)
        return _linear_in(call, joint, indices)
    if not call.name.endswith("add") or not _pure(indices):
        raise Coupled
    if indices.layout is None or updates.layout is None or where[indices.layout.dim] != updates.layout.dim:
        raise Coupled
    firm = {replace(f.layout, dim=0) for f in (indices, updates) if not f.loose and f.layout}
    if len(firm) > 1:
        raise Coupled
    row = _linear_in(call, updates, indices)
    if row.kind is not Kind.ROWS:
        raise Coupled
    summed = total(call, replace(row, layout=updates.layout), 2)
    return replace(algebra.add(call, replace(operand, layout=None), summed), constant=None)
