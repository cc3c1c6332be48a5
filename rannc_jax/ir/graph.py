"""The program as a graph that may be cut: nodes are equations, values are edges.

Three sorts of equations are not nodes. *Prologue*: work on parameters, frozen leaves and constants
alone, run once a step on every stage that needs it. *Clones*: batch-free work without parameters (and
cheap batch-only work such as masks), copied into every consumer. *Dead*: nothing reads them.
Everything else is a node. Equations that must stay together (readers and writers of one written
model_state leaf, sums over rows and what reads them, values whose rows do not lie contiguously) share a
node.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp
import networkx as nx
from jax.extend import core as jex

from rannc_jax.ir.batch import BatchInfo, Dependence
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.ir.trace import Program, module_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Equations that are never separated, in program order.

    Args:
        equations: indices of the node's own equations.
        clones: indices of clone equations the node needs, transitively.
        path: module path (name stack) of the first equation.
        inputs: value ids of program inputs read, directly or through clones and the prologue.
        prologue: value ids defined by the prologue that the node reads.
    """

    equations: tuple[int, ...]
    clones: tuple[int, ...]
    path: str
    inputs: tuple[int, ...]
    prologue: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A value produced by one node and read by others.

    Args:
        value: value id.
        producer: node index.
        consumers: node indices, ascending.
        needs_grad: a cotangent flows back over it.
    """

    value: int
    producer: int
    consumers: tuple[int, ...]
    needs_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """Nodes in program order (a topological order) and the edges between them.

    `twin` is the second trace: costs at any number of rows are interpolated between the two.
    `prologue` holds equation indices. `outputs[i]` is the node that produces program output i (None if
    no node does). `flows` holds the value ids that gradients flow through.
    """

    program: Program
    twin: Program
    info: BatchInfo
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    prologue: tuple[int, ...]
    outputs: tuple[int | None, ...]
    flows: frozenset[int]


# Views of parameters are computed where they are read: they cost nothing there, and a copy in the
# prologue would cost memory. Slices are views of stacked parameters.
VIEWS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "copy", "name"})

# Work on the batch alone that is cheap enough to repeat in every stage instead of sending its result.
_CHEAP = frozenset(
    "abs add and argmax bitcast_convert_type broadcast_in_dim ceil clamp concatenate convert_element_type "
    "copy cos cumsum div eq exp expand_dims floor ge gt integer_pow iota is_finite le log log1p logistic lt "
    "max min mul name ne neg not or pad pow random_bits random_fold_in random_seed random_split "
    "random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or reduce_sum rem reshape rev round "
    "rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin slice sqrt square "
    "squeeze stop_gradient sub tanh transpose xor dynamic_slice erf_inv threefry2x32 gather".split()
)


class _Flag(enum.IntFlag):
    """What a value depends on."""

    NOTHING = 0
    PARAM = enum.auto()
    HELD = enum.auto()  # frozen leaves, constants, model_state that nothing writes
    STATE = enum.auto()  # model_state that is written
    BATCH = enum.auto()
    RNG = enum.auto()
    COSTLY = enum.auto()  # some equation upstream is a node


def build_graph(
    program: Program, twin: Program, info: BatchInfo, *, batch_grads: frozenset[int] = frozenset()
) -> Graph:
    """Sort the equations of a program into nodes, clones and prologue, and connect the nodes.

    Args:
        program: the traced function.
        twin: a second trace with other rows.
        info: where the batch goes.
        batch_grads: value ids of batch inputs whose gradient is asked for.

    Complexity: linear in equations and operands, but for merging nodes that must stay together
    (strongly connected components of the node graph, linear as well).
    """
    sorter = _Sorter(program, info)
    groups = _groups(program, info, sorter)
    nodes = tuple(_node(program, sorter, group) for group in groups)
    flows = _gradient_flow(program, batch_grads)
    edges = _edges(program, sorter, nodes, flows)
    node_of = {eqn: i for i, node in enumerate(nodes) for eqn in node.equations}
    producer = {v: node_of[e] for e in node_of for v in program.writes(e)}
    return Graph(
        program=program,
        twin=twin,
        info=info,
        nodes=nodes,
        edges=edges,
        prologue=tuple(sorted({e for node in nodes for v in node.prologue for e in sorter.prologue_of(v)})),
        outputs=tuple(producer.get(v) if v is not None else None for v in program.output_ids()),
        flows=flows,
    )


def written_state(program: Program) -> dict[int, int]:
    """Written model_state leaves: value id of the input -> position of the output that replaces it."""
    states = [i for i, leaf in enumerate(program.inputs) if leaf.role is Role.MODEL_STATE]
    outs = [k for k, leaf in enumerate(program.outputs) if leaf.kind is OutputKind.MODEL_STATE]
    ids = program.output_ids()
    return {i: k for i, k in zip(states, outs, strict=True) if ids[k] != i} if outs else {}


class _Sorter:
    """Decides for every equation whether it is a node, a clone, or prologue."""

    def __init__(self, program: Program, info: BatchInfo) -> None:
        self.program = program
        written = written_state(program)
        self.flags: dict[int, _Flag] = {}
        for i, leaf in enumerate(program.inputs):
            self.flags[i] = _INPUT_FLAGS[leaf.role]
            if leaf.role is Role.MODEL_STATE and i not in written:
                self.flags[i] = _Flag.HELD
        self.definer: dict[int, int] = {}
        self.nodes: list[int] = []
        self.clones: set[int] = set()
        self.once: set[int] = set()  # parameter-only equations
        for e, eqn in enumerate(program.eqns):
            flag = self._flag_of(e, info)
            self._sort(e, eqn, flag)
            for v in program.writes(e):
                self.definer[v] = e
        self.node_set = frozenset(self.nodes)

    def _flag_of(self, e: int, info: BatchInfo) -> _Flag:
        flag = _Flag.NOTHING
        for v in self.program.reads(e):
            flag |= self.flags[v]
        outs = self.program.writes(e)
        if any(info.layouts[v] is not None or info.dependence[v] is not Dependence.FREE for v in outs):
            flag |= _Flag.BATCH
        return flag

    def _sort(self, e: int, eqn: jex.JaxprEqn, flag: _Flag) -> None:
        name = eqn.primitive.name
        lasting = flag & (_Flag.PARAM | _Flag.HELD)
        moving = flag & (_Flag.BATCH | _Flag.RNG | _Flag.STATE | _Flag.COSTLY)
        if eqn.effects or flag & (_Flag.COSTLY | _Flag.STATE):
            is_node = True
        elif lasting and not moving:
            is_node = False
            (self.clones if name in VIEWS else self.once).add(e)
        else:
            is_node = bool(lasting) or (name not in _CHEAP and bool(flag & _Flag.BATCH))
            if not is_node:
                self.clones.add(e)
        if is_node:
            self.nodes.append(e)
            flag |= _Flag.COSTLY
        for v in self.program.writes(e):
            self.flags[v] = flag

    def needs(self, equations: Iterable[int]) -> tuple[set[int], set[int], set[int]]:
        """What equations need from outside: (clone equations, input value ids, prologue value ids)."""
        clones: set[int] = set()
        inputs: set[int] = set()
        prologue: set[int] = set()
        stack = [v for e in equations for v in self.program.reads(e)]
        seen = set(stack)
        while stack:
            v = stack.pop()
            e = self.definer.get(v)
            if e is None:
                inputs.add(v)
            elif e in self.once:
                prologue.add(v)
            elif e in self.clones:
                clones.add(e)
                fresh = [u for u in self.program.reads(e) if u not in seen]
                seen.update(fresh)
                stack += fresh
        return clones, inputs, prologue

    def prologue_of(self, value: int) -> set[int]:
        """Equations that compute a prologue value."""
        found: set[int] = set()
        stack = [value]
        while stack:
            e = self.definer.get(stack.pop())
            if e is not None and e not in found:
                found.add(e)
                stack += self.program.reads(e)
        return found

    def prologue_inputs(self, value: int) -> set[int]:
        """Program inputs that a prologue value is computed from."""
        reads = {v for e in self.prologue_of(value) for v in self.program.reads(e)}
        return {v for v in reads if v not in self.definer}


_INPUT_FLAGS = {
    Role.PARAM: _Flag.PARAM,
    Role.FROZEN: _Flag.HELD,
    Role.CONST: _Flag.HELD,
    Role.MODEL_STATE: _Flag.STATE,
    Role.BATCH: _Flag.BATCH,
    Role.RNG: _Flag.RNG,
}


def _groups(program: Program, info: BatchInfo, sorter: _Sorter) -> list[tuple[int, ...]]:
    """Node equations grouped by what must stay together, groups in a topological order."""
    together = nx.utils.UnionFind(sorter.nodes)
    readers: dict[int, list[int]] = {}
    for e in sorter.nodes:
        _, inputs, _ = sorter.needs([e])
        for v in inputs:
            if sorter.flags[v] & _Flag.STATE:
                readers.setdefault(v, []).append(e)
    ids = program.output_ids()
    for state, position in written_state(program).items():
        value = ids[position]
        writer = None if value is None else sorter.definer.get(value)
        joined = [*readers.get(state, []), *([writer] if writer in sorter.node_set else [])]
        together.union(*joined)
    together.union(*_loss_nodes(program, info, sorter))
    for e in sorter.nodes:
        for v in program.reads(e):
            producer = sorter.definer.get(v)
            if producer in sorter.node_set and _stays(info, v):
                together.union(producer, e)
    links = nx.DiGraph()
    links.add_nodes_from(together[e] for e in sorter.nodes)
    for e in sorter.nodes:
        for v in program.reads(e):
            producer = sorter.definer.get(v)
            if producer in sorter.node_set and together[producer] != together[e]:
                links.add_edge(together[producer], together[e])
    component = {root: k for k, roots in enumerate(nx.strongly_connected_components(links)) for root in roots}
    members: dict[int, list[int]] = {}
    for e in sorter.nodes:
        members.setdefault(component[together[e]], []).append(e)
    condensed = nx.DiGraph()
    condensed.add_nodes_from(members)
    condensed.add_edges_from(
        (component[a], component[b]) for a, b in links.edges if component[a] != component[b]
    )
    order = nx.lexicographical_topological_sort(condensed, key=lambda k: members[k][0])
    return [tuple(members[k]) for k in order]


def _stays(info: BatchInfo, value: int) -> bool:
    """Whether a value must not leave its stage.

    Rows that do not lie contiguously cannot be dealt out to replicas. A sum over rows is only part of the
    sum on each replica: it stays with its readers (which lead to the loss and to nothing else) unless
    rows are coupled, when programs see the whole microbatch anyway.
    """
    layout = info.layouts[value]
    if layout is None:
        return not info.couplings and info.dependence[value] is not Dependence.FREE
    return not layout.contiguous


def _loss_nodes(program: Program, info: BatchInfo, sorter: _Sorter) -> list[int]:
    """The nodes that make the loss, its weight and its divisor: they share a stage."""
    ids = program.output_ids()
    values = [v for v, leaf in zip(ids, program.outputs, strict=True) if leaf.kind is OutputKind.LOSS]
    if info.loss is not None:
        values += [info.loss.weight, info.loss.divisor]
    producers = [sorter.definer.get(v) for v in values if v is not None]
    return [e for e in producers if e in sorter.node_set]


def _node(program: Program, sorter: _Sorter, group: tuple[int, ...]) -> Node:
    clones, inputs, prologue = sorter.needs(group)
    held = set(inputs)
    for v in prologue:
        held |= sorter.prologue_inputs(v)
    return Node(
        equations=group,
        clones=tuple(sorted(clones)),
        path=module_path(program.eqns[group[0]]),
        inputs=tuple(sorted(held)),
        prologue=tuple(sorted(prologue)),
    )


def _edges(
    program: Program, sorter: _Sorter, nodes: tuple[Node, ...], flows: frozenset[int]
) -> tuple[Edge, ...]:
    node_of = {e: i for i, node in enumerate(nodes) for e in node.equations}
    consumers: dict[int, set[int]] = {}
    for i, node in enumerate(nodes):
        for e in (*node.equations, *node.clones):
            for v in program.reads(e):
                producer = node_of.get(sorter.definer.get(v, -1))
                if producer is not None and producer != i:
                    consumers.setdefault(v, set()).add(i)
    return tuple(
        Edge(
            value=v,
            producer=node_of[sorter.definer[v]],
            consumers=tuple(sorted(consumers[v])),
            needs_grad=v in flows,
        )
        for v in sorted(consumers)
    )


def _gradient_flow(program: Program, batch_grads: frozenset[int]) -> frozenset[int]:
    """Floating values downstream of something a gradient is asked for."""
    roots = {i for i, leaf in enumerate(program.inputs) if leaf.role is Role.PARAM} | set(batch_grads)
    flows = {v for v in roots if jnp.issubdtype(program.vars[v].aval.dtype, jnp.inexact)}
    for e in range(len(program.eqns)):
        if any(v in flows for v in program.reads(e)):
            outs = program.writes(e)
            flows.update(v for v in outs if jnp.issubdtype(program.vars[v].aval.dtype, jnp.inexact))
    return frozenset(flows)
