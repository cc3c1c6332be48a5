"""The callable that `auto_partition` and `parallelize` return.

A `Step` owns a plan, the sub-meshes, and engines that run the user's function over them. It changes
nothing of what it is given: state comes in and new state goes out, as with any JAX function (the old
state's memory is taken over unless `donate=False`).
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rannc_jax.contract import LossOut
from rannc_jax.errors import PlanError, RuntimeFailure, TraceError, message
from rannc_jax.ir.example import AUTO, Example, Subject, abstract, make_example, path_leaves, subject
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.match import check_identity, find_stages
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.mesh import stage_meshes
from rannc_jax.plan import Plan
from rannc_jax.progress import NoProgress, Progress
from rannc_jax.runtime.engine import Engine, Prepared, Routine, Stages, settled
from rannc_jax.runtime.follow import stages_by_parameters
from rannc_jax.runtime.optimizer import OptimizerCut, apply_cut, cut_optimizer, init_state
from rannc_jax.runtime.reference import reference_step
from rannc_jax.runtime.state import TrainState, gather
from rannc_jax.runtime.transfer import move, place

Planner = Callable[[Subject, Example], tuple[Plan, Graph | None]]
Batch = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a step runs; none of these is searched.

    Args:
        donate: the old state's memory is used for the new one.
        async_errors: do not wait for the gradients before the update is dispatched. Faster, but an
            error then costs the state.
        check_finite: refuse to update on a loss or gradient that is not finite.
    """

    donate: bool = True
    async_errors: bool = False
    check_finite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What `init` uses when it is called without arguments: what a TrainableModel brings along."""

    params: Any = None
    batch: Any = None
    frozen: Any = None
    model_state: Any = None


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
        self._times_laid_out = 0
        self._home: Prepared | None = None
        self._cut: OptimizerCut | None = None

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
            params: a pytree of arrays, or `init_fn(key) -> pytree`, called with fold_in(rng, 0).
            batch: a pytree of arrays or `jax.ShapeDtypeStruct`s; for forward-only functions the first
                positional argument after params, `args` the others.
            model_state, frozen, rng: what the function takes. Steps use fold_in(rng, 1) as their key.

        Returns:
            The state; every leaf lies on the devices of its stage.

        Raises:
            TraceError: the function cannot be cut, or an argument is missing.
            PlanError: nothing fits, or the plan belongs to another model.
        """
        d = self._defaults
        if args and not self._who.spread:
            raise TraceError(
                message(
                    f"init takes params and one batch, got {len(args)} more arguments.",
                    hint="put what the loss reads into one pytree: init(params, (x, y)).",
                )
            )
        params = d.params if params is None else params
        batch = d.batch if batch is None else ((batch, *args) if self._who.spread else batch)
        frozen = d.frozen if frozen is None and "frozen" in self._declared.takes else frozen
        model_state = (
            d.model_state if model_state is None and "model_state" in self._declared.takes else model_state
        )
        self._who = self._declared.with_given(frozen=frozen, model_state=model_state, rng=rng)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            raise TraceError(
                message(
                    "init needs arrays for the parameters, not shapes.",
                    hint="init_fn(key) with rng= makes them on the devices; make_plan takes shapes.",
                )
            )
        if params is None or batch is None:
            raise TraceError(message("init needs params and a batch.", hint="step.init(params, batch)."))
        if callable(params) and rng is None:
            raise TraceError(
                message(
                    "params is a function of a key, but no key was given.",
                    hint="init(init_fn, batch, rng=jax.random.key(0)).",
                )
            )
        make = params if callable(params) and jax.tree_util.all_leaves([params]) else None
        shapes = jax.eval_shape(make, jax.random.fold_in(rng, 0)) if make is not None else params
        example = make_example(
            self._who,
            shapes,
            batch,
            frozen=frozen,
            model_state=model_state,
            rng=rng,
            batch_dims=self._batch_dims,
        )
        self._lay_out(example)
        return self._place(make, params, frozen, model_state, rng)

    def _lay_out(self, example: Example) -> None:
        graph: Graph | None = None
        if self._planner is not None:
            self._progress.note("planning")
            self._plan, graph = self._planner(self._who, example)
        plan = self.plan
        self._meshes = stage_meshes(plan, self._devices)
        self._times_laid_out += 1
        train = self._optimizer is not None
        self._engine = self._make_engine(self._who, example, self._planned_stages(), train=train, graph=graph)
        self._progress.note("lowering")
        self._home = self._engine.prepared(example.batch)
        if self._optimizer is not None:
            owners = [self._home.table.owner[v] for v in self._ids(Role.PARAM)]
            self._cut = cut_optimizer(
                self._optimizer, example.params, owners, len(self._meshes), loss_dtype=self._home.loss_dtype
            )

    def _planned_stages(self) -> Callable[[Graph], Stages]:
        """Lays the plan's cut on a graph; the first graph must be that of the plan's own model."""
        plan, seen = self.plan, 0

        def stages_of(graph: Graph) -> Stages:
            nonlocal seen
            if not seen:
                check_identity(graph.program, plan)
            stages, same = find_stages(graph, plan)
            if not same and not seen:
                made = plan.versions.get("jax", "unknown")
                warnings.warn(
                    f"the plan was made for another program of the same model (under jax {made}, here "
                    f"{jax.__version__}): the cuts were found again by its matrix products and parameters. "
                    "Predicted times and memory may be off; a new plan knows better.",
                    stacklevel=6,
                )
            seen += 1
            return stages

        return stages_of

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

    def _ids(self, role: Role) -> list[int]:
        assert self._home is not None
        return [v for v, leaf in enumerate(self._home.graph.program.inputs) if leaf.role is role]

    def _place(self, make: Any, params: Any, frozen: Any, model_state: Any, rng: Any) -> TrainState:
        who = self._who
        first = self._meshes[0]
        if make is not None:
            placed = self._initialise(make, jax.random.fold_in(rng, 0))
        else:
            placed = self._place_tree(params, Role.PARAM)
        return TrainState(
            params=placed,
            opt_state=None if self._cut is None else init_state(self._cut, self._meshes, placed, move),
            model_state=self._place_tree(model_state, Role.MODEL_STATE)
            if "model_state" in who.takes
            else None,
            frozen=self._place_tree(frozen, Role.FROZEN) if "frozen" in who.takes else None,
            rng=place([jax.random.fold_in(rng, 1)], [None], first)[0] if "rng" in who.takes else None,
            step=place([jnp.int32(0)], [None], first)[0],
        )

    def _place_tree(self, tree: Any, role: Role) -> Any:
        assert self._home is not None
        owner, program = self._home.table.owner, self._home.graph.program
        leaves, treedef = jax.tree.flatten(tree)
        placed: list[Any] = list(leaves)
        ids = self._ids(role)
        for stage, mesh in enumerate(self._meshes):
            mine = [k for k, v in enumerate(ids) if owner[v] == stage]
            values = [_as_dtype(leaves[k], program.inputs[ids[k]].aval.dtype) for k in mine]
            for k, array in zip(mine, place(values, [None] * len(mine), mesh), strict=True):
                placed[k] = array
        return treedef.unflatten(placed)

    def _initialise(self, make: Callable[[Any], Any], key: Any) -> Any:
        """Make every stage's parameters on its own devices; XLA drops what a stage does not keep."""
        assert self._home is not None
        owner, ids = self._home.table.owner, self._ids(Role.PARAM)
        shape = jax.eval_shape(make, key)
        placed: list[Any] = [None] * len(ids)
        for stage, mesh in enumerate(self._meshes):
            mine = [k for k, v in enumerate(ids) if owner[v] == stage]
            whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            run = jax.jit(
                lambda x, mine=mine: [jax.tree.leaves(make(x))[k] for k in mine], out_shardings=whole
            )
            for k, array in zip(mine, run(place([key], [None], mesh)[0]), strict=True):
                placed[k] = array
        return jax.tree.structure(shape).unflatten(placed)

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
            RuntimeFailure: something failed on the devices; before the update `state` is still good.
        """
        batch = (batch, *args) if self._who.spread else batch
        engine = self._ready(state, batch)
        if self._optimizer is None:
            return self._outputs_of(engine, state, batch, rng)
        state = self._at_stages(state)
        env, prepared = self._run(engine, state, batch, rng)
        grads = self._at_home(prepared, env)
        self._wait(env["loss",], grads)
        assert self._cut is not None
        params, opt_state = apply_cut(
            self._cut,
            self._meshes,
            jax.tree.structure(state.params).unflatten(grads),
            state.opt_state,
            state.params,
            move,
            loss=move([env["loss",]], [None], self._meshes[self._cut.hub])[0],
            donate=self._options.donate,
        )
        out = self._loss_out(prepared, env, state)
        new = state.replace(
            params=params, opt_state=opt_state, model_state=out.model_state, step=_next(state.step, rng)
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
        engine = self._ready(state, batch)
        if self._optimizer is None:
            raise TraceError(message("this step has no loss.", hint="auto_partition(fn, optimizer=...)."))
        chosen = self._batch_leaves(batch, wrt_batch)
        env, prepared = self._run(engine, state, batch, rng, frozenset(chosen.values()))
        out = self._loss_out(prepared, env, state)
        structure = jax.tree.structure(state.params)
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(state.params)]
        sums = self._at_home(prepared, env)
        grads = structure.unflatten([g.astype(dtype) for g, dtype in zip(sums, dtypes, strict=True)])
        if not wrt_batch:
            return out, grads
        leaves = jax.tree.leaves(batch)
        first = self._ids(Role.BATCH)[0]
        found = {
            name: env["batch_grad", v] if ("batch_grad", v) in env else jnp.zeros_like(leaves[v - first])
            for name, v in chosen.items()
        }
        return out, (grads, found)

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
        declared = subject(call, takes, is_loss=False)
        engines: dict[Any, Engine] = {}

        def run(state: TrainState, batch: Batch, *, rng: Any = None) -> Any:
            self._ready(state, batch)
            rng = state.rng if rng is None else rng
            who = declared.with_given(frozen=state.frozen, model_state=state.model_state, rng=rng)
            key = (self._times_laid_out, who.takes, jax.tree.structure(batch))
            if key not in engines:
                dims = self._dims_of(batch) if batch_dims is None else batch_dims
                engines[key] = self._evaluation_engine(who, state, batch, rng, dims)
            return self._outputs_of(engines[key], state, batch, rng)

        return run

    def _dims_of(self, batch: Batch) -> Any:
        assert self._home is not None
        same = jax.tree.structure(batch) == jax.tree.structure(self._home.example.batch)
        return self._batch_dims if same else AUTO

    def _evaluation_engine(
        self, who: Subject, state: TrainState, batch: Batch, rng: Any, batch_dims: Any
    ) -> Engine:
        given = {"frozen": state.frozen, "model_state": state.model_state, "rng": rng}
        example = make_example(who, abstract(state.params), batch, batch_dims=batch_dims, **given)
        assert self._home is not None
        home = self._home.table
        readers = {
            v: [s.index for s in home.shapes if v in (*s.params, *s.held, *s.state)] or [home.owner[v]]
            for v in home.owner
        }
        by_path = {self._home.graph.program.inputs[v].path: stages for v, stages in readers.items()}
        count = len(self._meshes)
        return self._make_engine(
            who,
            example,
            lambda g: stages_by_parameters(g, by_path, count),
            train=False,
            batch_dims=batch_dims,
        )

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

    def _ready(self, state: TrainState, batch: Batch) -> Engine:
        self._refuse_tracers((state, batch))
        if self._engine is None:
            raise PlanError(message("the step has no state yet.", hint="state = step.init(params, batch)."))
        if not isinstance(state, TrainState):
            raise TraceError(
                message(
                    f"the first argument of a step is its state, got {type(state).__name__}.",
                    hint="state, out = step(state, batch).",
                )
            )
        leaves = jax.tree.leaves((state.params, state.opt_state))
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise RuntimeFailure(
                message(
                    "this state was given to an earlier step, which took over its memory.",
                    hint="go on with the state that step returned, or use donate=False.",
                )
            )
        return self._engine

    def _refuse_tracers(self, tree: Any) -> None:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
            raise TraceError(
                message(
                    "a step cannot be traced by jit, grad or vmap: it runs programs on several meshes.",
                    hint="call it as it is (its programs are compiled), or use step.reference, the pure "
                    "function it equals.",
                )
            )

    def _run(
        self,
        engine: Engine,
        state: TrainState,
        batch: Batch,
        rng: Any,
        batch_grads: frozenset[int] = frozenset(),
    ) -> tuple[dict[Any, Any], Prepared]:
        prepared = engine.prepared(batch, batch_grads)
        leaves: dict[int, Any] = {}
        trees = {Role.PARAM: state.params, Role.FROZEN: state.frozen, Role.MODEL_STATE: state.model_state}
        for role, tree in trees.items():
            ids = [v for v, leaf in enumerate(prepared.graph.program.inputs) if leaf.role is role]
            if ids:
                leaves.update(zip(ids, jax.tree.leaves(tree), strict=True))
        key = None
        if "rng" in engine.who.takes:
            key = _step_key(state.rng, state.step) if rng is None else rng
        try:
            return engine.run(prepared, leaves, batch, key), prepared
        except jax.errors.JaxRuntimeError as error:
            raise _failure(error) from error

    def _at_stages(self, state: TrainState) -> TrainState:
        """The state with what the user put in (host arrays from a checkpoint, say) on its stages."""
        assert self._home is not None
        assert self._cut is not None
        owner = self._home.table.owner

        def laid(tree: Any, stages: Sequence[int], like: Any, name: str) -> Any:
            leaves, treedef = jax.tree.flatten(tree)
            self._check_like(tree, like, name)
            pairs = zip(leaves, stages, strict=True)
            return treedef.unflatten([settled(leaf, self._meshes[stage]) for leaf, stage in pairs])

        return state.replace(
            params=laid(state.params, [owner[v] for v in self._ids(Role.PARAM)], self._cut.params, "params"),
            opt_state=laid(state.opt_state, self._cut.state_owner, self._cut.state, "opt_state"),
        )

    @staticmethod
    def _check_like(tree: Any, like: Any, name: str) -> None:
        """Refuse a tree that a user has put into the state with another structure, shape or dtype."""
        if jax.tree.structure(tree) != jax.tree.structure(like):
            raise TraceError(
                message(
                    f"state.{name} has another structure than at init.",
                    f"got {jax.tree.structure(tree)}",
                    f"expected {jax.tree.structure(like)}",
                )
            )
        for leaf, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True):
            if leaf.shape != wanted.shape or leaf.dtype != wanted.dtype:
                path = next(
                    path
                    for path, x, y in zip(
                        path_leaves(tree, name)[0], jax.tree.leaves(tree), jax.tree.leaves(like), strict=True
                    )
                    if x is leaf and y is wanted
                )
                raise TraceError(
                    message(
                        f"state.{path} has another shape or dtype than at init.",
                        f"got {leaf.dtype}{list(leaf.shape)}, expected {wanted.dtype}{list(wanted.shape)}",
                    )
                )

    def _at_home(self, prepared: Prepared, env: dict[Any, Any]) -> list[Any]:
        """Gradients where their parameters live, also if a batch of another shape is read elsewhere."""
        assert self._home is not None
        owner, meshes = self._home.table.owner, self._meshes
        if prepared.table.owner == owner and prepared.layout.meshes == meshes:
            return [env["grad", v] for v in self._ids(Role.PARAM)]
        return [move([env["grad", v]], [None], meshes[owner[v]])[0] for v in self._ids(Role.PARAM)]

    def _outputs_of(self, engine: Engine, state: TrainState, batch: Batch, rng: Any) -> Any:
        env, prepared = self._run(engine, state, batch, rng)
        program = prepared.graph.program
        return program.out_tree.unflatten([env["aux", k] for k in range(len(program.outputs))])

    def _loss_out(self, prepared: Prepared, env: dict[Any, Any], state: TrainState) -> LossOut:
        program, table = prepared.graph.program, prepared.table
        states = [v for v, leaf in enumerate(program.inputs) if leaf.role is Role.MODEL_STATE]
        old = jax.tree.leaves(state.model_state)
        last = prepared.layout.num_microbatches
        leaves, state_index = [], 0
        for k, leaf in enumerate(program.outputs):
            if leaf.kind is OutputKind.LOSS:
                leaves.append(env["loss",])
            elif leaf.kind is OutputKind.WEIGHT:
                leaves.append(env["total_weight",])
            elif leaf.kind is OutputKind.MODEL_STATE:
                v = states[state_index]
                leaves.append(env["state", v, last] if v in table.written else old[state_index])
                state_index += 1
            else:
                leaves.append(env["aux", k])
        return program.out_tree.unflatten(leaves)

    def _wait(self, loss: Any, grads: Sequence[Any]) -> None:
        """Wait until all gradients are there: an error before the update leaves the state intact."""
        if not self._options.async_errors:
            try:
                jax.block_until_ready((loss, list(grads)))
            except jax.errors.JaxRuntimeError as error:
                raise _failure(error) from error
        if self._options.check_finite:
            flags = [jnp.isfinite(loss), *(jnp.all(jnp.isfinite(g)) for g in grads)]
            bad = [k for k, flag in enumerate(flags) if not bool(flag)]
            if bad:
                assert self._home is not None
                inputs = self._home.graph.program.inputs
                names = ["the loss" if k == 0 else inputs[self._ids(Role.PARAM)[k - 1]].path for k in bad[:5]]
                raise RuntimeFailure(
                    message(
                        "not finite: " + ", ".join(names) + ".",
                        hint="the state is unchanged; lower the rate.",
                    )
                )

    def _batch_leaves(self, batch: Batch, names: Sequence[str]) -> dict[str, int]:
        paths, leaves = path_leaves(abstract(batch), "")
        first = self._ids(Role.BATCH)[0] if self._ids(Role.BATCH) else 0
        chosen: dict[str, int] = {}
        for name in names:
            hits = [k for k, p in enumerate(paths) if p in (name, f"['{name}']", f"[{name}]", f".{name}")]
            if len(hits) != 1:
                raise TraceError(
                    message(
                        f"wrt_batch names {name!r}, which is no batch leaf.", f"there are: {', '.join(paths)}"
                    )
                )
            if not jnp.issubdtype(leaves[hits[0]].dtype, jnp.inexact):
                raise TraceError(
                    message(
                        f"wrt_batch names {name!r}, which has no gradient.",
                        f"got {leaves[hits[0]].dtype}, expected a floating dtype",
                    )
                )
            chosen[name] = first + hits[0]
        return chosen


@jax.jit
def _step_key(key: Any, step: Any) -> Any:
    return jax.random.fold_in(key, step)


@jax.jit
def _add_one(step: Any) -> Any:
    return step + 1


def _next(step: Any, rng: Any) -> Any:
    return _add_one(step) if rng is None else step


def _as_dtype(value: Any, dtype: Any) -> Any:
    return value if getattr(value, "dtype", None) == dtype else jnp.asarray(value, dtype)


def _failure(error: Exception) -> RuntimeFailure:
    return RuntimeFailure(
        message(
            "the devices failed before the update; the state is as it was.",
            str(error).splitlines()[0],
            hint="if memory ran out: a smaller memory_limit_bytes makes the planner leave more room.",
        )
    )
