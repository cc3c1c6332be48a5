"""Run a cut optimizer: its first state, and one update."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from rannc_jax.ir.batch import RowLayout
from rannc_jax.runtime.cut import Kind, Op, Send, Value
from rannc_jax.runtime.offload import Ferry
from rannc_jax.runtime.optimizer import OptimizerCut, values_of
from rannc_jax.runtime.shares import Shares
from rannc_jax.runtime.stacked import flat_parts, packed

Move = Callable[[Sequence[jax.Array], Sequence[RowLayout | None], Mesh], list[jax.Array]]


def init_state(cut: OptimizerCut, shares: Sequence[Shares], params: Any, move: Move) -> Any:
    """The optimizer's first state, each leaf on its stage; `params` lie on theirs and stay valid."""
    parts = flat_parts(params, cut.param_slicing)
    values = dict(zip(values_of(Kind.PARAM, cut.param_place), parts, strict=True))
    run_ops(cut.init, cut.shares_of(shares), values, move, donate=False)
    return _state_tree(cut, values)


def apply_cut(
    cut: OptimizerCut,
    shares: Sequence[Shares],
    grads: Any,
    state: Any,
    params: Any,
    move: Move,
    *,
    loss: jax.Array | None = None,
    donate: bool = True,
) -> tuple[Any, Any]:
    """One update.

    Args:
        cut: from `cut_optimizer`.
        shares: how the state of every stage lies.
        grads, params: trees of arrays, each leaf on its owner's sub-mesh, as the owner's `shares` say.
        state: as `init_state` or the last call returned it.
        move: `transfer.move`.
        loss: on the hub's sub-mesh; needed if `cut.needs_loss`.
        donate: reuse the memory of gradients, parameters and state.

    Returns:
        New parameters and new state.
    """
    slicings = cut.param_slicing
    parts = flat_parts(grads, slicings), flat_parts(state, cut.state_slicing), flat_parts(params, slicings)
    new_params, new_state = update_parts(cut, shares, *parts, move, loss=loss, donate=donate)
    return (
        packed(jax.tree.structure(cut.params), cut.param_slicing, new_params),
        packed(jax.tree.structure(cut.state), cut.state_slicing, new_state),
    )


def update_parts(
    cut: OptimizerCut,
    shares: Sequence[Shares],
    grads: Sequence[Any],
    state: Sequence[Any],
    params: Sequence[Any],
    move: Move,
    *,
    loss: jax.Array | None = None,
    donate: bool = True,
) -> tuple[list[Any], list[Any]]:
    """`apply_cut` on the parts of leaves, in order; may be traced if there is one stage."""
    kinds = ((Kind.GRAD, cut.param_place, grads), (Kind.PARAM, cut.param_place, params))
    values: dict[Value, jax.Array] = {}
    for kind, owner, parts in (*kinds, (Kind.STATE, cut.state_place, state)):
        values.update(zip(values_of(kind, owner), parts, strict=True))
    if cut.needs_loss:
        assert loss is not None, "this optimizer reads the loss"
        values[Value(Kind.LOSS, 0, len(cut.places) - 1)] = loss
    run_ops(cut.update, cut.shares_of(shares), values, move, donate=donate)
    return (
        [values[value] for value in values_of(Kind.NEW_PARAM, cut.param_place)],
        [values[value] for value in values_of(Kind.NEW_STATE, cut.state_place)],
    )


def run_ops(
    ops: Sequence[Op], shares: Sequence[Shares], values: dict[Value, jax.Array], move: Move, *, donate: bool
) -> None:
    """Run programs and sends in order, adding what they give to `values`. `shares` are those of places."""
    ferry = Ferry(ops, shares, values, donate=donate)
    for op in ops:
        if isinstance(op, Send):
            arrays = [values[value] for value in op.values]
            values.update(
                zip(op.arrived, move(arrays, [None] * len(arrays), shares[op.target].mesh), strict=True)
            )
        elif shares[op.stage].offload:
            ferry.run(op)
        else:
            program = op.compiled(shares[op.stage], op.donates if donate else ())
            values.update(zip(op.outputs, program(*(values[value] for value in op.inputs)), strict=True))


def _state_tree(cut: OptimizerCut, values: Mapping[Value, jax.Array]) -> Any:
    new = [values[value] for value in values_of(Kind.NEW_STATE, cut.state_place)]
    return packed(jax.tree.structure(cut.state), cut.state_slicing, new)
