"""Real devices for a plan's device indices, checked against what the plan was made for."""

from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rannc_jax.errors import MeshError, message
from rannc_jax.plan import Plan


def stage_meshes(plan: Plan, devices: Sequence[jax.Device] | None = None) -> tuple[Mesh, ...]:
    """One sub-mesh with the axis "data" for every stage.

    Args:
        plan: its device indices count through `devices`.
        devices: all local devices by default.

    Raises:
        MeshError: there are fewer devices than the plan uses.
    """
    devices = jax.devices() if devices is None else list(devices)
    needed = 1 + max(d for stage in plan.stages for d in stage.devices)
    if needed > len(devices):
        raise MeshError(
            message(
                f"the plan uses {needed} devices, {len(devices)} are here.",
                f"here: {describe_devices(devices)}",
                f"expected: {plan.cluster.num_devices} x {plan.cluster.device(0).kind}",
                hint=f"plan for what is here (mesh=None), or give {needed} devices; on CPU "
                f"jax.config.update('jax_num_cpu_devices', {needed}) before the first use of JAX.",
            )
        )
    return tuple(Mesh(np.array([devices[d] for d in stage.devices]), ("data",)) for stage in plan.stages)


def describe_devices(devices: Sequence[jax.Device]) -> str:
    """Counts by kind, such as "8 x cpu" or "2 x NVIDIA H200"."""
    kinds = Counter(device.device_kind for device in devices)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"
