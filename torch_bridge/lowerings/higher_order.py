"""Operators that take functions: cond, scan, while_loop, map, flex_attention.

The functions are `interpret.Subgraph`s: called with arrays, they return a tuple. An operator whose
functions draw random numbers gets a key, from which every iteration has its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.attention import Settings, attention
from torch_bridge.errors import BridgeError, message
from torch_bridge.interpret import Subgraph
from torch_bridge.lowerings import registry
from torch_bridge.lowerings.registry import lowering
from torch_bridge.program import Graph, Ref, refs, subgraphs

higher_order = torch.ops.higher_order
aten = torch.ops.aten


@lowering(higher_order.cond)
def cond(
    predicate: Any, true_branch: Subgraph, false_branch: Subgraph, operands: Any, *, rng: Any = None
) -> tuple[Any, ...]:
    if not isinstance(predicate, jax.Array):
        return (true_branch if predicate else false_branch)(*operands, rng=rng)
    return lax.cond(
        predicate.reshape(()),
        lambda: true_branch(*operands, rng=rng),
        lambda: false_branch(*operands, rng=rng),
    )


@lowering(higher_order.scan)
def scan(body: Subgraph, carry: Any, xs: Any, operands: Any, *, rng: Any = None) -> tuple[Any, ...]:
    """(last carry, results of every step stacked), flat."""

    def step(carried: Any, moving: Any) -> tuple[Any, Any]:
        index, slices = moving
        results = body(*carried, *slices, *operands, rng=_key_of(rng, index))
        return results[: len(carried)], results[len(carried) :]

    last, stacked = lax.scan(step, tuple(carry), (jnp.arange(xs[0].shape[0]), tuple(xs)))
    return (*last, *stacked)


@lowering(higher_order.while_loop)
def while_loop(
    condition: Subgraph, body: Subgraph, carried: Any, operands: Any, *, rng: Any = None
) -> tuple[Any, ...]:
    """JAX has no gradient of it in reverse: asking for one is an error."""

    def loop(carried: Any, operands: Any, rng: Any) -> tuple[Any, ...]:
        def go_on(state: Any) -> Any:
            index, values = state
            (predicate,) = condition(*values, *operands, rng=_key_of(rng, index))
            return predicate.reshape(())

        def step(state: Any) -> Any:
            index, values = state
            results = body(*values, *operands, rng=_key_of(rng, index))
            return index + 1, tuple(r.astype(v.dtype) for r, v in zip(results, values, strict=True))

        return lax.while_loop(go_on, step, (jnp.asarray(0), carried))[1]

    def refuse(_residuals: None, _cotangents: Any) -> Any:
        raise BridgeError(
            message(
                "the gradient of a while_loop is asked for, whose number of steps is not known.",
                *body.where,
                hint="use torch's scan over a fixed number of steps (torch.where for those that are not "
                "wanted), or .detach() what the loop returns",
            )
        )

    guarded = jax.custom_vjp(loop)
    guarded.defvjp(lambda *args: (loop(*args), None), refuse)
    return guarded(tuple(map(jnp.asarray, carried)), operands, rng)


@lowering(higher_order.map_impl)
def map_impl(body: Subgraph, xs: Any, operands: Any, *, rng: Any = None) -> tuple[Any, ...]:
    """All slices at once; one after another where the body has a loop or a branch of its own."""

    def one(moving: Any) -> Any:
        index, slices = moving
        return body(*slices, *operands, rng=_key_of(rng, index))

    moving = (jnp.arange(xs[0].shape[0]), tuple(xs))
    nested = any(any(subgraphs(node.args)) for node in body.graph.nodes)
    return lax.map(one, moving) if nested else jax.vmap(one)(moving)


@lowering(higher_order.auto_functionalized_v2, random=lambda written, **_: registry.draws(written))
def auto_functionalized(written: Any, *, _all_bases: Any, rng: Any = None, **kwargs: Any) -> tuple[Any, ...]:
    """A custom operator that writes its arguments: its results, and the new value of every base.

    The user's function returns, after the operator's results, the new values of what it writes.
    """
    found = registry.find(written)
    assert found is not None, "checked when exported"
    bases = list(_all_bases)
    views = {}
    for argument in written._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            views[argument.name] = _View.take(argument.name, kwargs)
    inputs = {name: None if view is None else view.read(bases) for name, view in views.items()}
    extra = {} if rng is None else {"rng": rng}
    results = found.function(**inputs, **kwargs, **extra)
    results = tuple(results) if isinstance(results, tuple | list) else (results,)
    num_results = len(written._schema.returns)
    news = results[num_results:]
    present = [view for view in views.values() if view is not None]
    for view, new in zip(present, news, strict=True):
        view.write(bases, new)
    return (*(results[:num_results] or (None,)), *bases)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What an operator writes: the base with this number, or a part of it.

    `parts` says which part, in the words of auto_functionalized_v2; a base lies in row-major order.
    """

    base: int
    parts: dict[str, Any]

    @staticmethod
    def take(name: str, kwargs: dict[str, Any]) -> "_View | None":
        """Out of the keywords of auto_functionalized_v2 for the argument of this name; None if it is None."""
        parts = {key: kwargs.pop(f"_{name}_{key}", None) for key in _VIEW_KEYS}
        base = parts.pop("base_index")
        return None if base is None else _View(base=base, parts=parts)

    def _elements(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """Where the part's elements lie in the base; None for the whole base."""
        size, dim = self.parts["size"], self.parts["slice_dim"]
        if size is not None:
            dims = zip(np.indices(size, sparse=True), self.parts["stride"], strict=True)
            return self.parts["storage_offset"] + sum(index * stride for index, stride in dims)
        if dim is not None:
            part = slice(self.parts["slice_start"], self.parts["slice_end"])
            return np.arange(math.prod(shape)).reshape(shape)[(slice(None),) * dim + (part,)]
        return None

    def read(self, bases: list[Any]) -> Any:
        base = bases[self.base]
        elements = self._elements(base.shape)
        return base if elements is None else base.reshape(-1)[elements]

    def write(self, bases: list[Any], new: Any) -> None:
        base = bases[self.base]
        elements = self._elements(base.shape)
        if elements is not None:
            new = base.reshape(-1).at[elements].set(new).reshape(base.shape)
        bases[self.base] = new


_VIEW_KEYS = (
    "base_index",
    "alias",
    "size",
    "stride",
    "storage_offset",
    "slice_dim",
    "slice_start",
    "slice_end",
)


def _key_of(rng: Any, index: Any) -> Any:
    return None if rng is None else jax.random.fold_in(rng, index)


@lowering(higher_order.flex_attention)
def flex_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    score_mod: Subgraph,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_operands: Any = (),
    mask_operands: Any = (),
) -> tuple[Any, Any, Any]:
    """(output, logsumexp and largest score in units of log 2); the last two only where asked for.

    A score_mod that adds to the score, or leaves it, is a bias of ordinary attention. Any other one is
    computed densely, and again in the backward, so that no score is saved.
    """
    mask_mod: Subgraph = block_mask[-1]
    positions = _Positions(query, key)
    allowed = positions.table(mask_mod.graph, 0, lambda *at: mask_mod(*at, *mask_operands)[0])

    def score_table(scores: Any) -> jax.Array:
        return positions.table(score_mod.graph, 1, lambda *at: score_mod(*at, *score_operands)[0], scores)

    wants_more = kernel_options.get("OUTPUT_LOGSUMEXP") or kernel_options.get("OUTPUT_MAX")
    if not wants_more and _adds_to_score(score_mod.graph):
        zero = jnp.zeros((1, 1, 1, 1), _wide(query))
        bias = None if score_mod.graph.outputs == (Ref(0),) else score_table(zero)
        key, value = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
        settings = Settings(scale=scale)
        return attention(query, key, value, bias=bias, allowed=allowed, settings=settings), None, None
    return jax.checkpoint(partial(_dense, score_table=score_table, scale=scale))(query, key, value, allowed)


def _dense(
    query: Any, key: Any, value: Any, allowed: Any, *, score_table: Callable[..., Any], scale: float
) -> tuple[Any, Any, Any]:
    groups = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, groups, 1) for x in (key, value))
    scores = jnp.matmul(query.astype(_wide(query)), key.astype(_wide(query)).swapaxes(-1, -2)) * scale
    scores = jnp.where(allowed, score_table(scores), -jnp.inf)
    largest = jnp.max(scores, -1, keepdims=True)
    shift = lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0.0))
    weights = jnp.where(scores == -jnp.inf, 0.0, jnp.exp(scores - shift))
    total = jnp.sum(weights, -1, keepdims=True)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    output = jnp.matmul((weights / total).astype(query.dtype), value.astype(query.dtype))
    logsumexp = jnp.where(seen, jnp.log(total) + shift, -jnp.inf)
    return output, logsumexp[..., 0] / math.log(2), largest[..., 0] / math.log(2)


def _wide(x: jax.Array) -> np.dtype:
    return np.dtype(jnp.promote_types(x.dtype, np.float32))


class _Positions:
    """Positions (batch, head, query, key) of an attention's scores."""

    def __init__(self, query: jax.Array, key: jax.Array) -> None:
        self.sizes = (*query.shape[:3], key.shape[2])

    def table(self, graph: Graph, first: int, function: Callable[..., Any], *scores: Any) -> jax.Array:
        """`function(*scores, batch, head, query, key)` at every position, `[batch, heads, queries, keys]`.

        `first` is the graph's first input that is a position. Dims whose position the graph does not read
        are 1 wide.
        """
        read = {ref.index for ref in refs((tuple((n.args, n.kwargs) for n in graph.nodes), graph.outputs))}
        sizes = [size if first + dim in read else 1 for dim, size in enumerate(self.sizes)]
        sizes = [max(size, *(s.shape[dim] for s in scores), 1) for dim, size in enumerate(sizes)]
        scores = tuple(jnp.broadcast_to(s, sizes) for s in scores)
        for dim in reversed(range(4)):
            axes: list[int | None] = [None] * 4
            axes[dim] = 0
            function = jax.vmap(function, in_axes=(*(0 for _ in scores), *axes))
        return function(*scores, *(jnp.arange(size, dtype=np.int32) for size in sizes))


def _adds_to_score(graph: Graph) -> bool:
    """Whether a score_mod returns its score, or the sum of that and something else."""
    (result,) = graph.outputs
    if result == Ref(0):
        return True
    readers = [n for n in graph.nodes for ref in refs((n.args, n.kwargs)) if ref == Ref(0)]
    if not isinstance(result, Ref) or result.index < graph.num_inputs:
        return False
    last = graph.nodes[result.index - graph.num_inputs]
    return last.operator is aten.add.Tensor and readers == [last] and not last.kwargs
