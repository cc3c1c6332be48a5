"""A user's function and the abstract arguments it is traced with.

`Subject` says which keyword arguments the function takes; `Example` holds shapes and dtypes of all
arguments and which dim of every batch leaf carries the rows. Both are data: nothing is traced here.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rannc_jax.errors import TraceError, message

KEYWORDS = ("rng", "model_state", "frozen")
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is to be cut.

    Args:
        fn: `fn(params, batch, **keywords)`, or `fn(params, *batch)` if `spread`.
        takes: which of "rng", "model_state", "frozen" it takes.
        optional: those of them that have a default; they are taken only if they are given.
        is_loss: the result is a loss (else: any outputs, forward only).
        spread: the batch is a tuple of positional arguments.
    """

    fn: Callable[..., Any]
    takes: frozenset[str]
    optional: frozenset[str] = frozenset()
    is_loss: bool = True
    spread: bool = False

    def with_given(self, **given: Any) -> "Subject":
        """The subject that takes what is required and what is given (not None)."""
        left_out = {name for name in self.optional if given.get(name) is None}
        return replace(self, takes=self.takes - left_out, optional=frozenset())

    @property
    def name(self) -> str:
        return getattr(self.fn, "__qualname__", type(self.fn).__name__)

    def __call__(self, params: Any, batch: Any, keywords: dict[str, Any]) -> Any:
        given = {k: v for k, v in keywords.items() if k in self.takes}
        return self.fn(params, *batch, **given) if self.spread else self.fn(params, batch, **given)


def subject(
    fn: Callable[..., Any], takes: Iterable[str] | None = None, *, is_loss: bool = True, spread: bool = False
) -> Subject:
    """Read once which keyword arguments `fn` takes.

    Raises:
        TraceError: `takes` names something else than rng, model_state, frozen.
    """
    optional: set[str] = set()
    if takes is None:
        try:
            found = inspect.signature(fn).parameters
        except (TypeError, ValueError):
            found = {}
        takes = [name for name in KEYWORDS if name in found]
        optional = {name for name in takes if found[name].default is not inspect.Parameter.empty}
    unknown = sorted(set(takes) - set(KEYWORDS))
    if unknown:
        raise TraceError(
            message(f"takes={unknown} is not understood.", hint=f"any of {', '.join(KEYWORDS)}.")
        )
    return Subject(
        fn=fn, takes=frozenset(takes), optional=frozenset(optional), is_loss=is_loss, spread=spread
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Shapes and dtypes of everything a subject is called with.

    Every tree holds `jax.ShapeDtypeStruct` leaves; what the subject does not take is None.
    `batch_dims` has one entry a batch leaf, in flattening order. `rows` is the number of batch rows.
    """

    params: Any
    batch: Any
    frozen: Any = None
    model_state: Any = None
    rng: Any = None
    batch_dims: tuple[int | None, ...]
    rows: int

    def with_rows(self, rows: int) -> Any:
        """The batch with another number of rows."""
        leaves, tree = jax.tree.flatten(self.batch)
        resized = []
        for leaf, dim in zip(leaves, self.batch_dims, strict=True):
            shape = list(leaf.shape)
            if dim is not None:
                shape[dim] = rows
            resized.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
        return tree.unflatten(resized)


def abstract(tree: Any) -> Any:
    """Shapes and dtypes of a tree of arrays, numpy arrays, scalars or ShapeDtypeStructs."""

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        if isinstance(x, (bool, int, float, complex)):
            x = jnp.asarray(x)
        elif not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) and not hasattr(x, "__jax_array__"):
            x = np.asarray(x)  # numpy arrays, and what can be one without a copy (torch tensors)
        dtype = x.dtype
        if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(tuple(x.shape), dtype)

    return jax.tree.map(leaf, tree)


def make_example(
    who: Subject,
    params: Any,
    batch: Any,
    *,
    frozen: Any = None,
    model_state: Any = None,
    rng: Any = None,
    batch_dims: Any = AUTO,
) -> Example:
    """Collect the abstract arguments of a subject.

    Raises:
        TraceError: something taken is not given, or batch leaves disagree about the number of rows.
    """
    given = {"frozen": frozen, "model_state": model_state, "rng": rng}
    for name in KEYWORDS:
        if name in who.takes and given[name] is None:
            raise TraceError(
                message(
                    f"{who.name} takes {name}, but none was given.",
                    hint=f"init(params, batch, {name}=...)"
                    + (", for example rng=jax.random.key(0)." if name == "rng" else "."),
                )
            )
    shapes = abstract(batch)
    dims, rows = _batch_dims(shapes, batch_dims)
    taken = {k: abstract(v) if k in who.takes else None for k, v in given.items()}
    return Example(params=abstract(params), batch=shapes, batch_dims=dims, rows=rows, **taken)


def _batch_dims(batch: Any, batch_dims: Any) -> tuple[tuple[int | None, ...], int]:
    paths, leaves = path_leaves(batch)
    if not leaves:
        raise TraceError(message("the batch is empty.", hint="a pytree with at least one array."))
    wanted = _given_dims(batch, batch_dims, len(leaves))
    found: list[int | None] = []
    for path, leaf, dim in zip(paths, leaves, wanted, strict=True):
        found.append((0 if leaf.ndim else None) if dim == AUTO else _dim_of(path, leaf, dim))
    sizes = [None if dim is None else leaf.shape[dim] for leaf, dim in zip(leaves, found, strict=True)]
    rows = max((s for s in sizes if s is not None), default=1)
    for i, dim in enumerate(wanted):
        if dim == AUTO and sizes[i] == 1 and rows != 1:
            found[i] = sizes[i] = None
    if any(s not in (None, rows) for s in sizes):
        listing = [
            f"{path}: {tuple(leaf.shape)}, dim {dim}" + (f" has {size} rows" if size is not None else "")
            for path, leaf, dim, size in zip(paths, leaves, found, sizes, strict=True)
        ]
        raise TraceError(
            message(
                "batch leaves disagree about the number of rows.",
                *listing,
                hint="batch_dims=, a pytree like the batch with the dim that carries the rows of every leaf, "
                "or None for leaves without rows.",
            )
        )
    if rows == 0:
        raise TraceError(message("the batch has no rows.", hint="leave empty batches out."))
    return tuple(found), rows


def _dim_of(path: str, leaf: Any, dim: int | None) -> int | None:
    """A dim the user gave, counted from the front."""
    if dim is None or -leaf.ndim <= dim < leaf.ndim:
        return None if dim is None else dim % leaf.ndim
    raise TraceError(
        message(
            "batch_dims names a dim that is not there.",
            f"{path}: shape {tuple(leaf.shape)}, dim {dim}",
            hint=f"a dim below {leaf.ndim}, or None for a leaf without rows.",
        )
    )


def _given_dims(batch: Any, batch_dims: Any, count: int) -> list[Any]:
    if isinstance(batch_dims, str):
        return [AUTO] * count
    try:
        full = jax.tree.broadcast(batch_dims, batch, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise TraceError(
            message("batch_dims does not fit the batch.", str(error), hint="a tree prefix of the batch.")
        ) from error
    return jax.tree.leaves(full, is_leaf=lambda x: x is None)


def path_leaves(tree: Any, root: str = "batch") -> tuple[list[str], list[Any]]:
    """Pytree paths ("batch['x']") and leaves of a tree."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [root + jax.tree_util.keystr(path) for path, _ in pairs], [leaf for _, leaf in pairs]
