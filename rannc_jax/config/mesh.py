"""Mesh files (`load_cluster`) and device files (`load_device`).

A mesh file lists groups of equal hosts, the links between devices, and what the user fixes of the mesh:

    version = 1
    [[devices]]              # repeat for heterogeneous clusters
    kind = "h200"            # preset, or the path of a device file; keys below override it
    hosts = 4
    count_per_host = 8
    [links.intra_host]       # each way, per device; or kind = "nvlink4"
    gib_per_s = 347.0
    latency_us = 12.0
    [links.inter_host]       # only needed with several hosts
    gbit_per_s = 100.0
    latency_us = 20.0
    [axes]                   # optional; what is missing or "auto" is searched
    stage = 4

A device file is what a calibration writes: `version`, `kind` and the same keys as may override a preset
(`platform`, `memory_gib`, `memory_margin`, `memory_gib_per_s`, `launch_us`, `dispatch_us`, `host_gib_per_s`,
`[tflops_per_s]` by dtype, `[efficiency]` by class of kernels).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rannc_jax.cluster import EFFICIENCY, ClusterSpec, DeviceGroup, DeviceSpec, LinkSpec
from rannc_jax.config.section import Section
from rannc_jax.config.source import read_table
from rannc_jax.cost.presets import PRESET_KINDS, PRESET_LINKS, device_preset, link_preset
from rannc_jax.errors import ConfigError
from rannc_jax.mistakes import Mistakes, nearest, one_of, shown

FILE_VERSION = 1
GIB = 2**30
AXES = ("stage", "data")
PLATFORMS = ("cpu", "gpu")
DTYPES = (
    "float64",
    "float32",
    "tensorfloat32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
)
_ONE_HOST = '[[devices]] with kind = "h100" and count_per_host = 8 describes one host with 8 GPUs.'
# A host alone moves nothing between hosts; the link then only fills the place.
_UNUSED_LINK = LinkSpec(bytes_per_s=1e9, latency_s=0.0)


def load_cluster(source: str | Path | Mapping[str, Any]) -> ClusterSpec:
    """Read a mesh file.

    Args:
        source: path of the file, or a mapping with the same keys.

    Raises:
        ConfigError: no such file, not TOML, or mistakes in it: all of them, with their key paths.

    Example:
        >>> cluster = load_cluster(
        ...     {
        ...         "version": 1,
        ...         "devices": [{"kind": "cpu", "count_per_host": 8}],
        ...         "links": {"intra_host": {"gib_per_s": 4.0, "latency_us": 5.0}},
        ...     }
        ... )
        >>> cluster.num_devices
        8
    """
    table, name, folder = read_table(source, "mesh file")
    mistakes = Mistakes(source=name)
    top = Section(table, "", mistakes)
    _read_version(top)
    groups = [_read_group(section, folder) for section in top.tables("devices")]
    num_hosts = sum(group.hosts if group else 1 for group in groups)
    several = any(group is None or group.count_per_host > 1 for group in groups)
    intra_host, inter_host = _read_links(top.table("links"), mistakes, several, num_hosts > 1)
    axes = _read_axes(top.table("axes"), groups, mistakes)
    top.finish()
    mistakes.raise_if_any(ConfigError, hint=None if groups else _ONE_HOST)
    return ClusterSpec(
        groups=tuple(group for group in groups if group),
        intra_host=intra_host or inter_host or _UNUSED_LINK,
        inter_host=inter_host or intra_host or _UNUSED_LINK,
        axes=axes,
    )


def load_device(source: str | Path | Mapping[str, Any]) -> DeviceSpec:
    """Read a device file.

    Raises:
        ConfigError: no such file, not TOML, or mistakes in it: all of them, with their key paths.
    """
    table, name, _ = read_table(source, "device file")
    mistakes = Mistakes(source=name)
    top = Section(table, "", mistakes)
    _read_version(top)
    kind = top.text("kind", required=True)
    values = _read_device_values(top, required=True)
    top.finish()
    mistakes.raise_if_any(ConfigError)
    return DeviceSpec(kind=str(kind), **values)


def _read_version(top: Section) -> None:
    version = top.take("version", required=True, expected=f"version = {FILE_VERSION}")
    if version is not None and (version != FILE_VERSION or isinstance(version, bool)):
        top.wrong("version", f"got {shown(version)}, this release reads version {FILE_VERSION}")


def _read_group(section: Section, folder: Path) -> DeviceGroup | None:
    base = _read_kind(section, folder)
    hosts = section.count("hosts", default=1)
    count_per_host = section.count("count_per_host", required=True)
    values = _read_device_values(section, required=False)
    section.finish()
    if base is None or not isinstance(hosts, int) or not isinstance(count_per_host, int):
        return None
    spec = {name: getattr(base, name) for name in DeviceSpec.__dataclass_fields__} | values
    for name in ("flops_per_s", "efficiency"):
        spec[name] = {**getattr(base, name), **values.get(name, {})}
    return DeviceGroup(device=DeviceSpec(**spec), hosts=hosts, count_per_host=count_per_host)


def _read_kind(section: Section, folder: Path) -> DeviceSpec | None:
    kind = section.text("kind", required=True)
    if kind is None:
        return None
    if kind.endswith(".toml"):
        try:
            return load_device(folder / kind)
        except ConfigError as error:
            section.wrong("kind", str(error))
            return None
    if kind not in PRESET_KINDS:
        expected = f"{one_of(PRESET_KINDS)}, or the path of a device file (.toml)"
        section.wrong("kind", f"got {shown(kind)}, expected {expected}{nearest(kind, PRESET_KINDS)}")
        return None
    return device_preset(kind)


def _read_device_values(section: Section, *, required: bool) -> dict[str, Any]:
    """What a table says about a device, in SI, by the field names of `DeviceSpec`."""
    memory_gib = section.number("memory_gib", required=required)
    memory_gib_per_s = section.number("memory_gib_per_s", required=required)
    launch_us = section.number("launch_us", zero=True)
    dispatch_us = section.number("dispatch_us", zero=True)
    leaf_us = section.number("leaf_us", zero=True)
    host_gib_per_s = section.number("host_gib_per_s")
    said = {
        "platform": section.text("platform", required=required, choices=PLATFORMS),
        "memory_bytes": None if memory_gib is None else round(memory_gib * GIB),
        "memory_margin": section.number("memory_margin", below=1.0, zero=True),
        "bytes_per_s": None if memory_gib_per_s is None else memory_gib_per_s * GIB,
        "launch_s": None if launch_us is None else launch_us * 1e-6,
        "dispatch_s": None if dispatch_us is None else dispatch_us * 1e-6,
        "leaf_s": None if leaf_us is None else leaf_us * 1e-6,
        "host_bytes_per_s": None if host_gib_per_s is None else host_gib_per_s * GIB,
        "flops_per_s": _read_numbers(section.table("tflops_per_s"), DTYPES, 1e12),
        "efficiency": _read_numbers(section.table("efficiency"), tuple(EFFICIENCY), 1.0),
    }
    return {name: value for name, value in said.items() if value is not None}


def _read_numbers(section: Section | None, names: Sequence[str], unit: float) -> dict[str, float] | None:
    """What a table of numbers says, in `unit`s."""
    if section is None:
        return None
    numbers = {name: section.number(name) for name in names}
    section.finish()
    return {name: number * unit for name, number in numbers.items() if number is not None}


def _read_links(
    links: Section | None, mistakes: Mistakes, needs_intra_host: bool, needs_inter_host: bool
) -> tuple[LinkSpec | None, LinkSpec | None]:
    found: list[LinkSpec | None] = []
    for name, needed in (("intra_host", needs_intra_host), ("inter_host", needs_inter_host)):
        section = links.table(name) if links else None
        if section is None and needed:
            expected = "a table with kind, or with gib_per_s (or gbit_per_s) and latency_us"
            mistakes.add(f"links.{name}", f"missing, expected {expected}")
        found.append(_read_link(section) if section else None)
    if links:
        links.finish()
    return found[0], found[1]


def _read_link(section: Section) -> LinkSpec | None:
    kind = section.text("kind", choices=PRESET_LINKS)
    stands_alone = "kind" not in section
    gib, gbit = section.number("gib_per_s"), section.number("gbit_per_s")
    latency_us = section.number("latency_us", required=stands_alone, zero=True)
    given = ("gib_per_s" in section) + ("gbit_per_s" in section)
    if given > 1 or (stands_alone and given == 0):
        section.wrong("gib_per_s", "expected exactly one of gib_per_s and gbit_per_s")
    section.finish()
    base = link_preset(kind) if kind else None
    bytes_per_s, latency_s = (base.bytes_per_s, base.latency_s) if base else (None, None)
    if gib is not None:
        bytes_per_s = gib * GIB
    elif gbit is not None:
        bytes_per_s = gbit * 1e9 / 8
    if latency_us is not None:
        latency_s = latency_us * 1e-6
    if bytes_per_s is None or latency_s is None:
        return None
    return LinkSpec(bytes_per_s=bytes_per_s, latency_s=latency_s)


def _read_axes(
    section: Section | None, groups: list[DeviceGroup | None], mistakes: Mistakes
) -> dict[str, int]:
    if section is None:
        return {}
    sizes = {axis: section.count(axis, words=("auto",)) for axis in AXES}
    section.finish()
    axes = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    wanted = axes.get("stage", 1) * axes.get("data", 1)
    there = sum(group.num_devices for group in groups if group)
    if all(groups) and wanted > there:
        said = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        mistakes.add("axes", f"{said} needs {wanted} devices, the file has {there}")
    return axes
