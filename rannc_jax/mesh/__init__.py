"""Plan and devices to one sub-mesh a stage.

A sub-mesh is a 1-D `jax.sharding.Mesh` with the axis "data", one device a replica.
"""

from rannc_jax.mesh.build import describe_devices, stage_meshes

__all__ = ["describe_devices", "stage_meshes"]
