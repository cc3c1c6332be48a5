"""The exported programs of one module: one for every batch size, one more for every other shape.

A program is exported at two batch sizes and merged (see `shapes`); it serves two rows and more. Where the
two do not merge, or the second export fails, it is exported with symbolic sizes (see `dynamic`); where
torch refuses that too, the module is exported again for each shape it meets. A single row, and other
sequence lengths, are always another export. Exports are cached by shape.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_bridge import shapes
from torch_bridge.assembly import Parts
from torch_bridge.capture import refuse_gradient_hooks
from torch_bridge.dynamic import Validity, refuse_fixed_rows, rows_to_show, symbolic, validity
from torch_bridge.errors import BridgeError, message
from torch_bridge.export import Exportable, OutputTree, export
from torch_bridge.fake import lent
from torch_bridge.initialise import concrete
from torch_bridge.interpret import check
from torch_bridge.program import Graph
from torch_bridge.shapes import BatchDims, DifferentStructure
from torch_bridge.signature import Destination, Names, Signature, read_graph, read_signature
from torch_bridge.simplify import simplify
from torch_bridge.stamp import from_repeats
from torch_bridge.tape import WritesNoted
from torch_bridge.tensors import is_abstract

Shapes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A graph with its signature and output structure.

    Args:
        rows: the number of batch rows of the first export.
        any_rows: whether it serves every number of rows, or those of `validity`.
        num_copies: how many blocks were stamped instead of exported.
        validity: for which rows an export with symbolic sizes holds; None for one at fixed sizes.
    """

    graph: Graph
    signature: Signature
    returned: OutputTree
    rows: int
    any_rows: bool
    num_copies: int
    validity: Validity | None = None

    def outputs(self, *destinations: Destination) -> tuple[Any, ...]:
        """The graph's outputs that go there, in order."""
        pairs = zip(self.graph.outputs, self.signature.outputs, strict=True)
        return tuple(value for value, (where, _) in pairs if where in destinations)

    @property
    def written(self) -> tuple[Any, ...]:
        """The graph's outputs that are new state, one for each name in `signature.written`."""
        return self.outputs(Destination.BUFFER, Destination.PARAMETER)

    def serves(self, rows: int) -> bool:
        """Whether it holds at this number of rows.

        Code often treats a single row as a case apart (`squeeze()`, `if len(x) > 1`), and neither of two
        merged exports has seen it: it gets an export of its own.
        """
        if not self.any_rows:
            return rows == self.rows
        return rows > 1 if self.validity is None else self.validity.at(rows)

    @property
    def loss(self) -> Any:
        """The graph's output that is the loss, or None."""
        index = self.returned.loss
        return None if index is None else self.outputs(Destination.RESULT)[index]


@dataclass(slots=True, kw_only=True)
class Programs:
    """Exports a module on demand.

    Args:
        wrapper: the module as it was at convert; its train and eval flags are put back for an export.
        dims: batch dim of every tensor of the call.
        first: the program of the example shapes.
        reason: why there is no program for every batch size; None if there is.
        dynamic_reason: why that program has symbolic sizes; None if two exports could be merged.
    """

    wrapper: Exportable
    names: Names
    example: tuple[torch.Tensor, ...]
    dims: BatchDims
    first: Program
    reason: str | None
    training: tuple[tuple[torch.nn.Module, bool], ...]
    dynamic_reason: str | None = None
    cache: dict[Shapes, Program] = field(default_factory=dict)

    def at(self, given: Shapes) -> tuple[Program, int]:
        """The program for these shapes (None: a tensor of the loss that is absent), and the rows.

        Raises:
            BridgeError: if the batch dims disagree, or the module cannot be exported at these shapes.
        """
        wanted = tuple(tuple(t.shape) if s is None else s for s, t in zip(given, self.example, strict=True))
        _same_ranks(wanted, self.example, self.wrapper.inputs.paths)
        rows = self._rows(given)
        key = self._key(wanted)
        if key in self.cache and not self.cache[key].serves(rows):
            key = wanted  # this number of rows is a case of its own
        if key not in self.cache:
            with _flags(self.training):
                self._make(key, wanted, rows)
        found = self.cache.get(key)
        return (found if found is not None and found.serves(rows) else self.cache[wanted]), rows

    def _make(self, key: Shapes, wanted: Shapes, rows: int) -> None:
        """Export for these shapes; for every number of rows if `key` leaves that out."""
        tensors = _shaped(self.example, wanted)
        if self.reason is None and key != wanted and (made := self._for_all_rows(tensors)):
            self.cache[key] = made
            if made.serves(rows):
                return
        self.cache[wanted] = _once(self.wrapper, self.names, tensors, rows)

    def _for_all_rows(self, tensors: tuple[torch.Tensor, ...]) -> Program | None:
        with contextlib.suppress(DifferentStructure):
            if self.dynamic_reason is None:
                return _for_any_rows(self.wrapper, self.names, tensors, self.dims)[0]
        with contextlib.suppress(BridgeError):
            return _symbolic(self.wrapper, self.names, tensors, self.dims)
        return None

    def _rows(self, given: Shapes) -> int:
        found = shapes.rows_of(given, self.dims)
        if len(found) > 1:
            listing = [
                f"{path}: shape {shape}, batch dim {dim}"
                for path, shape, dim in zip(self.wrapper.inputs.paths, given, self.dims, strict=True)
            ]
            raise BridgeError(message("the tensors of the batch have different numbers of rows.", *listing))
        return found.pop() if found else self.first.rows

    def _key(self, wanted: Shapes) -> Shapes:
        if self.reason is not None:
            return wanted
        pairs = zip(wanted, self.dims, strict=True)
        return tuple(tuple(size for d, size in enumerate(s or ()) if d != dim) for s, dim in pairs)


def make_programs(
    wrapper: Exportable, names: Names, example: tuple[torch.Tensor, ...], dims: BatchDims | None
) -> Programs:
    """Export the example call, for every batch size if that can be had.

    Args:
        dims: the user's word on the batch dims; None to find them.
    """
    training = tuple((m, m.training) for m in wrapper.module.modules())
    found = _Search(wrapper, names, example, dims).program()
    made = Programs(wrapper=wrapper, names=names, training=training, **found)
    made.cache[made._key(tuple(tuple(t.shape) for t in made.example))] = made.first
    return made


class _Search:
    """The ways to a program for every number of rows, cheapest first: see `program`."""

    def __init__(
        self, wrapper: Exportable, names: Names, example: tuple[torch.Tensor, ...], dims: BatchDims | None
    ) -> None:
        self.wrapper, self.names, self.example = wrapper, names, example
        stated = None if dims is None else [(_stated_rows(example, dims), dims)]
        self.guesses = stated or list(shapes.batch_dim_candidates(example))
        self.reasons: list[str] = []
        self.alone: Program | None = None

    def program(self) -> dict[str, Any]:
        """Two exports merged; else one with symbolic sizes; else one for the example's shapes alone."""
        for _, dims in self.guesses:
            if any(dim is not None for dim in dims) and (found := self._merged(dims)):
                return found
        for _, dims in self.guesses:
            if any(dim is not None for dim in dims) and (found := self._symbolic(dims)):
                return found
        rows, dims = self.guesses[0] if self.guesses else (1, tuple(None for _ in self.example))
        reason = self.reasons[0] if self.reasons else "no tensor has a batch dim"
        return {"example": self.example, "dims": dims, "first": self._alone(rows), "reason": reason}

    def _merged(self, dims: BatchDims) -> dict[str, Any] | None:
        try:
            program, used = _for_any_rows(self.wrapper, self.names, self.example, dims)
        except DifferentStructure as error:
            self.reasons.append(str(error))
            return None
        except BridgeError as error:
            self.reasons.append(str(error))
            self._alone(_stated_rows(self.example, dims))  # may be no matter of rows at all
            return None
        return {"example": used, "dims": dims, "first": program, "reason": None}

    def _symbolic(self, dims: BatchDims) -> dict[str, Any] | None:
        try:
            program = _symbolic(self.wrapper, self.names, self.example, dims)
        except BridgeError:
            return None
        return {
            "example": self.example,
            "dims": dims,
            "first": program,
            "reason": None,
            "dynamic_reason": self.reasons[0],
        }

    def _alone(self, rows: int) -> Program:
        """The program of the example's shapes, which a module that can be exported has."""
        if self.alone is None:
            self.alone = _once(self.wrapper, self.names, self.example, rows)
        return self.alone


def _stated_rows(example: Sequence[torch.Tensor], dims: BatchDims) -> int:
    found = shapes.rows_of([tuple(t.shape) for t in example], dims)
    if len(found) > 1:
        raise BridgeError(message("batch_dims point at dims of different sizes.", f"sizes: {sorted(found)}"))
    return found.pop() if found else 1


def _for_any_rows(
    wrapper: Exportable, names: Names, example: Sequence[torch.Tensor], dims: BatchDims
) -> tuple[Program, tuple[torch.Tensor, ...]]:
    """Two exports as one program (three where a literal is in doubt), and the tensors of the first.

    torch.export treats a size of 1 as special, so an example with one row is doubled first. The second
    size is 2 * rows + 1: a wide gap shows what is not linear (rows // 2, say).
    """
    rows = max(_stated_rows(example, dims), 2)
    other = 2 * rows + 1
    used = shapes.resized(example, dims, rows)
    small = _once(wrapper, names, used, rows)
    large = _once(wrapper, names, shapes.resized(example, dims, other), other)
    _same_signature(small, large)
    graph = shapes.merge(small.graph, large.graph, (rows, other))
    if shapes.doubtful(graph):
        third = _once(wrapper, names, shapes.resized(example, dims, rows + 1), rows + 1)
        if not shapes.agrees(graph, third.graph, rows + 1):
            raise DifferentStructure(
                f"sizes do not follow the number of rows on a line (seen at {rows + 1} rows)"
            )
    program = Program(
        graph=graph,
        signature=small.signature,
        returned=small.returned,
        rows=rows,
        any_rows=True,
        num_copies=small.num_copies,
    )
    return program, used


def _symbolic(wrapper: Exportable, names: Names, tensors: Sequence[torch.Tensor], dims: BatchDims) -> Program:
    """One export with symbolic batch dims."""
    held = itertools.chain(wrapper.parameters(), wrapper.buffers())
    rows = rows_to_show(tensors, dims, held, _stated_rows(tensors, dims))
    # Copies: torch leaves marks on tensors that it made symbolic.
    tensors = [tensor.detach().clone() for tensor in shapes.resized(tensors, dims, rows)]
    parts, exported = _whole(wrapper, names, tensors, symbolic(dims))
    program = _read(wrapper, parts, rows, num_copies=0)
    refuse_fixed_rows(program.graph, rows)
    return replace(program, any_rows=True, validity=validity(exported, tensors, dims))


def _once(wrapper: Exportable, names: Names, tensors: Sequence[torch.Tensor], rows: int) -> Program:
    """One export, at exactly these shapes; a block that repeats is exported once if that saves much."""
    refuse_gradient_hooks(wrapper)
    found = from_repeats(wrapper, names, tensors)
    num_copies, parts = (0, _whole(wrapper, names, tensors)[0]) if found is None else found
    return _read(wrapper, parts, rows, num_copies)


def _read(wrapper: Exportable, parts: Parts, rows: int, num_copies: int) -> Program:
    graph, signature, shapes = parts
    graph = simplify(graph, shapes)
    returned = wrapper.record.returned
    assert returned is not None, "export ran no forward"
    check(graph, graph.needed(graph.outputs))
    return Program(
        graph=graph,
        signature=signature,
        returned=returned,
        rows=rows,
        any_rows=False,
        num_copies=num_copies,
    )


def _whole(
    wrapper: Exportable, names: Names, tensors: Sequence[torch.Tensor], dynamic_shapes: Any = None
) -> tuple[Parts, torch.export.ExportedProgram]:
    """The module exported as it is; without values, its tensors are lent ones of no device in particular."""
    tensors = _distinct(tensors)
    held = itertools.chain(wrapper.parameters(), wrapper.buffers(), tensors)
    if not any(is_abstract(tensor) for tensor in held):
        exported = export(wrapper, tensors, dynamic_shapes, wrapper.precision)
        signature = read_signature(exported, names)
    else:
        mode = WritesNoted()
        with lent(wrapper, mode, concrete) as pairs:
            twins = [mode.twin(t) if is_abstract(t) else t for t in tensors]
            exported = export(wrapper, twins, dynamic_shapes, wrapper.precision)
            signature = read_signature(exported, names)
        originals = {id(twin): tensor for tensor, twin in pairs}
        literals = {name: originals.get(id(t), t) for name, t in signature.literals.items()}
        signature = replace(signature, literals=literals)
    graph = read_graph(exported.graph, exported.graph_module)
    return (graph, signature, _input_shapes(exported)), exported


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every argument an object of its own: torch.export takes one tensor given twice for one argument."""
    first = {id(tensor): slot for slot, tensor in reversed(list(enumerate(tensors)))}
    return [
        tensor if first[id(tensor)] == slot else tensor.detach().requires_grad_(tensor.requires_grad)
        for slot, tensor in enumerate(tensors)
    ]


def _input_shapes(exported: torch.export.ExportedProgram) -> tuple[tuple[int, ...], ...]:
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    sizes = [getattr(node.meta.get("val"), "shape", ()) for node in placeholders]
    # A symbolic size equals nothing.
    return tuple(tuple(-1 if isinstance(s, torch.SymInt) else s for s in shape) for shape in sizes)


def _same_signature(a: Program, b: Program) -> None:
    if a.signature.inputs != b.signature.inputs or a.signature.outputs != b.signature.outputs:
        raise DifferentStructure("the two exports read or write different tensors")
    if a.returned != b.returned:
        raise DifferentStructure("the two exports return different structures")
    for name, value in a.signature.literals.items():
        other = b.signature.literals[name]
        if value is not other and not (value.shape == other.shape and torch.equal(value, other)):
            raise DifferentStructure(f"a tensor made in forward ({name}) depends on the number of rows")


def _shaped(example: Sequence[torch.Tensor], wanted: Shapes) -> tuple[torch.Tensor, ...]:
    made = list(example)
    for index, shape in enumerate(wanted):
        for dim, size in enumerate(shape or ()):
            made[index] = shapes.resized((made[index],), (dim,), size)[0]
    return tuple(made)


def _same_ranks(wanted: Shapes, example: Sequence[torch.Tensor], paths: Sequence[str]) -> None:
    for shape, tensor, path in zip(wanted, example, paths, strict=True):
        if len(shape or ()) != tensor.ndim:
            raise BridgeError(
                message(
                    f"{path} has another number of dims than at export.",
                    f"got: {shape}",
                    f"expected: {tensor.ndim} dims, such as {tuple(tensor.shape)}",
                )
            )


@contextlib.contextmanager
def _flags(wanted: Sequence[tuple[torch.nn.Module, bool]]) -> Iterator[None]:
    """Put train and eval flags back to what they were at convert, for the time of an export."""
    found = [(module, module.training) for module, _ in wanted]
    try:
        for module, flag in wanted:
            module.training = flag
        yield
    finally:
        for module, flag in found:
            module.training = flag
