"""Which kernels XLA:CPU makes of a program, and the buffers that go between them.

A buffer is a value in one layout. Products, convolutions, reductions, sorts and loops are kernels of
their own and read buffers; elementwise work is done wherever it is needed, so a value may be computed in
several kernels and stored in several layouts, or never. What is dear (exp, division) is computed once.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core as jex

from rannc_jax.cost import primitives
from rannc_jax.cost.operations import NO_VALUE, Operation, Operations
from rannc_jax.ir.trace import aval_bytes

Buffer = tuple[int, tuple[Any, ...]]
"""A value and its layout: () as the value is, anything else tells copies in other layouts apart."""

# What XLA's instruction fusion never does twice, by JAX's names.
_DEAR = (primitives.TRANSCENDENTAL | primitives.names("div rem sqrt rsqrt")) - {"erfc"}
_ELEMENTWISE = primitives.ARITHMETIC | primitives.TRANSCENDENTAL | primitives.names("convert_element_type")
_LOOPS = _ELEMENTWISE | primitives.names(
    "broadcast_in_dim transpose iota rev pad concatenate split reduce_precision slice dynamic_slice"
)
_VIEWS = primitives.VIEWS | primitives.names("copy copy_p device_put")
# Stored parts of functions that XLA writes as quotients and exponentials before it fuses.
_PARTS = {"erfc": 3}
_INPLACE = primitives.SCATTERS | primitives.names("dynamic_update_slice")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel.

    Args:
        writes: the buffers it makes.
        reads: the buffers it reads.
        inplace: it may write over an operand of the same size that dies in it.
        scratch: bytes it needs while it runs.
    """

    writes: tuple[Buffer, ...]
    reads: tuple[Buffer, ...]
    inplace: bool
    scratch: int = 0


class Kernels:
    """The kernels of a program, in program order.

    Args:
        ops: an opened program.
        scratch: what a loop or branch needs inside, from its bodies.

    Attributes:
        kernels: see `Kernel`.
        results: the buffers that are the program's results, in order.
    """

    def __init__(self, ops: Operations, scratch: Callable[[Operation], int]) -> None:
        self._ops, self._scratch = ops, scratch
        self._source: dict[int, int] = {}
        self._sizes: dict[Buffer, int] = {}
        self._live = self._simplified()
        self._maker = {v: op for op in self._live for v in op.writes}
        self._shared = self._computed_once()
        self._leaves: dict[int, tuple[Buffer, ...]] = {}
        self._made: dict[Buffer, None] = {}
        self.kernels: list[Kernel] = []
        for op in self._live:  # in order, so that nothing recurses deeply
            if not self._is_loop(op):
                self._add_whole(op)
            elif op.writes[0] in self._shared:
                self._buffer(op.writes[0])
            else:
                self._sources(op.writes[0])
        results = [self._buffer(v, self._shape_form(v)) for v in reversed(ops.outputs) if v != NO_VALUE]
        self.results = results[::-1]

    def nbytes(self, buffer: Buffer) -> int:
        """Size of a buffer."""
        if buffer in self._sizes:
            return self._sizes[buffer]
        aval = self._ops.avals[buffer[0]]
        return aval_bytes(aval) if hasattr(aval, "shape") else 0

    # --- simplification -----------------------------------------------------------------------

    def _simplified(self) -> list[Operation]:
        """What is left when views stand for their sources and equal work is done once, in order."""
        seen: dict[Any, Operation] = {}
        kept: list[Operation] = []
        for op in self._ops.operations:
            if self._is_view(op):
                self._source.update(zip(op.writes, op.reads, strict=False))
                continue
            twin = seen.setdefault(self._key(op), op)
            if twin is not op:
                self._source.update(zip(op.writes, twin.writes, strict=True))
            else:
                kept.append(op)
        needed = {self._of(v) for v in self._ops.outputs}
        live: list[Operation] = []
        for op in reversed(kept):
            if op.eqn.effects or any(v in needed for v in op.writes):
                needed.update(self._of(v) for v in op.reads)
                live.append(op)
        return live[::-1]

    def _key(self, op: Operation) -> Any:
        """Equal for operations that compute the same."""
        if op.bodies or op.eqn.effects:
            return id(op)
        operands = tuple(
            (str(a.val), str(a.aval)) if isinstance(a, jex.Literal) else self._of(v)
            for a, v in zip(op.eqn.invars, op.reads, strict=True)
        )
        return op.name, operands, str(op.eqn.params), tuple(v.aval.str_short() for v in op.eqn.outvars)

    def _is_view(self, op: Operation) -> bool:
        """No kernel: a change of shape, or of nothing."""
        if op.name in _VIEWS:
            return True
        if op.name not in ("broadcast_in_dim", "transpose", "convert_element_type", "reduce_precision"):
            return False
        before, after = op.eqn.invars[0].aval, op.eqn.outvars[0].aval
        if op.reads[0] == NO_VALUE or before.dtype != after.dtype:
            return False
        if op.name != "transpose":
            return math.prod(before.shape) == math.prod(after.shape)
        moved = [d for d in op.eqn.params["permutation"] if before.shape[d] > 1]
        return len(before.shape) == 2 or moved == sorted(moved)  # products take a matrix either way

    def _of(self, value: int) -> int:
        while value in self._source:
            value = self._source[value]
        return value

    # --- what is stored -----------------------------------------------------------------------

    def _is_loop(self, op: Operation) -> bool:
        return op.name in _LOOPS

    def _is_made_in_loop(self, value: int) -> bool:
        return value in self._maker and self._is_loop(self._maker[value])

    def _computed_once(self) -> set[int]:
        """Elementwise values that are stored for all their readers.

        Dear ones that several kernels need or that a broadcast repeats; and those with several full
        operands that something else than elementwise work reads as they are (reading them back moves less).
        """
        shared: set[int] = set()
        needed_by: dict[int, set[Buffer]] = {}
        repeated: set[int] = set()
        users: dict[int, int] = {}
        direct: set[int] = set()
        for v in self._ops.outputs:
            needed_by.setdefault(self._of(v), set()).add((self._of(v), self._shape_form(v)))
            direct.update({v} - self._source.keys())
        for op in reversed(self._live):
            value = op.writes[0]
            if not self._is_loop(op):
                for v, form in self._reads(op):
                    needed_by.setdefault(self._of(v), set()).add((self._of(v), form))
                    direct.update({v} if not form and v not in self._source else ())
                continue
            kernels = needed_by.get(value, set())
            dear = op.name in _DEAR and (len(kernels) > 1 or users.get(value, 0) > 1 or value in repeated)
            if dear or (len(kernels) > 1 and value in direct and self._full_operands(op) > 1):
                shared.add(value)
                kernels = {(value, ())}
            for v in dict.fromkeys(map(self._of, op.reads)):
                users[v] = users.get(v, 0) + 1
                needed_by.setdefault(v, set()).update(kernels)
                repeated.update({v} if op.name == "broadcast_in_dim" else ())
        return shared

    def _full_operands(self, op: Operation) -> int:
        size = self.nbytes((op.writes[0], ()))
        return sum(v != NO_VALUE and self.nbytes((self._of(v), ())) >= size for v in op.reads)

    def _sources(self, value: int) -> tuple[Buffer, ...]:
        """The buffers that an elementwise value is computed from."""
        if value not in self._leaves:
            op = self._maker[value]
            found: dict[Buffer, None] = {}
            for v in map(self._of, op.reads):
                if v != NO_VALUE:
                    inner = self._is_made_in_loop(v) and v not in self._shared
                    found.update(dict.fromkeys(self._sources(v) if inner else ((v, ()),)))
            for part in range(_PARTS.get(op.name, 0)):
                self._add(((value, ("part", part)),), tuple(found), inplace=True)
            parts = [(value, ("part", part)) for part in range(_PARTS.get(op.name, 0))]
            self._leaves[value] = (*parts, *found)
        return self._leaves[value]

    # --- kernels ------------------------------------------------------------------------------

    def _add(self, writes: tuple[Buffer, ...], reads: Iterable[Buffer], *, inplace: bool = False) -> None:
        """Add a kernel, behind those that make what it reads."""
        made = tuple(self._buffer(*b) if not b[1] else b for b in dict.fromkeys(reads))
        self.kernels.append(Kernel(writes=writes, reads=made, inplace=inplace))

    def _buffer(self, value: int, form: tuple[Any, ...] = ()) -> Buffer:
        """The buffer of a value in a layout, with the loop kernel that makes it if there is none yet."""
        value = self._of(value)
        loop = self._is_made_in_loop(value)
        if form and form[0] != "layout" and (not loop or value in self._shared):
            form = ()  # what is stored anyway is seen through a change of shape
        buffer = (value, form)
        if (not loop and not form) or buffer in self._made:
            return buffer
        self._made[buffer] = None
        stored = ((value, ()),) if not loop or (value in self._shared and form) else self._sources(value)
        self._add((buffer,), stored, inplace=not form)
        return buffer

    def _shape_form(self, value: int) -> tuple[Any, ...]:
        return ("shape", self._ops.avals[value].shape) if value in self._source else ()

    def _add_whole(self, op: Operation) -> None:
        if op.name == "select_and_scatter_add":
            self._add_select_and_scatter(op)
            return
        writes = tuple((v, ()) for v in op.writes)
        self._add(writes, list(self._operands(op)), inplace=op.name in _INPLACE)
        self.kernels[-1] = replace(self.kernels[-1], scratch=self._scratch(op))

    def _add_select_and_scatter(self, op: Operation) -> None:
        """XLA finds the maxima (windows over the operand and a number for every dim), then scatters."""
        source, operand = (x.aval for x in op.eqn.invars)
        value, dims = op.writes[0], range(len(operand.shape))
        numbers, found = ([(value, (word, d)) for d in dims] for word in ("number", "place"))
        best, index, zeros = ((value, (word,)) for word in ("best", "index", "zeros"))
        words = 4 * math.prod(source.shape)
        self._sizes.update(dict.fromkeys(numbers, 4 * math.prod(operand.shape)))
        self._sizes.update({**dict.fromkeys((best, *found), words), index: len(dims) * words})
        for number in (*numbers, zeros):
            self._add((number,), ())
        gradient, image = self._operands(op)
        self._add((best, *found), (image, *numbers))
        self._add((index,), found)
        self._add(((value, ()),), (zeros, index, gradient), inplace=True)

    def _reads(self, op: Operation) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """The values that an operation reads, and the layouts it wants them in."""
        forms = _FORMS.get(op.name)
        for position, v in enumerate(op.reads):
            if v != NO_VALUE:
                yield v, (forms(op, position) if forms is not None else ()) or self._shape_form(v)

    def _operands(self, op: Operation) -> Iterator[Buffer]:
        for v, form in self._reads(op):
            if op.name in primitives.REDUCTIONS:
                yield from self._reduced(self._of(v), form)
            else:
                yield self._buffer(v, form)

    def _reduced(self, value: int, form: tuple[Any, ...]) -> Iterator[Buffer]:
        """A reduction takes elementwise work on operands of one shape in."""
        op = self._maker.get(value)
        if op is None or value in self._shared or op.name not in _ELEMENTWISE:
            yield self._buffer(value, form)
            return
        operands = [self._of(v) for v in op.reads if v != NO_VALUE]
        if any(self._ops.avals[v].shape != op.eqn.outvars[0].aval.shape for v in operands) or any(
            self._maker[v].name not in _ELEMENTWISE for v in operands if self._is_made_in_loop(v)
        ):
            yield self._buffer(value, form)
            return
        for v in operands:
            yield from self._reduced(v, ())


def _dot_form(op: Operation, position: int) -> tuple[Any, ...]:
    """The layout a product wants of an operand.

    One free and one contracted dim behind leading batch dims are taken in either order. Else the operand
    becomes a matrix: the first one with its contracted dims last, the second one with its free dims last.
    """
    if position > 1:
        return ()
    shape = op.eqn.invars[position].aval.shape
    batch, free, contracted = _dot_dims(op, position)
    if batch == list(range(len(batch))) and len(free) <= 1 and len(contracted) == 1:
        return ()
    order = [*batch, *free, *contracted] if position == 0 else [*batch, *contracted, *free]
    kept = [d for d in order if shape[d] > 1]
    if kept != sorted(kept):
        return ("layout", *order)
    return ("matrix",) if len(shape) > 2 and not batch else ()


def _dot_dims(op: Operation, position: int) -> tuple[list[int], list[int], list[int]]:
    """Batch, free and contracted dims of an operand."""
    contracted, batch = (dims[position] for dims in op.eqn.params["dimension_numbers"])
    rank = len(op.eqn.invars[position].aval.shape)
    free = [d for d in range(rank) if d not in contracted and d not in batch]
    return list(batch), free, list(contracted)


def _convolution_form(op: Operation, position: int) -> tuple[Any, ...]:
    """Images want rows first and features last, kernels input and output features last."""
    if position > 1:
        return ()
    numbers = op.eqn.params["dimension_numbers"]
    spec = (numbers.lhs_spec, numbers.rhs_spec)[position]
    order = (spec[0], *spec[2:], spec[1]) if position == 0 else (*spec[2:], spec[1], spec[0])
    return () if order == tuple(range(len(spec))) else ("layout", *order)


_FORMS: dict[str, Callable[[Operation, int], tuple[Any, ...]]] = {
    "dot_general": _dot_form,
    "conv_general_dilated": _convolution_form,
}
