"""A program from a tape: each repeated block exported once and stamped wherever it is called.

The run outside the blocks is exported as one piece, in which a block is one call of an operator that
nobody opens; every distinct block is a piece of its own. torch.export sees functions that repeat calls
from the tape, so gradient barriers, in-place writes, views and decompositions are treated as in a module
that is exported whole. Each node of a copy gets the module path and source line of its own call.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from torch_bridge.errors import BridgeError
from torch_bridge.export import Exportable, export, exporting
from torch_bridge.fake import Pairs, lent
from torch_bridge.initialise import concrete
from torch_bridge.program import Graph, Node, Ref, map_leaves, tree_map
from torch_bridge.repeated import Block, find_blocks, references
from torch_bridge.signature import PREFIX, Destination, Names, Signature, Source, read_graph
from torch_bridge.tape import Call, NotTaped, State, Tape, Value, WritesNoted, record

# A functional graph, its signature, and the shapes of its inputs.
Parts = tuple[Graph, Signature, tuple[tuple[int, ...], ...]]


def from_repeats(
    wrapper: Exportable,
    names: Names,
    tensors: Sequence[torch.Tensor],
) -> tuple[int, Parts] | None:
    """Export a module by its repeated blocks: (number of copies, program).

    None where nothing repeats that is worth it, or where the run cannot be taped; whatever the user's
    code raises is left to the export of the whole module, which explains it.

    Args:
        wrapper: the module.
        names: its own tensors.
        tensors: example arguments.
    """
    if any(isinstance(inner, torch.jit.ScriptModule) for inner in wrapper.modules()):
        return None  # their tensors cannot be lent
    mode = WritesNoted()
    with lent(wrapper, mode, concrete) as pairs, wrapper.precision.region():
        tape = _taped(wrapper, names, tensors, pairs, mode)
        blocks = () if tape is None else find_blocks(tape)
        if tape is None or not blocks:
            return None
        try:
            parts = stamped(tape, blocks)
        except (NotTaped, BridgeError):
            return None
    return len(blocks) - len({block.key for block in blocks}), parts


def _taped(
    wrapper: Exportable, names: Names, tensors: Sequence[torch.Tensor], pairs: Pairs, mode: WritesNoted
) -> Tape | None:
    own = {id(tensor): name for name, tensor in {**names.params, **names.frozen, **names.buffers}.items()}
    # What only the loss holds is no parameter of the module: it has no name.
    homes = [(twin, tensor, own.get(id(tensor))) for tensor, twin in pairs]
    paths = {
        id(inner): (name + ".").removeprefix(PREFIX).rstrip(".").replace(".", "/")
        for name, inner in wrapper.named_modules()
    }
    try:
        with exporting():
            twins = [mode.twin(t.detach()).requires_grad_(t.requires_grad) for t in tensors]
            return record(wrapper, paths, twins, homes, mode)
    except Exception:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stamp:
    """A block as a call of the skeleton; its results are those of `block`."""

    number: int
    block: Block
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of the tape that is exported on its own: what it takes, does and leaves."""

    inputs: tuple[int, ...]
    steps: tuple[tuple[int, Call | _Stamp], ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    """An exported piece. Inputs of its graph are numbers of values, or literals by name; `writes` are the
    inputs whose new values lead the outputs."""

    graph: Graph
    inputs: tuple[int | str, ...]
    literals: dict[str, torch.Tensor]
    writes: tuple[int, ...]


def stamped(tape: Tape, blocks: Sequence[Block]) -> Parts:
    """The whole run as one functional graph, with its signature and the shapes of its inputs.

    Args:
        tape: the run.
        blocks: repeated blocks, in order.

    Raises:
        NotTaped: a piece writes what it may not, or torch.export sees another program in it.
    """
    skeleton, stamps = _skeleton(tape, blocks)
    with _Opaque(tape, stamps) as opaque:
        whole = _export(tape, skeleton, opaque)
        bodies: dict[Hashable, tuple[int, _Exported]] = {}
        for block in blocks:
            if block.key not in bodies:
                bodies[block.key] = block.start, _export(tape, _piece(tape, block), opaque)
    if any(body.writes for _, body in bodies.values()):
        raise NotTaped("a block writes one of its inputs")
    return _Assembly(tape, whole, stamps, bodies).finish()


def _piece(tape: Tape, block: Block) -> Piece:
    steps = tuple(enumerate(tape.calls[block.start : block.end], block.start))
    return Piece(inputs=block.inputs, steps=steps, outputs=block.outputs)


def _skeleton(tape: Tape, blocks: Sequence[Block]) -> tuple[Piece, tuple[_Stamp, ...]]:
    """The tape with a stamp in the place of every block."""
    written = frozenset().union(*(call.written for call in tape.calls))
    steps: list[tuple[int, Call | _Stamp]] = []
    stamps: list[_Stamp] = []
    position = 0
    for block in blocks:
        steps += enumerate(tape.calls[position : block.start], position)
        taken = tuple(n for n in block.inputs if not _at_home(tape.values[n], written))
        stamps.append(_Stamp(number=len(stamps), block=block, inputs=taken))
        steps.append((block.start, stamps[-1]))
        position = block.end
    steps += enumerate(tape.calls[position:], position)
    used = dict.fromkeys(itertools.chain.from_iterable(_taken(step) for _, step in steps))
    used.update(dict.fromkeys(ref.index for ref in tape.results))
    inputs = tuple(number for number in used if tape.values[number].home is not None)
    outputs = tuple(ref.index for ref in tape.results)
    return Piece(inputs=inputs, steps=tuple(steps), outputs=outputs), tuple(stamps)


def _at_home(value: Value, written: frozenset[int]) -> bool:
    """Whether it has the same value wherever it is read: the graph's own input, never written."""
    return value.home is not None and value.storage not in written


def _taken(step: Call | _Stamp) -> Iterator[int]:
    return iter(step.inputs) if isinstance(step, _Stamp) else references((step.args, step.kwargs))


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

    def __init__(self, state: State, steps: Sequence[tuple[int, Call | _Stamp]], opaque: "_Opaque") -> None:
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

    def _do(self, position: int, step: Call | _Stamp, values: dict[int, torch.Tensor]) -> None:
        if isinstance(step, _Stamp):
            made = self.opaque([values[number] for number in step.inputs], step.number)
            values.update(zip(step.block.outputs, made, strict=True))
            return
        given = [values[number] for number in references((step.args, step.kwargs))]
        _match(step.result, getattr(self, f"step{position}")(*given), values)


class _Repeat(torch.nn.Module):
    """Does again what a piece of the tape says."""

    def __init__(self, piece: Piece, opaque: "_Opaque") -> None:
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


def _state(step: Call | _Stamp) -> State:
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


class _Opaque:
    """The operator that stands for a block while the skeleton is exported."""

    current: "_Opaque | None" = None

    def __init__(self, tape: Tape, stamps: Sequence[_Stamp]) -> None:
        self.tape = tape
        self.stamps = stamps

    def __call__(self, tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        return _operator()(tensors, number)

    def made(self, number: int) -> list[torch.Tensor]:
        likes = [self.tape.values[output].tensor for output in self.stamps[number].block.outputs]
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in likes]

    def __enter__(self) -> "_Opaque":
        _Opaque.current = self
        return self

    def __exit__(self, *_: object) -> None:
        _Opaque.current = None


@functools.cache
def _operator() -> Any:
    """`torch_bridge::repeated`, defined when it is first needed: importing the bridge changes nothing."""
    torch.library.define("torch_bridge::repeated", "(Tensor[] inputs, int number) -> Tensor[]")

    @torch.library.register_fake("torch_bridge::repeated")
    def repeated(_inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        assert _Opaque.current is not None, "blocks are stamped only while exporting"
        return _Opaque.current.made(number)

    return torch.ops.torch_bridge.repeated.default


def _export(tape: Tape, piece: Piece, opaque: _Opaque) -> _Exported:
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
    return _Exported(
        graph=read_graph(program.graph, program.graph_module),
        inputs=tuple(inputs),
        literals=literals,
        writes=tuple(
            places[spec.target]  # type: ignore[index]
            for spec in outputs
            if spec.kind is OutputKind.USER_INPUT_MUTATION
        ),
    )


class _Assembly:
    """Puts the nodes of all pieces into one list, in the order of the run."""

    def __init__(
        self,
        tape: Tape,
        whole: _Exported,
        stamps: Sequence[_Stamp],
        bodies: dict[Hashable, tuple[int, _Exported]],
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

    def _input(self, piece: Hashable, exported: _Exported, given: int | str) -> None:
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
            if node.operator is _operator():
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

    def _first(self, stamp: _Stamp) -> Block:
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
