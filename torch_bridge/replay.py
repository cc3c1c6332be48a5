"""Doing what a journal says: exactly in torch, or in JAX with JAX's random numbers.

Values that follow from no random numbers (rotary frequencies, position ids, masks) are computed by
torch's own kernels, bit for bit. Others are recipes: pure JAX functions of a key, from the same operators
that converted modules run on. Random numbers belong to their entry of the journal, so two tensors that
share a draw (a weight and its norm) agree, and each tensor can be made alone, on its own devices.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_bridge.errors import BridgeError, message
from torch_bridge.journal import Entry, Given, Journal, View, truncated_normal
from torch_bridge.lowerings import registry
from torch_bridge.program import map_leaves, tree_map
from torch_bridge.tensors import jax_dtype, to_jax

_aten = torch.ops.aten
_RANDOM = torch.Tag.nondeterministic_seeded
# Memory that nobody wrote: zeros here, whatever it happens to hold in torch.
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
}
_FILLS = {
    *_EMPTY, _aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.zero_.default,
    _aten.fill_.Scalar, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
}  # fmt: skip


def _zeros(x: Any) -> Any:
    return jnp.zeros_like(x)


def _same(x: Any) -> Any:
    return x


def _integers(x: Any, low: int = 0, high: int | None = None, *, rng: Any) -> Any:
    """random_: whole numbers, all that the dtype counts exactly if no bound is given."""
    if high is None and jnp.issubdtype(x.dtype, jnp.floating):
        high = 2 ** (jnp.finfo(x.dtype).nmant + 1) + 1
    high = int(jnp.iinfo(jnp.int32).max) if high is None else high
    return jax.random.randint(rng, x.shape, low, high).astype(x.dtype)


def _flips(x: Any, p: Any = 0.5, *, rng: Any) -> Any:
    return jax.random.bernoulli(rng, p, x.shape).astype(x.dtype)


def _truncated(x: Any, mean: float, std: float, a: float, b: float, *, rng: Any) -> Any:
    low, high = (a - mean) / std, (b - mean) / std
    drawn = jax.random.truncated_normal(rng, low, high, x.shape, jnp.promote_types(x.dtype, jnp.float32))
    return jnp.clip(drawn * std + mean, a, b).astype(x.dtype)


# Operators that only constructors use; the others are those of `lowerings`.
_REPLAYS: dict[Any, Callable[..., Any]] = {
    _aten.zero_.default: _zeros,
    _aten.lift_fresh.default: _same,
    _aten.random_.default: _integers,
    getattr(_aten.random_, "from"): _integers,
    _aten.random_.to: lambda x, high, *, rng: _integers(x, 0, high, rng=rng),
    _aten.bernoulli_.float: _flips,
    _aten.bernoulli_.Tensor: _flips,
}


def is_random(journal: Journal, recipe: Sequence[int]) -> bool:
    """Whether any entry of a recipe draws random numbers."""
    return any(_RANDOM in journal.entries[index].operator.tags for index in recipe)


def is_fill(journal: Journal, recipe: Sequence[int]) -> bool:
    """Whether a recipe only fills memory with a number."""
    return all(journal.entries[index].operator in _FILLS for index in recipe)


def exact(journal: Journal, view: View, name: str) -> torch.Tensor:
    """The values of a view by torch itself.

    Raises:
        BridgeError: if they follow from random numbers, or from memory that nobody wrote.
    """
    recipe = journal.recipe(view)
    if not recipe or is_random(journal, recipe):
        what = "random numbers" if recipe else "what was not recorded"
        raise BridgeError(message(f"the values of {name} follow from {what}."))
    memory: dict[int, torch.Tensor] = {}

    def window(v: View) -> torch.Tensor:
        if v.storage not in memory:
            memory[v.storage] = torch.zeros(journal.sizes[v.storage], dtype=v.dtype)
        return memory[v.storage].as_strided(v.size, v.stride, v.offset)

    def leaf(value: Any) -> Any:
        if isinstance(value, View):
            return window(value)
        if isinstance(value, Given):
            return journal.constants[value.index]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        for index in recipe:
            entry = journal.entries[index]
            result = entry.operator(*map_leaves(leaf, entry.args), **map_leaves(leaf, entry.kwargs))
            if not entry.in_place:
                results = result if isinstance(result, tuple | list) else (result,)
                tensors = [r for r in results if isinstance(r, torch.Tensor)]
                for v, tensor in zip(entry.writes, tensors, strict=True):
                    window(v).copy_(tensor)
        return window(view).clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make one array from a key.

    Args:
        steps: entries with storages numbered from 0, and constants by their place in `constants`.
        sizes: elements of each storage.
        view: the result.
        draws: numbers of the random entries, folded into the key.
        constants: tensors that had values when they were used.
    """

    steps: tuple[Entry, ...]
    sizes: tuple[int, ...]
    view: View
    draws: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]

    def __call__(self, key: Any) -> jax.Array:
        """The array, in its torch shape and dtype. Recipes of equal steps are traced and compiled once."""
        make = _compiled(_Program(self.steps, self.sizes, self.view))
        constants = [to_jax(c) for c in self.constants]
        return make(key, np.asarray(self.draws, np.uint32), constants)


def recipe_of(journal: Journal, view: View, name: str) -> Recipe:
    """The recipe of a view.

    Raises:
        BridgeError: nothing was recorded of it, or an operator cannot be replayed (it is named).
    """
    indices = journal.recipe(view)
    if not indices:
        raise BridgeError(
            message(
                f"no initialisation of {name} was recorded.",
                hint="build the module under torch_bridge.fake_init(), or give values: from_state_dict",
            )
        )
    storages: dict[int, int] = {}
    constants: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, View):
            number = storages.setdefault(value.storage, len(storages))
            return View(number, value.offset, value.size, value.stride, value.dtype)
        if isinstance(value, Given):
            constants.append(journal.constants[value.index])
            return Given(len(constants) - 1)
        return value

    steps: list[Entry] = []
    for index in indices:
        entry = journal.entries[index]
        _check_replayed(entry, name)
        steps.append(
            Entry(
                operator=entry.operator,
                args=tree_map(leaf, entry.args),
                kwargs=tree_map(leaf, entry.kwargs),
                reads=frozenset(),
                writes=tuple(leaf(v) for v in entry.writes),
                in_place=entry.in_place,
                overwrites=entry.overwrites,
            )
        )
    final = leaf(view)
    return Recipe(
        steps=tuple(steps),
        sizes=tuple(journal.sizes[storage] for storage in storages),
        view=final,
        draws=tuple(i for i in indices if _RANDOM in journal.entries[i].operator.tags),
        constants=tuple(constants),
    )


def _check_replayed(entry: Entry, name: str) -> None:
    if entry.operator in _EMPTY or _function(entry.operator) is not None:
        return
    raise BridgeError(
        message(
            f"{entry.operator} has no replay in JAX; the initialisation of {name} uses it.",
            hint=f"@torch_bridge.register_lowering({_functional(entry.operator)}), or give values: "
            "from_state_dict",
        )
    )


def _function(operator: Any) -> Callable[..., Any] | None:
    """The JAX function of an operator's arguments that computes what it returns or writes."""
    if operator in _REPLAYS:
        return _REPLAYS[operator]
    if operator is truncated_normal():
        return _truncated
    found = registry.find(_functional(operator))
    return None if found is None else found.function


def _functional(operator: Any) -> Any:
    """The functional operator that computes what an in-place one writes; others are their own."""
    if not operator._schema.is_mutable:
        return operator
    name, overload = operator._schema.name.split("::")[1], operator._overloadname
    if operator is _aten.normal_.default:
        return _aten.normal_functional.default
    if any(argument.is_out for argument in operator._schema.arguments):
        overload = overload.removesuffix("out").removesuffix("_") or "default"
    return getattr(getattr(_aten, name.removesuffix("_"), None), overload, operator)


class _Program:
    """Steps that are traced once, compared by what they say."""

    def __init__(self, steps: tuple[Entry, ...], sizes: tuple[int, ...], view: View) -> None:
        self.steps, self.sizes, self.view = steps, sizes, view
        words = tuple((e.operator, _frozen(e.args), _frozen(e.kwargs), e.writes) for e in steps)
        self.words: Hashable = (words, sizes, view)

    def __hash__(self) -> int:
        return hash(self.words)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and self.words == other.words

    def run(self, key: Any, draws: Any, constants: Sequence[jax.Array]) -> jax.Array:
        memory: dict[int, jax.Array] = {}
        keys = iter(draws)
        for entry in self.steps:
            if entry.operator not in _EMPTY:
                self._step(entry, memory, key, keys, constants)
        return self._read(memory, self.view)

    def _step(self, entry: Entry, memory: dict[int, jax.Array], key: Any, keys: Any, constants: Any) -> None:
        def leaf(value: Any) -> Any:
            if isinstance(value, View):
                return self._read(memory, value)
            return constants[value.index] if isinstance(value, Given) else value

        function = _function(entry.operator)
        assert function is not None, "checked when the recipe was made"
        args, kwargs = tree_map(leaf, entry.args), tree_map(leaf, entry.kwargs)
        for unused in ("generator", "out"):
            kwargs.pop(unused, None)
        if _RANDOM in entry.operator.tags:
            kwargs["rng"] = jax.random.fold_in(key, next(keys))
        result = function(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        for view, value in zip(entry.writes, results, strict=False):
            self._write(memory, view, value)

    def _read(self, memory: dict[int, jax.Array], view: View) -> jax.Array:
        flat = memory.get(view.storage)
        if flat is None:
            return jnp.zeros(view.size, jax_dtype(view.dtype))
        if _is_dense(view):
            return jax.lax.slice(flat, (view.offset,), (view.offset + math.prod(view.size),)).reshape(
                view.size
            )
        return flat[_positions(view)]

    def _write(self, memory: dict[int, jax.Array], view: View, value: jax.Array) -> None:
        dtype, size = jax_dtype(view.dtype), self.sizes[view.storage]
        value = jnp.broadcast_to(value, view.size).astype(dtype)
        if _is_dense(view) and math.prod(view.size) == size:
            memory[view.storage] = value.reshape(-1)
            return
        flat = memory.get(view.storage)
        flat = jnp.zeros(size, dtype) if flat is None else flat
        if _is_dense(view):
            memory[view.storage] = jax.lax.dynamic_update_slice(flat, value.reshape(-1), (view.offset,))
        else:
            memory[view.storage] = flat.at[_positions(view)].set(value)


@functools.lru_cache(maxsize=4096)
def _compiled(program: _Program) -> Any:
    return jax.jit(program.run)


def _frozen(tree: Any) -> Hashable:
    if isinstance(tree, list | tuple):
        return tuple(_frozen(item) for item in tree)
    if isinstance(tree, dict):
        return tuple((key, _frozen(value)) for key, value in tree.items())
    return (type(tree), repr(tree)) if isinstance(tree, int | float | complex) else tree


def _is_dense(view: View) -> bool:
    """Whether the window's elements lie one after another, in order."""
    expected = 1
    for length, stride in zip(reversed(view.size), reversed(view.stride), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _positions(view: View) -> np.ndarray:
    """The place in storage of each element of a window."""
    places = np.full((), view.offset, np.int32)
    for length, stride in zip(view.size, view.stride, strict=True):
        places = places[..., None] + np.arange(length, dtype=np.int32) * stride
    return places
