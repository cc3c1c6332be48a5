"""The decision, as plain frozen data: what runs where, how it was chosen, what it should cost.

A `Plan` can be saved, loaded, compared and read by a person, and is made on a laptop for a cluster
that is not there. Nothing in it is executable; a plan that contradicts itself cannot be built, from a
file or otherwise.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rannc_jax.cluster import ClusterSpec
from rannc_jax.contract import Remat, Sharding
from rannc_jax.errors import PlanError, message
from rannc_jax.files import write_whole
from rannc_jax.mistakes import Mistakes, shown
from rannc_jax.plan import check, codec, explain, text

PLAN_VERSION = 3


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
    """Blocks that run together on one sub-mesh. With an interleaved schedule several stages share one.

    Args:
        blocks: indices into `Plan.blocks`.
        devices: device indices of the cluster, one a replica.
        remat: what is kept from forward to backward.
        sharding: how parameters lie on the replicas.
        offload: the optimizer state lies in host memory between updates.
        forward_s, backward_s: predicted seconds for one microbatch, collectives included.
        weight_s: of the backward, what a schedule that splits it may put off.
        tail_s: predicted seconds after the last backward: reduction, update, gathering.
        memory_bytes: predicted peak of one device by class ("parameters", "gradients", "optimizer",
            "residuals", "working", "transfers", "constants").
    """

    blocks: tuple[int, ...]
    devices: tuple[int, ...]
    remat: Remat = Remat.SAVE_MATMULS
    sharding: Sharding = Sharding.REPLICATED
    offload: bool = False
    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    tail_s: float = 0.0
    memory_bytes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_bytes", dict(self.memory_bytes))

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that goes from one stage to others.

    It takes `bytes_per_row` for every row of a microbatch or, where it has no rows, `fixed_bytes`.
    """

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
        schedule: "gpipe", "1f1b", "zb-h1", "interleaved(chunks)", "forward" (no backward), or actions,
            one line a rank: "0F0 0B0".
        blocks, stages, crossings, ties: the cut.
        batching: "separable", "batch statistics" or "coupled": how rows may be spread (see notes).
        loss: how the losses of parts combine ("mean", "sum", "weighted", "mean_of_means", "none").
        step_s, bubble_fraction, bound_s: predicted step time, idle share, and a lower bound that no plan
            of this program on this cluster can beat.
        host_s: seconds of a step in which the busiest host calls programs; `step_s` is no less.
        runners_up: best first.
        notes: what the plan does that a user might not expect, one sentence each.
        versions: of this package, jax, and what else decided the program.

    Raises:
        PlanError: the parts contradict each other; the message lists every contradiction.
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
    host_s: float = 0.0
    bound_s: float = 0.0
    runners_up: tuple[RunnerUp, ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", dict(self.versions))
        mistakes = Mistakes(source="the plan")
        check.check_plan(self, mistakes)
        mistakes.raise_if_any(PlanError)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def __str__(self) -> str:
        return text.table(self)

    def explain(self) -> str:
        """Why the plan is as it is: where the step goes, what limits it (memory, a heavy block, links), how
        far from the best it can be, time and memory of every device, and why the runners-up lost."""
        return explain.explain(self)

    def diff(self, other: "Plan") -> str:
        """What is different in `other`, one line a difference; "" if the plans are equal in all that
        `str` shows."""
        return text.diff(self, other)

    def to_json(self) -> str:
        """The plan as JSON: what `from_json` reads back equal, bit by bit."""
        return json.dumps(codec.encode(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, content: str) -> "Plan":
        """Read what `to_json` wrote.

        Raises:
            PlanError: not JSON, of another version, or mistakes in it: all of them, with key paths.
        """
        try:
            data = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise PlanError(message("the plan is not JSON.", str(error))) from error
        if isinstance(data, dict) and data.get("version", PLAN_VERSION) != PLAN_VERSION:
            raise PlanError(
                message(
                    "the plan was written by another release.",
                    f"version: got {shown(data['version'])}, this release reads version {PLAN_VERSION}",
                    hint="make the plan again.",
                )
            )
        mistakes = Mistakes(source="the plan")
        plan = codec.decode(cls, data, mistakes)
        mistakes.raise_if_any(PlanError)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON; a file that is there is replaced whole or not at all."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan from a file.

        Raises:
            PlanError: the file does not hold a plan; see `from_json`.
            FileNotFoundError: there is no such file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (PlanError, UnicodeDecodeError) as error:
            raise PlanError(message(f"{path} cannot be loaded.", str(error))) from error
