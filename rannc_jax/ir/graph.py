"""The program as a graph that may be cut: nodes are equations, values are edges.

Three sorts of equations are not nodes. *Prologue*: work on parameters, frozen leaves and constants
alone, run once a step on every stage that needs it. *Clones*: batch-free work without parameters (and
cheap batch-only work such as masks), copied into every consumer. *Dead*: nothing reads them.
Everything else is a node. Equations that must stay together (readers and writers of one written
model_state leaf; values whose rows do not lie contiguously) share a node.
"""

from dataclasses import dataclass

from rannc_jax.ir.batch import BatchInfo
from rannc_jax.ir.trace import Program


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
    no node does).
    """

    program: Program
    twin: Program
    info: BatchInfo
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    prologue: tuple[int, ...]
    outputs: tuple[int | None, ...]
