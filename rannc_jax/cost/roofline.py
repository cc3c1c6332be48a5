"""Seconds of a group of operations on a device: the larger of arithmetic and memory time, per kernel.

time = sum over kernels of max(flops / rate, bytes / bandwidth) + launch. The rates of a `DeviceSpec`
are achieved rates (presets and calibration see to that), so nothing is multiplied in here but its
`efficiency`, the share of them that convolutions and fused attention reach. Backward: a product costs
its forward once for each operand that needs a gradient; fused elementwise work moves twice its forward
bytes (what was saved, and the cotangents); a checkpoint repeats its forward. Rematerialisation adds what
its mode does again.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from rannc_jax.cluster import DeviceSpec
from rannc_jax.contract import Remat
from rannc_jax.cost import primitives
from rannc_jax.cost.flops import Fusion
from rannc_jax.cost.fusion import Fused, Kernel, edge_bytes, fuse
from rannc_jax.cost.operations import Twins, body_gradients
from rannc_jax.errors import CostError, message

ATTENTION_BACKWARD = 2.5
"""Fused attention multiplies 5 times backward, against 2 forward (Dao, FlashAttention-2, 2023, 3.2)."""

LOOP_LAUNCHES = 2
"""Kernels that a turn of a loop adds: slicing its inputs and storing its outputs."""

_FALLBACKS = {
    "tensorfloat32": ("float32",),
    "float16": ("bfloat16", "tensorfloat32", "float32"),
    "bfloat16": ("float16", "tensorfloat32", "float32"),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("bfloat16", "float16", "float32"),
    "complex64": ("float32",),
    "complex128": ("float64",),
}


@dataclass(slots=True)
class _Rows:
    """Columns of a table with one line a kernel; numbers come in pairs, one for each trace."""

    unit: list[str] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    saved: list[bool] = field(default_factory=list)
    operation: list[int] = field(default_factory=list)
    flops: list[tuple[float, float]] = field(default_factory=list)
    nbytes: list[tuple[float, float]] = field(default_factory=list)
    back_flops: list[float] = field(default_factory=list)
    back_bytes: list[float] = field(default_factory=list)
    back_times: list[float] = field(default_factory=list)
    back_weight: list[float] = field(default_factory=list)


class Kernels:
    """The kernels of a group of operations with their work at any number of rows.

    Args:
        twins: the opened program.
        group: operation indices, ascending.
        escaping: value ids that are read outside the group.
        gradients: value ids that get a cotangent; empty for forward-only programs.
    """

    def __init__(
        self, twins: Twins, group: Sequence[int], escaping: Collection[int], gradients: Collection[int] = ()
    ) -> None:
        self.fused = fuse(twins, group, escaping)
        rows = _Rows()
        _measure(rows, twins, self.fused, gradients, times=1, operation=None)
        self._units, self._unit = np.unique(np.asarray(rows.unit, str), return_inverse=True)
        self._kinds, self._kind = np.unique(np.asarray(rows.kind, str), return_inverse=True)
        self._times = np.asarray(rows.times)
        self._saved = np.asarray(rows.saved, bool)
        self.operation = np.asarray(rows.operation, np.int64)
        flops_of = np.asarray(rows.flops, float).reshape(-1, 2)
        bytes_of = np.asarray(rows.nbytes, float).reshape(-1, 2)
        self._flops = twins.line(flops_of[:, 0], flops_of[:, 1])
        self._bytes = twins.line(bytes_of[:, 0], bytes_of[:, 1])
        self._back_flops = np.asarray(rows.back_flops)
        self._back_bytes = np.asarray(rows.back_bytes)
        self._back_times = np.asarray(rows.back_times)
        self._back_weight = np.asarray(rows.back_weight)

    def flops(self, rows: int) -> float:
        """Operations of one forward."""
        return float(np.sum(self._flops.at(rows) * self._times))

    def nbytes(self, rows: int) -> float:
        """Bytes read and written by one forward."""
        return float(np.sum(self._bytes.at(rows) * self._times))

    def forward_by_kernel(self, device: DeviceSpec, rows: int) -> np.ndarray:
        """Seconds of every kernel in one forward, float64 [kernels]; `operation` names their roots."""
        return self._times * self._seconds(device, self._flops.at(rows), self._bytes.at(rows), 1.0)

    def forward_s(self, device: DeviceSpec, rows: int) -> float:
        """Seconds of one forward."""
        return float(np.sum(self.forward_by_kernel(device, rows)))

    def backward_by_kernel(self, device: DeviceSpec, rows: int, remat: Remat) -> np.ndarray:
        """Seconds that every forward kernel causes in one backward, float64 [kernels]."""
        work, moved = self._flops.at(rows) * self._back_flops, self._bytes.at(rows) * self._back_bytes
        backward = self._times * self._seconds(device, work, moved, self._back_times)
        if remat is Remat.SAVE_ALL or not backward.any():
            return backward
        forward = self.forward_by_kernel(device, rows)
        return backward + (np.where(self._saved, 0.0, forward) if remat is Remat.SAVE_MATMULS else forward)

    def backward_s(self, device: DeviceSpec, rows: int, remat: Remat) -> float:
        """Seconds of one backward, what `remat` computes again included."""
        return float(np.sum(self.backward_by_kernel(device, rows, remat)))

    def weight_s(self, device: DeviceSpec, rows: int) -> float:
        """Seconds of one backward that only make gradients of parameters."""
        backward = self.backward_by_kernel(device, rows, Remat.SAVE_ALL)
        return float(np.sum(backward * self._back_weight))

    def _seconds(
        self, device: DeviceSpec, work: np.ndarray, moved: np.ndarray, launches: np.ndarray | float
    ) -> np.ndarray:
        rates = np.asarray([rate(device, str(unit)) for unit in self._units])[self._unit]
        rates = (
            rates * np.asarray([device.efficiency.get(str(kind), 1.0) for kind in self._kinds])[self._kind]
        )
        return np.maximum(work / rates, moved / device.bytes_per_s) + device.launch_s * launches


@functools.lru_cache(maxsize=1024)
def _rate(rates: tuple[tuple[str, float], ...], kind: str, unit: str) -> float:
    known = dict(rates)
    for name in (unit or "float32", *_FALLBACKS.get(unit, ("float32",))):
        if name in known:
            return known[name]
    raise CostError(
        message(
            f"device kind {kind!r} has no arithmetic rate for {unit or 'float32'}.",
            f"flops_per_s knows {sorted(known)}",
            hint='give flops_per_s at least a "float32" rate.',
        )
    )


def rate(device: DeviceSpec, unit: str) -> float:
    """Operations a second for a unit (dtype name; "" is vector work, done at float32's rate)."""
    return _rate(tuple(device.flops_per_s.items()), device.kind, unit)


def _measure(
    rows: _Rows,
    twins: Twins,
    fused: Fused,
    gradients: Collection[int],
    *,
    times: float,
    operation: int | None,
) -> None:
    """Add a row for every kernel; loops add the kernels of their bodies, under the loop's own index."""
    for kernel in fused.kernels:
        root = kernel.root if operation is None else operation
        if kernel.root in twins.bodies:
            active = any(v in gradients for v in twins.first.operations[kernel.root].writes)
            for body, turns in twins.bodies[kernel.root]:
                inner = body_gradients(body.first) if active else ()
                group = range(len(body.first.operations))
                inside = fuse(body, group, body.first.outputs)
                _measure(rows, body, inside, inner, times=times * turns, operation=root)
                _add(rows, "", (0, 0), (0, 0), times * turns * LOOP_LAUNCHES, root, (0, 0, float(active)))
            continue
        _add_kernel(rows, twins, fused, kernel, gradients, times, root)


def _add_kernel(
    rows: _Rows,
    twins: Twins,
    fused: Fused,
    kernel: Kernel,
    gradients: Collection[int],
    times: float,
    root: int,
) -> None:
    op = twins.first.operations[kernel.root]
    units = twins.works[0][kernel.root].unit
    moved = [
        sum(edge_bytes(fused, kernel, opened.operations, works, nbytes))
        for opened, works, nbytes in zip((twins.first, twins.second), twins.works, twins.nbytes, strict=True)
    ]
    worked = [sum(works[index].flops for index in kernel.members) for works in twins.works]
    kind = "convolution" if op.name in primitives.CONVOLUTIONS else ""
    if op.attention or op.name in primitives.ATTENTION:
        kind = "attention"
    back = backward_factors(twins, kernel, gradients)
    _add(rows, units, tuple(worked), tuple(moved), times, root, back, kind=kind, saved=op.is_matmul)
    rows.back_weight[-1] = _weight_share(twins, kernel, gradients)


def _add(
    rows: _Rows,
    unit: str,
    worked: Sequence[float],
    moved: Sequence[float],
    times: float,
    root: int,
    back: tuple[float, float, float],
    *,
    kind: str = "",
    saved: bool = False,
) -> None:
    rows.unit.append(unit)
    rows.kind.append(kind)
    rows.times.append(times)
    rows.saved.append(saved)
    rows.operation.append(root)
    rows.flops.append((worked[0], worked[1]))
    rows.nbytes.append((moved[0], moved[1]))
    rows.back_weight.append(0.0)
    for column, value in zip((rows.back_flops, rows.back_bytes, rows.back_times), back, strict=True):
        column.append(value)


def backward_factors(twins: Twins, kernel: Kernel, gradients: Collection[int]) -> tuple[float, float, float]:
    """How often a kernel's backward repeats its forward's operations, bytes and launches."""
    ops = twins.first.operations
    if not any(v in gradients for index in kernel.members for v in ops[index].writes):
        return 0.0, 0.0, 0.0
    op = ops[kernel.root]
    again = float(op.region >= 0 and twins.first.regions[op.region].recomputes)
    if op.is_matmul:
        active = sum(v in gradients for v in op.reads[:2]) or 1
        work = ATTENTION_BACKWARD if op.attention or op.name in primitives.ATTENTION else float(active)
        return work + again, (2.0 if op.attention else active) + again, active + again
    factor = 1.0 if twins.works[0][kernel.root].fusion is Fusion.WHOLE else 2.0
    return factor + again, factor + again, 1.0 + again


def _weight_share(twins: Twins, kernel: Kernel, gradients: Collection[int]) -> float:
    """Share of a product's backward that makes the gradient of an operand without rows: of a parameter."""
    op = twins.first.operations[kernel.root]
    first, second = twins.nbytes
    if not op.is_matmul or op.attention or twins.rows[0] == twins.rows[1]:
        return 0.0
    asked = [v for v in op.reads[:2] if v in gradients]
    return sum(first[v] == second[v] for v in asked) / len(asked) if asked else 0.0
