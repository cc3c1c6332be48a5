"""How long it takes to plan: from a loss function and shapes to a plan, without weights or devices.

    python -m benchmarks.planning_time                                   # all models, 8, 32 and 1,024 devices
    python -m benchmarks.planning_time --models bert-96-128 --devices 32 --json times.json
    python -m benchmarks.planning_time --models unet-1b --devices 1024 --profile unet.prof

Every case runs in a process of its own, so that peak memory is its own and no cache is warm. CPU seconds
are those of that process (all threads), so that a busy machine does not count; wall seconds are those of
`plan`, without tracing. Imports and the making of shapes are left out. Hosts hold eight H200 with NVLink;
between them 100 Gb/s.
"""

import argparse
import cProfile
import functools
import json
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optax

import rannc_jax.ir
from benchmarks.clusters import hosts_of_8, matmul_dtype
from benchmarks.models import CASES, make_case
from rannc_jax import planning
from rannc_jax.partition.constraints import Constraints
from rannc_jax.words import schedule_words

PARTS = {
    "trace": (rannc_jax.ir, ("trace",)),
    "prepare": (planning, ("prepare",)),
    "atoms": (planning, ("open_graph", "node_seconds", "atoms")),
    "coarsen": (planning, ("coarsen",)),
    "price": (planning, ("price",)),
    "search": (planning, ("search",)),
}
"""Part of planning -> the module that calls its functions, and their names there."""

COLUMNS = ("trace", "prepare", "atoms", "coarsen", "price", "search", "plan")


class Clock:
    """Wall and CPU seconds by part."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = dict.fromkeys(COLUMNS, 0.0)
        self.cpu_s: dict[str, float] = dict.fromkeys(COLUMNS, 0.0)

    def timed(self, part: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, its seconds added to a part."""

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return fn(*args, **kwargs)
            finally:
                self.wall_s[part] += time.perf_counter() - wall
                self.cpu_s[part] += time.process_time() - cpu

        return run

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Time the parts where the planner calls them."""
        originals = [
            (module, name, getattr(module, name)) for module, names in PARTS.values() for name in names
        ]
        for part, (module, names) in PARTS.items():
            for name in names:
                setattr(module, name, self.timed(part, getattr(module, name)))
        try:
            yield
        finally:
            for module, name, original in originals:
                setattr(module, name, original)

    def result(self) -> dict[str, dict[str, float]]:
        """Seconds by part; tracing is taken out of what calls it."""
        for seconds in (self.wall_s, self.cpu_s):
            seconds["prepare"] -= seconds["trace"]
            seconds["plan"] -= seconds["trace"]
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s}


def measure(name: str, devices: int, profile: str | None = None) -> dict[str, Any]:
    """Plan one case in this process."""
    cluster = hosts_of_8(devices)
    case = make_case(name, matmul_dtype(cluster))
    rows = case.rows_per_device * devices
    request = planning.Request(cluster=cluster, constraints=Constraints(), optimizer=optax.adamw(1e-4))
    clock, profiler = Clock(), cProfile.Profile()
    plan_function = clock.timed("plan", planning.plan_function)
    with clock.watch():
        if profile:
            profiler.enable()
        plan, graph = plan_function(case.subject(), case.example(rows), request)
        profiler.disable()
    if profile:
        profiler.dump_stats(profile)
    return {
        "model": name,
        "parameters": case.num_parameters,
        "devices": devices,
        "rows": rows,
        "equations": len(graph.program.eqns),
        "nodes": len(graph.nodes),
        "blocks": len(plan.blocks),
        **clock.result(),
        "stages": len(plan.stages),
        "replicas": [len(stage.devices) for stage in plan.stages],
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "step_s": plan.step_s,
        "bound_s": plan.bound_s,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def measure_apart(name: str, devices: int, limit_s: float) -> dict[str, Any]:
    """Plan one case in a new process; {"error": why} where that failed."""
    command = [sys.executable, "-m", "benchmarks.planning_time", "--here", "--models", name]
    command += ["--devices", str(devices)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"model": name, "devices": devices, "error": f"stopped after {limit_s:.0f} s"}
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        return {"model": name, "devices": devices, "error": why}
    return json.loads(done.stdout)


def header() -> str:
    parts = " ".join(f"{part:>8}" for part in COLUMNS)
    return f"{'CPU s':14} {'devices':>7} {parts} {'wall s':>7} {'RSS GiB':>8}  plan"


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    start = f"{row['model']:14} {row['devices']:7}"
    if "error" in row:
        return f"{start} {row['error']}"
    parts = " ".join(f"{row['cpu_s'][part]:8.2f}" for part in COLUMNS)
    gap = row["step_s"] / row["bound_s"] - 1
    replicas = sorted(set(row["replicas"]))
    counts = str(replicas[0]) if len(replicas) == 1 else f"{replicas[0]}-{replicas[-1]}"
    plan = (
        f"{row['stages']} x {counts}, m={row['microbatches']}, {schedule_words(row['schedule'])}: "
        f"{1e3 * row['step_s']:.4g} ms, bound {gap:+.1%}"
    )
    return f"{start} {parts} {row['wall_s']['plan']:7.2f} {row['peak_rss_gib']:8.2f}  {plan}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES), metavar="MODEL")
    parser.add_argument("--devices", default="8,32,1024")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures there")
    parser.add_argument("--limit", type=float, default=900.0, help="most seconds a case")
    parser.add_argument("--profile", help="write a cProfile of the (single) case there")
    parser.add_argument("--here", action="store_true", help="one case in this process, as JSON")
    arguments = parser.parse_args()
    devices = [int(count) for count in arguments.devices.split(",")]
    if arguments.here or arguments.profile:
        print(json.dumps(measure(arguments.models[0], devices[0], arguments.profile)))
        return
    rows = []
    print(header(), flush=True)
    for count in devices:
        for name in arguments.models:
            rows.append(measure_apart(name, count, arguments.limit))
            print(line(rows[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
