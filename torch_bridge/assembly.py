"""Pieces put together: one functional graph of the whole run, with its signature.

Inputs of the whole are numbered once, whichever piece reads them. The body of a block is repeated for each
copy, with the copy's own inputs, and with the module path and source line of the copy's own calls.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_bridge.pieces import ExportedPiece, Stamp, repeated_operator
from torch_bridge.program import Graph, Node, Ref, tree_map
from torch_bridge.repeated import Block
from torch_bridge.signature import Destination, Signature, Source
from torch_bridge.tape import NotTaped, Tape

# A functional graph, its signature, and the shapes of its inputs.
Parts = tuple[Graph, Signature, tuple[tuple[int, ...], ...]]


class Assembly:
    """Puts the nodes of all pieces into one list, in the order of the run."""

    def __init__(
        self,
        tape: Tape,
        whole: ExportedPiece,
        stamps: Sequence[Stamp],
        bodies: dict[Hashable, tuple[int, ExportedPiece]],
    ) -> None:
        self.tape, self.whole, self.stamps, self.bodies = tape, whole, stamps, bodies
        self.inputs: dict[Any, Ref] = {}
        self.literals: dict[str, torch.Tensor] = {}
        self.sources: list[tuple[Source, Any]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.nodes: list[Node] = []
        for number in whole.inputs:
            self._input("whole", whole, number)
        for stamp in stamps:
            _, body = bodies[stamp.block.key]
            for number in stamp.block.inputs:
                if number not in stamp.inputs:
                    self._input("whole", whole, number)
            for name in body.literals:
                self._input(stamp.block.key, body, name)

    def _input(self, piece: Hashable, exported: ExportedPiece, given: int | str) -> None:
        """Number an input of the whole graph, once."""
        key = given if isinstance(given, int) else (piece, given)
        if key in self.inputs:
            return
        self.inputs[key] = Ref(len(self.sources))
        home = exported.literals[given] if isinstance(given, str) else self.tape.values[given].home
        tensor = home if isinstance(home, torch.Tensor) else self.tape.values[given].tensor  # type: ignore[index]
        self.shapes.append(tuple(tensor.shape))
        if isinstance(home, torch.Tensor):
            name = f"literal{len(self.literals)}"
            self.literals[name] = home
            self.sources.append((Source.LITERAL, name))
        else:
            self.sources.append((Source.ARGUMENT if isinstance(home, int) else Source.TENSOR, home))

    def finish(self) -> Parts:
        destinations = [self._destination(number) for number in self.whole.writes]
        values: list[Any] = [self._of("whole", given) for given in self.whole.inputs]
        for node in self.whole.graph.nodes:
            if node.operator is repeated_operator():
                values.append(self._stamp(node, values))
            elif node.operator is operator.getitem and isinstance(values[node.args[0].index], tuple):
                values.append(values[node.args[0].index][node.args[1]])
            else:
                values.append(self._add(node, values, 0))
        outputs = tuple(tree_map(_resolver(values), out) for out in self.whole.graph.outputs)
        results = [(Destination.RESULT, None)] * (len(outputs) - len(destinations))
        graph = Graph(num_inputs=len(self.sources), nodes=tuple(self.nodes), outputs=outputs)
        signature = Signature(
            inputs=tuple(self.sources), outputs=(*destinations, *results), literals=self.literals
        )
        return graph, signature, tuple(self.shapes)

    def _of(self, piece: Hashable, given: int | str) -> Ref:
        return self.inputs[given if isinstance(given, int) else (piece, given)]

    def _destination(self, number: int) -> tuple[Destination, str | None]:
        value = self.tape.values[number]
        if isinstance(value.home, int):
            return Destination.ARGUMENT, None
        if isinstance(value.home, str) and not isinstance(value.tensor, torch.nn.Parameter):
            return Destination.BUFFER, value.home
        raise NotTaped("forward writes a parameter or a constant")

    def _stamp(self, node: Node, values: list[Any]) -> tuple[Any, ...]:
        """The nodes of a block's body, with the copy's own inputs; returns the block's results."""
        given, number = node.args
        stamp = self.stamps[number]
        start, body = self.bodies[stamp.block.key]
        passed = dict(zip(stamp.inputs, (values[ref.index] for ref in given), strict=True))
        own = dict(zip(self._first(stamp).inputs, stamp.block.inputs, strict=True))
        inner: list[Any] = []
        for taken in body.inputs:
            if isinstance(taken, str):
                inner.append(self._of(stamp.block.key, taken))
            else:
                inner.append(passed[own[taken]] if own[taken] in passed else self.inputs[own[taken]])
        for inside in body.graph.nodes:
            inner.append(self._add(inside, inner, stamp.block.start - start))
        return tuple(tree_map(_resolver(inner), out) for out in body.graph.outputs)

    def _first(self, stamp: Stamp) -> Block:
        return next(s.block for s in self.stamps if s.block.key == stamp.block.key)

    def _add(self, node: Node, values: list[Any], shift: int) -> Ref:
        resolve = _resolver(values)
        placed = self._placed(node, shift)
        self.nodes.append(
            replace(placed, args=tree_map(resolve, placed.args), kwargs=tree_map(resolve, placed.kwargs))
        )
        return Ref(len(self.sources) + len(self.nodes) - 1)

    def _placed(self, node: Node, shift: int) -> Node:
        """The node with the path and line of the call it came from; also inside its own graphs."""

        def inside(leaf: Any) -> Any:
            if not isinstance(leaf, Graph):
                return leaf
            return replace(leaf, nodes=tuple(self._placed(inner, shift) for inner in leaf.nodes))

        name = node.path.rpartition("/")[2]
        if not name.startswith("step"):
            return node
        call = self.tape.calls[int(name.removeprefix("step")) + shift]
        return replace(
            node,
            path=call.path,
            source=call.source_line,
            args=tree_map(inside, node.args),
            kwargs=tree_map(inside, node.kwargs),
        )


def _resolver(values: Sequence[Any]) -> Callable[[Any], Any]:
    return lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf
