"""Operators that look along the rows: what does not count is neutral to them."""

from typing import Any

import torch
from torch.fx import Node

from torch_bridge.bounded.registry import dims_of, name_of, named_arguments, replace_argument, rule_for
from torch_bridge.bounded.rewriting import Bounded
from torch_bridge.explain import unknown_shape

aten = torch.ops.aten


_NEUTRAL: dict[str, float] = {
    "sum": 0, "nansum": 0, "prod": 1, "amax": -torch.inf, "amin": torch.inf, "max": -torch.inf,
    "min": torch.inf, "argmax": -torch.inf, "argmin": torch.inf, "any": 0, "all": 1, "logsumexp": -torch.inf,
    "softmax": -torch.inf, "log_softmax": -torch.inf, "norm": 0, "linalg_vector_norm": 0, "count_nonzero": 0,
    "cumsum": 0, "cumprod": 1, "logcumsumexp": -torch.inf,
}  # fmt: skip


# They keep the dim.
_ALONG = ("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp")


@rule_for(*_NEUTRAL)
def _reduce(bounded: Bounded, node: Any) -> Node:
    name, x = name_of(node), node.args[0]
    if name in ("max", "min") and isinstance(named_arguments(node).get("other"), Node):
        return node
    dims = dims_of(node, x)
    node.update_arg(0, bounded.filled(x, _NEUTRAL[name], dims))
    if name not in _ALONG or not _is_met(bounded, x, dims):
        return node
    result = bounded.emit(node.target, *node.args, **node.kwargs)
    bounded.sizes[result] = bounded.sizes[x]
    return bounded.settled(result, dims)


@rule_for("topk", "sort", "argsort")
def _best(bounded: Bounded, node: Any) -> Node:
    """The k best are among the rows that count; all of them in order would have a size that is not known."""
    named, x = named_arguments(node), node.args[0]
    dims = (named["dim"] % x.meta["val"].ndim,)
    if not _is_met(bounded, x, dims):
        return node
    if name_of(node) != "topk":
        raise unknown_shape(node)
    node.update_arg(0, bounded.filled(x, -torch.inf if named["largest"] else torch.inf, dims))
    return node


def _count(bounded: Bounded, x: Node, dims: tuple[int, ...]) -> Any:
    """How many elements of some dims count."""
    total: Any = 1
    for dim in dims:
        number = bounded.number(bounded.seen(x)[dim])
        if isinstance(number, Node) and isinstance(total, Node):
            total = bounded.emit(aten.mul.Tensor, total, number)
        elif isinstance(number, Node) or isinstance(total, Node):
            scaled, by = (number, total) if isinstance(number, Node) else (total, number)
            total = bounded.emit(aten.mul.Tensor, scaled, by)
        else:
            total *= number
    return total


def _is_met(bounded: Bounded, x: Node, dims: tuple[int, ...]) -> bool:
    return bool(set(dims) & set(bounded.open_dims(x)))


def _mean_of(bounded: Bounded, x: Node, dims: tuple[int, ...], keep: bool, dtype: Any = None) -> Node:
    total = bounded.emit(aten.sum.dim_IntList, bounded.filled(x, 0, dims), list(dims), keep, dtype=dtype)
    return bounded.emit(aten.div.Tensor, total, _count(bounded, x, dims))


@rule_for("mean")
def _mean(bounded: Bounded, node: Any) -> Node:
    x, named = node.args[0], named_arguments(node)
    dims = dims_of(node, x)
    if not _is_met(bounded, x, dims):
        return node
    return _mean_of(bounded, x, dims, named.get("keepdim", False), named.get("dtype"))


@rule_for("var", "std", "var_mean", "std_mean")
def _variance(bounded: Bounded, node: Any) -> Any:
    x, named = node.args[0], named_arguments(node)
    name = name_of(node)
    dims, keep = dims_of(node, x), named.get("keepdim", False)
    if not _is_met(bounded, x, dims):
        return node
    correction = named.get("correction", int(named.get("unbiased", True)))
    centred = bounded.emit(aten.sub.Tensor, x, _mean_of(bounded, x, dims, True))
    bounded.sizes[centred] = bounded.sizes[x]
    square = bounded.filled(bounded.emit(aten.square.default, bounded.filled(centred, 0, dims)), 0)
    free = bounded.emit(aten.sub.Tensor, _count(bounded, x, dims), 1 if correction is None else correction)
    free = bounded.emit(aten.clamp.default, free, 0)
    result = bounded.emit(aten.div.Tensor, bounded.emit(aten.sum.dim_IntList, square, list(dims), keep), free)
    if name.startswith("std"):
        result = bounded.emit(aten.sqrt.default, result)
    return (result, _mean_of(bounded, x, dims, keep)) if name.endswith("mean") else result


@rule_for("matmul", "mm", "bmm", "mv", "dot", "linear", "addmm", "baddbmm", "addbmm")
def _product(bounded: Bounded, node: Any) -> Node:
    """Dims that are summed over are filled with zeros on both sides."""
    first = 1 if "add" in node.target._schema.name else 0
    a, b = node.args[first : first + 2]
    transposed = "linear" in node.target._schema.name
    of_b = b.meta["val"].ndim - (1 if transposed or b.meta["val"].ndim == 1 else 2)
    node.update_arg(first, bounded.filled(a, 0, (a.meta["val"].ndim - 1,)))
    node.update_arg(first + 1, bounded.filled(b, 0, (of_b,)))
    return node


@rule_for("einsum")
def _einsum(bounded: Bounded, node: Any) -> Node:
    equation, operands = node.args[:2]
    inputs, arrow, output = str(equation).replace(" ", "").partition("->")
    if not arrow or "." in inputs:
        raise unknown_shape(node)
    terms = zip(inputs.split(","), operands, strict=True)
    filled = [
        bounded.filled(x, 0, [dim for dim, label in enumerate(labels) if label not in output])
        for labels, x in terms
    ]
    node.update_arg(1, filled)
    return node


_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
           "binary_cross_entropy_with_logits", "soft_margin_loss", "kl_div", "poisson_nll_loss")  # fmt: skip


@rule_for(*_LOSSES)
def _loss(bounded: Bounded, node: Any) -> Any:
    """One loss a place, then the mean or the sum of those that count."""
    named = named_arguments(node)
    reduction = named["reduction"]
    if reduction == 0:
        return node
    largest = max(node.all_input_nodes, key=lambda n: n.meta["val"].ndim)
    x, target, *_ = node.args
    given = {key: value for key, value in named.items() if key not in ("self", "target", "reduction")}
    losses = bounded.emit(node.target, x, target, **given, reduction=0)
    if largest not in bounded.sizes or losses.meta["val"].shape != largest.meta["val"].shape:
        raise unknown_shape(node)
    bounded.sizes[losses] = bounded.sizes[largest]
    dims = tuple(range(largest.meta["val"].ndim))
    if reduction == 1:
        return _mean_of(bounded, losses, dims, False)
    return bounded.emit(aten.sum.default, bounded.filled(losses, 0))


@rule_for("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def _classes(bounded: Bounded, node: Any) -> Node:
    """Classes of rows that do not count are those to ignore."""
    named = named_arguments(node)
    target, x = named["target"], node.args[0]
    if (1 if x.meta["val"].ndim > 1 else 0) in bounded.open_dims(x):
        raise unknown_shape(node, "the classes depend on values")
    if target.meta["val"].is_floating_point() or named["reduction"] == 0:
        raise unknown_shape(node, "losses of single rows of a mask, or of shares of classes")
    replace_argument(node, "target", bounded.filled(target, named["ignore_index"]))
    return node
