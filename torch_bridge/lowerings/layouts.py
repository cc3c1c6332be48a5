"""What lowerings do with values that lie channels-last, as rules: from the lowering of arrays in torch's
order to one of values in either layout.

A rule is given to `lowering(..., layouts=)`. The function it makes takes every value as it lies, and keeps
it channels-last where the operator can; where it cannot, it turns the value to torch's order first, as the
interpreter does for operators without a rule. The result means the same in either case.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.layout import ChannelsLast, channels_last, channels_second, is_array, place, plain
from torch_bridge.program import tree_map

Function = Callable[..., Any]
Rule = Callable[[Function], Function]


def pointwise(function: Function) -> Function:
    """Of operators whose result at a place depends on the operands at that place, broadcast."""

    @functools.wraps(function)
    def in_layout(*args: Any, **kwargs: Any) -> Any:
        rank = _common_rank((args, kwargs))
        if rank is None:
            return function(*plain(args), **plain(kwargs))
        args, kwargs = tree_map(lambda leaf: _aligned(leaf, rank), (args, kwargs))
        return tree_map(ChannelsLast, function(*args, **kwargs))

    return in_layout


def _common_rank(operands: Any) -> int | None:
    """Of operands that meet, the rank, if they had better meet channels-last: if a largest one lies so."""
    found = [leaf for leaf in jax.tree.leaves(operands) if is_array(leaf)]
    if not any(isinstance(x, ChannelsLast) for x in found):
        return None
    rank, size = max(x.ndim for x in found), max(x.size for x in found)
    lying = any(isinstance(x, ChannelsLast) and x.ndim == rank and x.size == size for x in found)
    return rank if lying else None


def _aligned(leaf: Any, rank: int) -> Any:
    """An operand as it meets channels-last ones of this rank; numbers stay numbers."""
    if isinstance(leaf, ChannelsLast) and leaf.ndim == rank:
        return leaf.array
    leaf = plain(leaf)
    if not is_array(leaf) or not leaf.ndim:
        return leaf
    return channels_last(leaf.reshape((1,) * (rank - leaf.ndim) + leaf.shape))


def in_space(rank: int | None = None) -> Rule:
    """Of functions of an image that know both layouts, told by `channels_last=`; further results are plain.

    Args:
        rank: how many dims the image has with batch and channels; None for any number.
    """

    def rule(function: Function) -> Function:
        @functools.wraps(function)
        def in_layout(x: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = plain(args), plain(kwargs)
            if not isinstance(x, ChannelsLast) or rank not in (None, x.ndim):
                return function(plain(x), *args, **kwargs)
            result = function(x.array, *args, channels_last=True, **kwargs)
            if isinstance(result, tuple):
                return (ChannelsLast(result[0]), *result[1:])
            return ChannelsLast(result)

        return in_layout

    return rule


def convolving(function: Function) -> Function:
    """Of convolutions, which lay every batch of images channels-last; `channels_last=` says that it is."""

    @functools.wraps(function)
    def in_layout(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        weight, args, kwargs = plain((weight, args, kwargs))
        if x.ndim != weight.ndim:  # one image without a batch
            return function(plain(x), weight, *args, **kwargs)
        array = x.array if isinstance(x, ChannelsLast) else channels_last(x)
        return ChannelsLast(function(array, weight, *args, channels_last=True, **kwargs))

    return in_layout


def along(name: str, *, last: bool = False) -> Rule:
    """Of functions that work along dims, or reduce them away, each result alike.

    Args:
        name: of the argument that says which dims. None and () must not depend on the order of elements.
        last: only where the dim is the one of channels, and so lies last.
    """

    def rule(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def in_layout(x: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = plain(args), plain(kwargs)
            if not isinstance(x, ChannelsLast):
                return function(x, *args, **kwargs)
            call = signature.bind(x.array, *args, **kwargs)
            call.apply_defaults()
            dims = _listed(call.arguments[name], x.ndim)
            if last and dims != (1,):
                return function(plain(x), *args, **kwargs)
            if dims:
                places = tuple(place(dim, x.ndim) for dim in dims)
                call.arguments[name] = places[0] if isinstance(call.arguments[name], int) else places
            result = function(*call.args, **call.kwargs)
            return tree_map(lambda out: _reduced(out, x.ndim, dims), result)

        return in_layout

    return rule


def _listed(dims: Any, ndim: int) -> tuple[int, ...]:
    listed = (dims,) if isinstance(dims, int) else tuple(dims or ())
    return tuple(dim % ndim for dim in listed)


def _reduced(out: Any, ndim: int, dims: Sequence[int]) -> Any:
    """What is left of a channels-last array of `ndim` dims, some of `dims` perhaps gone."""
    if out.ndim == ndim:
        return ChannelsLast(out)
    if out.ndim < 2 or 1 in dims or (out.ndim == 2 and 0 not in dims):  # in torch's order as they are
        return out
    return jnp.moveaxis(out, -1, 0) if 0 in dims else ChannelsLast(out)


def joining(function: Function) -> Function:
    """Of functions that put arrays of one rank one after another."""

    @functools.wraps(function)
    def in_layout(tensors: Sequence[Any], dim: int = 0) -> Any:
        rank = _common_rank(tensors)
        if rank is None or any(x.ndim != rank for x in tensors):
            return function(plain(tensors), dim)
        return ChannelsLast(function([_aligned(x, rank) for x in tensors], place(dim, rank)))

    return in_layout


def reading_order(function: Function) -> Function:
    """Of functions that show the elements, in reading order, in another shape."""

    @functools.wraps(function)
    def in_layout(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, ChannelsLast):
            return function(x, *plain(args), **plain(kwargs))
        whole = jax.ShapeDtypeStruct(x.shape, x.dtype)
        shape = jax.eval_shape(lambda y: function(y, *plain(args), **plain(kwargs)), whole).shape
        batch, channels, *space = x.shape
        if channels == 1 or math.prod(space) == 1:
            return x.array.reshape(shape)
        if shape[:2] == (batch, channels) and len(shape) > 2:
            return ChannelsLast(x.array.reshape(batch, *shape[2:], channels))
        return channels_second(x.array).reshape(shape)

    return in_layout


def permuting(function: Function) -> Function:
    """Of functions that permute dims. To move channels last, or the last dim second, moves no element."""

    @functools.wraps(function)
    def in_layout(x: Any, *args: Any, **kwargs: Any) -> Any:
        # The sizes of such an array are the numbers of its dims.
        numbered = jax.ShapeDtypeStruct(tuple(range(x.ndim)), np.float32)
        order = jax.eval_shape(lambda y: function(y, *args, **kwargs), numbered).shape
        if not isinstance(x, ChannelsLast):
            to_second = (0, x.ndim - 1, *range(1, x.ndim - 1))
            return ChannelsLast(x) if x.ndim > 2 and order == to_second else function(x, *args, **kwargs)
        if order == tuple(range(x.ndim)):
            return x
        places = tuple(place(dim, x.ndim) for dim in order)
        return x.array if places == tuple(range(x.ndim)) else jnp.transpose(x.array, places)

    return in_layout


def broadcasting(function: Function) -> Function:
    """Of functions that broadcast to a shape; one number a channel becomes an image channels-last."""

    @functools.wraps(function)
    def in_layout(x: Any, shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        per_channel = x.ndim > 2 and x.shape[1] > 1 and math.prod(x.shape[2:]) == 1
        if len(shape) != x.ndim or not (per_channel or isinstance(x, ChannelsLast)):
            return function(plain(x), shape, *args, **kwargs)
        array = x.array if isinstance(x, ChannelsLast) else channels_last(x)
        return ChannelsLast(function(array, (shape[0], *shape[2:], shape[1]), *args, **kwargs))

    return in_layout
