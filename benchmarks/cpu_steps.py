"""Plans of several planners on eight fake CPU devices: predicted and measured steps.

    python -m benchmarks.cpu_steps --rounds 9

Three small networks, and devices too small for plain data parallelism. Steps of all plans are
taken in turn, so that whatever else the machine does meets all of them; medians. Fake devices share the
cores of the machine: what is measured is the sum of a plan's work and dispatch, not how well it overlaps.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.clusters import uniform_cluster
from benchmarks.models import Case, bert, moe, unet
from benchmarks.models.bert import Bert
from benchmarks.models.moe import Moe
from benchmarks.models.unet import UNet
from benchmarks.plan_quality import EQUAL, SCHEDULES, make_task
from rannc_jax import parallelize, planning
from rannc_jax.api import RUNNABLE
from rannc_jax.cluster import ClusterSpec
from rannc_jax.cost.calibrate import calibrate
from rannc_jax.cost.presets import device_preset
from rannc_jax.partition.baselines import equal_plan, rannc_plan
from rannc_jax.partition.candidate import Evaluation
from rannc_jax.partition.constraints import Constraints
from rannc_jax.plan import Plan
from rannc_jax.schedule import GPipe

DEVICES = 8

SMALL: dict[str, tuple[Callable[[], Case], int]] = {
    "bert": (
        lambda: bert.case(
            "bert", Bert(layers=4, width=128, heads=4, length=64, vocabulary=1024, dtype="float32"), 4
        ),
        18,
    ),
    "u-net": (
        lambda: unet.case(
            "u-net", UNet(width=32, growth=(1, 2), blocks=1, heads=2, side=16, dtype="float32"), 4
        ),
        22,
    ),
    "moe": (
        lambda: moe.case(
            "moe",
            Moe(layers=4, width=64, hidden=128, heads=4, length=64, vocabulary=1024, dtype="float32"),
            4,
        ),
        21,
    ),
}
"""Name -> (maker, MB of a device)."""


def constraints_of(plan: Evaluation) -> Constraints:
    """What fixes a plan entirely."""
    candidate = plan.candidate
    placed = candidate.placements
    return Constraints(
        num_stages=len(placed),
        cuts=tuple(p.blocks[0] for p in placed[1:]),
        replicas=tuple(p.num_replicas for p in placed),
        num_microbatches=candidate.num_microbatches,
        schedule=candidate.schedule,
        remat=tuple(price.mode.remat for price in plan.prices),
    )


def plans_of(case: Case, cluster: ClusterSpec) -> dict[str, Plan]:
    """Every planner's plan, as the runtime takes it; equal plans of several planners once."""
    task = make_task(case, cluster)
    answer = rannc_plan(task.problem, GPipe())
    found = {kind: equal_plan(task.problem, task.weights[kind], SCHEDULES) for kind in EQUAL}
    found["rannc"] = None if answer is None else answer.plan
    fixed = {name: constraints_of(plan) for name, plan in found.items() if plan is not None}
    example = case.example(DEVICES * case.rows_per_device)
    plans = {}
    for name, constraints in {"ours": Constraints(), **fixed}.items():
        request = planning.Request(
            cluster=cluster, constraints=constraints, optimizer=optax.adamw(1e-4), menu=RUNNABLE
        )
        plans[name] = planning.plan_function(case.subject(), example, request)[0]
    return plans


def filled(shapes: Any, key: int) -> Any:
    """Small random arrays of these shapes."""
    rng = np.random.default_rng(key)

    def fill(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        if np.issubdtype(shape.dtype, np.integer):
            return rng.integers(0, 1000, shape.shape).astype(shape.dtype)
        return (0.02 * rng.standard_normal(shape.shape) + 0.01).astype(shape.dtype)

    return jax.tree.map(fill, shapes)


def measure(case: Case, plans: dict[str, Plan], rounds: int) -> dict[str, list[float]]:
    """Seconds of steps by plan, taken in turn; the first two of each are left out."""
    params, batch = filled(case.params, 0), filled(case.batch(DEVICES * case.rows_per_device), 1)
    steps, states = {}, {}
    for name, plan in plans.items():
        steps[name] = parallelize(case.loss, plan, optimizer=optax.adamw(1e-4))
        states[name] = steps[name].init(params, batch)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for turn, name in itertools.product(range(rounds + 2), plans):
        began = time.perf_counter()
        states[name], out = steps[name](states[name], batch)
        jax.block_until_ready((states[name], out))
        if turn >= 2:
            seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calibrate", action="store_true", help="measure the devices, not the preset")
    parser.add_argument("--models", nargs="*", default=list(SMALL), choices=list(SMALL))
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    measured = calibrate(seconds=30).device if arguments.calibrate else None
    print(f"{'model':20} {'planner':10} {'predicted ms':>12} {'measured ms':>11} {'least':>8}  plan")
    for name in arguments.models:
        make, megabytes = SMALL[name]
        case = make()
        device = replace(measured or device_preset("cpu"), memory_bytes=megabytes * 10**6)
        plans = plans_of(case, uniform_cluster(device, DEVICES, "host"))
        seconds = measure(case, plans, arguments.rounds)
        for planner, plan in plans.items():
            taken = seconds[planner]
            counts = "+".join(str(len(stage.devices)) for stage in plan.stages)
            print(
                f"{name:20} {planner:10} {1e3 * plan.step_s:12.1f} {1e3 * statistics.median(taken):11.1f} "
                f"{1e3 * min(taken):8.1f}  {counts}, m={plan.num_microbatches}, {plan.schedule}",
                flush=True,
            )


if __name__ == "__main__":
    main()
