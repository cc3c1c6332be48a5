"""Which module calls of a tape do the same: blocks that need to be exported only once.

Two calls are copies if they ask the same functions of torch in the same order with the same constants,
on tensors of equal shape, dtype and strides wired in the same way, and if the same of their results are
used later. Classes, attributes and names play no part, so a block that behaves by its layer index is
seen for what it does. A call that writes memory from outside itself is never a copy.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_bridge.program import Ref, map_leaves
from torch_bridge.tape import Span, Tape, Value

# A block must hold some calls to be worth a node of its own.
_SMALLEST_BLOCK = 4
# Exporting one more piece costs torch.export's fixed part, about as much as following 60 calls.
WORTHWHILE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One of the repeated module calls.

    Args:
        key: equal for copies.
        inputs: numbers of the values it takes from outside, in order of first use.
        outputs: numbers of the values it makes that are used after it.
    """

    start: int
    end: int
    key: Hashable
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def find_blocks(tape: Tape, *, worthwhile: int = WORTHWHILE) -> tuple[Block, ...]:
    """The outermost repeated module calls in order, or none if stamping them would save too little.

    Args:
        tape: the run.
        worthwhile: how many calls must not have to be exported.
    """
    described = _Describer(tape)
    known: dict[tuple[int, int], Block | None] = {}
    for span in _spans(tape.root):
        where = span.start, span.end
        if where not in known and where != (tape.root.start, tape.root.end):
            known[where] = described.block(span)
    counts = Counter(block.key for block in known.values() if block is not None)
    chosen = list(_outermost(tape.root, known, counts))
    counts = Counter(block.key for block in chosen)
    chosen = [block for block in chosen if counts[block.key] > 1]
    total = sum(block.end - block.start for block in chosen)
    once = sum(block.end - block.start for block in {block.key: block for block in chosen}.values())
    return tuple(chosen) if total - once >= worthwhile else ()


def _spans(span: Span) -> Iterator[Span]:
    yield span
    for inner in span.inner:
        yield from _spans(inner)


def _outermost(
    span: Span, known: dict[tuple[int, int], Block | None], counts: Counter[Hashable]
) -> Iterator[Block]:
    block = known.get((span.start, span.end))
    if block is not None and counts[block.key] > 1:
        yield block
        return
    for inner in span.inner:
        yield from _outermost(inner, known, counts)


class _Describer:
    """Describes spans of one tape by what they do."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.last_use: dict[int, int] = {}
        self.last_write: dict[int, int] = {}
        for position, call in enumerate(tape.calls):
            for storage in call.written:
                self.last_write[storage] = position
            for number in references((call.args, call.kwargs)):
                self.last_use[number] = position
        for ref in tape.results:
            self.last_use[ref.index] = len(tape.calls)

    def block(self, span: Span) -> Block | None:
        if span.end - span.start < _SMALLEST_BLOCK:
            return None
        inputs: dict[int, int] = {}
        made: dict[int, int] = {}
        words: list[Hashable] = []

        def name(leaf: Any) -> Hashable:
            if not isinstance(leaf, Ref):
                return _constant(leaf)
            if leaf.index in made:
                return "made", made[leaf.index]
            if leaf.index not in inputs:
                inputs[leaf.index] = len(inputs)
            return "input", inputs[leaf.index]

        for call in self.tape.calls[span.start : span.end]:
            words.append((call.function, call.state, _hashable((call.args, call.kwargs), name)))
            for number in references(call.result):
                if number not in inputs:
                    made.setdefault(number, len(made))
            words.append(_hashable(call.result, name))
        outputs = tuple(number for number in made if self.last_use.get(number, -1) >= span.end)
        if not self._keeps_to_itself(span, tuple(inputs), outputs):
            return None
        key = (
            tuple(words),
            tuple(_metadata(self.tape.values[number]) for number in inputs),
            tuple(made[number] for number in outputs),
        )
        return Block(start=span.start, end=span.end, key=_Key(key), inputs=tuple(inputs), outputs=outputs)

    def _keeps_to_itself(self, span: Span, inputs: Sequence[int], outputs: Sequence[int]) -> bool:
        """No memory from outside is written; no memory that leaves twice is written afterwards."""
        taken = {self.tape.values[number].storage for number in inputs}
        if any(not taken.isdisjoint(call.written) for call in self.tape.calls[span.start : span.end]):
            return False
        left: set[int] = set()
        for number in outputs:
            storage = self.tape.values[number].storage
            shared = storage in taken or storage in left
            if shared and self.last_write.get(storage, -1) >= span.end:
                return False
            left.add(storage)
        return True


class _Key:
    """A description that is hashed once."""

    __slots__ = ("hash", "value")

    def __init__(self, value: Hashable) -> None:
        self.value = value
        self.hash = hash(value)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Key) and self.hash == other.hash and self.value == other.value
        )


def references(tree: Any) -> Iterator[int]:
    """Numbers of all values in a nested structure."""
    found: list[int] = []
    map_leaves(lambda leaf: found.append(leaf.index) if isinstance(leaf, Ref) else None, tree)
    return iter(found)


def _hashable(tree: Any, name: Any) -> Hashable:
    if isinstance(tree, torch.Size):
        return name(tree)
    if isinstance(tree, list | tuple):
        return type(tree) is list, tuple(_hashable(item, name) for item in tree)
    if isinstance(tree, dict):
        return "dict", tuple((key, _hashable(item, name)) for key, item in tree.items())
    if isinstance(tree, slice):
        return "slice", tuple(_hashable(item, name) for item in (tree.start, tree.stop, tree.step))
    return name(tree)


def _constant(leaf: Any) -> Hashable:
    """Constants by class and digits: 1, 1.0 and True differ, so do 0.0 and -0.0."""
    return (type(leaf), repr(leaf)) if isinstance(leaf, int | float | complex) else leaf


def _metadata(value: Value) -> Hashable:
    tensor = value.tensor
    return (
        tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.layout, tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip
