"""The third level: blocks on devices become a stage, and a stage gets a price.

`StageModel` is the one cost model of the search, of its exact check and of its bound. It adds up the
prices of blocks, counts every byte a device must hold, finds the modes (remat, sharding, offload) that fit,
and says how long values take from one stage to another. A price depends on the stage alone (its blocks, its
devices, the microbatches it keeps), never on the rest of the plan.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rannc_jax.cluster import ClusterSpec, DeviceSpec, LinkSpec
from rannc_jax.cost.comm import Ring
from rannc_jax.cost.table import BlockValue, CostTable, Priced, StateBytes
from rannc_jax.partition.constraints import Constraints
from rannc_jax.partition.mode import Mode, StageState, Work, for_replicas, stage_seconds

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
    """What a placement costs in one mode.

    Args:
        mode: remat, sharding, offload.
        forward_s, backward_s: seconds of one microbatch on the slowest replica, collectives included.
        weight_s: of the backward, what only gradients of weights take: it may wait.
        tail_s: seconds after the last backward: prologue, gradient reduction, tied copies, update.
        memory_bytes: by class, on the device that is fullest against its limit.
        fullness: peak over limit of that device; a stage fits up to 1.
    """

    mode: Mode
    forward_s: float
    backward_s: float
    weight_s: float
    tail_s: float
    memory_bytes: tuple[int, ...]
    fullness: float

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory_bytes)

    def step_s(self, num_microbatches: int) -> float:
        """Seconds that the stage works in a step."""
        return num_microbatches * (self.forward_s + self.backward_s) + self.tail_s

    def beats(self, other: "StagePrice") -> bool:
        """Whether no step with this price is slower than the same with the other: whatever starts the last
        backward, it ends the stage's step as early."""
        mine, its = self.backward_s + self.tail_s, other.backward_s + other.tail_s
        return self.forward_s <= other.forward_s and self.backward_s <= other.backward_s and mine <= its


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
        self,
        placement: Placement,
        microbatch_rows: int,
        in_flight: int,
        trains: bool,
        modes: tuple[Mode, ...],
    ) -> tuple[StagePrice, ...]:
        """The price in each mode, fitting or not, in their order.

        `microbatch_rows` must divide by the replicas. O(modes + blocks + values + ties).
        """
        replicas = placement.num_replicas
        rows = microbatch_rows // replicas
        transfers = self.buffer_bytes(placement.blocks, rows, trains)
        kinds = sorted({self.kind_of[device] for device in placement.devices})
        prices = {kind: [self.block_price(b, rows, kind) for b in placement.blocks] for kind in kinds}
        work = Work(
            forward_s=max(sum(price.forward_s for price in prices[kind]) for kind in kinds),
            backward_s=0.0,
            once_s=max(sum(price.once_s for price in prices[kind]) for kind in kinds),
            trains=trains,
            state=self.stage_state(placement.blocks),
            slowest=min((self.kinds[kind] for kind in kinds), key=lambda kind: kind.bytes_per_s),
            pieces=len(placement.blocks),
            num_replicas=replicas,
        )
        weight_s = min(sum(price.weight_s for price in prices[kind]) for kind in kinds) if trains else 0.0
        ring = self.ring(placement)
        options = []
        for mode in for_replicas(modes, replicas):
            fullness, memory = max(
                self._memory(kind, prices[kind], mode, work, in_flight, transfers) for kind in kinds
            )
            if trains:
                remat = mode.remat
                backward_s = max(sum(price.backward_s[remat] for price in prices[kind]) for kind in kinds)
                work = replace(work, backward_s=backward_s)
            forward_s, backward_s, tail_s = stage_seconds(mode, work, ring, self.tie_link)
            options.append(
                StagePrice(
                    mode=mode,
                    forward_s=float(forward_s),
                    backward_s=float(backward_s),
                    weight_s=float(min(weight_s, backward_s)),
                    tail_s=float(tail_s),
                    memory_bytes=memory,
                    fullness=fullness,
                )
            )
        return tuple(options)

    def good(
        self,
        placement: Placement,
        num_microbatches: int,
        in_flight: int,
        trains: bool,
        modes: tuple[Mode, ...],
    ) -> list[StagePrice]:
        """The modes that fit and of which none beats another."""
        rows = self.rows // num_microbatches
        kept: list[StagePrice] = []
        for option in self.options(placement, rows, in_flight, trains, modes):
            if option.fullness <= 1.0 and not any(other.beats(option) for other in kept):
                kept = [other for other in kept if not option.beats(other)] + [option]
        return kept

    def _stage_state(self, blocks: tuple[int, ...]) -> StageState:
        """State of a stage with ties counted once."""
        states = [self.blocks[block].state for block in blocks]
        members, borrowed = set(blocks), 0
        for tie in self.ties:
            if tie.blocks[0] in members:
                states.append(tie.state)
            elif not members.isdisjoint(tie.blocks):
                parameters, gradients = tie.state.parameters, tie.state.gradients
                states.append(StateBytes(parameters=parameters, gradients=gradients))
                borrowed += parameters
        total = sum(states, StateBytes())
        return StageState(
            parameters=total.parameters,
            gradients=total.gradients,
            optimizer=total.optimizer,
            constants=total.constants,
            prologue=total.prologue,
            update_bytes=sum(state.update_bytes for state in states),
            borrowed=borrowed,
            largest_parameters=max(state.parameters + state.prologue for state in states),
            largest_optimizer=max(state.optimizer for state in states),
        )

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

    def ring(self, placement: Placement) -> Ring:
        """The replicas of a stage."""
        counts = Counter(self.hosts[device] for device in placement.devices).values()
        return Ring(
            intra_host=self.cluster.intra_host,
            inter_host=self.cluster.inter_host,
            hosts=len(counts),
            fewest=min(counts),
            most=max(counts),
        )

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

    def host_s(self, placements: Sequence[Placement], num_microbatches: int, trains: bool) -> float:
        """Seconds in which the busiest host calls the programs and copies of a step, one after another.

        A plan of one stage is one program a step, whatever the number of microbatches.
        """
        calls, arrays = Counter[int](), Counter[int]()
        for placed in placements:
            rows = self.rows // num_microbatches // placed.num_replicas
            kind = self.kind_of[placed.first_device]
            each = sum(self.block_price(block, rows, kind).num_arrays for block in placed.blocks)
            for host, replicas in Counter(self.hosts[device] for device in placed.devices).items():
                calls[host] += 1 + trains
                arrays[host] += each * replicas
        if len(placements) == 1:
            calls, num_microbatches = Counter(dict.fromkeys(calls, 1)), 1
        for source, target, back in self._neighbours(placements, trains):
            ends = (*placements[source].devices, *placements[target].devices)
            calls.update(dict.fromkeys({self.hosts[device] for device in ends}, 1 + back))
        slowest = max(self.kinds, key=lambda kind: kind.dispatch_s)
        seconds = (calls[host] * slowest.dispatch_s + arrays[host] * slowest.leaf_s for host in calls)
        return num_microbatches * max(seconds)

    def _neighbours(self, placements: Sequence[Placement], trains: bool) -> list[tuple[int, int, bool]]:
        """(source stage, target stage, whether cotangents come back) of stages that values go between."""
        stage_of = {b: stage for stage, placed in enumerate(placements) for b in placed.blocks}
        found: dict[tuple[int, int], bool] = {}
        for value in self.values:
            source = stage_of[value.producer]
            for target in {stage_of[consumer] for consumer in value.consumers} - {source}:
                found[source, target] = found.get((source, target), False) or (trains and value.needs_grad)
        return [(*pair, back) for pair, back in sorted(found.items())]

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
        mode: Mode,
        work: Work,
        in_flight: int,
        transfers: int,
    ) -> tuple[float, tuple[int, ...]]:
        """Peak over limit, and bytes by class in the order of `MEMORY_CLASSES`."""
        kept = work.state.under(mode, work.num_replicas)
        memory = (
            kept.parameters,
            kept.gradients,
            kept.optimizer,
            in_flight * sum(price.residual_bytes[mode.remat] for price in prices),
            max(price.working_bytes[mode.remat] for price in prices),
            transfers + kept.buffers,
            kept.constants,
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
