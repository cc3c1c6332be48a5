"""Optimizer state on the host against the same plan with it on the device: step, update, memory, copies.

    python -m benchmarks.offload --width 3072 --layers 12 --rows 16 --length 1024 --microbatches 2

One device, a GPT of 1.4 B parameters in float32 with AdamW. Each plan is run in a process of its own, because
a device's peak is never reset. "copies" is the state's bytes, once each way, over the time of an update; the
planner counts both ways one after the other at the rate in its description of the device.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rannc_jax
from benchmarks.fused_step import VOCABULARY, loss_fn, make_params

GB = 1e9
GIB = 2**30


def measured(options: argparse.Namespace, offload: bool) -> dict[str, float]:
    """Seconds and bytes of one plan."""
    step = rannc_jax.auto_partition(
        loss_fn,
        optimizer=optax.adamw(1e-4),
        num_stages=1,
        replicas=1,
        num_microbatches=options.microbatches,
        remat="save_matmuls",
        offload=offload,
    )
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (options.rows, options.length + 1), dtype=np.int32)
    batch = {"ids": ids[:, :-1], "labels": ids[:, 1:]}
    state = step.init(
        lambda key: make_params(key, options.width, options.layers), batch, rng=jax.random.key(0)
    )
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))

    def train() -> Any:
        nonlocal state
        state, out = step(state, batch)
        return out.loss, state

    step_s = median_seconds(train, options.repeats)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    def update() -> Any:
        nonlocal state
        state = step.update(state, jax.tree.map(jnp.zeros_like, state.params))
        return state

    update_s = median_seconds(update, options.repeats)
    plan = step.plan
    return {
        "step_s": step_s,
        "update_s": update_s,
        "peak_bytes": peak,
        "planned_bytes": plan.stages[0].peak_bytes,
        "buffer_bytes": plan.stages[0].memory_bytes["transfers"],
        "state_bytes": state_bytes,
        "planner_bytes_per_s": plan.cluster.device(0).host_bytes_per_s,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    }


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Of one call, waited for; the first two compile and warm up."""
    found = []
    for turn in range(repeats + 2):
        began = time.perf_counter()
        jax.block_until_ready(run())
        if turn >= 2:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def copy_rates() -> tuple[float, float]:
    """Bytes a second of one large copy to pinned host memory, and from it, each alone."""
    x = jnp.ones(256 * 2**20 if jax.default_backend() == "gpu" else 2**22, jnp.float32)
    here = x.sharding
    pinned = jax.block_until_ready(jax.device_put(x, here.with_memory_kind("pinned_host")))
    to_host = median_seconds(lambda: jax.device_put(x, here.with_memory_kind("pinned_host")), 5)
    from_host = median_seconds(lambda: jax.device_put(pinned, here), 5)
    return x.nbytes / to_host, x.nbytes / from_host


def table(found: dict[str, dict[str, float]], rates: tuple[float, float]) -> str:
    """The figures as markdown."""
    device = jax.local_devices()[0]
    resident, offloaded = found["resident"], found["offloaded"]
    python = ".".join(map(str, sys.version_info[:3]))
    size = (
        f"{resident['parameters'] / 1e9:.2f} B parameters, AdamW state of {_gib(resident['state_bytes'])} GiB"
    )
    columns = (
        "optimizer state",
        "step ms",
        "update ms",
        "peak GiB",
        "planned GiB",
        "buffers GiB",
        "copies GB/s",
    )
    rows = [columns, ("---",) * len(columns)]
    for name, row in found.items():
        rate = f"{row['state_bytes'] / row['update_s'] / GB:.1f}" if row is offloaded else "-"
        sizes = [_gib(row[key]) for key in ("peak_bytes", "planned_bytes", "buffer_bytes")]
        rows.append((name, _ms(row["step_s"]), _ms(row["update_s"]), *sizes, rate))
    planned_s = 2 * offloaded["state_bytes"] / offloaded["planner_bytes_per_s"]
    lines = [
        f"{device.device_kind}, jax {jax.__version__}, Python {python}; {size}",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"One copy alone: {rates[0] / GB:.1f} GB/s to the host, {rates[1] / GB:.1f} from it; the planner "
        f"counts with {offloaded['planner_bytes_per_s'] / GB:.1f}. Offloading adds "
        f"{_ms(offloaded['step_s'] - resident['step_s'])} ms a step; the planner says {_ms(planned_s)}.",
    ]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (("width", 128), ("layers", 2), ("length", 64), ("rows", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("microbatches", 2), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", choices=("resident", "offloaded"), help="one plan, as JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measured(options, options.only == "offloaded")))
        return
    found = {}
    for name in ("resident", "offloaded"):  # one after the other: each takes most of the device's memory
        call = [sys.executable, "-m", "benchmarks.offload", *sys.argv[1:], "--only", name]
        found[name] = json.loads(
            subprocess.run(call, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]
        )
    print(table(found, copy_rates()))


if __name__ == "__main__":
    main()
