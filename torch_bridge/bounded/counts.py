"""bincount: as long as the largest value, which the graph or torch must know to be below something."""

from typing import Any

import torch

from torch_bridge.bounded.limits import limit
from torch_bridge.bounded.registry import named_arguments, rule_for
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
