"""An exported module as plain data: a list of nodes, independent of torch.fx and of the batch size.

Values are numbered: inputs first, then nodes in order. Sizes and other integers that follow the number
of batch rows are `Affine` literals, so one program serves every batch size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Ref:
    """The value with this number."""

    index: int


@dataclass(frozen=True, slots=True)
class Affine:
    """The integer `scale * rows + offset`."""

    scale: int
    offset: int

    def at(self, rows: int) -> int:
        return self.scale * rows + self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator call.

    Args:
        operator: a torch overload or a builtin such as `operator.getitem`.
        args, kwargs: nested tuples and dicts of `Ref`, `Affine`, constants, and `Graph` where a
            higher-order operator takes a function.
        path: where in the module tree, slash-separated ("bert/encoder/layer/0"), "" for the root.
        source: the user's file and line, "" if unknown.
        dtypes: torch dtype of each result (one for a single tensor, None for what is no tensor).
        shape: of a single result, at the example batch; None otherwise, and where it has symbolic sizes.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: str
    source: str
    dtypes: tuple[Any, ...]
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes, and the values that leave. Value i is input i, or node i - num_inputs.

    `outputs` holds `Ref`s and constants (an output that is no tensor).
    """

    num_inputs: int
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]

    def needed(self, outputs: Sequence[Any]) -> tuple[int, ...]:
        """Positions of the nodes that these outputs depend on, in order."""
        live = {ref.index for out in outputs for ref in refs(out)}
        kept: list[int] = []
        for position in range(len(self.nodes) - 1, -1, -1):
            if position + self.num_inputs in live:
                kept.append(position)
                node = self.nodes[position]
                live |= {ref.index for ref in refs((node.args, node.kwargs))}
        return tuple(reversed(kept))

    def pruned(self) -> "Graph":
        """The same graph without nodes that no output depends on."""
        kept = self.needed(self.outputs)
        if len(kept) == len(self.nodes):
            return self
        number = {position + self.num_inputs: self.num_inputs + k for k, position in enumerate(kept)}

        def renumbered(leaf: Any) -> Any:
            return Ref(number.get(leaf.index, leaf.index)) if isinstance(leaf, Ref) else leaf

        def moved(node: Node) -> Node:
            args, kwargs = map_leaves(renumbered, node.args), map_leaves(renumbered, node.kwargs)
            return replace(node, args=args, kwargs=kwargs)

        return replace(
            self,
            nodes=tuple(moved(self.nodes[position]) for position in kept),
            outputs=tuple(map_leaves(renumbered, output) for output in self.outputs),
        )

    def between(self, inputs: Sequence[int], outputs: Sequence[Any]) -> tuple[int, ...]:
        """Positions of the nodes on the way from these values (by number) to the outputs, in order."""
        moving = set(inputs)
        kept: list[int] = []
        for position in self.needed(outputs):
            node = self.nodes[position]
            if any(ref.index in moving for ref in refs((node.args, node.kwargs))):
                moving.add(position + self.num_inputs)
                kept.append(position)
        return tuple(kept)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply to every leaf of nested tuples, lists and dicts; lists become tuples."""
    if isinstance(tree, tuple | list):
        return tuple(tree_map(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: tree_map(function, item) for key, item in tree.items()}
    return function(tree)


def refs(tree: Any) -> Iterator[Ref]:
    """All `Ref`s of a tree."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from refs(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from refs(item)


def subgraphs(tree: Any) -> Iterator[Graph]:
    """All graphs that a tree holds: the branches and bodies of a higher-order operator."""
    if isinstance(tree, Graph):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from subgraphs(item)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply to every leaf of nested lists, tuples, dicts and slices, keeping their kinds."""
    if isinstance(tree, list):
        return [map_leaves(function, item) for item in tree]
    if type(tree) is tuple:
        return tuple(map_leaves(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_leaves(function, item) for key, item in tree.items()}
    if isinstance(tree, slice):
        parts = (tree.start, tree.stop, tree.step)
        return slice(*(map_leaves(function, part) for part in parts))
    return function(tree)
