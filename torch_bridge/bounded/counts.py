"""Lengths that are values: of bincount, as the largest value is; of repeat_interleave, the sum."""

from typing import Any

import torch
from torch.fx import Node

from torch_bridge.bounded.limits import limit
from torch_bridge.bounded.registry import dims_of, named_arguments, rule_for, rule_of
from torch_bridge.bounded.rewriting import Bounded
from torch_bridge.explain import unknown_shape
from torch_bridge.rewrites import counts

aten = torch.ops.aten


@rule_for("bincount")
def _bincount(bounded: Bounded, node: Any) -> Any:
    named, x = named_arguments(node), node.args[0]
    size = bounded.shape_seen(node.meta["val"])[0]
    weights, known = named["weights"], bounded.constants.value(node)
    if known is not None:
        bounded.bind(size, len(known), len(known))
        size = len(known)
    if isinstance(size, int):
        return bounded.emit(counts(), x, weights, size)
    room = bounded.most(size) or limit(bounded, x)
    if room is None or x in bounded.sizes:
        raise unknown_shape(node, "nothing says what its values are below: torch.bincount(x, minlength=n)")
    # Of no values at all the largest is -1.
    padded = bounded.emit(aten.constant_pad_nd.default, x, [0, 1], -1)
    count = bounded.emit(aten.add.Tensor, bounded.emit(aten.max.default, padded), 1)
    bounded.bind(size, room, count)
    return bounded.emit(counts(), x, weights, room)


@rule_for("repeat_interleave")
def _repeated(bounded: Bounded, node: Any) -> Any:
    """By a tensor of numbers: how many rows there are is known if that is, or if the caller says so."""
    named = named_arguments(node)
    repeats = named["repeats"]
    if not isinstance(repeats, Node):
        return rule_of("roll")(bounded, node)
    known, value = bounded.constants.value(repeats), node.meta["val"]
    if known is None:
        raise unknown_shape(
            node, "the numbers of rows depend on values: output_size=n says how many they are"
        )
    dim = 0 if value.ndim == 1 else dims_of(node, node.args[0])[0]
    number = int(known.sum())
    bounded.bind(bounded.shape_seen(value)[dim], number, number)
    return bounded.emit(node.target, *node.args, **{**node.kwargs, "output_size": number})
