"""Any optax transformation, exactly, on parameters that live on different stages.

`optimizer.update`, followed by `optax.apply_updates`, is traced once over the user's whole tree and cut
by dataflow (`homes`, `cut`): every stage updates its own leaves, and the few scalars that belong to all
(step counts, a global norm, a finiteness flag) are computed on the hub, the last stage, which is the
first to finish a pipelined backward and has the loss. The optimizer state is the user's optax tree, one
array a leaf (one a layer, for leaves stacked over layers), each on one stage. Nothing here knows a
transformation by name.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core as jex

from rannc_jax.errors import PlanError, message
from rannc_jax.ir.leaves import WHOLE, Slicing
from rannc_jax.runtime.cut import Kind, Op, StageProgram, Task, Value, cut
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
from rannc_jax.runtime.places import Group, Place, find_places, joined
from rannc_jax.runtime.shares import Shares
from rannc_jax.runtime.unstack import find_slicings, unstacked


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
        param_place, state_place: of every flat leaf or slice of the two, as positions in `places`; so is the
            `stage` of the values of `init` and `update`.
        places: where the parts of the update run: the stages, if no state is offloaded.
        hub: the stage that does the shared work.
        needs_loss: whether the transformation reads `value=`.
    """

    init: tuple[Op, ...]
    update: tuple[Op, ...]
    params: Any
    state: Any
    param_slicing: tuple[Slicing, ...]
    state_slicing: tuple[Slicing, ...]
    param_place: tuple[int, ...]
    state_place: tuple[int, ...]
    places: tuple[Place, ...]
    hub: int
    needs_loss: bool

    @property
    def param_owner(self) -> tuple[int, ...]:
        return tuple(self.places[place].stage for place in self.param_place)

    @property
    def state_owner(self) -> tuple[int, ...]:
        return tuple(self.places[place].stage for place in self.state_place)

    def shares_of(self, shares: Sequence[Shares]) -> tuple[Shares, ...]:
        """How the state of every place lies, given how that of every stage does."""
        return tuple(replace(shares[place.stage], offload=place.offload) for place in self.places)


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
    groups: Sequence[Group | None] | None = None,
    loss_dtype: Any = jnp.float32,
) -> OptimizerCut:
    """Cut an optimizer's `init` and `update` over the stages that own the parameters.

    Args:
        optimizer: any optax transformation. It may take `value=`, the loss, and no other extra argument.
        params: tree of arrays or `ShapeDtypeStruct`s, as the user has it.
        owner: stage of every flat leaf of `params`, or of every slice of it.
        num_stages: number of stages; some may own nothing.
        slicings: how every flat leaf of `params` is given; whole by default.
        groups: for every leaf or slice, a name for those of its stage with which its state is fetched from
            the host; None where state stays on the devices. Small groups are joined.
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
    num_states = sum(slicing.num_parts for slicing in states)

    def over(groups: Sequence[Group | None]) -> OptimizerCut:
        places, at, homes = _places(update, owner, groups, num_states, num_stages)
        hub = len(places) - 1
        value = Value(Kind.LOSS, 0, hub)
        ops = _cut_update(update, at, homes, places)
        return OptimizerCut(
            init=_cut_init(init, at, homes, places),
            update=ops,
            params=params,
            state=state,
            param_slicing=own,
            state_slicing=states,
            param_place=at,
            state_place=_positions(homes, hub),
            places=places,
            hub=num_stages - 1,
            needs_loss=any(isinstance(op, StageProgram) and value in op.inputs for op in ops),
        )

    together = (None,) * len(owner)
    if groups is None or all(group is None for group in groups):
        return over(together)
    try:
        return over(groups)
    except PlanError as error:
        over(together)  # what stages cannot do either is said in its own words
        raise PlanError(_cannot_offload(error)) from error


def _cannot_offload(error: PlanError) -> str:
    return message(
        "the state of this optimizer cannot be offloaded: its update joins whole arrays of groups of leaves.",
        *(line.strip() for line in str(error).splitlines()[1:] if "operands:" in line or "where:" in line),
        hint="offload=False (with sharding, more stages or a state in bfloat16 where memory is short), or a "
        "transformation that treats every leaf on its own and joins them by sums only.",
    )


def _places(
    update: jex.ClosedJaxpr,
    owner: tuple[int, ...],
    groups: Sequence[Group | None],
    num_states: int,
    num_stages: int,
) -> tuple[tuple[Place, ...], tuple[int, ...], list[Home]]:
    """Where the update runs: the places, that of every parameter, and the home of every state leaf."""
    places, at = find_places(owner, groups, num_stages)
    homes = _state_homes(update, at, num_states, len(places))
    sizes: dict[int, int] = defaultdict(int)
    for home, aval in zip(homes, update.in_avals[2 * len(owner) :], strict=False):
        sizes[home] += aval.size * aval.dtype.itemsize
    places, new = joined(places, sizes)
    return places, tuple(new[p] for p in at), [new[home] if home >= 0 else home for home in homes]


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
    update: jex.ClosedJaxpr, owner: Sequence[int], states: Sequence[Home], places: Sequence[Place]
) -> tuple[Op, ...]:
    hub = len(places) - 1
    positions = _positions(states, hub)
    homes = (*owner, *owner, *states, SHARED if hub else 0)
    results = tuple(reach(home) for home in (*owner, *states))
    task = Task(
        name="update",
        closed=split_conditionals(update, homes, results, len(places)),
        homes=homes,
        results=results,
        inputs=(
            *values_of(Kind.GRAD, owner),
            *values_of(Kind.PARAM, owner),
            *values_of(Kind.STATE, positions),
            Value(Kind.LOSS, 0, hub),
        ),
        outputs=(*values_of(Kind.NEW_PARAM, owner), *values_of(Kind.NEW_STATE, positions)),
        labels=tuple(place.label for place in places),
        hub=hub,
    )
    return cut(task)


def _cut_init(
    init: jex.ClosedJaxpr, owner: Sequence[int], states: Sequence[Home], places: Sequence[Place]
) -> tuple[Op, ...]:
    hub = len(places) - 1
    results = tuple(reach(home) for home in states)
    task = Task(
        name="init",
        closed=split_conditionals(init, owner, results, len(places)),
        homes=tuple(owner),
        results=results,
        inputs=values_of(Kind.PARAM, owner),
        outputs=values_of(Kind.NEW_STATE, _positions(states, hub)),
        labels=tuple(place.label for place in places),
        hub=hub,
    )
    return cut(task)


def _positions(homes: Sequence[Home], hub: int) -> tuple[int, ...]:
    return tuple(hub if home == SHARED else home for home in homes)


def values_of(kind: Kind, stages: Sequence[int]) -> tuple[Value, ...]:
    """The values of all flat leaves of a kind, given where each lies."""
    return tuple(Value(kind, index, stage) for index, stage in enumerate(stages))
