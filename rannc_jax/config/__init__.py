"""The only reader of TOML: mesh files and device files become `ClusterSpec` and `DeviceSpec`.

Files speak the units people measure in (GiB, microseconds, TFLOP/s); specs speak SI. Every mistake of a
file is reported at once, each with its key path, what was got and expected, and the nearest known word.
"""

from rannc_jax.config.mesh import load_cluster, load_device

__all__ = ["load_cluster", "load_device"]
