"""The third level: blocks on devices become a stage, and a stage gets a price.

`StageModel` is the one cost model of the search, of its exact check and of its bound. It adds up the
prices of blocks, counts every byte a device must hold, chooses the fastest remat that fits, and says
how long values take from one stage to another. A price depends on the stage alone (its blocks, its
devices, the microbatches it keeps), never on the rest of the plan.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from rannc_jax.cluster import ClusterSpec, DeviceSpec, LinkSpec
from rannc_jax.contract import Remat
from rannc_jax.cost.table import BlockValue, CostTable, Priced, StateBytes
from rannc_jax.partition.constraints import Constraints

MEMORY_CLASSES = ("parameters", "gradients", "optimizer", "residuals", "working", "transfers", "constants")


@dataclass(frozen=True, slots=True)
class Placement:
    """Blocks (ascending) on `num_replicas` consecutive devices from `first_device` on."""

    blocks: tuple[int, ...]
    first_device: int
    num_replicas: int

    @property
    def devices(self) -> range:
        return range(self.first_device, self.first_device + self.num_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrice:
    """What a placement costs under one remat.

    Args:
        remat: what is kept from forward to backward.
        forward_s, backward_s: seconds of one microbatch on the slowest replica.
        tail_s: seconds after the last backward: prologue, gradient reduction, tied copies, update.
        memory_bytes: by class, on the device that is fullest against its limit.
        fullness: peak over limit of that device; a stage fits up to 1.
    """

    remat: Remat
    forward_s: float
    backward_s: float
    tail_s: float
    memory_bytes: tuple[int, ...]
    fullness: float

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory_bytes)


class StageModel:
    """Prices stages of one program on one cluster, and remembers the prices.

    Args:
        table: what the blocks cost.
        cluster: what they run on.
        constraints: memory limits are read here.
        rows: batch rows of one step.
    """

    def __init__(self, table: CostTable, cluster: ClusterSpec, constraints: Constraints, rows: int) -> None:
        self.table = table
        self.cluster = cluster
        self.constraints = constraints
        self.rows = rows
        self.num_blocks = len(table.blocks)
        self.num_devices = cluster.num_devices
        self.blocks = table.blocks
        self.values = table.values
        self.ties = table.ties
        self.devices = tuple(cluster.device(index) for index in range(cluster.num_devices))
        self.hosts = tuple(cluster.host(index) for index in range(cluster.num_devices))
        self.kinds = _distinct(self.devices)
        self.kind_of = tuple(self.kinds.index(device) for device in self.devices)
        self.limits = tuple(constraints.limit_bytes(kind) for kind in self.kinds)
        self.tie_link = cluster.inter_host if self.hosts[-1] > 0 else cluster.intra_host
        self._prices: dict[tuple[int, int, int], Priced] = {}
        self.options = functools.cache(self._options)
        self.stage_state = functools.cache(self._stage_state)
        self.buffer_bytes = functools.cache(self._buffer_bytes)

    @property
    def is_uniform(self) -> bool:
        """Whether all devices and all links are equal, so that only the number of devices matters."""
        return len(self.kinds) == 1 and self.hosts[-1] == 0

    def block_price(self, block: int, rows: int, kind: int) -> Priced:
        """The table's price, kept."""
        key = (block, rows, kind)
        if key not in self._prices:
            self._prices[key] = self.table.price(block, rows, self.kinds[kind])
        return self._prices[key]

    def _options(
        self, placement: Placement, microbatch_rows: int, in_flight: int, trains: bool
    ) -> tuple[StagePrice, ...]:
        """The price under each remat, fitting or not.

        `microbatch_rows` must divide by the replicas. O(blocks + values + ties).
        """
        rows = microbatch_rows // placement.num_replicas
        state, tied_bytes = self.stage_state(placement.blocks)
        transfers = self.buffer_bytes(placement.blocks, rows, trains)
        kinds = sorted({self.kind_of[device] for device in placement.devices})
        prices = {kind: [self.block_price(b, rows, kind) for b in placement.blocks] for kind in kinds}
        once_s = max(sum(price.once_s for price in prices[kind]) for kind in kinds)
        tail_s = once_s + self.tail_seconds(state, tied_bytes, placement.first_device, placement.num_replicas)
        forward_s = max(sum(price.forward_s for price in prices[kind]) for kind in kinds)
        options = []
        for remat in Remat:
            fullness, memory = max(
                self._memory(kind, prices[kind], remat, state, in_flight, transfers) for kind in kinds
            )
            backward_s = max(sum(price.backward_s[remat] for price in prices[kind]) for kind in kinds)
            options.append(
                StagePrice(
                    remat=remat,
                    forward_s=forward_s,
                    backward_s=backward_s if trains else 0.0,
                    tail_s=tail_s,
                    memory_bytes=memory,
                    fullness=fullness,
                )
            )
        return tuple(options)

    def price(
        self,
        placement: Placement,
        microbatch_rows: int,
        in_flight: int,
        trains: bool,
        remats: tuple[Remat, ...],
    ) -> StagePrice | None:
        """The fastest of `remats` that fits; of equally fast ones the smallest; None if none fits."""
        options = self.options(placement, microbatch_rows, in_flight, trains)
        fitting = [option for option in options if option.remat in remats and option.fullness <= 1.0]
        return min(fitting, key=lambda option: (option.backward_s, option.peak_bytes), default=None)

    def _stage_state(self, blocks: tuple[int, ...]) -> tuple[StateBytes, int]:
        """State of a stage with ties counted once, and the bytes of parameters it borrows from others."""
        state = sum((self.blocks[block].state for block in blocks), StateBytes())
        members, borrowed = set(blocks), 0
        for tie in self.ties:
            if tie.blocks[0] in members:
                state = state + tie.state
            elif not members.isdisjoint(tie.blocks):
                parameters, gradients = tie.state.parameters, tie.state.gradients
                state = state + StateBytes(parameters=parameters, gradients=gradients)
                borrowed += parameters
        return state, borrowed

    def _buffer_bytes(self, blocks: tuple[int, ...], rows: int, trains: bool) -> int:
        """What is on its way in or out for one microbatch, cotangents included."""
        members, total = set(blocks), 0.0
        for value in self.values:
            comes = value.producer not in members and not members.isdisjoint(value.consumers)
            goes = value.producer in members and not members.issuperset(value.consumers)
            if comes or goes:
                ways = 2 if trains and value.needs_grad else 1
                total += ways * (value.bytes_per_row * rows + value.fixed_bytes)
        return int(total)

    def tail_seconds(self, state: StateBytes, borrowed: int, first: int, replicas: int) -> float:
        """Gradient reduction over a ring, copies of borrowed parameters there and back, update."""
        reduce_s = 0.0
        if replicas > 1 and state.gradients > 0:
            link = self.link_within(first, replicas)
            moved = state.gradients * 2 * (replicas - 1) / replicas
            reduce_s = 2 * (replicas - 1) * link.latency_s + moved / link.bytes_per_s
        slowest = min(self.devices[d].bytes_per_s for d in range(first, first + replicas))
        return reduce_s + 2 * self.tie_link.seconds(borrowed) + state.update_bytes / slowest

    def link_within(self, first: int, replicas: int) -> LinkSpec:
        """The slowest link of the ring over these devices."""
        same = self.hosts[first] == self.hosts[first + replicas - 1]
        return self.cluster.intra_host if same else self.cluster.inter_host

    def transfers(
        self, placements: Sequence[Placement], microbatch_rows: int, trains: bool
    ) -> tuple[tuple[int, int, float, float | None], ...]:
        """(source stage, target stage, seconds of values, seconds of cotangents or None), ascending.

        Rows go straight from the replica that has them to the one that needs them, so the side with
        fewer replicas sets the pace; values without rows go to every replica.
        """
        stage_of = {b: stage for stage, placed in enumerate(placements) for b in placed.blocks}
        values: dict[tuple[int, int], float] = {}
        cotangents: dict[tuple[int, int], float] = {}
        for value in self.values:
            source = stage_of[value.producer]
            for target in sorted({stage_of[consumer] for consumer in value.consumers} - {source}):
                pair = (source, target)
                moved = _moved_bytes(value, placements[source], placements[target], microbatch_rows)
                values[pair] = values.get(pair, 0.0) + moved
                if trains and value.needs_grad:
                    cotangents[pair] = cotangents.get(pair, 0.0) + moved
        result = []
        for pair in sorted(values):
            link = self._link_between(placements[pair[0]], placements[pair[1]])
            back = link.seconds(cotangents[pair]) if pair in cotangents else None
            result.append((*pair, link.seconds(values[pair]), back))
        return tuple(result)

    def _link_between(self, source: Placement, target: Placement) -> LinkSpec:
        """The slowest link over which rows go from one stage to the other."""
        for sender, device in enumerate(source.devices):
            first = sender * target.num_replicas // source.num_replicas
            last = -(-(sender + 1) * target.num_replicas // source.num_replicas)
            if any(self.hosts[target.first_device + r] != self.hosts[device] for r in range(first, last)):
                return self.cluster.inter_host
        return self.cluster.intra_host

    def _memory(
        self,
        kind: int,
        prices: list[Priced],
        remat: Remat,
        state: StateBytes,
        in_flight: int,
        transfers: int,
    ) -> tuple[float, tuple[int, ...]]:
        """Peak over limit, and bytes by class in the order of `MEMORY_CLASSES`."""
        memory = (
            state.parameters,
            state.gradients,
            state.optimizer,
            in_flight * sum(price.residual_bytes[remat] for price in prices),
            max(price.working_bytes[remat] for price in prices),
            transfers,
            state.constants + state.prologue,
        )
        return sum(memory) / max(self.limits[kind], 1), memory


def _moved_bytes(value: BlockValue, source: Placement, target: Placement, rows: int) -> float:
    fewer = min(source.num_replicas, target.num_replicas)
    copies = -(-target.num_replicas // source.num_replicas)
    return value.bytes_per_row * rows / fewer + value.fixed_bytes * copies


def _distinct(devices: Sequence[DeviceSpec]) -> tuple[DeviceSpec, ...]:
    """Equal devices once (they hold a mapping, so they cannot be hashed), in order of appearance."""
    kinds: list[DeviceSpec] = []
    for device in devices:
        if device not in kinds:
            kinds.append(device)
    return tuple(kinds)
