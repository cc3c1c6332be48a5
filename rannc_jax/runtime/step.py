"""The callable that `auto_partition` and `parallelize` return.

A `Step` owns a plan, the sub-meshes, and engines that run the user's function over them. It changes
nothing of what it is given: state comes in and new state goes out, as with any JAX function (the old
state's memory is taken over unless `donate=False`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rannc_jax.contract import LossOut
from rannc_jax.errors import PlanError, TraceError, message
from rannc_jax.ir.example import AUTO, Example, Subject, abstract, make_example, subject
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.roles import Role
from rannc_jax.mesh import stage_meshes
from rannc_jax.plan import Plan
from rannc_jax.progress import NoProgress, Progress
from rannc_jax.runtime.engine import Engine, Prepared, Routine, Stages
from rannc_jax.runtime.follow import planned_stages, stages_by_parameters
from rannc_jax.runtime.given import (
    batch_leaves,
    check_concrete,
    check_one_batch,
    check_start,
    check_state,
    filled,
    is_gone,
)
from rannc_jax.runtime.optimizer import cut_optimizer
from rannc_jax.runtime.outcome import check_finite, failure, loss_out, outputs, wait
from rannc_jax.runtime.placement import Placement, Update, shapes_of
from rannc_jax.runtime.reference import reference_step
from rannc_jax.runtime.stacked import flat_parts, packed, slicings_of
from rannc_jax.runtime.state import TrainState, gather
from rannc_jax.runtime.transfer import move
from rannc_jax.runtime.update import apply_cut

Planner = Callable[[Subject, Example], tuple[Plan, Graph | None]]
Batch = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a step runs; none of these is searched.

    Args:
        donate: the old state's memory is used for the new one.
        async_errors: do not wait for the gradients before the update is dispatched. Faster, but an
            error then costs the state. A plan of one stage is one program, update included: nothing is
            waited for, and a device that fails costs the state unless `donate=False`.
        check_finite: refuse to update on a loss or gradient that is not finite; the state stays good, with
            one stage too, whose gradients and update are then two programs.
    """

    donate: bool = True
    async_errors: bool = False
    check_finite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What `init` uses when it is called without arguments: what a TrainableModel brings along.

    `initialisers()` gives, by role, what makes the leaves of which only shapes are brought.
    """

    params: Any = None
    batch: Any = None
    frozen: Any = None
    model_state: Any = None
    initialisers: Callable[[], Any] | None = None


class Step:
    """Trains (or, without an optimizer, evaluates) a function over the stages of a plan.

    Args:
        who: the function.
        plan: a plan, or how to make one once shapes are known.
        optimizer: any optax transformation; None for forward only.
        devices: all local ones by default.
        options: see `Options`.
        batch_dims: as the user gave them.
        defaults: see `Defaults`.
        progress: told what takes long.
    """

    def __init__(
        self,
        who: Subject,
        plan: Plan | Planner,
        *,
        optimizer: optax.GradientTransformation | None,
        devices: Sequence[jax.Device] | None = None,
        options: Options | None = None,
        batch_dims: Any = "auto",
        defaults: Defaults | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._declared, self._who, self._optimizer, self._devices = who, who, optimizer, devices
        self._plan = plan if isinstance(plan, Plan) else None
        self._planner = None if isinstance(plan, Plan) else plan
        self._options = options or Options()
        self._batch_dims = batch_dims
        self._defaults = defaults or Defaults()
        self._progress = progress or NoProgress()
        self._meshes: tuple[Mesh, ...] = ()
        self._engine: Engine | None = None
        self._placement: Placement | None = None

    @property
    def plan(self) -> Plan:
        """The plan. Raises PlanError before `init`, where it is made."""
        if self._plan is None:
            raise PlanError(
                message("there is no plan yet.", hint="step.init(params, batch); shapes are enough.")
            )
        return self._plan

    # --- state --------------------------------------------------------------------------------

    def init(
        self,
        params: Any = None,
        batch: Any = None,
        *args: Any,
        model_state: Any = None,
        frozen: Any = None,
        rng: Any = None,
    ) -> TrainState:
        """Plan (unless there is a plan), lay everything out, and place the state.

        Args:
            params: a pytree of arrays, or `init_fn(key) -> pytree`, called with fold_in(rng, 0). A model that
                brings shapes and `initialisers` needs `rng` alone: each leaf is made where it lives.
            batch: a pytree of arrays or `jax.ShapeDtypeStruct`s; for forward-only functions the first
                positional argument after params, `args` the others.
            model_state, frozen, rng: what the function takes. Steps use fold_in(rng, 1) as their key.

        Returns:
            The state; every leaf lies on the devices of its stage.

        Raises:
            TraceError: the function cannot be cut, or an argument is missing.
            PlanError: nothing fits, or the plan belongs to another model.
        """
        d, takes = self._defaults, self._declared.takes
        check_one_batch(args, self._who.spread)
        params = d.params if params is None else params
        batch = d.batch if batch is None else ((batch, *args) if self._who.spread else batch)
        frozen = d.frozen if frozen is None and "frozen" in takes else frozen
        model_state = d.model_state if model_state is None and "model_state" in takes else model_state
        shapes = {"params": params, "frozen": frozen, "model_state": model_state}
        start = filled(shapes, d.initialisers)
        check_start(batch=batch, rng=rng, **start)
        self._who = self._declared.with_given(frozen=frozen, model_state=model_state, rng=rng)
        example = make_example(
            self._who,
            shapes_of(params, rng),
            batch,
            frozen=frozen,
            model_state=model_state,
            rng=rng,
            batch_dims=self._batch_dims,
        )
        self._placement = at = self._laid_out(example)
        return at.first_state(self._who.takes, **start, rng=rng)

    def _laid_out(self, example: Example) -> Placement:
        graph: Graph | None = None
        if self._planner is not None:
            self._progress.note("planning")
            self._plan, graph = self._planner(self._who, example)
        plan = self.plan
        self._meshes = stage_meshes(plan, self._devices)
        train = self._optimizer is not None
        self._engine = self._make_engine(self._who, example, planned_stages(plan), train=train, graph=graph)
        self._progress.note("lowering")
        home = self._engine.prepared(example.batch)
        placement = Placement(meshes=self._meshes, home=home, cut=None)
        if self._optimizer is None:
            return placement
        owners, count = placement.owners(Role.PARAM), len(self._meshes)
        cut = cut_optimizer(
            self._optimizer,
            example.params,
            owners,
            count,
            slicings=placement.slicings(Role.PARAM),
            groups=placement.groups([stage.offload for stage in plan.stages]),
            loss_dtype=home.loss_dtype,
        )
        return replace(placement, cut=cut)

    def _make_engine(
        self,
        who: Subject,
        example: Example,
        stages_of: Callable[[Graph], Stages],
        *,
        train: bool,
        graph: Graph | None = None,
        batch_dims: Any = None,
    ) -> Engine:
        plan = self.plan
        routine = Routine(
            remats=tuple(stage.remat for stage in plan.stages),
            meshes=self._meshes,
            schedule=plan.schedule if train else "forward",
            num_microbatches=plan.num_microbatches,
            train=train,
            shardings=tuple(stage.sharding for stage in plan.stages),
        )
        return Engine(
            who,
            example,
            stages_of,
            routine,
            batch_dims=self._batch_dims if batch_dims is None else batch_dims,
            allow_coupled=plan.num_microbatches > 1,  # else the planner had not split coupled rows
            graph=graph,
        )

    # --- running ------------------------------------------------------------------------------

    def __call__(self, state: TrainState, batch: Batch, *args: Any, rng: Any = None) -> Any:
        """One step.

        Args:
            state: from `init` or the step before.
            batch: arrays; another number of rows or another length than planned is fine.
            rng: replaces the step's key fold_in(state.rng, state.step).

        Returns:
            `(new state, LossOut)` with the loss of the whole batch and aux; without an optimizer the
            function's outputs.

        Raises:
            RuntimeFailure: something failed on the devices; it says whether `state` is still good.
        """
        batch = (batch, *args) if self._who.spread else batch
        engine, at = self._ready(state, batch)
        if at.cut is None:
            return outputs(*self._run(engine, state, batch, rng))
        state = at.settled(state)
        if not self._options.check_finite and at.runs_alone(engine.prepared(batch)):
            return self._one_program(engine, at, state, batch, rng)
        prepared, env = self._run(engine, state, batch, rng)
        grads = at.gradients(prepared, env)
        if not self._options.async_errors:
            wait(env["loss",], grads)
        if self._options.check_finite:
            check_finite(env["loss",], grads, at.paths(Role.PARAM))
        new = self._updated(at, state, grads, env["loss",])
        out = loss_out(prepared, env, state.model_state)
        return new.replace(model_state=out.model_state, step=_next(state.step, rng)), replace(
            out, model_state=None
        )

    def update(self, state: TrainState, grads: Any, *, loss: Any = None) -> TrainState:
        """The optimizer's update alone, with gradients that `value_and_grad` gave.

        The caller may have added them up over batches, scaled or clipped them.

        Args:
            state: from `init` or a step.
            grads: a tree like the parameters.
            loss: scalar, for optimizers that read it.

        Returns:
            The state with new parameters and optimizer state; the step's number stays.

        Raises:
            TraceError: there is no optimizer, or the gradients have another structure, shape or dtype.
        """
        _, at = self._ready(state, None)
        if at.cut is None:
            raise TraceError(
                message("this step has no optimizer.", hint="auto_partition(fn, optimizer=...).")
            )
        if at.cut.needs_loss and loss is None:
            raise TraceError(message("the optimizer reads the loss.", hint="update(state, grads, loss=...)."))
        state = at.settled(state)
        return self._updated(at, state, at.settled_gradients(grads), loss)

    def _updated(self, at: Placement, state: TrainState, grads: Sequence[Any], loss: Any) -> TrainState:
        """The state after an update; gradients slice by slice, on the stages of their parameters."""
        assert at.cut is not None
        try:
            params, opt_state = apply_cut(
                at.cut,
                at.shares,
                packed(jax.tree.structure(state.params), at.slicings(Role.PARAM), grads),
                state.opt_state,
                state.params,
                move,
                loss=None if loss is None else move([loss], [None], at.meshes[at.cut.hub])[0],
                donate=self._options.donate,
            )
        except jax.errors.JaxRuntimeError as error:
            raise failure(error, lost=is_gone(state)) from error
        return state.replace(params=params, opt_state=opt_state)

    def _one_program(self, engine: Engine, at: Placement, state: TrainState, batch: Batch, rng: Any) -> Any:
        """A step of one stage, update included."""
        prepared, cut = engine.prepared(batch), at.cut
        assert prepared.fused is not None
        assert cut is not None
        update = Update(at, self._options.donate)
        try:
            leaves, key = self._arguments(engine, prepared, state, rng)
            env = engine.given(prepared, leaves, batch, key)
            params, opt_state, env = prepared.fused.step(
                env, flat_parts(state.opt_state, cut.state_slicing), update
            )
        except jax.errors.JaxRuntimeError as error:
            raise failure(error, lost=is_gone(state)) from error
        out = loss_out(prepared, env, state.model_state)
        new = state.replace(
            params=packed(jax.tree.structure(cut.params), cut.param_slicing, params),
            opt_state=packed(jax.tree.structure(cut.state), cut.state_slicing, opt_state),
            model_state=out.model_state,
            step=_next(state.step, rng),
        )
        return new, replace(out, model_state=None)

    def value_and_grad(
        self, state: TrainState, batch: Batch, *, wrt_batch: Sequence[str] = (), rng: Any = None
    ) -> tuple[LossOut, Any]:
        """Loss and gradients of the whole batch, without an update.

        Args:
            state: from `init` or a step.
            batch: arrays.
            wrt_batch: batch leaves to differentiate too: top-level names, or pytree paths ("['x']").
            rng: as in a step.

        Returns:
            `(LossOut, grads)`; with `wrt_batch`, grads is `(params grads, {name: batch leaf grad})`.
        """
        engine, at = self._ready(state, batch)
        if self._optimizer is None:
            raise TraceError(message("this step has no loss.", hint="auto_partition(fn, optimizer=...)."))
        return self._differentiated(engine, at, state, batch, wrt_batch, rng)

    def _differentiated(
        self,
        engine: Engine,
        at: Placement,
        state: TrainState,
        batch: Batch,
        wrt_batch: Sequence[str],
        rng: Any,
    ) -> tuple[LossOut, Any]:
        ids = [v for v, leaf in enumerate(engine.graph(batch).program.inputs) if leaf.role is Role.BATCH]
        chosen = {name: ids[k] for name, k in batch_leaves(batch, wrt_batch).items()}
        prepared, env = self._run(engine, state, batch, rng, frozenset(chosen.values()))
        out = loss_out(prepared, env, state.model_state)
        slicings = slicings_of(prepared.graph.program.leaves(Role.PARAM))
        dtypes = [part.dtype for part in flat_parts(state.params, slicings)]
        sums = [g.astype(dtype) for g, dtype in zip(at.gradients(prepared, env), dtypes, strict=True)]
        grads = packed(jax.tree.structure(state.params), slicings, sums)
        if not wrt_batch:
            return out, grads
        given = dict(zip(ids, jax.tree.leaves(batch), strict=True))
        found = {
            name: env["batch_grad", v] if ("batch_grad", v) in env else jnp.zeros_like(given[v])
            for name, v in chosen.items()
        }
        return out, (grads, found)

    def differentiate(
        self, fn: Callable[..., Any], *, takes: Sequence[str] | None = None, batch_dims: Any = None
    ) -> Callable[..., Any]:
        """Another loss of the same parameters: its value and gradients, cut by where they live.

        Args:
            fn: `fn(params, batch, **keywords)` that returns what a loss function of `auto_partition` may, or
                an object with a `loss_fn`.
            takes, batch_dims: as in `evaluate`.

        Returns:
            `value_and_grad(state, batch, wrt_batch=(), rng=None)`, as the method of that name.
        """
        call = getattr(fn, "loss_fn", fn)
        batch_dims = getattr(fn, "batch_dims", None) if batch_dims is None else batch_dims
        engine_of = self._second(subject(call, takes, is_loss=True), batch_dims, train=True)

        def run(state: TrainState, batch: Batch, *, wrt_batch: Sequence[str] = (), rng: Any = None) -> Any:
            engine, at = engine_of(state, batch, rng)
            return self._differentiated(engine, at, state, batch, wrt_batch, rng)

        return run

    def evaluate(
        self, fn: Callable[..., Any], *, takes: Sequence[str] | None = None, batch_dims: Any = None
    ) -> Callable[..., Any]:
        """Another function of the same parameters, forward only, cut by where they live.

        Args:
            fn: `fn(params, batch, **keywords)` with the keywords of `auto_partition`, or an object with
                an `outputs_fn` or a `loss_fn` (a module converted in eval mode).
            takes, batch_dims: as in `auto_partition`; by default the object's batch_dims, or the step's where
                the batch has the structure of the one that was planned.

        Returns:
            `evaluate(state, batch, rng=None) -> outputs`, the outputs of `fn` for the whole batch.
        """
        call = getattr(fn, "outputs_fn", None) or getattr(fn, "loss_fn", fn)
        batch_dims = getattr(fn, "batch_dims", None) if batch_dims is None else batch_dims
        engine_of = self._second(subject(call, takes, is_loss=False), batch_dims, train=False)

        def run(state: TrainState, batch: Batch, *, rng: Any = None) -> Any:
            rng = state.rng if rng is None else rng
            engine, _ = engine_of(state, batch, rng)
            return outputs(*self._run(engine, state, batch, rng))

        return run

    def value(
        self, fn: Callable[..., Any], *, takes: Sequence[str] | None = None, batch_dims: Any = None
    ) -> Callable[..., LossOut]:
        """Another loss of the same parameters, forward only, with the model state that it makes.

        Args:
            fn, takes, batch_dims: as in `differentiate`.

        Returns:
            `value(state, batch, rng=None) -> LossOut`.
        """
        call = getattr(fn, "loss_fn", fn)
        batch_dims = getattr(fn, "batch_dims", None) if batch_dims is None else batch_dims
        engine_of = self._second(subject(call, takes, is_loss=True), batch_dims, train=False)

        def run(state: TrainState, batch: Batch, *, rng: Any = None) -> LossOut:
            engine, _ = engine_of(state, batch, rng)
            prepared, env = self._run(engine, state, batch, rng)
            return loss_out(prepared, env, state.model_state)

        return run

    def _second(
        self, declared: Subject, batch_dims: Any, *, train: bool
    ) -> Callable[[TrainState, Batch, Any], tuple[Engine, Placement]]:
        """Engines of another function of the same parameters, one for every structure of a batch."""
        engines: dict[Any, Engine] = {}

        def engine_of(state: TrainState, batch: Batch, rng: Any) -> tuple[Engine, Placement]:
            _, at = self._ready(state, batch)
            given = {"frozen": state.frozen, "model_state": state.model_state}
            given["rng"] = state.rng if rng is None else rng
            who = declared.with_given(**given)
            key = (at, who.takes, jax.tree.structure(batch))
            if key not in engines:
                same = jax.tree.structure(batch) == jax.tree.structure(at.home.example.batch)
                dims = batch_dims if batch_dims is not None else self._batch_dims if same else AUTO
                example = make_example(who, abstract(state.params), batch, batch_dims=dims, **given)
                readers, count = at.readers(), len(at.meshes)
                engines[key] = self._make_engine(
                    who,
                    example,
                    lambda g: stages_by_parameters(g, readers, count),
                    train=train,
                    batch_dims=dims,
                )
            return engines[key], at

        return engine_of

    def reference(self, state: TrainState, batch: Batch, *, rng: Any = None) -> tuple[TrainState, LossOut]:
        """The same step as one unpartitioned pure function: the oracle.

        Everything is gathered on one device; the microbatches are run one after another. Under jit hand it
        a gathered state: `jax.jit(step.reference)(step.gather(state), batch)`.

        Raises:
            PlanError: before `init`.
            TraceError: there is no optimizer (call the function itself).
        """
        if self._engine is None:
            raise PlanError(message("the step has no state yet.", hint="state = step.init(params, batch)."))
        if self._optimizer is None:
            raise TraceError(
                message("a step without an optimizer has no reference.", hint="call the function.")
            )
        prepared = self._engine.prepared(batch)
        return reference_step(self._who, self._optimizer, prepared, state, batch, rng)

    def gather(self, tree: Any) -> Any:
        """A tree of state as numpy arrays on the host."""
        return gather(tree)

    # --- details ------------------------------------------------------------------------------

    def _ready(self, state: TrainState, batch: Batch) -> tuple[Engine, Placement]:
        check_concrete((state, batch))
        if self._engine is None or self._placement is None:
            raise PlanError(message("the step has no state yet.", hint="state = step.init(params, batch)."))
        check_state(state)
        return self._engine, self._placement

    def _run(
        self,
        engine: Engine,
        state: TrainState,
        batch: Batch,
        rng: Any,
        batch_grads: frozenset[int] = frozenset(),
    ) -> tuple[Prepared, dict[Any, Any]]:
        prepared = engine.prepared(batch, batch_grads)
        try:
            leaves, key = self._arguments(engine, prepared, state, rng)
            return prepared, engine.run(prepared, leaves, batch, key)
        except jax.errors.JaxRuntimeError as error:
            raise failure(error) from error

    def _arguments(
        self, engine: Engine, prepared: Prepared, state: TrainState, rng: Any
    ) -> tuple[dict[int, Any], Any]:
        """The leaves of the state by input of the program, and the step's key."""
        leaves: dict[int, Any] = {}
        trees = {Role.PARAM: state.params, Role.FROZEN: state.frozen, Role.MODEL_STATE: state.model_state}
        for role, tree in trees.items():
            found = prepared.graph.program.leaves(role)
            if found:
                ids = [v for leaf in found for v in leaf.positions]
                leaves.update(zip(ids, flat_parts(tree, slicings_of(found)), strict=True))
        if "rng" not in engine.who.takes:
            return leaves, None
        return leaves, _step_key(state.rng, state.step) if rng is None else rng


@jax.jit
def _step_key(key: Any, step: Any) -> Any:
    return jax.random.fold_in(key, step)


@jax.jit
def _add_one(step: Any) -> Any:
    return step + 1


def _next(step: Any, rng: Any) -> Any:
    return _add_one(step) if rng is None else step
