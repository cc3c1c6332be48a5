"""Reading and writing by index.

Reading follows the index. Writing sends what does not count out of bounds, where JAX drops it.
"""

from typing import Any

import torch
from torch.fx import Node

from torch_bridge.bounded.registry import named_arguments, replace_argument, rule_for
from torch_bridge.bounded.rewriting import Bounded
from torch_bridge.bounded.sources import opened_indices
from torch_bridge.explain import unknown_shape

aten = torch.ops.aten


@rule_for("index_select", "gather", "take", "embedding", "take_along_dim")
def _read(bounded: Bounded, node: Any) -> Node:
    return node


@rule_for("index_put", "_index_put_impl")
def _index_put(bounded: Bounded, node: Any) -> Node:
    """A mask alone stays one: its k-th true place takes the k-th row."""
    x, indices = node.args[:2]
    given = [(k, i) for k, i in enumerate(indices) if i is not None]
    values = node.args[2].meta["val"]
    mask_alone = len(given) == 1 and given[0][1].meta["val"].dtype == torch.bool
    if mask_alone and (given[0][1] not in bounded.sizes or values.numel() == 1):
        return node
    opened, masks = opened_indices(bounded, indices)
    if masks:
        raise unknown_shape(node, "masks beside other indices")
    for place, index in given:
        for dim in bounded.open_dims(index):
            size = x.meta["val"].shape[place]
            opened[place] = bounded.filled(opened[place], size, (dim,))
    node.update_arg(1, opened)
    return node


@rule_for("index_add", "index_copy", "index_fill", "index_reduce", "scatter", "scatter_add", "scatter_reduce")
def _write(bounded: Bounded, node: Any) -> Node:
    named = named_arguments(node)
    x, index, dim = node.args[0], named["index"], named["dim"]
    size = x.meta["val"].shape[dim] if x.meta["val"].ndim else 1
    replace_argument(node, "index", bounded.filled(index, size))
    source = named.get("source", named.get("src"))
    if isinstance(source, Node) and source in bounded.sizes and index not in bounded.sizes:
        raise unknown_shape(node)
    return node
