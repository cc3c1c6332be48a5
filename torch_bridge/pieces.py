"""Pieces of a tape, each exported on its own: what lies outside the blocks, and each distinct block.

torch.export sees a module that repeats the calls of the tape, each under the gradient and autocast state
that it was made in. A block inside a piece is one call of `torch_bridge::repeated`, an operator that nobody
opens.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from torch_bridge.export import export
from torch_bridge.program import Graph, Ref, map_leaves
from torch_bridge.repeated import Block, references
from torch_bridge.signature import read_graph
from torch_bridge.tape import Call, NotTaped, State, Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A block as a call of the skeleton; its results are those of `block`."""

    number: int
    block: Block
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of the tape that is exported on its own: what it takes, does and leaves."""

    inputs: tuple[int, ...]
    steps: tuple[tuple[int, Call | Stamp], ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedPiece:
    """An exported piece. Inputs of its graph are numbers of values, or literals by name; `writes` are the
    inputs whose new values lead the outputs."""

    graph: Graph
    inputs: tuple[int | str, ...]
    literals: dict[str, torch.Tensor]
    writes: tuple[int, ...]


def inputs_of(step: Call | Stamp) -> Iterator[int]:
    """Numbers of the values that a step of a piece takes."""
    return iter(step.inputs) if isinstance(step, Stamp) else references((step.args, step.kwargs))


class _Step(torch.nn.Module):
    """One call as a module, whose name in the exported graph's module stack tells which call it was."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)

        def filled(leaf: Any) -> Any:
            return next(given) if isinstance(leaf, Ref) else leaf

        args, kwargs = map_leaves(filled, self.call.args), map_leaves(filled, self.call.kwargs)
        return self.call.function(*args, **kwargs)


class _Group(torch.nn.Module):
    """Steps under one state. It is named after its first call: where torch makes a region of the state, the
    nodes inside keep the name of the group only."""

    def __init__(
        self, state: State, steps: Sequence[tuple[int, Call | Stamp]], opaque: "OpaqueBlocks"
    ) -> None:
        super().__init__()
        self.state = state
        self.steps = tuple(steps)
        self.opaque = opaque
        for position, step in steps:
            if isinstance(step, Call):
                self.add_module(f"step{position}", _Step(step))

    def forward(self, values: dict[int, torch.Tensor]) -> None:
        with self.state.entered():
            for position, step in self.steps:
                self._do(position, step, values)

    def _do(self, position: int, step: Call | Stamp, values: dict[int, torch.Tensor]) -> None:
        if isinstance(step, Stamp):
            made = self.opaque([values[number] for number in step.inputs], step.number)
            values.update(zip(step.block.outputs, made, strict=True))
            return
        given = [values[number] for number in references((step.args, step.kwargs))]
        _match(step.result, getattr(self, f"step{position}")(*given), values)


class _Repeat(torch.nn.Module):
    """Does again what a piece of the tape says."""

    def __init__(self, piece: Piece, opaque: "OpaqueBlocks") -> None:
        super().__init__()
        self.piece = piece
        for state, group in itertools.groupby(piece.steps, key=lambda step: _state(step[1])):
            steps = tuple(group)
            self.add_module(f"step{steps[0][0]}", _Group(state, steps, opaque))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(self.piece.inputs, tensors, strict=True))
        for group in self.children():
            group(values)
        return tuple(values[number] for number in self.piece.outputs)


_PLAIN = State(grad=True, autocast=())


def _state(step: Call | Stamp) -> State:
    return step.state if isinstance(step, Call) else _PLAIN


def _match(wanted: Any, result: Any, values: dict[int, Any]) -> None:
    if isinstance(wanted, Ref):
        values[wanted.index] = result
    elif isinstance(wanted, list | tuple):
        for one, other in zip(wanted, result, strict=True):
            _match(one, other, values)
    elif isinstance(wanted, dict):
        for key, one in wanted.items():
            _match(one, result[key], values)


class OpaqueBlocks:
    """The operator that stands for a block while the skeleton is exported."""

    current: "OpaqueBlocks | None" = None

    def __init__(self, tape: Tape, stamps: Sequence[Stamp]) -> None:
        self.tape = tape
        self.stamps = stamps

    def __call__(self, tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        return repeated_operator()(tensors, number)

    def made(self, number: int) -> list[torch.Tensor]:
        likes = [self.tape.values[output].tensor for output in self.stamps[number].block.outputs]
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in likes]

    def __enter__(self) -> "OpaqueBlocks":
        OpaqueBlocks.current = self
        return self

    def __exit__(self, *_: object) -> None:
        OpaqueBlocks.current = None


@functools.cache
def repeated_operator() -> Any:
    """`torch_bridge::repeated`, defined when it is first needed: importing the bridge changes nothing."""
    torch.library.define("torch_bridge::repeated", "(Tensor[] inputs, int number) -> Tensor[]")

    @torch.library.register_fake("torch_bridge::repeated")
    def repeated(_inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        assert OpaqueBlocks.current is not None, "blocks are stamped only while exporting"
        return OpaqueBlocks.current.made(number)

    return torch.ops.torch_bridge.repeated.default


def export_piece(tape: Tape, piece: Piece, opaque: OpaqueBlocks) -> ExportedPiece:
    """Export a piece as a function of its inputs.

    Args:
        tape: the run that the piece is of.
        piece: what is exported.
        opaque: the operator that stands for the blocks in it.

    Raises:
        NotTaped: the exported program takes or writes what is no input of the piece.
    """
    # Every call brings the autocast region that it was made in.
    program = export(_Repeat(piece, opaque), [tape.values[number].tensor for number in piece.inputs])
    inputs: list[int | str] = []
    literals: dict[str, torch.Tensor] = {}
    places: dict[str, int] = {}
    remaining = iter(piece.inputs)
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            places[spec.arg.name] = next(remaining)
            inputs.append(places[spec.arg.name])
        elif spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
            inputs.append(spec.target)
            literals[spec.target] = program.constants[spec.target]  # type: ignore[assignment]
        else:
            raise NotTaped(f"the exported piece takes a {spec.kind.name.lower()}")
    outputs = program.graph_signature.output_specs
    if any(spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION) for spec in outputs):
        raise NotTaped("the exported piece writes what is no input")
    return ExportedPiece(
        graph=read_graph(program.graph, program.graph_module),
        inputs=tuple(inputs),
        literals=literals,
        writes=tuple(
            places[spec.target]  # type: ignore[index]
            for spec in outputs
            if spec.kind is OutputKind.USER_INPUT_MUTATION
        ),
    )
