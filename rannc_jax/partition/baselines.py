"""What other planners would do with the same blocks, priced by the same clock.

`rannc_plan` follows the stage level of RaNNC (Tanaka et al., IPDPS 2021, and its published code): the
first number of stages that fits, replicas in powers of two, no device idle, all or nothing recomputed, a
fill-drain schedule, a dynamic programme with one label a cell, link speeds fixed in advance.
`equal_plan` cuts where stages weigh the same, by layers, parameters or operations, with as many replicas
for every stage. Both get the blocks of our own block level; their plans lie in our search's own space.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rannc_jax.cluster import ClusterSpec
from rannc_jax.contract import Remat
from rannc_jax.cost.table import CostTable
from rannc_jax.partition.candidate import Candidate, Evaluation, Evaluator, Simulator
from rannc_jax.partition.constraints import Constraints, NamedSchedule
from rannc_jax.partition.even import best_ends, run_weights
from rannc_jax.partition.mode import Mode
from rannc_jax.partition.space import Menu, search_space
from rannc_jax.partition.stage import Placement, StageModel

Matrix = NDArray[np.float64]

STAGE_BYTES_PER_S = 20 * 2**30
REDUCE_BYTES_PER_S = 10 * 2**30
"""RaNNC's links, whatever the cluster: between stages, and of the gradient reduction."""

MOST_MICROBATCHES = 32
"""RaNNC's `max_pipeline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What every planner is given.

    Args:
        table: prices of blocks.
        cluster: the devices.
        rows: of one step.
        menu: what there is to choose from.
        simulate: the clock.
        splittable: whether the batch may be split into microbatches.
    """

    table: CostTable
    cluster: ClusterSpec
    rows: int
    menu: Menu
    simulate: Simulator
    splittable: bool = True

    def evaluator(self, constraints: Constraints | None = None) -> Evaluator:
        """Prices whole plans under constraints."""
        constraints = constraints or Constraints()
        model = StageModel(self.table, self.cluster, constraints, self.rows)
        space = search_space(model, constraints, self.menu, splittable=self.splittable)
        return Evaluator(model, space, self.simulate)

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Divisors of the rows, ascending."""
        most = self.rows if self.splittable else 1
        return tuple(m for m in range(1, most + 1) if self.rows % m == 0)


# Equal splits ----------------------------------------------------------------------------------------


def equal_plan(
    problem: Problem, weights: Sequence[float], schedules: Sequence[NamedSchedule]
) -> Evaluation | None:
    """The fastest plan whose stages weigh as nearly the same as blocks allow, or None if none fits.

    Numbers of stages are the powers of two up to the devices; each stage has an equal share of the
    devices as replicas. Microbatches, schedule and remat are those that serve it best.

    Args:
        problem: what is to be planned.
        weights: of the blocks.
        schedules: to choose from.
    """
    evaluator = problem.evaluator()
    found = (evaluator(candidate) for candidate in equal_candidates(problem, weights, schedules))
    return min((plan for plan in found if plan is not None), key=lambda plan: plan.rank, default=None)


def equal_candidates(
    problem: Problem, weights: Sequence[float], schedules: Sequence[NamedSchedule]
) -> Iterator[Candidate]:
    """Every plan `equal_plan` looks at."""
    devices = problem.cluster.num_devices
    for num_stages in _powers_of_two(min(devices, len(weights))):
        replicas = devices // num_stages
        stages = equal_cut(weights, num_stages)
        placements = _consecutive(stages, [replicas] * num_stages)
        for schedule, m in itertools.product(schedules, problem.num_microbatches):
            if problem.rows // m % replicas == 0:
                yield Candidate(schedule, m, placements)


def equal_cut(weights: Sequence[float], num_stages: int) -> list[range]:
    """Cut a row into runs, none empty, that weigh as nearly the same as possible (least squares)."""
    ends, _ = best_ends(run_weights(weights) ** 2, num_stages, np.add)
    return [range(a, b) for a, b in itertools.pairwise((0, *ends))]


def parameter_weights(table: CostTable) -> list[float]:
    """Bytes of parameters by block; a tie counts where it is read first."""
    weights = [float(block.state.parameters) for block in table.blocks]
    for tie in table.ties:
        weights[tie.blocks[0]] += tie.state.parameters
    return weights


def layer_weights(blocks: Sequence[Sequence[str]]) -> list[float]:
    """Layers by block, from the module paths of the blocks' nodes.

    A layer is the outermost module with a number in its name; a layer in several blocks counts in each
    with its share of the nodes. Where nothing is numbered, every block is a layer.

    Example:
        >>> layer_weights([["embed", "layer/0/mlp"], ["layer/1", "layer/2"], ["layer/2"]])
        [1.0, 1.5, 0.5]
    """
    layers = [[layer for path in paths if (layer := layer_of(path))] for paths in blocks]
    sizes: dict[str, int] = {}
    for layer in itertools.chain.from_iterable(layers):
        sizes[layer] = sizes.get(layer, 0) + 1
    if not sizes:
        return [1.0] * len(blocks)
    return [math.fsum(1 / sizes[layer] for layer in inside) for inside in layers]


def layer_of(path: str) -> str | None:
    """The part of a module path down to its first number."""
    found = re.match(r"[^0-9]*[0-9]+[^/]*", path)
    return found.group() if found else None


# RaNNC -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RanncResult:
    """What RaNNC would answer.

    Args:
        plan: on our clock; None where nothing fits, or what it chose does not fit on real links.
        estimate_s: the step as RaNNC itself estimates it.
        objective_s: of its dynamic programme: largest forward plus largest backward of a stage.
    """

    plan: Evaluation | None
    estimate_s: float
    objective_s: float


def rannc_plan(
    problem: Problem, schedule: NamedSchedule, *, num_stages: int | None = None
) -> RanncResult | None:
    """RaNNC's answer, or None where it finds none.

    Pipelines are first laid over one host, then over as many as divide the hosts, with a copy of the
    pipeline on each such part (unequal hosts count as one). The first number of stages that fits with
    any number of microbatches is final; of these numbers the one with the least estimate is taken.

    Args:
        problem: what is to be planned; devices are taken to be alike.
        schedule: fill-drain: GPipe.
        num_stages: RaNNC's `partition_num`: the only number tried.
    """
    cluster = problem.cluster
    sizes = {group.count_per_host for group in cluster.groups}
    hosts = sum(group.hosts for group in cluster.groups) if len(sizes) == 1 else 1
    per_host, fewest = cluster.num_devices // hosts, 1
    for span in (n for n in range(1, hosts + 1) if hosts % n == 0):
        copies, devices = hosts // span, span * per_host
        tables = [
            _RanncTable(problem, schedule, m, copies, devices)
            for m in _powers_of_two(min(problem.rows, MOST_MICROBATCHES))
            if m in problem.num_microbatches
        ]
        for count in range(1, min(devices, len(problem.table.blocks)) + 1):
            for table in tables:
                table.add_layer()
            wanted = count >= fewest if num_stages is None else count == num_stages
            fitting = [table for table in tables if wanted and table.fits(count)]
            if fitting:
                return min((table.result(count) for table in fitting), key=lambda r: r.estimate_s)
        fewest = devices + 1
    return None


@dataclass(slots=True)
class _Layer:
    """Cells [devices used, blocks placed] of one number of stages."""

    value: Matrix
    forward_s: Matrix
    backward_s: Matrix
    choice: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


class _RanncTable:
    """RaNNC's dynamic programme for one number of microbatches; a layer is one more stage."""

    def __init__(
        self, problem: Problem, schedule: NamedSchedule, num_microbatches: int, copies: int, devices: int
    ) -> None:
        self.problem, self.schedule = problem, schedule
        self.num_microbatches, self.copies, self.devices = num_microbatches, copies, devices
        remat = Remat.RECOMPUTE if num_microbatches > 1 else Remat.SAVE_ALL
        self.evaluator = problem.evaluator(Constraints(remat=remat))
        self.num_blocks = len(problem.table.blocks)
        microbatch_rows = problem.rows // num_microbatches
        self.counts = [n for n in _powers_of_two(devices) if microbatch_rows % (n * copies) == 0]
        self.prices = {n: self._prices(n, remat) for n in self.counts}
        shape = (devices + 1, self.num_blocks + 1)
        start = _Layer(np.full(shape, np.inf), np.zeros(shape), np.zeros(shape))
        start.value[0, 0] = 0.0
        self.layers = [start]

    def _prices(self, count: int, remat: Remat) -> tuple[Matrix, Matrix, Matrix]:
        """Forward, backward and communication of a stage by [first block, end]; infinite if too large."""
        size = self.num_blocks + 1
        forward, backward, sent = (np.full((size, size), np.inf) for _ in range(3))
        model, replicas = self.evaluator.model, count * self.copies
        rows = self.problem.rows // self.num_microbatches
        for begin, end in itertools.combinations(range(size), 2):
            placement = Placement(tuple(range(begin, end)), 0, replicas)
            m = self.num_microbatches
            for price in model.good(placement, m, m, True, (Mode(remat),)):
                forward[begin, end], backward[begin, end] = price.forward_s, price.backward_s
                moved = model.buffer_bytes(placement.blocks, rows // replicas, False)
                sent[begin, end] = moved / STAGE_BYTES_PER_S
        return forward, backward, sent

    def add_layer(self) -> None:
        """One stage more: every cell takes the best last stage behind a cell of the layer before."""
        before = self.layers[-1]
        shape = before.value.shape
        layer = _Layer(np.full(shape, np.inf), np.zeros(shape), np.zeros(shape))
        for used, count in itertools.product(range(1, self.devices + 1), reversed(self.counts)):
            if count <= used:
                self._extend(before, layer, used, count)
        self.layers.append(layer)

    def _extend(self, before: _Layer, layer: _Layer, used: int, count: int) -> None:
        forward, backward, sent = self.prices[count]
        left = used - count
        earlier = before.value[left][:, None]
        slowest = np.maximum(forward + sent, before.forward_s[left][:, None])
        slowest = slowest + np.maximum(backward + sent, before.backward_s[left][:, None])
        value = np.maximum(slowest, earlier)
        begin = value.argmin(axis=0)
        ends = np.arange(self.num_blocks + 1)
        least = value[begin, ends]
        for end in np.flatnonzero(least < layer.value[used]):
            first = int(begin[end])
            layer.value[used, end] = least[end]
            layer.forward_s[used, end] = max(forward[first, end], before.forward_s[left, first])
            layer.backward_s[used, end] = max(backward[first, end], before.backward_s[left, first])
            layer.choice[used, int(end)] = (left, first)

    def fits(self, num_stages: int) -> bool:
        """Whether so many stages hold all blocks on all devices."""
        return bool(np.isfinite(self.layers[num_stages].value[self.devices, self.num_blocks]))

    def stages(self, num_stages: int) -> list[tuple[range, int]]:
        """Blocks and replicas of every stage within one copy of the pipeline."""
        used, end, found = self.devices, self.num_blocks, []
        for layer in reversed(self.layers[1 : num_stages + 1]):
            left, first = layer.choice[used, end]
            found.append((range(first, end), used - left))
            used, end = left, first
        return found[::-1]

    def result(self, num_stages: int) -> RanncResult:
        """The plan behind the last cell, on our clock."""
        stages = self.stages(num_stages)
        replicas = [count * self.copies for _, count in stages]
        placements = _consecutive([blocks for blocks, _ in stages], replicas)
        return RanncResult(
            plan=self.evaluator(Candidate(self.schedule, self.num_microbatches, placements)),
            estimate_s=self._estimate(stages),
            objective_s=float(self.layers[num_stages].value[self.devices, self.num_blocks]),
        )

    def _estimate(self, stages: Sequence[tuple[range, int]]) -> float:
        """Fill and drain by steps as long as their slowest active stage, and the largest reduction."""
        forward, backward = [], []
        for blocks, count in stages:
            there, back, sent = (matrix[blocks.start, blocks.stop] for matrix in self.prices[count])
            forward.append(there + sent)
            backward.append(back + sent)
        steps = range(self.num_microbatches + len(stages) - 1)
        active = [[s for s in range(len(stages)) if 0 <= step - s < self.num_microbatches] for step in steps]
        clock = sum(max(forward[s] for s in on) + max(backward[s] for s in on) for on in active)
        parameters = parameter_weights(self.problem.table)
        largest = max(sum(parameters[b] for b in blocks) for blocks, _ in stages)
        return float(clock + largest / REDUCE_BYTES_PER_S)


def _powers_of_two(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]


def _consecutive(stages: Sequence[range], replicas: Sequence[int]) -> tuple[Placement, ...]:
    """Stages one after another on the devices."""
    firsts = itertools.accumulate(replicas, initial=0)
    return tuple(
        Placement(tuple(blocks), first, count)
        for blocks, first, count in zip(stages, firsts, replicas, strict=False)
    )
