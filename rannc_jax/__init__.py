"""Cut an unchanged network automatically and train it on many devices with JAX.

    step = rannc_jax.auto_partition(loss_fn, optimizer=optax.adamw(1e-4), mesh="mesh.toml")
    state = step.init(params, batch)
    state, out = step(state, batch)

Importing this package touches no device, no environment variable and no optional package.
"""

from rannc_jax.api import auto_partition as auto_partition
from rannc_jax.api import make_plan as make_plan
from rannc_jax.api import parallelize as parallelize
from rannc_jax.cluster import ClusterSpec as ClusterSpec
from rannc_jax.cluster import DeviceGroup as DeviceGroup
from rannc_jax.cluster import DeviceSpec as DeviceSpec
from rannc_jax.cluster import LinkSpec as LinkSpec
from rannc_jax.config import load_cluster as load_cluster
from rannc_jax.contract import LossOut as LossOut
from rannc_jax.contract import Remat as Remat
from rannc_jax.contract import Sharding as Sharding
from rannc_jax.contract import TrainableModel as TrainableModel
from rannc_jax.contract import Weighted as Weighted
from rannc_jax.contract import coupled as coupled
from rannc_jax.contract import separable as separable
from rannc_jax.dag import CostGraph as CostGraph
from rannc_jax.dag import GraphEdge as GraphEdge
from rannc_jax.dag import GraphNode as GraphNode
from rannc_jax.dag import GraphPlan as GraphPlan
from rannc_jax.dag import load_graph as load_graph
from rannc_jax.dag import solve_graph as solve_graph
from rannc_jax.errors import ConfigError as ConfigError
from rannc_jax.errors import CostError as CostError
from rannc_jax.errors import InfeasibleError as InfeasibleError
from rannc_jax.errors import MeshError as MeshError
from rannc_jax.errors import PlanError as PlanError
from rannc_jax.errors import RanncError as RanncError
from rannc_jax.errors import RuntimeFailure as RuntimeFailure
from rannc_jax.errors import ScheduleError as ScheduleError
from rannc_jax.errors import TraceError as TraceError
from rannc_jax.plan import Plan as Plan
from rannc_jax.progress import StderrProgress as StderrProgress
from rannc_jax.runtime.state import TrainState as TrainState
from rannc_jax.runtime.step import Step as Step
from rannc_jax.schedule import GPipe as GPipe
from rannc_jax.schedule import OneFOneB as OneFOneB
