"""Device files as text: what `load_device` reads back."""

from rannc_jax.cluster import DeviceSpec, LinkSpec
from rannc_jax.config.mesh import FILE_VERSION, GIB


def device_text(device: DeviceSpec, comments: tuple[str, ...] = ()) -> str:
    """A device file.

    Args:
        device: what it says. Figures keep five digits.
        comments: lines for its head.
    """
    lines = [f"# {line}".rstrip() for line in comments]
    lines += [
        f"version = {FILE_VERSION}",
        f"kind = {_quoted(device.kind)}",
        f'platform = "{device.platform}"',
        f"memory_gib = {_number(device.memory_bytes / GIB)}",
        f"memory_margin = {_number(device.memory_margin)}",
        f"memory_gib_per_s = {_number(device.bytes_per_s / GIB)}",
        f"launch_us = {_number(device.launch_s * 1e6)}",
        f"dispatch_us = {_number(device.dispatch_s * 1e6)}",
        f"leaf_us = {_number(device.leaf_s * 1e6)}",
        f"host_gib_per_s = {_number(device.host_bytes_per_s / GIB)}",
        "",
        "[tflops_per_s]",
        *(f"{name} = {_number(rate / 1e12)}" for name, rate in device.flops_per_s.items()),
        "",
        "[efficiency]",
        *(f"{name} = {_number(share)}" for name, share in device.efficiency.items()),
    ]
    return "\n".join(lines) + "\n"


def link_text(name: str, link: LinkSpec) -> str:
    """The table of a link, for a mesh file."""
    return (
        f"[links.{name}]\ngib_per_s = {_number(link.bytes_per_s / GIB)}\n"
        f"latency_us = {_number(link.latency_s * 1e6)}\n"
    )


def _number(value: float) -> str:
    """Five digits, always a TOML number."""
    return repr(float(f"{value:.5g}"))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
