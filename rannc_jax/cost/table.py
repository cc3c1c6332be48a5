"""What the blocks of a program cost: the only thing the search knows about a program.

A `CostTable` is a small graph of blocks (a topological order by index) and the price of each block at
any number of rows on any device. *Rows* are always the rows of one replica of one microbatch. Prices
of blocks add up to the price of a stage: seconds, residuals and state are summed, working memory is
the largest of the stage's blocks. Costs are pure numbers; whoever makes them (rooflines or
measurements) is not known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rannc_jax.cluster import DeviceSpec
from rannc_jax.contract import Remat
from rannc_jax.errors import CostError, message


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that lie on a device for the whole step, whatever the rows.

    Args:
        parameters: trained parameters.
        gradients: the accumulator of their gradients.
        optimizer: optimizer state of these parameters.
        constants: frozen leaves, model state, lifted closure constants.
        prologue: results of parameter-only work (casts, weight norm) and cotangents towards them.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    constants: int = 0
    prologue: int = 0

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            constants=self.constants + other.constants,
            prologue=self.prologue + other.prologue,
        )

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.constants + self.prologue

    @property
    def update_bytes(self) -> int:
        """Bytes that the optimizer update reads and writes: nothing where nothing is trained."""
        if self.gradients == 0:
            return 0
        return 2 * (self.parameters + self.optimizer) + self.gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One block at one number of rows on one kind of device.

    Args:
        forward_s: seconds of one forward, the same under every `Remat`.
        backward_s: seconds of one backward, recomputation included.
        residual_bytes: kept from forward to backward for one microbatch, the block's held inputs
            included, parameters and other state excluded.
        working_bytes: peak of what lives inside one forward or one backward beyond residuals and
            state (recomputed residuals included).
        once_s: seconds once a step, whatever the number of microbatches: prologue and its transpose.
        weight_s: of the backward, what only gradients of parameters take, so that it may be put off.
        num_arrays: about how many arrays the programs of one microbatch take and give (parameters, sums of
            gradients, residuals as of SAVE_MATMULS): the host handles every one.
    """

    forward_s: float
    backward_s: Mapping[Remat, float]
    residual_bytes: Mapping[Remat, int]
    working_bytes: Mapping[Remat, int]
    once_s: float = 0.0
    weight_s: float = 0.0
    num_arrays: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """What is known of a block without asking for rows.

    Args:
        path: its module.
        state: its own state, no ties.
        modules: paths of all modules that it holds a part of; `path` alone by default.
        pieces: how many parts a finer cut could make of it.
    """

    path: str
    state: StateBytes = field(default_factory=StateBytes)
    modules: tuple[str, ...] = ()
    pieces: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", self.modules or (self.path,))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockValue:
    """A value that one block makes and later blocks read.

    Args:
        name: what a person reads in a plan.
        producer: block index.
        consumers: block indices, ascending, all larger than `producer`.
        bytes_per_row: size by rows of the microbatch; 0 for values without rows.
        fixed_bytes: size that does not depend on the rows.
        needs_grad: a cotangent of the same size flows back.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    bytes_per_row: float = 0.0
    fixed_bytes: int = 0
    needs_grad: bool = True

    def __post_init__(self) -> None:
        if not self.consumers or min(self.consumers) <= self.producer:
            raise CostError(
                message(
                    f"value {self.name!r} does not flow forward.",
                    f"producer {self.producer}, consumers {self.consumers}",
                    hint="blocks are numbered in a topological order, and every value has a consumer.",
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedState:
    """A parameter that several blocks read, counted once a stage and not in `BlockCost.state`.

    Args:
        path: pytree path of the parameter.
        blocks: block indices that read it, ascending. The stage of the first one owns it and keeps its
            optimizer state; other stages hold a copy and an accumulator.
        state: what it costs the owner.
    """

    path: str
    blocks: tuple[int, ...]
    state: StateBytes


class CostTable(Protocol):
    """Blocks in a topological order, the values between them, and their prices."""

    @property
    def blocks(self) -> tuple[BlockCost, ...]: ...
    @property
    def values(self) -> tuple[BlockValue, ...]: ...
    @property
    def ties(self) -> tuple[TiedState, ...]: ...

    def price(self, block: int, rows: int, device: DeviceSpec) -> Priced:
        """Price `block` at `rows` >= 1 rows of one replica of one microbatch.

        Pure and the same at every call; the search keeps the answers, so it need not be cached.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineBlock:
    """Costs of a block as a constant plus a multiple of the rows, each pair `(fixed, per_row)`.

    `backward_s`, `residual_bytes` and `working_bytes` give a pair for each of SAVE_ALL, SAVE_MATMULS
    and RECOMPUTE, in this order.
    """

    path: str = ""
    state: StateBytes = field(default_factory=StateBytes)
    forward_s: tuple[float, float]
    backward_s: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
    residual_bytes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    working_bytes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    once_s: float = 0.0
    weight_s: tuple[float, float] = (0.0, 0.0)
    num_arrays: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineTable:
    """A `CostTable` held in memory: affine costs written down by hand or fitted to measurements.

    Args:
        affine: one entry a block, in a topological order.
        speeds: by device kind, divides the seconds; 1.0 where a kind is missing.
    """

    affine: tuple[AffineBlock, ...]
    values: tuple[BlockValue, ...] = ()
    ties: tuple[TiedState, ...] = ()
    speeds: Mapping[str, float] | None = None

    @property
    def blocks(self) -> tuple[BlockCost, ...]:
        return tuple(BlockCost(path=block.path, state=block.state) for block in self.affine)

    def price(self, block: int, rows: int, device: DeviceSpec) -> Priced:
        costs = self.affine[block]
        speed = (self.speeds or {}).get(device.kind, 1.0)
        return Priced(
            forward_s=_at(costs.forward_s, rows) / speed,
            backward_s={m: _at(p, rows) / speed for m, p in zip(Remat, costs.backward_s, strict=True)},
            residual_bytes={m: int(_at(p, rows)) for m, p in zip(Remat, costs.residual_bytes, strict=True)},
            working_bytes={m: int(_at(p, rows)) for m, p in zip(Remat, costs.working_bytes, strict=True)},
            once_s=costs.once_s / speed,
            weight_s=_at(costs.weight_s, rows) / speed,
            num_arrays=costs.num_arrays,
        )


def _at(pair: tuple[float, float], rows: int) -> float:
    return pair[0] + pair[1] * rows
