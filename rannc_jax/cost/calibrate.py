"""What the devices of this process really reach: rates, bandwidths and latencies, in a minute.

`calibrate` measures and returns plain data; `config.write` makes a device file of it. Unlike the rest of
this room it touches devices, so nothing imports it until it is asked for. Figures are medians of
repeated, warmed-up calls on operations large enough to fill the device; a rate that a device does not
have (a dtype its compiler refuses) is left out, and so is what there was no time for, least needed last.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from rannc_jax.cluster import DeviceSpec, LinkSpec
from rannc_jax.cost.timing import Clock, attempt
from rannc_jax.errors import CostError, message
from rannc_jax.progress import NoProgress, Progress

MIB = 2**20
FILL_S = 4e-3
"""A product is doubled until it takes this long: edges and launches then cost below a percent."""
FEW, MANY = 8, 72
"""Arrays of the two calls that tell what a call costs, and an array."""

_RATES: tuple[tuple[str, str, Any], ...] = (  # name of the rate, dtype of the operands, precision
    ("float32", "float32", jax.lax.Precision.HIGHEST),
    ("bfloat16", "bfloat16", None),
    ("tensorfloat32", "float32", None),
    ("float16", "float16", None),
    ("float64", "float64", None),
    ("float8_e4m3fn", "float8_e4m3fn", None),
    ("float8_e5m2", "float8_e5m2", None),
    ("int8", "int8", None),
)
_GPU_ONLY = frozenset({"tensorfloat32", "float8_e4m3fn", "float8_e5m2", "int8"})
_RARE = frozenset({"float8_e4m3fn", "float8_e5m2", "int8"})
"""Measured last: no training in full precision needs them, and some take most of a minute to compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured.

    Args:
        device: the kind of device, ready for a cluster.
        description: as the driver names it.
        intra_host: copies between two devices of this process; None with one device.
        all_reduce_bytes_per_s: bytes of the whole array a second, over all devices of this process.
        to_host_bytes_per_s, from_host_bytes_per_s: copies between the device and host memory.
        skipped: what could not be measured, one sentence each.
    """

    device: DeviceSpec
    description: str
    intra_host: LinkSpec | None = None
    all_reduce_bytes_per_s: float | None = None
    to_host_bytes_per_s: float | None = None
    from_host_bytes_per_s: float | None = None
    skipped: tuple[str, ...] = ()


def calibrate(
    devices: Sequence[jax.Device] | None = None, *, seconds: float = 60.0, progress: Progress | None = None
) -> Calibration:
    """Measure devices of this process.

    Args:
        devices: of one kind; the first is measured, links between the first two. All local ones by default.
        seconds: about how long it may take; a compilation that has begun is waited for.
        progress: told every figure.

    Raises:
        CostError: `seconds` is not above 0, or not even the needed figures could be measured.
    """
    if not seconds > 0:
        raise CostError(message(f"seconds={seconds} leaves no time to measure.", hint="60 is plenty."))
    devices = list(jax.local_devices() if devices is None else devices)
    with jax.default_device(devices[0]):
        return _Bench(devices, Clock(seconds), progress or NoProgress()).run()


@dataclass(slots=True)
class _Found:
    rates: dict[str, float] = field(default_factory=dict)
    efficiency: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


class _Bench:
    """Runs the measurements in the order of their need."""

    def __init__(self, devices: Sequence[jax.Device], clock: Clock, progress: Progress) -> None:
        self.devices, self.clock, self.progress = devices, clock, progress
        self.is_cpu = devices[0].platform == "cpu"
        self.found = _Found()

    def run(self) -> Calibration:
        first = self.devices[0]
        copied = self._needed("memory bandwidth", self._copy, "GB/s", 1e9)
        dispatch_s = self._needed("dispatch", functools.partial(self._dispatch, FEW), "us", 1e-6)
        many_s = self._wanted("dispatch of many", functools.partial(self._dispatch, MANY), "us", 1e-6)
        leaf = {} if many_s is None else {"leaf_s": max(0.0, many_s - dispatch_s) / (2 * (MANY - FEW))}
        launch_s = self._needed("launch", self._launch, "us", 1e-6)
        self._products(rare=False)
        best = "float32" if self.is_cpu or "bfloat16" not in self.found.rates else "bfloat16"
        for name, measure in (("convolution", self._convolution), ("attention", self._attention)):
            rate = self._wanted(name, functools.partial(measure, best), "TFLOP/s", 1e12)
            if rate is not None:
                reference = self.found.rates["tensorfloat32" if self._is_fast(best) else best]
                self.found.efficiency[name] = min(1.0, rate / reference)
        link = self._link() if len(self.devices) > 1 else None
        to_host = self._wanted("to host memory", self._to_host, "GB/s", 1e9)
        from_host = self._wanted("from host memory", self._from_host, "GB/s", 1e9)
        slower = {"host_bytes_per_s": min(to_host, from_host)} if to_host and from_host else {}
        several = len(self.devices) > 1
        all_reduce = self._wanted("all-reduce", self._all_reduce, "GB/s", 1e9) if several else None
        self._products(rare=True)
        return Calibration(
            device=DeviceSpec(
                kind=first.device_kind,
                platform="cpu" if self.is_cpu else "gpu",
                memory_bytes=memory_bytes(self.devices),
                flops_per_s=self.found.rates,
                efficiency=self.found.efficiency,
                bytes_per_s=copied,
                launch_s=launch_s,
                dispatch_s=dispatch_s,
                **leaf,
                **slower,
            ),
            description=f"{first.platform} {first.device_kind}",
            intra_host=link,
            all_reduce_bytes_per_s=all_reduce,
            to_host_bytes_per_s=to_host,
            from_host_bytes_per_s=from_host,
            skipped=tuple(self.found.skipped),
        )

    def _products(self, *, rare: bool) -> None:
        """Measure the rates of products, by dtype."""
        for name, dtype, precision in _RATES:
            if (self.is_cpu and name in _GPU_ONLY) or (name in _RARE) != rare:
                continue
            measure = functools.partial(self._product, dtype, precision)
            record = self._needed if name == "float32" else self._wanted
            rate = record(f"product {name}", measure, "TFLOP/s", 1e12)
            if rate is not None:
                self.found.rates[name] = rate

    def _is_fast(self, dtype: str) -> bool:
        """Whether float32 work here runs at the rate of tensorfloat32."""
        return dtype == "float32" and "tensorfloat32" in self.found.rates

    def _needed(self, what: str, measure: Callable[[], float], unit: str, scale: float) -> float:
        value = attempt(measure, what)
        self.progress.note(f"{what}: {value / scale:.4g} {unit}")
        return value

    def _wanted(self, what: str, measure: Callable[[], float], unit: str, scale: float) -> float | None:
        if self.clock.is_over:
            self.found.skipped.append(f"{what}: the time was up")
            return None
        try:
            return self._needed(what, measure, unit, scale)
        except CostError as error:
            self.found.skipped.append(" ".join(str(error).split()))
            self.progress.note(f"{what}: not here")
            return None

    # --- one device ---------------------------------------------------------------------------

    def _size(self, gpu: int, cpu: int) -> int:
        return cpu if self.is_cpu else gpu

    def _copy(self) -> float:
        """Bytes a second of reading and writing arrays inside a program, where memory is not allocated."""
        turns, x = 8, jnp.ones(self._size(256, 64) * MIB // 4, jnp.float32)

        def add(x: Any) -> Any:
            for _ in range(turns):  # a loop of the program would add its own kernels
                x = jax.lax.optimization_barrier(x * 0.5 + 1)
            return x

        return turns * 2 * x.nbytes / self.clock.seconds(functools.partial(jax.jit(add), x))

    def _dispatch(self, count: int) -> float:
        """Host seconds of calling a program that takes and gives `count` arrays."""
        xs = [jnp.ones(8) for _ in range(count)]
        call = jax.jit(lambda xs: [x + 1 for x in xs])
        return self.clock.seconds(lambda: call(xs), most_s=0.5)

    def _launch(self) -> float:
        """Seconds that one more small kernel takes inside a program: the slope over their number."""

        def chain(length: int) -> Callable[[Any], Any]:
            def run(x: Any) -> Any:
                for _ in range(length):
                    x = x @ x  # never fused
                return x

            return jax.jit(run)

        x = jnp.eye(16)
        few, many = (self.clock.seconds(functools.partial(chain(n), x), most_s=0.5) for n in (20, 120))
        return max((many - few) / 100, 1e-8)

    def _product(self, dtype: str, precision: Any) -> float:
        """Operations a second of square products, as large as it takes to fill the device."""
        with jax.enable_x64(dtype == "float64"):
            out = jnp.int32 if dtype == "int8" else jnp.float32 if dtype.startswith("float8") else None
            multiply = jax.jit(lambda x, y: jnp.matmul(x, y, precision=precision, preferred_element_type=out))
            best, size = 0.0, self._size(4096, 256)
            while size <= self._size(8192, 4096):
                x = jnp.ones((size, size), dtype)
                seconds = self.clock.seconds(functools.partial(multiply, x, x), most_s=0.3)
                best = max(best, 2 * size**3 / seconds)
                if seconds > FILL_S or self.clock.is_over:
                    break
                size *= 2
            return best

    def _convolution(self, dtype: str) -> float:
        """Operations a second over the convolutions of a ResNet's stages."""
        rows, total, flops = self._size(64, 2), 0.0, 0.0
        for image, features in ((56, 64), (28, 128), (14, 256)):
            x = jnp.ones((rows, image, image, features), dtype)
            kernel = jnp.ones((3, 3, features, features), dtype)
            convolve = jax.jit(
                lambda x, k: jax.lax.conv_general_dilated(
                    x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
            total += self.clock.seconds(functools.partial(convolve, x, kernel), most_s=0.5)
            flops += 2.0 * x.size * 9 * features
        return flops / total

    def _attention(self, dtype: str) -> float:
        """Operations a second of fused attention where there is one, else of what XLA makes of it."""
        shape = (self._size(8, 1), self._size(2048, 256), 16, 64)
        x = jnp.ones(shape, dtype)
        kinds = ("xla",) if self.is_cpu else ("cudnn", "xla")
        for kind in kinds:
            attend = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation=kind))
            try:
                seconds = self.clock.seconds(functools.partial(attend, x, x, x))
            except Exception:
                if kind == kinds[-1]:
                    raise
                continue  # no cuDNN, or one that refuses this device
            return 4.0 * x.size * shape[1] / seconds
        raise AssertionError(kinds)

    # --- between devices ----------------------------------------------------------------------

    def _link(self) -> LinkSpec | None:
        latency_s = self._wanted("latency between devices", lambda: self._transfer(4096), "us", 1e-6)
        size = self._size(256, 32) * MIB
        rate = self._wanted(
            "copy between devices",
            lambda: size / max(self._transfer(size) - (latency_s or 0.0), 1e-9),
            "GB/s",
            1e9,
        )
        return None if latency_s is None or rate is None else LinkSpec(bytes_per_s=rate, latency_s=latency_s)

    def _transfer(self, num_bytes: int) -> float:
        """Seconds of one copy, waited for: what follows it needs what it brings."""
        x = jax.device_put(jnp.ones(num_bytes // 4, jnp.float32), self.devices[0])
        target = self.devices[1]
        return self.clock.seconds(lambda: jax.block_until_ready(jax.device_put(x, target)))

    def _all_reduce(self) -> float:
        """Bytes a second of summing one array a device, results everywhere."""
        count, size = len(self.devices), self._size(256, 16) * MIB
        mesh = Mesh(np.asarray(self.devices), ("data",))
        whole = NamedSharding(mesh, PartitionSpec("data"))
        x = jax.jit(lambda: jnp.ones((count, size // 4), jnp.float32), out_shardings=whole)()
        add = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "data"),
                mesh=mesh,
                in_specs=PartitionSpec("data"),
                out_specs=PartitionSpec(),
            )
        )
        return size / self.clock.seconds(lambda: add(x))

    def _to_host(self) -> float:
        """Bytes a second from device memory to pinned host memory, or to numpy arrays where there is none."""
        x = jnp.ones(self._size(256, 32) * MIB // 4, jnp.float32)
        if self._has_pinned:
            return x.nbytes / self.clock.seconds(lambda: jax.device_put(x, self._memory("pinned_host")))
        add = jax.jit(lambda x: x + 1)  # a new array: one that was fetched keeps its copy
        compute_s = self.clock.seconds(lambda: add(x), most_s=0.3)
        both_s = self.clock.seconds(lambda: np.array(add(x)), batches=3)
        return x.nbytes / max(both_s - compute_s, 1e-9)

    def _from_host(self) -> float:
        x = np.ones(self._size(256, 32) * MIB // 4, np.float32)
        device = self.devices[0]
        if self._has_pinned:
            pinned = jax.device_put(x, self._memory("pinned_host"))
            return x.nbytes / self.clock.seconds(lambda: jax.device_put(pinned, self._memory("device")))
        return x.nbytes / self.clock.seconds(
            lambda: jax.block_until_ready(jax.device_put(x, device, may_alias=False)), batches=3
        )

    @property
    def _has_pinned(self) -> bool:
        """Whether there is host memory of another kind; a CPU's is its own."""
        kinds = {memory.kind for memory in self.devices[0].addressable_memories()}
        return not self.is_cpu and "pinned_host" in kinds

    def _memory(self, kind: str) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.devices[0], memory_kind=kind)


def memory_bytes(devices: Sequence[jax.Device]) -> int:
    """Bytes that JAX may use of the first device; a CPU's devices share the machine's memory."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return int(limit)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return math.floor(pages / len(devices))
