"""Bytes that lie on a device for the whole step: parameters, accumulators, optimizer state, constants.

A parameter belongs to the block that reads it, directly or through the prologue; one that several
blocks read is a tie and counts once a stage; what none reads lies on the first stage all the same.
Gradients accumulate in float32, or wider if the parameter is.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rannc_jax.cost.operations import differentiable
from rannc_jax.cost.table import StateBytes, TiedState
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.roles import Role
from rannc_jax.ir.slice import prologue_slice

ONCE_PASSES = 3
"""Passes over what the prologue reads and writes: once forward, twice for its transpose."""

_LASTING = frozenset({Role.PARAM, Role.FROZEN, Role.MODEL_STATE, Role.CONST})
_CONSTANT_ROLES = frozenset({Role.FROZEN, Role.MODEL_STATE, Role.CONST})


def accumulator_bytes(aval: Any) -> int:
    """Bytes of the float32-or-wider accumulator of a value's gradient; 0 if it has no gradient."""
    if not differentiable(aval):
        return 0
    return int(np.prod(aval.shape, dtype=np.int64)) * max(4, np.dtype(aval.dtype).itemsize)


class State:
    """What every block keeps for the whole step.

    Args:
        graph: the graph.
        gradients: value ids that get a cotangent.
        blocks: node indices of each block.
        optimizer_bytes: value id of a parameter input -> bytes of its optimizer state.
        shared_optimizer_bytes: of optimizer state that belongs to no parameter: it lies on the last stage.

    Attributes:
        own: per block, without ties.
        ties: parameters that several blocks read.
        accumulator_bytes: per block, of everything whose gradient it adds up, ties included.
        gradient_bytes: per block, of these gradients as one backward gives them.
        once_bytes, once_launches: per block, traffic and kernels of its prologue and the transpose.
        num_held, num_summed: per block, parameters and prologue results that a microbatch reads, and how
            many of them have sums of gradients.
    """

    def __init__(
        self,
        graph: Graph,
        gradients: Collection[int],
        blocks: Sequence[Sequence[int]],
        optimizer_bytes: Mapping[int, int],
        shared_optimizer_bytes: int = 0,
    ) -> None:
        self._graph = graph
        self._gradients = gradients
        self._optimizer = optimizer_bytes
        readers: dict[int, list[int]] = {}
        for block, nodes in enumerate(blocks):
            for value in sorted({v for n in nodes for v in graph.nodes[n].inputs}):
                readers.setdefault(value, []).append(block)
        inputs = graph.program.inputs
        tied = {v for v, r in readers.items() if len(r) > 1 and inputs[v].role is Role.PARAM}
        self.ties = tuple(
            TiedState(path=inputs[v].path, blocks=tuple(readers[v]), state=self._of_input(v))
            for v in sorted(tied)
        )
        self.own: list[StateBytes] = []
        self.accumulator_bytes: list[int] = []
        self.gradient_bytes: list[int] = []
        self.once_bytes: list[int] = []
        self.once_launches: list[int] = []
        self.num_held: list[int] = []
        self.num_summed: list[int] = []
        for nodes in blocks:
            self._add(nodes, tied)
        for value, leaf in enumerate(inputs):
            if value not in readers and leaf.role in _LASTING:
                self.own[0] += self._of_input(value)
        self.own[-1] += StateBytes(optimizer=shared_optimizer_bytes)

    def _of_input(self, value: int) -> StateBytes:
        program = self._graph.program
        leaf, nbytes = program.inputs[value], program.nbytes(value)
        if leaf.role is Role.PARAM:
            trained = value in self._gradients
            return StateBytes(
                parameters=nbytes,
                gradients=accumulator_bytes(leaf.aval) if trained else 0,
                optimizer=self._optimizer.get(value, 0),
            )
        return StateBytes(constants=nbytes if leaf.role in _CONSTANT_ROLES else 0)

    def _add(self, nodes: Sequence[int], tied: Collection[int]) -> None:
        graph, program = self._graph, self._graph.program
        inputs = sorted({v for n in nodes for v in graph.nodes[n].inputs})
        made = sorted({v for n in nodes for v in graph.nodes[n].prologue})
        sources = prologue_slice(graph, made).inputs if made else ()
        read = {
            v
            for n in nodes
            for e in (*graph.nodes[n].equations, *graph.nodes[n].clones)
            for v in program.reads(e)
        }
        through = [v for v in sources if v not in read]  # parameters that only the prologue reads
        direct = [v for v in inputs if v in read and program.inputs[v].role is Role.PARAM]

        def accumulators(values: Sequence[int]) -> int:
            return sum(accumulator_bytes(program.vars[v].aval) for v in values if v in self._gradients)

        # The cotangents of prologue values wait in accumulators of their own, which their transpose turns
        # into the parameters' gradients at the end: both never need their place at once.
        cotangents = accumulators(made)
        waiting = max(0, cotangents - accumulators(through))
        results = sum(program.nbytes(v) for v in made)
        state = StateBytes(prologue=results + waiting)
        for value in inputs:
            if value not in tied:
                state += self._of_input(value)
        self.own.append(state)
        self.accumulator_bytes.append(accumulators(direct) + cotangents)
        self.gradient_bytes.append(sum(program.nbytes(v) for v in (*direct, *made) if v in self._gradients))
        self.once_bytes.append(ONCE_PASSES * (results + sum(program.nbytes(v) for v in sources)))
        self.once_launches.append(2 * len(made))
        self.num_held.append(len(direct) + len(made))
        self.num_summed.append(sum(v in self._gradients for v in (*direct, *made)))
