"""The front door: `auto_partition`, `make_plan`, `parallelize`.

Thin on purpose: it reads what users may say (a mesh in four forms, constraints, options), and hands it
to the planner on one side and the runtime on the other.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import optax

from rannc_jax.cluster import ClusterSpec, DeviceGroup
from rannc_jax.config import load_cluster
from rannc_jax.contract import TrainableModel
from rannc_jax.cost.presets import device_preset, kind_of, link_preset
from rannc_jax.errors import MeshError, PlanError, TraceError, message
from rannc_jax.ir.example import AUTO, Example, Subject, make_example, subject
from rannc_jax.ir.graph import Graph
from rannc_jax.partition.constraints import Constraints
from rannc_jax.partition.space import check_menu
from rannc_jax.plan import Plan
from rannc_jax.planning import EVERYTHING, Request, plan_function
from rannc_jax.progress import Progress
from rannc_jax.runtime.abilities import OFFLOADS, SHARDINGS, check_runs
from rannc_jax.runtime.step import Defaults, Options, Step
from rannc_jax.schedule import schedule_named

RUNNABLE = replace(EVERYTHING, shardings=SHARDINGS, offloads=OFFLOADS)
"""What the planner may choose from where the plan is to be run."""

Mesh = str | Path | Mapping[str, Any] | ClusterSpec | jax.sharding.Mesh | None


def auto_partition(
    fn: Callable[..., Any] | TrainableModel,
    *,
    optimizer: optax.GradientTransformation | None = None,
    mesh: Mesh = None,
    takes: Iterable[str] | None = None,
    batch_dims: Any = AUTO,
    batch_stats: str = AUTO,
    allow_coupled: bool = False,
    costs: str = "analytic",
    progress: Progress | None = None,
    **settings: Any,
) -> Step:
    """Cut a function automatically and train it on the devices of a mesh.

    Args:
        fn: `loss_fn(params, batch)` with keyword-only any of `rng`, `model_state`, `frozen`, returning a
            scalar, `(scalar, aux)`, `Weighted` or `LossOut`; or an object that brings such a function
            along (`TrainableModel`). Without an optimizer: `apply_fn(params, *inputs)`, any outputs.
        optimizer: any optax transformation; None for forward only.
        mesh: path of a mesh file, a `ClusterSpec`, nothing (all local devices), or a
            `jax.sharding.Mesh` whose axis "stage" fixes num_stages and "data" the replicas.
        takes: which of rng, model_state, frozen `fn` takes, where its signature does not say.
        batch_dims: a tree prefix of the batch with the dim that carries the rows of each leaf, None for
            leaves without rows; "auto": dim 0.
        batch_stats: "auto" only: over the microbatch, shared by a stage's replicas.
        allow_coupled: split batches although examples see each other.
        costs: "analytic", by rules; "measured": blocks are timed on the device here (and remembered).
        progress: told what takes long.
        **settings: constraints (`num_stages`, `num_microbatches`, `replicas`, `schedule`, `remat`,
            `sharding`, `offload`, `memory_limit_bytes`, `memory_margin`, `cuts`; each also "auto"), some by
            stage or by module (`remat={"encoder": "recompute"}`: docs/how-to/fix-parts.md), and options of
            running (`donate`, `async_errors`, `check_finite`).

    Returns:
        A `Step`: `state = step.init(params, batch)`, then `state, out = step(state, batch)`.

    Raises:
        PlanError: a setting is unknown or not built yet. Planning itself happens in `init`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> step = auto_partition(loss_fn, optimizer=optax.sgd(0.1))
        >>> batch = {"x": jnp.ones((8, 4)), "y": jnp.zeros((8, 2))}
        >>> state = step.init({"w": jnp.ones((4, 2))}, batch)
        >>> state, out = step(state, batch)
        >>> float(out.loss)
        16.0
    """
    who, defaults, batch_dims = _subject(fn, takes, optimizer, batch_dims)
    _check_costs(costs)
    constraints, options = _settings(settings, batch_stats, (*_CONSTRAINTS, *_OPTIONS))
    check_menu(constraints, RUNNABLE)
    devices, cluster, constraints = _devices(mesh, constraints)

    def planner(who: Subject, example: Example) -> tuple[Plan, Graph | None]:
        fitted = _fit_memory(cluster, constraints, devices)
        request = Request(
            cluster=cluster,
            constraints=fitted,
            optimizer=optimizer,
            allow_coupled=allow_coupled,
            menu=RUNNABLE,
            costs=costs,
        )
        return plan_function(who, example, request, progress)

    return Step(
        who,
        planner,
        optimizer=optimizer,
        devices=devices,
        options=options,
        batch_dims=batch_dims,
        defaults=defaults,
        progress=progress,
    )


def make_plan(
    fn: Callable[..., Any] | TrainableModel,
    params: Any = None,
    batch: Any = None,
    *,
    model_state: Any = None,
    frozen: Any = None,
    rng: Any = None,
    optimizer: optax.GradientTransformation | None = None,
    mesh: Mesh = None,
    takes: Iterable[str] | None = None,
    batch_dims: Any = AUTO,
    batch_stats: str = AUTO,
    allow_coupled: bool = False,
    runnable: bool = True,
    costs: str = "analytic",
    progress: Progress | None = None,
    **constraints: Any,
) -> Plan:
    """Plan without devices and without weights: shapes are enough.

    Args:
        fn, optimizer, mesh, takes, batch_dims, batch_stats, allow_coupled, costs, progress: as in
            `auto_partition`.
        params, batch, model_state, frozen, rng: arrays or `jax.ShapeDtypeStruct`s. Without an optimizer
            a tuple `batch` holds the positional arguments after params.
        runnable: choose from what this release runs. False: from all that can be planned.
        **constraints: as in `auto_partition`.

    Returns:
        A `Plan` that can be printed, saved, and given to `parallelize`.
    """
    who, defaults, batch_dims = _subject(fn, takes, optimizer, batch_dims)
    _check_costs(costs)
    fixed, _ = _settings(constraints, batch_stats, _CONSTRAINTS)
    _, cluster, fixed = _devices(mesh, fixed)
    given = {
        "frozen": defaults.frozen if frozen is None else frozen,
        "model_state": defaults.model_state if model_state is None else model_state,
        "rng": jax.eval_shape(lambda: jax.random.key(0))
        if rng is None and "rng" in who.takes - who.optional
        else rng,
    }
    batch = defaults.batch if batch is None else batch
    example = make_example(
        who.with_given(**given),
        defaults.params if params is None else params,
        (batch,) if who.spread and not isinstance(batch, tuple) else batch,
        batch_dims=batch_dims,
        **given,
    )
    request = Request(
        cluster=cluster,
        constraints=fixed,
        optimizer=optimizer,
        allow_coupled=allow_coupled,
        menu=RUNNABLE if runnable else EVERYTHING,
        costs=costs,
    )
    return plan_function(who.with_given(**given), example, request, progress)[0]


def parallelize(
    fn: Callable[..., Any] | TrainableModel,
    plan: Plan,
    *,
    optimizer: optax.GradientTransformation | None = None,
    mesh: Mesh = None,
    takes: Iterable[str] | None = None,
    batch_dims: Any = AUTO,
    progress: Progress | None = None,
    **options: Any,
) -> Step:
    """Train a function by a plan that was made before, here or elsewhere.

    Args:
        fn, optimizer, takes, batch_dims, progress: as in `auto_partition`.
        plan: from `make_plan` or `Plan.load`.
        mesh: a `jax.sharding.Mesh` (its devices are used in order), or nothing: all devices. A mesh file
            or `ClusterSpec` is checked against the plan.
        **options: `donate`, `async_errors`, `check_finite`.

    Raises:
        PlanError: the plan asks for what is not run yet; in `init`, if it belongs to another model.
        MeshError: the mesh is too small for the plan, or in `init`, if too few devices are here.
    """
    who, defaults, batch_dims = _subject(fn, takes, optimizer, batch_dims)
    if schedule_named(plan.schedule).has_backward == (optimizer is None):
        raise PlanError(
            message(
                "the plan and the optimizer do not go together.",
                f"schedule {plan.schedule!r}, optimizer {'none' if optimizer is None else 'given'}",
                hint="a forward-only plan has no optimizer, a training plan needs one.",
            )
        )
    _, chosen = _settings(options, AUTO, _OPTIONS)
    check_runs(plan)
    devices = None
    if isinstance(mesh, jax.sharding.Mesh):
        devices = list(mesh.devices.flat)
    elif mesh is not None:
        _check_fits(plan, _described(mesh))
    return Step(
        who,
        plan,
        optimizer=optimizer,
        devices=devices,
        options=chosen,
        batch_dims=batch_dims,
        defaults=defaults,
        progress=progress,
    )


def _check_fits(plan: Plan, cluster: ClusterSpec) -> None:
    """Refuse a cluster with fewer devices, or less memory, than a plan uses."""
    for index, stage in enumerate(plan.stages):
        for device in stage.devices:
            if device >= cluster.num_devices:
                raise MeshError(
                    message(
                        f"the plan uses device {device}, the mesh has {cluster.num_devices}.",
                        hint="make a plan for this mesh.",
                    )
                )
            if stage.peak_bytes > cluster.device(device).memory_bytes:
                raise MeshError(
                    message(
                        f"stage {index} of the plan does not fit device {device} of the mesh.",
                        f"needs {stage.peak_bytes / 2**30:.2f} GiB, "
                        f"has {cluster.device(device).memory_bytes / 2**30:.2f}",
                        hint="make a plan for this mesh.",
                    )
                )


def _subject(
    fn: Any, takes: Iterable[str] | None, optimizer: Any, batch_dims: Any
) -> tuple[Subject, Defaults, Any]:
    trains = optimizer is not None
    if trains and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise PlanError(
            message(f"optimizer={optimizer!r} is no optimizer.", hint="any of optax: optax.adamw(1e-4).")
        )
    if not callable(getattr(fn, "loss_fn", fn)):
        raise TraceError(message(f"{fn!r} is no function.", hint="loss_fn(params, batch)."))
    if isinstance(fn, TrainableModel):
        defaults = Defaults(
            params=fn.params,
            batch=fn.batch,
            frozen=fn.frozen or None,
            model_state=fn.model_state or None,
            initialisers=(lambda: fn.initialisers) if hasattr(type(fn), "initialisers") else None,
        )
        if isinstance(batch_dims, str) and fn.batch_dims is not None:
            batch_dims = fn.batch_dims
        outputs_fn = getattr(fn, "outputs_fn", None)
        call = fn.loss_fn if trains or outputs_fn is None else outputs_fn
        return subject(call, takes, is_loss=trains), defaults, batch_dims
    return subject(fn, takes, is_loss=trains, spread=not trains), Defaults(), batch_dims


def _check_costs(costs: str) -> None:
    if costs not in ("analytic", "measured"):
        raise PlanError(message(f"costs={costs!r} is not known.", hint='"analytic" or "measured".'))


_OPTIONS = tuple(f.name for f in fields(Options))
_CONSTRAINTS = tuple(f.name for f in fields(Constraints))
_NOT_BUILT = {"precision": (None, AUTO), "loss_scale": (None,), "verify": (False,), "executor": (AUTO,)}


def _settings(
    settings: Mapping[str, Any], batch_stats: str, known: Sequence[str]
) -> tuple[Constraints, Options]:
    """Sort keyword arguments into constraints and options; `known` are those that have a meaning here."""
    if batch_stats != AUTO:
        raise PlanError(
            message(
                f"batch_stats={batch_stats!r} is not built yet.",
                hint='"auto": statistics of a microbatch, shared by the replicas of a stage.',
            )
        )
    for name, plain in _NOT_BUILT.items():
        if settings.get(name, plain[0]) not in plain:
            raise PlanError(
                message(f"{name}={settings[name]!r} is not built yet.", hint=f"leave {name} out.")
            )
    rest = {k: v for k, v in settings.items() if k not in _NOT_BUILT}
    unknown = [k for k in rest if k not in known]
    if unknown:
        misplaced = [k for k in unknown if k in _CONSTRAINTS or k in _OPTIONS]
        raise PlanError(
            message(
                f"unknown settings: {', '.join(unknown)}.",
                f"known here: {', '.join(sorted(known))}",
                hint="constraints belong to make_plan, options of running to parallelize."
                if misplaced
                else None,
            )
        )
    return (
        Constraints(**{k: v for k, v in rest.items() if k in _CONSTRAINTS}),
        Options(**{k: v for k, v in rest.items() if k in _OPTIONS}),
    )


def _devices(
    mesh: Mesh, constraints: Constraints
) -> tuple[Sequence[jax.Device] | None, ClusterSpec, Constraints]:
    """Devices (None: all local), their description, and constraints with what the mesh fixes."""
    if isinstance(mesh, jax.sharding.Mesh):
        devices = list(mesh.devices.flat)
        axes = _mesh_axes(mesh)
        return devices, replace(local_cluster(devices), axes=axes), constraints
    if mesh is None:
        return None, local_cluster(jax.devices()), constraints
    return None, _described(mesh), constraints


def _described(mesh: Any) -> ClusterSpec:
    if isinstance(mesh, ClusterSpec):
        return mesh
    if not isinstance(mesh, str | Path | Mapping):
        raise MeshError(
            message(
                f"mesh={mesh!r} is no mesh.",
                hint="the path of a mesh file, a ClusterSpec, a jax.sharding.Mesh, or nothing: all devices.",
            )
        )
    return load_cluster(mesh)


def _mesh_axes(mesh: jax.sharding.Mesh) -> dict[str, int]:
    sizes = dict(mesh.shape)
    known = {"stage", "data"} & set(sizes)
    others = {axis: size for axis, size in sizes.items() if axis not in known and size > 1}
    if known and others:
        raise MeshError(
            message(
                f"the mesh has axes that the planner does not use: {', '.join(others)}.",
                f"got {sizes}",
                hint='axes "stage" and "data"; a mesh without these names lends its devices only.',
            )
        )
    return {axis: sizes[axis] for axis in known}


def local_cluster(devices: Sequence[jax.Device]) -> ClusterSpec:
    """A description of devices of this process, from presets and from what JAX says of their memory."""
    first = devices[0]
    limit = memory_limit(devices)
    name = "cpu" if first.platform == "cpu" else kind_of(first.device_kind, limit)
    if name is None:
        name = "h100"
        warnings.warn(
            f"no preset for {first.device_kind!r}; planning as for {name}. Describe it in a mesh file.",
            stacklevel=4,
        )
    device = device_preset(name)
    if limit is not None:
        device = replace(device, memory_bytes=limit)
    link = link_preset("host" if first.platform == "cpu" else "nvlink4")
    group = DeviceGroup(device=device, count_per_host=len(devices))
    return ClusterSpec(groups=(group,), intra_host=link, inter_host=link_preset("net100g"))


def memory_limit(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that JAX may use of the device that gives least; None where it does not say (CPU)."""
    found = [(d.memory_stats() or {}).get("bytes_limit") for d in devices if d.platform != "cpu"]
    known = [int(limit) for limit in found if limit]
    return min(known) if known else None


def _fit_memory(
    cluster: ClusterSpec, constraints: Constraints, devices: Sequence[jax.Device] | None
) -> Constraints:
    """Never plan for more memory than JAX may use of the devices that are here."""
    limit = memory_limit(jax.devices() if devices is None else devices)
    promised = min(group.device.memory_bytes for group in cluster.groups)
    if limit is None or limit >= promised:
        return constraints
    if constraints.memory_limit_bytes != AUTO and constraints.memory_limit_bytes <= limit:
        return constraints
    warnings.warn(
        f"JAX may use {limit / 2**30:.1f} GiB of a device, the mesh promises {promised / 2**30:.1f}: "
        "planning for the smaller. XLA_PYTHON_CLIENT_MEM_FRACTION, set before JAX starts, frees the rest.",
        stacklevel=5,
    )
    return replace(constraints, memory_limit_bytes=limit)
