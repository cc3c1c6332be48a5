"""The exported programs of one module: one for every batch size, one more for every other shape.

A program is exported at two batch sizes and merged (see `shapes`). Where the two do not merge, or the
second export fails, the module is exported again for each shape it meets. Other sequence lengths are
always another export. Exports are cached by shape.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_bridge import shapes
from torch_bridge.errors import BridgeError, message
from torch_bridge.explain import refuse_unknown_shapes
from torch_bridge.export import Exportable, OutputTree, export
from torch_bridge.interpret import check
from torch_bridge.program import Graph
from torch_bridge.shapes import BatchDims, DifferentStructure
from torch_bridge.signature import Destination, Names, Signature, read_graph, read_signature
from torch_bridge.simplify import simplify

Shapes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A graph with its signature and output structure.

    Args:
        rows: the number of batch rows of the first export.
        any_rows: whether it serves every number of rows.
    """

    graph: Graph
    signature: Signature
    returned: OutputTree
    rows: int
    any_rows: bool

    def outputs(self, destination: Destination) -> tuple[Any, ...]:
        """The graph's outputs that go there, in order."""
        pairs = zip(self.graph.outputs, self.signature.outputs, strict=True)
        return tuple(value for value, (where, _) in pairs if where is destination)

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
    """

    wrapper: Exportable
    names: Names
    example: tuple[torch.Tensor, ...]
    dims: BatchDims
    first: Program
    reason: str | None
    training: tuple[tuple[torch.nn.Module, bool], ...]
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
        if key not in self.cache:
            with _flags(self.training):
                if self.reason is None:
                    made, _ = _for_any_rows(
                        self.wrapper, self.names, _shaped(self.example, wanted), self.dims
                    )
                else:
                    made = _once(self.wrapper, self.names, _shaped(self.example, wanted), rows)
            self.cache[key] = made
        return self.cache[key], rows

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
    guesses = (
        list(shapes.batch_dim_candidates(example)) if dims is None else [(_stated_rows(example, dims), dims)]
    )
    reasons: list[str] = []
    for _, guess in guesses:
        if all(dim is None for dim in guess):
            continue
        try:
            program, used = _for_any_rows(wrapper, names, example, guess)
        except (DifferentStructure, BridgeError) as error:
            reasons.append(str(error))
            continue
        made = Programs(
            wrapper=wrapper,
            names=names,
            example=used,
            dims=guess,
            first=program,
            reason=None,
            training=training,
        )
        break
    else:
        rows, guess = guesses[0] if guesses else (1, tuple(None for _ in example))
        program = _once(wrapper, names, example, rows)
        reason = reasons[0] if reasons else "no tensor has a batch dim"
        made = Programs(
            wrapper=wrapper,
            names=names,
            example=example,
            dims=guess,
            first=program,
            reason=reason,
            training=training,
        )
    made.cache[made._key(tuple(tuple(t.shape) for t in made.example))] = program
    return made


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
        graph=graph, signature=small.signature, returned=small.returned, rows=rows, any_rows=True
    )
    return program, used


def _once(wrapper: Exportable, names: Names, tensors: Sequence[torch.Tensor], rows: int) -> Program:
    """One export, at exactly these shapes."""
    exported = export(wrapper, tensors)
    refuse_unknown_shapes(exported)
    signature = read_signature(exported, names)
    graph = read_graph(exported.graph, exported.graph_module)
    graph = simplify(graph, _input_shapes(exported))
    returned = wrapper.record.returned
    assert returned is not None, "export ran no forward"
    check(graph, graph.needed(graph.outputs))
    return Program(graph=graph, signature=signature, returned=returned, rows=rows, any_rows=False)


def _input_shapes(exported: torch.export.ExportedProgram) -> tuple[tuple[int, ...], ...]:
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    return tuple(tuple(getattr(node.meta.get("val"), "shape", ())) for node in placeholders)


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
