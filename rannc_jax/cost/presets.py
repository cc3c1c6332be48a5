"""Devices and links that a mesh file may name instead of measuring: achieved rates, not promised ones.

Figures are dense (no sparsity) rates of the makers' data sheets times the share that large operations
reach. The shares are measured on H200: a bfloat16 product of 8192^3 ran at 760 to 790 TFLOP/s of the
989 promised, a copy in device memory at 4.3 TB/s read plus write of 4.8, a copy between devices at
347 GiB/s of 450 GB/s, pinned host memory at 44 GiB/s of PCIe 5's 63 GB/s. Other kinds get the same
shares until somebody calibrates them; keys in the mesh file override single figures.
"""

import difflib
from collections.abc import Iterable

from rannc_jax.cluster import DeviceSpec, LinkSpec
from rannc_jax.errors import CostError, message

MATRIX_SHARE = 0.78  # 775 / 989, H200
MEMORY_SHARE = 0.9  # 4.3 / 4.8, H200
NVLINK_SHARE = 0.83  # 347 GiB/s / 450 GB/s, H200
PCIE_SHARE = 0.75  # 44 GiB/s / 63 GB/s, PCIe 5
NETWORK_SHARE = 0.9  # headers and congestion control of RDMA and TCP take about a tenth


def _gpu(
    kind: str,
    memory_gib: float,
    terabytes_per_s: float,
    vector: float,
    double: float,
    matrix: dict[str, float],
    host: float,
) -> DeviceSpec:
    """A GPU from data sheet figures, in TFLOP/s and TB/s; `host` in GB/s each way.

    `memory_gib` is what CUDA reports; `vector` and `double` are the rates of the general cores.
    """
    rates = {"float64": double, "float32": vector}
    rates |= {name: rate * MATRIX_SHARE for name, rate in matrix.items()}
    return DeviceSpec(
        kind=kind,
        platform="gpu",
        memory_bytes=int(memory_gib * 2**30),
        flops_per_s={name: rate * 1e12 for name, rate in rates.items()},
        bytes_per_s=terabytes_per_s * 1e12 * MEMORY_SHARE,
        host_bytes_per_s=host * 1e9 * PCIE_SHARE,
    )


_VOLTA = {"float16": 125.0, "bfloat16": 15.7}  # no bfloat16 units: done in float32
_AMPERE = {"tensorfloat32": 156.0, "bfloat16": 312.0, "float16": 312.0}
_HOPPER = {
    "tensorfloat32": 494.7,
    "bfloat16": 989.4,
    "float16": 989.4,
    "float8_e4m3fn": 1978.9,
    "float8_e5m2": 1978.9,
}
_ADA_L40S = {
    "tensorfloat32": 183.0,
    "bfloat16": 362.0,
    "float16": 362.0,
    "float8_e4m3fn": 733.0,
    "float8_e5m2": 733.0,
}
_ADA_4090 = {"tensorfloat32": 82.6, "bfloat16": 165.2, "float16": 165.2, "float8_e4m3fn": 330.3}
_AMPERE_3090 = {"tensorfloat32": 35.6, "bfloat16": 71.0, "float16": 71.0}
_TURING = {"float16": 65.0, "bfloat16": 8.1}  # no bfloat16 units: done in float32

_PCIE3, _PCIE4, _PCIE5 = 15.75, 31.5, 63.0  # 16 lanes of 8, 16, 32 GT/s, 128b/130b (PCI-SIG)

_DEVICES = (
    _gpu("v100", 15.8, 0.900, 15.7, 7.8, _VOLTA, _PCIE3),  # NVIDIA V100 data sheet, SXM2, 2020
    _gpu("v100-32gb", 31.7, 0.900, 15.7, 7.8, _VOLTA, _PCIE3),  # the same sheet
    _gpu("a100", 39.4, 1.555, 19.5, 9.7, _AMPERE, _PCIE4),  # NVIDIA A100 data sheet, 40 GB SXM, 2021
    _gpu("a100-80gb", 79.1, 2.039, 19.5, 9.7, _AMPERE, _PCIE4),  # the same sheet, 80 GB SXM
    _gpu("h100", 79.1, 3.35, 66.9, 33.5, _HOPPER, _PCIE5),  # H100 data sheet, SXM5; halves of sparse rates
    _gpu("h200", 139.8, 4.8, 66.9, 33.5, _HOPPER, _PCIE5),  # H200 data sheet, SXM; product, copy measured
    _gpu("l40s", 44.4, 0.864, 91.6, 1.4, _ADA_L40S, _PCIE4),  # NVIDIA L40S data sheet, 2023; memory with ECC
    _gpu("rtx4090", 23.6, 1.008, 82.6, 1.3, _ADA_4090, _PCIE4),  # Ada paper v2.1; float32 accumulation
    _gpu(
        "rtx3090", 23.7, 0.936, 35.6, 0.56, _AMPERE_3090, _PCIE4
    ),  # GA102 architecture paper v2; float32 accumulation
    _gpu("t4", 14.6, 0.320, 8.1, 0.25, _TURING, _PCIE3),  # T4 data sheet, 2019; 70 W keep it below that
    # A few cores of a server: 2 x 8 float32 fused multiply-adds a cycle at about 3 GHz are 96 GFLOP/s a
    # core; Eigen products of small networks reach half of two. Two memory channels. Thunks start in 1 us.
    DeviceSpec(
        kind="cpu",
        platform="cpu",
        memory_bytes=16 * 2**30,
        flops_per_s={"float64": 5e10, "float32": 1e11, "bfloat16": 2.5e10, "float16": 2.5e10},
        bytes_per_s=2e10,
        launch_s=1e-6,
        dispatch_s=100e-6,
    ),
)
_BY_KIND = {device.kind: device for device in _DEVICES}

PRESET_KINDS = tuple(_BY_KIND)
"""Names that `device_preset` knows."""


def _link(gigabytes_per_s: float, share: float, latency_us: float) -> LinkSpec:
    return LinkSpec(bytes_per_s=gigabytes_per_s * 1e9 * share, latency_s=latency_us * 1e-6)


# GB/s each way and device.
_LINKS = {
    "nvlink2": _link(150, NVLINK_SHARE, 12),  # V100: 6 links of 25 GB/s (V100 data sheet)
    "nvlink3": _link(300, NVLINK_SHARE, 12),  # A100: 12 links of 25 GB/s (A100 data sheet)
    "nvlink4": _link(450, NVLINK_SHARE, 12),  # H100, H200: 18 links of 25 GB/s; measured
    "pcie3": _link(_PCIE3, PCIE_SHARE, 20),
    "pcie4": _link(_PCIE4, PCIE_SHARE, 20),
    "pcie5": _link(_PCIE5, PCIE_SHARE, 20),
    "net25g": _link(25 / 8, NETWORK_SHARE, 30),
    "net50g": _link(50 / 8, NETWORK_SHARE, 30),
    "net100g": _link(100 / 8, NETWORK_SHARE, 20),
    "net200g": _link(200 / 8, NETWORK_SHARE, 20),
    "net400g": _link(400 / 8, NETWORK_SHARE, 20),
    "host": _link(5.0, 1.0, 20),  # fake devices of one process: a copy by one core
}

PRESET_LINKS = tuple(_LINKS)
"""Names that `link_preset` knows."""


def device_preset(kind: str) -> DeviceSpec:
    """The preset of a device kind.

    Raises:
        CostError: there is no such preset.

    Example:
        >>> device_preset("h200").bytes_per_s / 1e12
        4.32
    """
    if kind not in _BY_KIND:
        raise _unknown("device kind", kind, PRESET_KINDS)
    return _BY_KIND[kind]


def link_preset(name: str) -> LinkSpec:
    """The preset of a class of links, each way and device.

    Raises:
        CostError: there is no such preset.
    """
    if name not in _LINKS:
        raise _unknown("link", name, PRESET_LINKS)
    return _LINKS[name]


def kind_of(description: str, memory_bytes: int | None = None) -> str | None:
    """The preset kind of a device as its driver describes it, None if there is none.

    Args:
        description: `jax.Device.device_kind`, such as "NVIDIA A100-SXM4-80GB" or "cpu".
        memory_bytes: tells the variants of one kind apart.

    Example:
        >>> kind_of("NVIDIA A100-SXM4-80GB")
        'a100-80gb'
    """
    plain = "".join(c for c in description.lower() if c.isalnum())
    names = sorted(PRESET_KINDS, key=len, reverse=True)
    found = [name for name in names if all(part in plain for part in name.split("-"))]
    if memory_bytes is not None:
        base = [name for name in names if name.split("-")[0] in plain]
        found = sorted(base, key=lambda name: abs(_BY_KIND[name].memory_bytes - memory_bytes))
    return found[0] if found else None


def _unknown(what: str, name: str, known: Iterable[str]) -> CostError:
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.4)
    hint = f"{near[0]!r}, or one of the others." if near else "one of these, or a calibrated device file."
    return CostError(
        message(f"there is no preset for {what} {name!r}.", f"presets: {', '.join(known)}", hint=hint)
    )
