"""Fused attention on NVIDIA GPUs: is cuDNN's result the XLA form's result, and how much faster is it?

    PYTHONPATH=. python benchmarks/attention_gpu.py [--json attention.json] [--small] [--skip-timing]

Equality: both kernels against float32 attention on the same half-precision numbers, forward and every
gradient; cuDNN may be at most `SLACK` times as far from it as the XLA form in the same dtype. Compiled
programs are read too: one fused forward and one fused backward, nothing computed twice. Timing: forward
alone and forward with backward, under jit, beside a bare call of `jax.nn.dot_product_attention`, and
inside shard_map and under sharded jit over all GPUs (two at least). `--small` is a rehearsal for machines
without a GPU, where both kernels are the XLA form.
"""

import argparse
import contextlib
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_bridge import cudnn
from torch_bridge.attention import Settings, attention

SLACK = 1.5
FLOOR = 2e-3  # an error below this share of the value's norm is half-precision rounding whoever makes it
TIMED = ((8, 16, 2048, 64), (4, 32, 4096, 128))
SMALL = ((2, 4, 64, 16),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of attention. `mask`: none, padding, holes (rows that see nothing), bias, infinite bias."""

    name: str
    dtype: str = "bfloat16"
    heads: int = 8
    key_heads: int = 8
    queries: int = 256
    keys: int = 256
    dim: int = 64
    causal: bool = False
    mask: str = "none"
    bias_heads: int = 1


CASES = (
    Case(name="plain"),
    Case(name="float16", dtype="float16"),
    Case(name="causal", causal=True),
    Case(name="causal, dim 128", causal=True, dim=128),
    Case(name="dim 256 (Hopper)", dim=256),
    Case(name="dim 72", dim=72),
    Case(name="grouped queries", key_heads=2, causal=True),
    Case(name="one key head", key_heads=1),
    Case(name="other number of keys", keys=384),
    Case(name="odd lengths", queries=253, keys=253, causal=True),
    Case(name="padding mask", mask="padding"),
    Case(name="padding mask, grouped", mask="padding", key_heads=2),
    Case(name="rows that see nothing", mask="holes"),
    Case(name="bias for all heads", mask="bias"),
    Case(name="bias per head", mask="bias", bias_heads=8),
    Case(name="bias with -inf", mask="infinite bias"),
    Case(name="bias with -inf, float16", mask="infinite bias", dtype="float16"),
)


@contextlib.contextmanager
def only_xla() -> Iterator[None]:
    """Trace with the XLA form alone."""
    original = cudnn.takes
    cudnn.takes = lambda *_: False
    try:
        yield
    finally:
        cudnn.takes = original


def operands(case: Case, rows: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), case.dtype)

    made = {
        "query": normal(rows, case.heads, case.queries, case.dim),
        "key": normal(rows, case.key_heads, case.keys, case.dim),
        "value": normal(rows, case.key_heads, case.keys, case.dim),
    }
    if case.mask == "padding":
        lengths = rng.integers(case.keys // 2, case.keys, rows)
        made["allowed"] = jnp.asarray((np.arange(case.keys) < lengths[:, None])[:, None, None])
    if case.mask == "holes":
        allowed = rng.random((rows, 1, case.queries, case.keys)) < 0.7
        allowed[:, :, ::5] = False
        made["allowed"] = jnp.asarray(allowed)
    if "bias" in case.mask:
        bias = rng.standard_normal((1, case.bias_heads, case.queries, case.keys))
        if case.mask == "infinite bias":
            bias[..., case.keys // 2 :] = -np.inf
            bias[..., ::7, :] = -np.inf
        made["bias"] = jnp.asarray(bias, case.dtype)
    return made


def program(case: Case, given: dict[str, Any]) -> Callable[..., Any]:
    """(output, gradients) of a fixed random projection of the attention."""
    settings = Settings(scale=case.dim**-0.5, causal=case.causal)
    moving = tuple(name for name in given if name != "allowed")
    shape = (*given["query"].shape[:3], case.dim)
    towards = np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    def run(values: dict[str, Any]) -> Any:
        def loss(parts: dict[str, Any]) -> Any:
            out = attention(**{**values, **parts}, settings=settings)
            return jnp.sum(out.astype(jnp.float32) * jnp.asarray(towards, out.dtype)), out

        return jax.grad(loss, has_aux=True)({name: values[name] for name in moving})

    return run


def check(case: Case) -> dict[str, Any]:
    """Errors of both kernels relative to float32 attention, and whether cuDNN was used and is as good."""
    given = operands(case)
    settings = Settings(scale=case.dim**-0.5, causal=case.causal)
    six = (*(given.get(k) for k in ("query", "key", "value", "bias", "allowed")), None)
    used = cudnn.takes(settings, *six)
    compiled = jax.jit(program(case, given)).lower(given).compile()
    fused = compiled(given)
    with only_xla():
        plain = jax.jit(program(case, given))(given)
        wide = {k: v if v.dtype == bool else v.astype(jnp.float32) for k, v in given.items()}
        exact = jax.jit(program(case, given))(wide)
    calls = fused_calls(compiled)
    rows, good = {}, calls == ([1, 1] if used else [0, 0])
    for name in ("output", *exact[0]):
        values = [run[1] if name == "output" else run[0][name] for run in (fused, plain, exact)]
        rows[name] = [distance(value, values[2]) for value in values[:2]]
        good &= rows[name][0] <= max(SLACK * rows[name][1], FLOOR) and bool(jnp.isfinite(values[0]).all())
    return {"case": case.name, "cudnn": used, "good": good, "errors": rows, "calls": calls}


def fused_calls(compiled: Any) -> list[int]:
    """How many fused forwards and backwards a compiled program holds."""
    targets = re.findall(r'custom_call_target="__cudnn\$fmha(\w*)"', compiled.as_text())
    backward = sum("Backward" in target for target in targets)
    return [len(targets) - backward, backward]


def distance(value: Any, exact: Any) -> float:
    difference = np.asarray(value, np.float64) - np.asarray(exact, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(exact, np.float64)))


def median_ms(function: Callable[..., Any], *args: Any, rounds: int = 7, calls: int = 10) -> float:
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times)


def forward(causal: bool, query: Any, key: Any, value: Any) -> Any:
    settings = Settings(scale=query.shape[-1] ** -0.5, causal=causal)
    return attention(query, key, value, settings=settings)


def bare(causal: bool, query: Any, key: Any, value: Any) -> Any:
    """What JAX itself offers, in the same layout."""
    swapped = [jnp.swapaxes(x, 1, 2) for x in (query, key, value)]
    kind = "cudnn" if jax.default_backend() == "gpu" else "xla"
    out = jax.nn.dot_product_attention(*swapped, is_causal=causal, implementation=kind)
    return jnp.swapaxes(out, 1, 2)


def trained(function: Callable[..., Any]) -> Callable[..., Any]:
    """Output and gradients, towards a cotangent that is given."""

    def run(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(function, query, key, value)
        return out, pull(cotangent)

    return run


def random_inputs(shape: tuple[int, ...]) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]


def timed(shape: tuple[int, ...], causal: bool) -> Iterator[dict[str, Any]]:
    """Milliseconds and temporary bytes under jit on one device."""
    inputs = random_inputs(shape)
    ours = partial(forward, causal)
    for name, function, context in (
        ("cudnn", ours, contextlib.nullcontext),
        ("xla", ours, only_xla),
        ("bare jax.nn", partial(bare, causal), contextlib.nullcontext),
    ):
        with context():
            # A fresh function object each time: jit keeps traces by function.
            both = jax.jit(trained(partial(function))).lower(*inputs).compile()
            alone = jax.jit(partial(function)).lower(*inputs[:3]).compile()
        yield {
            "shape": shape,
            "causal": causal,
            "kernel": name,
            "forward_ms": median_ms(alone, *inputs[:3]),
            "forward_backward_ms": median_ms(both, *inputs),
            "temporary_mib": both.memory_analysis().temp_size_in_bytes / 2**20,
        }


def spread(shape: tuple[int, ...], causal: bool) -> Iterator[dict[str, Any]]:
    """The same over all devices, rows spread: equal to one device, and how fast."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = PartitionSpec("data")
    inputs = random_inputs(shape)
    whole = jax.jit(trained(partial(forward, causal)))(*inputs)
    placed = jax.device_put(inputs, NamedSharding(mesh, rows))
    run = trained(partial(forward, causal))
    for name, function in (
        ("shard_map", jax.shard_map(run, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows)),
        ("sharded jit", run),
    ):
        compiled = jax.jit(function).lower(*placed).compile()
        got = compiled(*placed)
        errors = [
            distance(a.astype(jnp.float32), b.astype(jnp.float32))
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True)
        ]
        yield {
            "shape": shape,
            "how": f"{name} over {len(jax.devices())}",
            "forward_backward_ms": median_ms(compiled, *placed),
            "fused_calls": fused_calls(compiled),
            "largest_difference_from_one_device": max(errors),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", help="write everything there")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a rehearsal")
    parser.add_argument("--skip-timing", action="store_true")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {len(jax.devices())} x {jax.devices()[0].device_kind}")
    result: dict[str, Any] = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    result["equality"] = [report(case) for case in CASES]
    if not options.skip_timing:
        shapes = SMALL if options.small else TIMED
        result["timing"] = [show(row) for shape in shapes for c in (False, True) for row in timed(shape, c)]
        if len(jax.devices()) > 1:
            result["spread"] = [show(row) for shape in shapes for row in spread(shape, True)]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result | {"cases": [asdict(case) for case in CASES]}, file, indent=1)
    bad = [row["case"] for row in result["equality"] if not row["good"]]
    raise SystemExit(f"not equal: {', '.join(bad)}" if bad else 0)


def report(case: Case) -> dict[str, Any]:
    try:
        row = check(case)
    except Exception as error:  # a driver goes on and reports
        row = {"case": case.name, "cudnn": None, "good": False, "error": f"{type(error).__name__}: {error}"}
        print(f"{case.name:26} FAILED {row['error'][:400]}")
        return row
    errors = "  ".join(f"{name} {a:.1e}/{b:.1e}" for name, (a, b) in row["errors"].items())
    kernel = "cudnn" if row["cudnn"] else "xla  "
    print(f"{row['case']:26} {'ok ' if row['good'] else 'BAD'} {kernel} calls {row['calls']}  {errors}")
    return row


def show(row: dict[str, Any]) -> dict[str, Any]:
    print(
        "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True
    )
    return row


if __name__ == "__main__":
    main()
