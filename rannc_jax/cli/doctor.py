"""What a report of trouble should contain: versions, settings, and the devices as JAX sees them."""

import importlib.metadata
import os
import platform

import jax

PACKAGES = (
    "rannc-jax", "jax", "jaxlib", "flax", "optax", "numpy", "networkx", "torch", "transformers",
)  # fmt: skip
# Settings of the environment that change what fits or how fast it runs.
SETTINGS = ("JAX_", "XLA_", "CUDA_VISIBLE_DEVICES", "NCCL_")
GIB = 2**30


def report() -> str:
    """Versions, settings and devices, one a line. Starts JAX's devices."""
    lines = [f"Python {platform.python_version()} on {platform.platform()}", "", "packages:"]
    lines += [f"  {name} {_version(name)}" for name in PACKAGES]
    settings = sorted(name for name in os.environ if name.startswith(SETTINGS))
    lines += ["", "settings:", *(f"  {name}={os.environ[name]}" for name in settings)]
    lines += ["", "devices:", *(f"  {_describe(device)}" for device in jax.local_devices())]
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _describe(device: jax.Device) -> str:
    text = f"{device.id}: {device.platform} {device.device_kind}, process {device.process_index}"
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return text if limit is None else f"{text}, {limit / GIB:.1f} GiB usable"
