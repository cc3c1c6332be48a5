"""How a stage keeps its state and its residuals: the choices that change no result, only bytes and seconds.

With r replicas, parameters of P bytes and gradients of G bytes, a step moves

    replicated   all-reduce of G once
    ZeRO-1       reduce-scatter of G and all-gather of P once
    ZeRO-2       reduce-scatter of G every microbatch, all-gather of P once
    FSDP         all-gather of P forward and again backward, reduce-scatter of G, every microbatch

and keeps 1/r of the optimizer state from ZeRO-1 on, of the gradients from ZeRO-2 on, of the parameters with
FSDP (Rajbhandari et al., "ZeRO", SC 2020).
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rannc_jax.cluster import DeviceSpec, LinkSpec
from rannc_jax.contract import Remat, Sharding
from rannc_jax.cost.comm import Ring

HIDDEN_REDUCTION = 0.75
"""Share of the gradients' reduction that runs beside the last backward. On two H200 a data-parallel step of
a 670 M model, whose all-reduce alone takes 11 ms, took 0 to 2 ms more than its backward and update."""

HIDDEN_GATHERS = 0.5
"""Share of the collectives inside a forward or backward that runs beside its compute. In the same runs FSDP's
22 ms of collectives cost 3 ms (of 122 ms of compute), 13 ms (of 21 ms), and once 41 ms (of 64 ms)."""

_SHARDS_OPTIMIZER = frozenset({Sharding.ZERO1, Sharding.ZERO2, Sharding.FSDP})
_SHARDS_GRADIENTS = frozenset({Sharding.ZERO2, Sharding.FSDP})


@dataclass(frozen=True, slots=True)
class Mode:
    """One choice.

    Args:
        remat: what is kept from forward to backward.
        sharding: how state lies on the replicas.
        offload: the optimizer state stays in host memory.
    """

    remat: Remat
    sharding: Sharding = Sharding.REPLICATED
    offload: bool = False


def modes_of(
    remats: Iterable[Remat], shardings: Iterable[Sharding], offloads: Iterable[bool]
) -> tuple[Mode, ...]:
    """All combinations."""
    return tuple(Mode(*parts) for parts in itertools.product(remats, shardings, offloads))


def for_replicas(modes: tuple[Mode, ...], num_replicas: int) -> tuple[Mode, ...]:
    """Those that differ: one replica has nothing to shard."""
    if num_replicas > 1:
        return modes
    first = {(mode.remat, mode.offload): mode for mode in reversed(modes)}
    return tuple(mode for mode in modes if first[mode.remat, mode.offload] is mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes that a device of a stage keeps all through the step, by class, under some mode.

    `buffers` hold what collectives and offloading have on its way.
    """

    parameters: Any
    gradients: Any
    optimizer: Any
    constants: Any
    buffers: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """State of a stage, ties counted once. Numbers of bytes, or matrices of them for many stages.

    Args:
        parameters, gradients, optimizer, constants, prologue: as in `StateBytes`.
        update_bytes: that the optimizer's update reads and writes.
        borrowed: parameters that other stages own.
        largest_parameters, largest_optimizer: of the block or tie that has most.
    """

    parameters: Any
    gradients: Any
    optimizer: Any
    constants: Any
    prologue: Any
    update_bytes: Any
    borrowed: Any
    largest_parameters: Any
    largest_optimizer: Any

    def under(self, mode: Mode, num_replicas: int) -> Kept:
        """What one device keeps. FSDP gathers a block while the one before is in use."""
        optimizer_parts = num_replicas if mode.sharding in _SHARDS_OPTIMIZER else 1
        gradient_parts = num_replicas if mode.sharding in _SHARDS_GRADIENTS else 1
        parts = num_replicas if mode.sharding is Sharding.FSDP else 1
        buffers = 2 * self.largest_parameters * (parts > 1)
        if mode.offload:
            buffers = buffers + 2 * _share(self.largest_optimizer, optimizer_parts)
        return Kept(
            parameters=_share(self.parameters, parts),
            gradients=_share(self.gradients, gradient_parts),
            optimizer=0 * self.optimizer if mode.offload else _share(self.optimizer, optimizer_parts),
            constants=self.constants + _share(self.prologue, parts),
            buffers=buffers,
        )

    def update_seconds(self, mode: Mode, num_replicas: int, device: DeviceSpec) -> Any:
        """Seconds of the optimizer's update, with its state fetched from the host and put back."""
        parts = num_replicas if mode.sharding in _SHARDS_OPTIMIZER else 1
        seconds = self.update_bytes / parts / device.bytes_per_s
        return seconds + 2 * self.optimizer / parts / device.host_bytes_per_s if mode.offload else seconds


def _share(num_bytes: Any, parts: int) -> Any:
    return -(-num_bytes // parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a stage works whatever its sharding. Seconds are numbers, or matrices for many stages.

    Args:
        forward_s, backward_s: compute of one microbatch on the slowest replica.
        once_s: of the prologue and its transpose.
        trains: whether there is a backward.
        state: what lies on the stage.
        slowest: the device with the slowest memory.
        pieces: number of blocks.
        num_replicas: r.
    """

    forward_s: Any
    backward_s: Any
    once_s: Any
    trains: bool
    state: StageState
    slowest: DeviceSpec
    pieces: Any
    num_replicas: int


def stage_seconds(mode: Mode, work: Work, ring: Ring, tie_link: LinkSpec) -> tuple[Any, Any, Any]:
    """Forward and backward of one microbatch with their collectives, and the tail of the step.

    The tail is what is left of the reduction after the last backward, the prologue, copies of borrowed
    parameters there and back, and the update.
    """
    state, moved = work.state, _Collectives()
    if work.num_replicas > 1:
        moved = _collectives(mode.sharding, ring, work)
    copies = (state.borrowed > 0) * (tie_link.latency_s + state.borrowed / tie_link.bytes_per_s)
    tail_s = work.once_s + 2 * copies + state.update_seconds(mode, work.num_replicas, work.slowest)
    tail_s = tail_s + _beside(work.backward_s, moved.reduce_s, HIDDEN_REDUCTION) + moved.gather_s
    forward_s = work.forward_s + _beside(work.forward_s, moved.forward_s, HIDDEN_GATHERS)
    backward_s = work.backward_s + _beside(work.backward_s, moved.backward_s, HIDDEN_GATHERS)
    return forward_s, backward_s, tail_s


@dataclass(frozen=True, slots=True)
class _Collectives:
    """Seconds of collectives: inside each forward, inside each backward, once after the last backward, and
    once after the update. Numbers, or matrices of them."""

    forward_s: Any = 0.0
    backward_s: Any = 0.0
    reduce_s: Any = 0.0
    gather_s: Any = 0.0


def _collectives(sharding: Sharding, ring: Ring, work: Work) -> _Collectives:
    """What two or more replicas of a stage exchange; FSDP and ZeRO-2 one piece after the other."""
    parameters, gradients = work.state.parameters + work.state.prologue, work.state.gradients
    if not work.trains:
        gather = ring.all_gather(parameters, work.pieces)
        return _Collectives(forward_s=gather * (sharding is Sharding.FSDP))
    scatter = ring.reduce_scatter(gradients, work.pieces)
    if sharding is Sharding.FSDP:
        gather = ring.all_gather(parameters, work.pieces)
        return _Collectives(forward_s=gather, backward_s=gather + scatter)
    after = ring.all_gather(parameters) * (gradients > 0)
    if sharding is Sharding.ZERO2:
        return _Collectives(backward_s=scatter, gather_s=after)
    if sharding is Sharding.ZERO1:
        return _Collectives(reduce_s=ring.reduce_scatter(gradients), gather_s=after)
    return _Collectives(reduce_s=ring.all_reduce(gradients))


def _beside(compute_s: Any, collective_s: Any, share: float) -> Any:
    """Seconds that a collective adds to the compute it runs beside, `share` of which can hide it."""
    return np.maximum(collective_s - share * compute_s, (1 - share) * collective_s)
