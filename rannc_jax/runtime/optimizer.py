"""Any optax transformation, exactly, on parameters that live on different stages.

`optimizer.update`, followed by `optax.apply_updates`, is traced once over the user's whole tree and cut
by dataflow (`homes`, `cut`): every stage updates its own leaves, and the few scalars that belong to all
(step counts, a global norm, a finiteness flag) are computed on the hub, the last stage, which is the
first to finish a pipelined backward and has the loss. The optimizer state is the user's optax tree, one
array a leaf (one a layer, for leaves stacked over layers), each on one stage. Nothing here knows a
transformation by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core as jex
from jax.sharding import Mesh

from rannc_jax.errors import PlanError, message
from rannc_jax.ir.batch import RowLayout
from rannc_jax.ir.leaves import WHOLE, Slicing
from rannc_jax.runtime.cut import Kind, Op, Send, StageProgram, Task, Value, cut
from rannc_jax.runtime.homes import (
    FREE,
    SHARED,
    Home,
    Rule,
    home_of,
    inline,
    propagate,
    reach,
    split_conditionals,
)
from rannc_jax.runtime.shares import Shares
from rannc_jax.runtime.stacked import flat_parts, packed
from rannc_jax.runtime.unstack import find_slicings, unstacked

Move = Callable[[Sequence[jax.Array], Sequence[RowLayout | None], Mesh], list[jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerCut:
    """An optimizer, cut.

    Args:
        init: from the values (PARAM, i) to (NEW_STATE, j). Donates nothing if run with `donate=False`.
        update: from (GRAD, i), (PARAM, i), (STATE, j) and, if `needs_loss`, (LOSS, 0) on the hub to
            (NEW_PARAM, i) and (NEW_STATE, j). Gradients are averaged and of `grad_dtype`.
        params: the user's tree of `ShapeDtypeStruct`s.
        state: the optax state as a tree of `ShapeDtypeStruct`s.
        param_slicing, state_slicing: how every flat leaf of the two is given: slices of a stacked leaf are
            values of their own, and index, owner and home are those of a slice.
        param_owner, state_owner: stage of every flat leaf or slice of the two.
        hub: the stage that does the shared work.
        needs_loss: whether the transformation reads `value=`.
    """

    init: tuple[Op, ...]
    update: tuple[Op, ...]
    params: Any
    state: Any
    param_slicing: tuple[Slicing, ...]
    state_slicing: tuple[Slicing, ...]
    param_owner: tuple[int, ...]
    state_owner: tuple[int, ...]
    hub: int
    needs_loss: bool


def grad_dtype(param_dtype: Any) -> Any:
    """The dtype of an accumulated gradient: float32, or the parameter's if that is wider."""
    return jnp.promote_types(param_dtype, jnp.float32)


def cut_optimizer(
    optimizer: optax.GradientTransformation,
    params: Any,
    owner: Sequence[int],
    num_stages: int,
    *,
    slicings: Sequence[Slicing] | None = None,
    loss_dtype: Any = jnp.float32,
) -> OptimizerCut:
    """Cut an optimizer's `init` and `update` over the stages that own the parameters.

    Args:
        optimizer: any optax transformation. It may take `value=`, the loss, and no other extra argument.
        params: tree of arrays or `ShapeDtypeStruct`s, as the user has it.
        owner: stage of every flat leaf of `params`, or of every slice of it.
        num_stages: number of stages; some may own nothing.
        slicings: how every flat leaf of `params` is given; whole by default.
        loss_dtype: dtype of the loss.

    Raises:
        PlanError: the update cannot be cut, wants more than gradients, parameters and loss, or gives a
            state of other shapes or dtypes than it took.
    """
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    owner = tuple(owner)
    own = (WHOLE,) * len(owner) if slicings is None else tuple(slicings)
    assert len(owner) == sum(slicing.num_parts for slicing in own), "one stage a parameter leaf or slice"
    init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
    loss = jax.ShapeDtypeStruct((), loss_dtype)
    init, update = inline(init), inline(_trace_update(optimizer, params, state, loss))
    states = _state_slicings(update, own, len(jax.tree.leaves(state)))
    update = unstacked(update, (*own, *own, *states, WHOLE), (*own, *states))
    init = unstacked(init, own, states)
    homes = _state_homes(update, owner, sum(slicing.num_parts for slicing in states), num_stages)
    hub = num_stages - 1
    ops = _cut_update(update, owner, homes, num_stages)
    return OptimizerCut(
        init=_cut_init(init, owner, homes, num_stages),
        update=ops,
        params=params,
        state=state,
        param_slicing=own,
        state_slicing=states,
        param_owner=owner,
        state_owner=_places(homes, hub),
        hub=hub,
        needs_loss=any(isinstance(op, StageProgram) and Value(Kind.LOSS, 0, hub) in op.inputs for op in ops),
    )


def _trace_update(
    optimizer: optax.GradientTransformation, params: Any, state: Any, loss: Any
) -> jex.ClosedJaxpr:
    """The program from flat gradients, parameters, state and loss to flat parameters and state."""
    extended = optax.with_extra_args_support(optimizer)
    grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, grad_dtype(leaf.dtype)), params)

    def step(grads: Any, params: Any, state: Any, loss: Any) -> Any:
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, params)
        updates, new_state = extended.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), new_state

    try:
        traced, (new_params, new_state) = jax.make_jaxpr(step, return_shape=True)(grads, params, state, loss)
    except (TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            message(
                "the optimizer's update cannot be traced.",
                "got: gradients of the parameters' own tree, state, parameters, and value= (the loss)",
                f"{type(error).__name__}: {error}",
                hint="a transformation without line search, wrapper of the parameters or other arguments, or "
                "optimizer=optax.identity() with step.value_and_grad and an update of your own.",
            )
        ) from error
    _check_kept("parameters", params, new_params)
    _check_kept("state", state, new_state)
    return traced


def _check_kept(what: str, before: Any, after: Any) -> None:
    """An update gives what it takes, or the next step would be another program."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        changed = [f"got {jax.tree.structure(after)}", f"expected {jax.tree.structure(before)}"]
    else:
        pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
        changed = [
            f"{what}{jax.tree_util.keystr(path)}: got {new.dtype}{list(new.shape)}, "
            f"expected {old.dtype}{list(old.shape)}"
            for (path, old), new in pairs
            if (old.shape, old.dtype) != (new.shape, new.dtype)
        ]
    if changed:
        raise PlanError(
            message(
                f"the optimizer's update returns other {what} than it takes.",
                *changed[:5],
                hint="state dtypes set explicitly (mu_dtype, accumulator_dtype), float32 parameters, or "
                "another transformation.",
            )
        )


def _state_slicings(
    update: jex.ClosedJaxpr, params: tuple[Slicing, ...], num_states: int
) -> tuple[Slicing, ...]:
    """How every state leaf is given: as what it becomes, else as what it is used with: moments and copies
    are sliced as their parameter is."""
    found = (WHOLE,) * num_states
    if not any(slicing.dims for slicing in params):
        return found
    while True:
        seen = find_slicings(update.jaxpr, (*params, *params, *found, WHOLE))
        becomes = seen.results[len(params) :]
        first = 2 * len(params)
        fresh = tuple(
            old if old.dims else new if new.dims else seen.met.get(first + j, WHOLE)
            for j, (old, new) in enumerate(zip(found, becomes, strict=True))
        )
        if fresh == found:
            return found
        found = fresh


def _state_homes(
    update: jex.ClosedJaxpr, owner: Sequence[int], num_states: int, num_stages: int
) -> list[Home]:
    """The home of every state leaf: of what it becomes, else of what it is used with, else SHARED."""
    if num_stages == 1:
        return [0] * num_states
    jaxpr, num_params = update.jaxpr, len(owner)
    shapes = [var.aval.shape for var in jaxpr.invars[2 * num_params : 2 * num_params + num_states]]
    known: dict[int, Home] = {}

    def becomes(probes: Mapping[Home, tuple[int, ...]], rule: Rule) -> list[Home]:
        """Homes of the new state; leaves that are not known are probes or else free."""
        states = [
            known.get(j, num_stages + j if num_stages + j in probes else FREE) for j in range(num_states)
        ]
        ends = [reach(known[j]) if j in known else 0 for j in range(num_states)]
        homes = propagate(jaxpr, [*owner, *owner, *states, SHARED], [*map(reach, owner), *ends], rule)
        return [home_of(homes, atom) for atom in jaxpr.outvars[num_params:]]

    before = -1
    while before != (before := len(known)):
        homes = becomes({}, Rule(num_stages))
        known.update({j: home for j, home in enumerate(homes) if home >= 0 and j not in known})
    probes = {num_stages + j: shape for j, shape in enumerate(shapes) if shape and j not in known}
    rule = Rule(num_stages, probe_shapes=probes)
    becomes(probes, rule)
    known.update({home - num_stages: min(met) for home, met in rule.met.items() if len(met) == 1})
    return [known.get(j, SHARED) for j in range(num_states)]


def _cut_update(
    update: jex.ClosedJaxpr, owner: Sequence[int], states: Sequence[Home], num_stages: int
) -> tuple[Op, ...]:
    hub = num_stages - 1
    places = _places(states, hub)
    homes = (*owner, *owner, *states, SHARED if num_stages > 1 else 0)
    results = tuple(reach(home) for home in (*owner, *states))
    task = Task(
        name="update",
        closed=split_conditionals(update, homes, results, num_stages),
        homes=homes,
        results=results,
        inputs=(
            *_values(Kind.GRAD, owner),
            *_values(Kind.PARAM, owner),
            *_values(Kind.STATE, places),
            Value(Kind.LOSS, 0, hub),
        ),
        outputs=(*_values(Kind.NEW_PARAM, owner), *_values(Kind.NEW_STATE, places)),
        num_stages=num_stages,
        hub=hub,
    )
    return cut(task)


def _cut_init(
    init: jex.ClosedJaxpr, owner: Sequence[int], states: Sequence[Home], num_stages: int
) -> tuple[Op, ...]:
    hub = num_stages - 1
    results = tuple(reach(home) for home in states)
    task = Task(
        name="init",
        closed=split_conditionals(init, owner, results, num_stages),
        homes=tuple(owner),
        results=results,
        inputs=_values(Kind.PARAM, owner),
        outputs=_values(Kind.NEW_STATE, _places(states, hub)),
        num_stages=num_stages,
        hub=hub,
    )
    return cut(task)


def _places(homes: Sequence[Home], hub: int) -> tuple[int, ...]:
    return tuple(hub if home == SHARED else home for home in homes)


def _values(kind: Kind, stages: Sequence[int]) -> tuple[Value, ...]:
    return tuple(Value(kind, index, stage) for index, stage in enumerate(stages))


def init_state(cut: OptimizerCut, shares: Sequence[Shares], params: Any, move: Move) -> Any:
    """The optimizer's first state, each leaf on its stage; `params` lie on theirs and stay valid."""
    parts = flat_parts(params, cut.param_slicing)
    values = dict(zip(_values(Kind.PARAM, cut.param_owner), parts, strict=True))
    run_ops(cut.init, shares, values, move, donate=False)
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
    kinds = ((Kind.GRAD, cut.param_owner, grads), (Kind.PARAM, cut.param_owner, params))
    values: dict[Value, jax.Array] = {}
    for kind, owner, parts in (*kinds, (Kind.STATE, cut.state_owner, state)):
        values.update(zip(_values(kind, owner), parts, strict=True))
    if cut.needs_loss:
        assert loss is not None, "this optimizer reads the loss"
        values[Value(Kind.LOSS, 0, cut.hub)] = loss
    run_ops(cut.update, shares, values, move, donate=donate)
    return (
        [values[value] for value in _values(Kind.NEW_PARAM, cut.param_owner)],
        [values[value] for value in _values(Kind.NEW_STATE, cut.state_owner)],
    )


def run_ops(
    ops: Sequence[Op], shares: Sequence[Shares], values: dict[Value, jax.Array], move: Move, *, donate: bool
) -> None:
    """Run programs and sends in order, adding what they give to `values`."""
    for op in ops:
        if isinstance(op, Send):
            arrays = [values[value] for value in op.values]
            values.update(
                zip(op.arrived, move(arrays, [None] * len(arrays), shares[op.target].mesh), strict=True)
            )
        else:
            program = op.compiled(shares[op.stage], donate=donate)
            values.update(zip(op.outputs, program(*(values[value] for value in op.inputs)), strict=True))


def _state_tree(cut: OptimizerCut, values: Mapping[Value, jax.Array]) -> Any:
    new = [values[value] for value in _values(Kind.NEW_STATE, cut.state_owner)]
    return packed(jax.tree.structure(cut.state), cut.state_slicing, new)
