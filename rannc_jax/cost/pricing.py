"""The cost table of a graph: what every block costs at any number of rows on any device.

`open_graph` measures both traces of a program once; `node_seconds` weighs single nodes for the block
level; `price` makes the `GraphTable` that the search reads. Nothing here needs a device: times come
from the roofline, residuals from derivative rules, or from an exact oracle where one is given.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rannc_jax.cluster import ClusterSpec, DeviceSpec
from rannc_jax.contract import Remat
from rannc_jax.cost.flops import warn_of_unknown
from rannc_jax.cost.memory import Residual, peak_bytes, residual_bytes, residuals
from rannc_jax.cost.operations import Line, Twins, differentiable, gradients, open_program
from rannc_jax.cost.roofline import Kernels, rate
from rannc_jax.cost.state import State
from rannc_jax.cost.table import BlockCost, BlockValue, Priced, TiedState
from rannc_jax.errors import CostError, message
from rannc_jax.ir.graph import VIEWS, Graph
from rannc_jax.ir.paths import common_path
from rannc_jax.ir.repeats import Repeats
from rannc_jax.ir.roles import OutputKind, Role

Oracle = Callable[[tuple[int, ...], Remat, int], int]
"""`(nodes, remat, rows) -> bytes`: exact residuals of nodes, without what is held anyway."""

ACCUMULATE_PASSES = 3
"""Passes over a gradient for each microbatch: read it, read and write the accumulator."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedGraph:
    """A graph with its program measured.

    Args:
        graph: the graph.
        twins: both traces as operations.
        gradients: value ids that get a cotangent; empty for forward-only programs.
        of_equation: equation index -> range of operation indices.
    """

    graph: Graph
    twins: Twins
    gradients: frozenset[int]
    of_equation: tuple[range, ...]

    def operations(self, nodes: Sequence[int]) -> list[int]:
        """Operation indices of nodes, clones included, ascending."""
        picked = (self.graph.nodes[n] for n in nodes)
        equations = sorted({e for node in picked for e in (*node.equations, *node.clones)})
        return [index for e in equations for index in self.of_equation[e]]


def open_graph(graph: Graph) -> OpenedGraph:
    """Measure a graph once, for `node_seconds` and `price`.

    Complexity: linear in the equations, bodies included; about 0.2 s for 1,000 equations.
    """
    program = graph.program
    twins = Twins(open_program(program), open_program(graph.twin), (program.rows, graph.twin.rows))
    starts = np.searchsorted(
        [op.equation for op in twins.first.operations], np.arange(len(program.eqns) + 1)
    ).tolist()
    losses = {
        value
        for leaf, value in zip(program.outputs, program.output_ids(), strict=True)
        if leaf.kind is OutputKind.LOSS and value is not None
    }
    seeds = {v for v in graph.flows if v < len(program.inputs)}
    _ask_rules(twins)
    warn_of_unknown()
    return OpenedGraph(
        graph=graph,
        twins=twins,
        gradients=frozenset(gradients(twins.first, seeds, losses)),
        of_equation=tuple(range(a, b) for a, b in itertools.pairwise(starts)),
    )


def _ask_rules(twins: Twins) -> None:
    """Price every operation, bodies of loops included, so that all without a rule are known."""
    _ = twins.works
    for bodies in twins.bodies.values():
        for body, _ in bodies:
            _ask_rules(body)


def node_seconds(opened: OpenedGraph, device: DeviceSpec, rows: int) -> np.ndarray:
    """Forward plus backward seconds of every node, float64 [nodes].

    The program is fused as a whole and a kernel's time counts for the node of its root, so what fuses
    into its readers weighs nothing by itself.
    """
    graph = opened.graph
    group = opened.operations(range(len(graph.nodes)))
    outputs = [v for v in graph.program.output_ids() if v is not None]
    kernels = Kernels(opened.twins, group, outputs, opened.gradients)
    seconds = kernels.forward_by_kernel(device, rows)
    seconds = seconds + kernels.backward_by_kernel(device, rows, Remat.SAVE_MATMULS)
    node_of = np.full(len(graph.program.eqns), len(graph.nodes), np.int64)  # clones go to a node too many
    for index, node in enumerate(graph.nodes):
        node_of[list(node.equations)] = index
    equations = [opened.twins.first.operations[root].equation for root in kernels.operation]
    weights = np.zeros(len(graph.nodes) + 1)
    np.add.at(weights, node_of[equations], seconds)
    return weights[:-1]


def price(
    graph: Graph,
    blocks: Sequence[Sequence[int]],
    cluster: ClusterSpec,
    *,
    optimizer_bytes: Mapping[int, int],
    shared_optimizer_bytes: int = 0,
    residuals: Oracle | None = None,
    opened: OpenedGraph | None = None,
) -> "GraphTable":
    """Make the cost table of a graph cut into blocks.

    Args:
        graph: the graph.
        blocks: node indices of each block, blocks in a topological order.
        cluster: the devices; each kind must have the rates that the program needs.
        optimizer_bytes: value id of a parameter input -> bytes of its optimizer state.
        shared_optimizer_bytes: of optimizer state that belongs to no parameter.
        residuals: an exact oracle, preferred to the derivative rules. It is asked at the rows of the
            two traces only.
        opened: the graph measured before, to save time.

    Raises:
        CostError: a device kind has no rate, or the blocks do not partition the nodes.
    """
    opened = opened or open_graph(graph)
    if sorted(n for nodes in blocks for n in nodes) != list(range(len(graph.nodes))):
        raise CostError(
            message(
                "the blocks do not hold every node once.",
                f"{len(graph.nodes)} nodes, {sum(map(len, blocks))} in {len(blocks)} blocks",
            )
        )
    for group in cluster.groups:
        rate(group.device, "")
    state = State(opened.graph, opened.gradients, blocks, optimizer_bytes, shared_optimizer_bytes)
    return GraphTable(opened, blocks, state, residuals)


class GraphTable:
    """The `CostTable` of a graph cut into blocks; make it with `price`."""

    def __init__(
        self, opened: OpenedGraph, blocks: Sequence[Sequence[int]], state: State, oracle: Oracle | None
    ) -> None:
        graph = opened.graph
        self._priced = _shared(opened, blocks, oracle)
        self._state = state
        self._trains = bool(opened.gradients)
        modules = [tuple(dict.fromkeys(graph.nodes[n].path for n in nodes)) for nodes in blocks]
        self._blocks = tuple(
            BlockCost(path=common_path(inside), state=own, modules=inside, pieces=len(nodes))
            for inside, own, nodes in zip(modules, state.own, blocks, strict=True)
        )
        self._values = _values(opened, blocks)

    @property
    def blocks(self) -> tuple[BlockCost, ...]:
        """Module path and own state of every block."""
        return self._blocks

    @property
    def values(self) -> tuple[BlockValue, ...]:
        """What flows between blocks."""
        return self._values

    @property
    def ties(self) -> tuple[TiedState, ...]:
        """Parameters that several blocks read."""
        return self._state.ties

    def price(self, block: int, rows: int, device: DeviceSpec) -> Priced:
        """Price a block; see `CostTable`."""
        costs = self._priced[block]
        per_byte = 1 / device.bytes_per_s
        gradient_bytes = self._state.gradient_bytes[block]
        accumulate = ACCUMULATE_PASSES * self._state.accumulator_bytes[block] * per_byte
        backward, kept, working = {}, {}, {}
        for remat in Remat:
            seconds = costs.kernels.backward_s(device, rows, remat)
            if seconds > 0 and remat is Remat.SAVE_ALL:
                seconds += 2 * costs.unfused_bytes.at(rows) * per_byte
            backward[remat] = seconds + accumulate if seconds > 0 else 0.0
            kept[remat] = int(costs.residual_bytes[remat].at(rows))
            working[remat] = int(costs.working_bytes(remat, rows)) + gradient_bytes
        return Priced(
            forward_s=costs.kernels.forward_s(device, rows),
            backward_s=backward,
            residual_bytes=kept,
            working_bytes=working,
            once_s=self._state.once_bytes[block] * per_byte
            + self._state.once_launches[block] * device.launch_s,
            weight_s=costs.kernels.weight_s(device, rows),
            num_arrays=self._num_arrays(block),
        )

    def _num_arrays(self, block: int) -> int:
        """Both programs read what is held; the backward takes and gives sums and takes what was kept."""
        held, summed = self._state.num_held[block], self._state.num_summed[block]
        if not self._trains:
            return held
        return 2 * held + 2 * summed + 2 * len(self._priced[block].kept[Remat.SAVE_MATMULS])


def _shared(opened: OpenedGraph, blocks: Sequence[Sequence[int]], oracle: Oracle | None) -> list["_Block"]:
    """The costs of every block; blocks that are copies of each other share one object."""
    program = opened.graph.program
    prologue = {v for e in opened.graph.prologue for v in program.writes(e)}

    def mark(value: int) -> tuple[bool, bool, Role | None]:
        role = program.inputs[value].role if value < len(program.inputs) else None
        return value in opened.gradients, value in prologue, role

    repeats = Repeats(opened.graph, mark)
    keys = [repeats.key(nodes) for nodes in blocks]
    first = dict(reversed(list(zip(keys, blocks, strict=True))))
    distinct = {key: _Block(opened, tuple(nodes), oracle) for key, nodes in first.items()}
    return [distinct[key] for key in keys]


class _Block:
    """Costs of one block and of its copies, each computed when first asked for."""

    def __init__(self, opened: OpenedGraph, nodes: tuple[int, ...], oracle: Oracle | None) -> None:
        self.opened = opened
        self.nodes = nodes
        self.oracle = oracle
        self.group = opened.operations(nodes)
        ops = opened.twins.first.operations
        inside = set(self.group)
        own = {e for n in nodes for e in opened.graph.nodes[n].equations}
        made = {v for index in self.group for v in ops[index].writes}
        outputs = set(opened.twins.first.outputs)
        self.escaping = {
            value
            for index in self.group
            if ops[index].equation in own
            for value in ops[index].writes
            if value in outputs or any(c not in inside for c in opened.twins.consumers.get(value, ()))
        }
        self.inputs = {v for index in self.group for v in ops[index].reads} - made - {-1}

    @functools.cached_property
    def kernels(self) -> Kernels:
        """Its kernels."""
        return Kernels(self.opened.twins, self.group, self.escaping, self.opened.gradients)

    @functools.cached_property
    def held(self) -> set[int]:
        """Inputs and views of inputs: the backward has them or makes them again for nothing."""
        held = set(self.inputs)
        for index in self.group:
            op = self.opened.twins.first.operations[index]
            if op.name in VIEWS and all(v in held for v in op.reads if v >= 0):
                held.update(op.writes)
        return held

    @functools.cached_property
    def held_bytes(self) -> Line:
        """Inputs that come from other blocks or the batch and are kept for the backward."""
        if not self.opened.gradients:
            return Line(0.0, 0.0)
        program = self.opened.graph.program
        prologue = {v for e in self.opened.graph.prologue for v in program.writes(e)}
        kept = [
            v
            for v in sorted(self.inputs - prologue)
            if v >= len(program.inputs) or program.inputs[v].role is Role.BATCH
        ]
        first, second = self.opened.twins.nbytes
        return self.opened.twins.line(float(first[kept].sum()), float(second[kept].sum()))

    @functools.cached_property
    def kept(self) -> dict[Remat, list[Residual]]:
        """Residuals by the derivative rules."""
        return {
            remat: residuals(
                self.opened.twins, self.group, remat, self.opened.gradients, self.held, self.escaping
            )
            for remat in Remat
        }

    @functools.cached_property
    def own_bytes(self) -> dict[Remat, Line]:
        """Residuals without held inputs."""
        if self.oracle is None or not self.opened.gradients:
            return {remat: residual_bytes(self.opened.twins, kept) for remat, kept in self.kept.items()}
        low, high = self.opened.twins.rows
        return {
            remat: self.opened.twins.line(
                float(self.oracle(self.nodes, remat, low)), float(self.oracle(self.nodes, remat, high))
            )
            for remat in Remat
        }

    @functools.cached_property
    def residual_bytes(self) -> dict[Remat, Line]:
        """Residuals, held inputs included."""
        return {remat: line + self.held_bytes for remat, line in self.own_bytes.items()}

    @functools.cached_property
    def stored(self) -> set[int]:
        """Values that the fused forward writes to memory."""
        ops = self.opened.twins.first.operations
        return {v for kernel in self.kernels.fused.kernels for v in ops[kernel.root].writes}

    @functools.cached_property
    def unfused_bytes(self) -> Line:
        """What SAVE_ALL writes and reads although the fused forward would never have stored it."""
        fused = self.kernels.fused
        extra = [
            r
            for r in self.kept[Remat.SAVE_ALL]
            if not isinstance(r, int) or fused.source(r) not in self.stored
        ]
        return residual_bytes(self.opened.twins, extra)

    @functools.cached_property
    def peak_bytes(self) -> Line:
        """Peak of one fused forward; a backward mirrors it with cotangents."""
        return peak_bytes(self.opened.twins, self.kernels.fused, self.held, self.escaping)

    @functools.cached_property
    def stored_bytes(self) -> Line:
        """Everything that the fused forward writes."""
        values = sorted(self.stored - self.held)
        first, second = self.opened.twins.nbytes
        return self.opened.twins.line(float(first[values].sum()), float(second[values].sum()))

    def working_bytes(self, remat: Remat, rows: int) -> float:
        """Peak inside one forward or backward beyond residuals and state, parameter gradients left out.

        SAVE_MATMULS makes its cheap values again while it consumes them, so a second peak is enough;
        RECOMPUTE makes all residuals of the block first.
        """
        peak = float(self.peak_bytes.at(rows))
        if not self.opened.gradients or remat is Remat.SAVE_ALL:
            return peak
        if remat is Remat.SAVE_MATMULS:
            return 2 * peak
        return peak + min(float(self.own_bytes[Remat.SAVE_ALL].at(rows)), float(self.stored_bytes.at(rows)))


def _values(opened: OpenedGraph, blocks: Sequence[Sequence[int]]) -> tuple[BlockValue, ...]:
    graph, program = opened.graph, opened.graph.program
    block_of = {n: b for b, nodes in enumerate(blocks) for n in nodes}
    first, second = opened.twins.nbytes
    definer = program.definer
    found = []
    for edge in graph.edges:
        producer = block_of[edge.producer]
        consumers = sorted({block_of[c] for c in edge.consumers} - {producer})
        if not consumers:
            continue
        eqn = definer[edge.value]
        line = opened.twins.line(float(first[edge.value]), float(second[edge.value]))
        if graph.info.layouts[edge.value] is None:
            line = Line(float(first[edge.value]), 0.0)
        elif opened.twins.rows[0] == opened.twins.rows[1]:
            line = Line(0.0, float(first[edge.value]) / program.rows)
        found.append(
            BlockValue(
                name="/".join(
                    filter(None, (graph.nodes[edge.producer].path, program.eqns[eqn].primitive.name))
                ),
                producer=producer,
                consumers=tuple(consumers),
                bytes_per_row=line.slope,
                fixed_bytes=max(0, round(line.fixed)),
                needs_grad=edge.needs_grad
                and bool(opened.gradients)
                and differentiable(program.vars[edge.value].aval),
            )
        )
    return tuple(found)
