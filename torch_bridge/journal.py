"""What is computed while a module is built without memory, written down so that it can be done later.

Under `fake_init` every tensor is fake. Each operation that makes or writes memory is an entry; views are
not entries, since a tensor is known by its storage, offset, size and strides. From the end backwards, the
entries that a tensor's values depend on are its recipe.
"""

import contextlib
import functools
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torch_bridge.fake import Lending, lent
from torch_bridge.program import map_leaves
from torch_bridge.tensors import is_abstract

_aten = torch.ops.aten
# In-place operators whose result does not depend on what was there.
_OVERWRITE = {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_",
    "cauchy_", "geometric_", "set_data",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a window on a storage."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor that had values when it was used: its number among the journal's constants."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One operation. `writes` are its results, or the arguments that it writes in place."""

    operator: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: tuple[View, ...]
    in_place: bool
    overwrites: bool


class Journal:
    """Entries in order. Storages are numbered as they are met."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.constants: list[torch.Tensor] = []
        self.sizes: list[int] = []
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []  # storages stay alive, so that their addresses name one only
        self._writers: defaultdict[int, list[int]] = defaultdict(list)

    def view(self, tensor: torch.Tensor) -> View:
        """The window that a fake tensor is."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = len(self._kept)
            self._kept.append(storage)
            self.sizes.append(storage.nbytes() // tensor.element_size())
        number = self._storages[storage._cdata]
        return View(number, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def note(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Append what an operation did, unless it only made views."""
        if torch.Tag.inplace_view in operator.tags:
            return
        reads: set[int] = set()

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if not isinstance(value, FakeTensor):
                self.constants.append(value.detach().clone())
                return Given(len(self.constants) - 1)
            view = self.view(value)
            reads.add(view.storage)
            return view

        args, kwargs = map_leaves(leaf, args), map_leaves(leaf, kwargs)
        in_place = operator._schema.is_mutable
        if in_place:
            writes = tuple(_written(operator, args, kwargs))
        else:
            results = result if isinstance(result, tuple | list) else (result,)
            writes = tuple(self.view(r) for r in results if isinstance(r, torch.Tensor))
            if not writes or any(view.storage in reads for view in writes):
                return
        whole = all(_covers(view, self.sizes[view.storage]) for view in writes)
        name = operator._schema.name.split("::")[1]
        overwrites = whole and (not in_place or name in _OVERWRITE)
        for view in writes:
            self._writers[view.storage].append(len(self.entries))
        self.entries.append(
            Entry(
                operator=operator,
                args=args,
                kwargs=kwargs,
                reads=frozenset(reads),
                writes=writes,
                in_place=in_place,
                overwrites=overwrites,
            )
        )

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether something has written a tensor since its memory was had."""
        return any(self.entries[index].in_place for index in self.recipe(self.view(tensor)))

    def recipe(self, view: View) -> tuple[int, ...]:
        """Numbers of the entries that the values of a view follow from, in order."""
        needed: set[int] = set()
        asked = [(view.storage, len(self.entries))]
        while asked:
            storage, before = asked.pop()
            for index in reversed(self._writers[storage]):
                if index >= before:
                    continue
                entry = self.entries[index]
                if index not in needed:
                    needed.add(index)
                    reads = entry.reads
                    if entry.in_place and entry.overwrites:
                        reads = reads - {v.storage for v in entry.writes}
                    asked += [(read, index) for read in reads]
                if entry.overwrites:
                    break
        return tuple(sorted(needed))


def _written(operator: Any, args: Any, kwargs: Any) -> Iterator[View]:
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (value if isinstance(value, list | tuple) else (value,))


def _covers(view: View, size: int) -> bool:
    """Whether a view reaches all of its storage (no dim is expanded)."""
    count = 1
    for length in view.size:
        count *= length
    return (
        view.offset == 0
        and count == size
        and all(s > 0 for s, n in zip(view.stride, view.size, strict=True) if n > 1)
    )


class Recording(Lending):
    """A fake mode that keeps a journal."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal()

    def __deepcopy__(self, _memo: Any) -> "Recording":
        return self  # copies of a tensor live where it lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._value(args[0])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(func, torch._ops.OpOverload) and result is not NotImplemented:
            self.journal.note(func, args, kwargs, result)
        return result

    def _value(self, tensor: torch.Tensor) -> Any:
        """The number that Python asks for: computed now, for real."""
        from torch_bridge.replay import exact  # the replay reads journals

        return exact(self.journal, self.journal.view(tensor), "a number that the constructor reads").item()


@contextlib.contextmanager
def fake_init() -> Iterator[None]:
    """Build modules inside without memory; how they would have been initialised is kept with them.

    The modules can be converted, planned and cut like any other. Their parameters are shapes, computed
    buffers have their exact values, and `JaxModule.init` draws parameters from the distributions that
    the constructor draws them from.

    Example:
        >>> import torch
        >>> with fake_init():
        ...     module = torch.nn.Linear(100_000, 100_000)
        >>> tuple(module.weight.shape)
        (100000, 100000)
    """
    with warnings.catch_warnings(), _truncated_normals_as_one_operator(), Recording():
        # copy.deepcopy of a tensor asks for its address first.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


@functools.cache
def truncated_normal() -> Any:
    """`torch_bridge::trunc_normal_`, defined when it is first needed.

    torch's own draws until all numbers lie between the bounds: a loop that asks for values.
    """
    schema = "(Tensor(a!) self, float mean, float std, float a, float b) -> Tensor(a!)"
    name = "torch_bridge::trunc_normal_"
    torch.library.define(name, schema, tags=(torch.Tag.nondeterministic_seeded,))
    torch.library.register_fake(name, lambda tensor, _mean, _std, _a, _b: tensor)
    return torch.ops.torch_bridge.trunc_normal_.default


@contextlib.contextmanager
def _truncated_normals_as_one_operator() -> Iterator[None]:
    plain = torch.nn.init._no_grad_trunc_normal_

    def one(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        if not isinstance(tensor, FakeTensor):
            return plain(tensor, mean, std, a, b, generator)
        with torch.no_grad():
            truncated_normal()(tensor, mean, std, a, b)
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = one
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = plain


def stand_ins(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Recorded twins of a module's tensors, if the module can initialise itself again.

    A Hugging Face model built without memory and without a record does: `initialize_weights` writes every
    parameter, and the computed buffers, since loading a checkpoint relies on it.

    Returns:
        id of a tensor that has neither values nor a record -> a fake tensor that has a record.
    """
    held = [*module.parameters(), *module.buffers()]
    if all(not is_abstract(t) or journal_of(t) is not None for t in held):
        return {}
    mode = Recording()
    with lent(module, mode) as pairs:
        for inner in module.modules():
            inner.__dict__.pop("_is_hf_initialized", None)
        with contextlib.suppress(Exception), _truncated_normals_as_one_operator(), mode, torch.no_grad():
            for inner in _self_initialising(module):
                inner.initialize_weights()
    return {
        id(tensor): twin
        for tensor, twin in pairs
        if is_abstract(tensor) and journal_of(tensor) is None and mode.journal.is_written(twin)
    }


def _self_initialising(module: torch.nn.Module) -> Iterator[Any]:
    if callable(getattr(module, "initialize_weights", None)):
        yield module
        return
    for inner in module.children():
        yield from _self_initialising(inner)


def journal_of(tensor: torch.Tensor) -> Journal | None:
    """The journal of the `fake_init` that a tensor was made in."""
    mode = getattr(tensor, "fake_mode", None)
    return mode.journal if isinstance(mode, Recording) else None
