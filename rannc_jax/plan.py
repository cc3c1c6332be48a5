"""The decision, as plain frozen data: what runs where, how it was chosen, what it should cost.

A `Plan` can be saved, loaded, compared and read by a person, and is made on a laptop for a cluster
that is not there. Nothing in it is executable.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rannc_jax.cluster import ClusterSpec
from rannc_jax.contract import Remat, Sharding

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A convex group of equations that the planner does not cut.

    Args:
        path: module path of its first equation, "" where the function has no name scopes.
        equations: half-open ranges of equation indices in the flattened program it was planned on.
        anchors: half-open ranges in the sequence of anchors (equations that read parameters or multiply
            matrices): the coordinates by which another JAX version finds the block again.
    """

    path: str
    equations: tuple[tuple[int, int], ...]
    anchors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Blocks that run together on one sub-mesh.

    Args:
        blocks: indices into `Plan.blocks`.
        devices: device indices of the cluster, one a replica.
        remat: what is kept from forward to backward.
        sharding: how parameters lie on the replicas.
        forward_s, backward_s: predicted seconds for one microbatch.
        memory_bytes: predicted peak of one device by class ("parameters", "gradients", "optimizer",
            "residuals", "working", "transfers", "constants").
    """

    blocks: tuple[int, ...]
    devices: tuple[int, ...]
    remat: Remat = Remat.SAVE_MATMULS
    sharding: Sharding = Sharding.REPLICATED
    forward_s: float = 0.0
    backward_s: float = 0.0
    memory_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that goes from one stage to others; `bytes_per_row` or, for values without rows, `fixed_bytes`."""

    name: str
    source: int
    targets: tuple[int, ...]
    bytes_per_row: float
    fixed_bytes: int
    needs_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A parameter that several stages read: it lives on `owner`, the others get a copy every step."""

    path: str
    owner: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """Another plan, and why it lost."""

    summary: str
    step_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a function is trained on a cluster.

    Args:
        identity: fingerprint of paths, shapes and dtypes of parameters and batch; must match to run.
        program: fingerprint of the flattened program; another JAX version may change it, then the cuts
            are found again by anchors, with a warning.
        anchors: fingerprint of the anchor sequence.
        cluster: what the plan was made for.
        rows: batch rows of one step.
        num_microbatches: parts the batch is cut into.
        schedule: "gpipe", "1f1b" or "forward" (no backward).
        blocks, stages, crossings, ties: the cut.
        batching: "separable", "batch statistics" or "coupled": how rows may be spread (see notes).
        loss: how the losses of parts combine ("mean", "sum", "weighted", "mean_of_means", "none").
        step_s, bubble_fraction, bound_s: predicted step time, idle share, and a lower bound that no plan
            of this program on this cluster can beat.
        runners_up: best first.
        notes: what the plan does that a user might not expect, one sentence each.
        versions: of this package, jax, and what else decided the program.
    """

    version: int = PLAN_VERSION
    identity: str
    program: str
    anchors: str
    cluster: ClusterSpec
    rows: int
    num_microbatches: int
    schedule: str
    blocks: tuple[Block, ...]
    stages: tuple[Stage, ...]
    crossings: tuple[Crossing, ...] = ()
    ties: tuple[Tie, ...] = ()
    batching: str = "separable"
    loss: str = "mean"
    step_s: float = 0.0
    bubble_fraction: float = 0.0
    bound_s: float = 0.0
    runners_up: tuple[RunnerUp, ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        return len(self.stages)
