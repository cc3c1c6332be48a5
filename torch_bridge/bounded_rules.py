"""What operators do with tensors in room for more rows than count (see `bounded`), kind by kind.

    sources      masks and nonzero make such tensors
    each place   pointwise operators and views leave rows that do not count as they are
    each row     layers that look at trailing dims alone
    along rows   reductions, products and losses see the rows that count, by a neutral element
    by index     reading follows the index; writing sends what does not count out of bounds, where JAX
                 drops it

A rule gets the rewriting, the node, and returns the node itself (kept, its inputs as they now are), what
stands in its place, or a tuple in the place of several results.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from torch_bridge.bounded import Bounded
from torch_bridge.explain import unknown_shape

aten = torch.ops.aten
Rule = Callable[[Bounded, Node], Any]
_RULES: dict[str, Rule] = {}


def rule(node: Node) -> Rule | None:
    """The rule of an operator; one that writes in place has that of its twin."""
    target: Any = node.target
    if target is operator.getitem:
        return _kept
    if not isinstance(target, torch._ops.OpOverload):
        return _number
    name = target._schema.name.removeprefix("aten::")
    found = _RULES.get(name) or _RULES.get(name.removesuffix("_"))
    return found or (_kept if torch.Tag.pointwise in target.tags else None)


def _for(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _named(node: Node) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return {**defaults, **given, **node.kwargs}


def _replace(node: Node, name: str, value: Any) -> None:
    """Give a node another argument."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    if names.index(name) < len(node.args):
        node.update_arg(names.index(name), value)
    else:
        node.update_kwarg(name, value)


def _dims(node: Node, of: Node, name: str = "dim") -> tuple[int, ...]:
    """The dims that an operator works along; all of them where it names none."""
    dims, ndim = _named(node).get(name), of.meta["val"].ndim
    dims = range(ndim) if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
    return tuple(dim % max(ndim, 1) for dim in dims)


def _input(node: Node) -> Any:
    return node.args[0]


# Each place: nothing meets along the rows.


@_for(
    "clone", "detach", "alias", "contiguous", "to", "_to_copy", "type_as", "dropout", "feature_dropout", "where",
    "masked_fill", "lift_fresh", "lift_fresh_copy", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like",
    "randn_like", "zero", "fill", "copy", "bernoulli", "native_dropout", "masked_scatter", "permute", "transpose",
    "t", "numpy_T", "mT", "unsqueeze", "movedim", "squeeze", "view_as_real", "view_as_complex", "real", "imag",
    "alpha_dropout", "prelu", "uniform", "normal", "random", "softplus", "one_hot", "expand_as", "stack",
    "_assert_tensor_metadata", "conj", "resolve_conj", "resolve_neg", "broadcast_tensors",
)  # fmt: skip
def _kept(bounded: Bounded, node: Node) -> Node:
    """Numbers of rows become tensors, which what takes a number takes too."""
    if node.target is aten.where.default:
        return _nonzero(bounded, node)
    return node


def _number(bounded: Bounded, node: Node) -> Any:
    """Arithmetic with numbers of rows, which are tensors now."""
    functions: dict[Any, Any] = {
        torch.sym_max: torch.maximum,
        torch.sym_min: torch.minimum,
        torch.sym_float: lambda x: None,
    }
    arguments = [a for a in node.args if isinstance(a, Node)]
    if any(isinstance(a.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool) for a in arguments):
        raise unknown_shape(node)
    if node.target is torch.sym_float:
        return bounded.emit(aten.to.dtype, node.args[0], torch.get_default_dtype())
    if node.target in functions:
        args = [a if isinstance(a, Node) else bounded.emit(aten.full.default, [], a) for a in node.args]
        return bounded.emit(functions[node.target], *args)
    if getattr(node.target, "__module__", None) not in ("_operator", "operator"):
        raise unknown_shape(node)
    return node


@_for("sym_size")
def _size(bounded: Bounded, node: Node) -> Any:
    tensor, dim = node.args
    return bounded.number(bounded.seen(tensor)[dim])  # type: ignore[index,arg-type]


@_for("sym_numel")
def _numel(bounded: Bounded, node: Node) -> Any:
    count: Any = 1
    for size in bounded.seen(_input(node)):
        number = bounded.number(size)
        count = bounded.emit(aten.mul.Tensor, number, count) if isinstance(number, Node) else count * number
    return count


# Sources: the places where a mask is true.


def _places(bounded: Bounded, mask: Node) -> tuple[list[Node], Node]:
    """(one index for each dim of a mask, number of true places); further rows repeat the first place."""
    mask = bounded.filled(mask, -1)
    value = mask.meta["val"]
    if value.dtype != torch.bool:
        mask = bounded.emit(aten.ne.Scalar, mask, 0)
    room, device = value.numel(), value.device
    found = bounded.emit(aten.nonzero_static.default, mask, size=room, fill_value=0)
    count = bounded.emit(aten.sum.default, mask)
    rows = bounded.emit(aten.arange.default, room, device=device, pin_memory=False)
    counted = bounded.emit(aten.unsqueeze.default, bounded.emit(aten.lt.Tensor, rows, count), 1)
    first = bounded.emit(aten.slice.Tensor, found, 0, 0, 1)
    found = bounded.emit(aten.where.self, counted, found, first)
    return [bounded.emit(aten.select.int, found, 1, dim) for dim in range(value.ndim)], count


def _bind(bounded: Bounded, value: torch.Tensor, dim: int, room: int, count: Node) -> None:
    bounded.bind(bounded.shape_seen(value)[dim], room, count)


@_for("nonzero", "argwhere", "nonzero_numpy")
def _nonzero(bounded: Bounded, node: Node) -> Any:
    value = node.meta["val"]
    columns, count = _places(bounded, _input(node))
    several = not isinstance(value, torch.Tensor)
    _bind(bounded, value[0] if several else value, 0, _input(node).meta["val"].numel(), count)
    return tuple(columns) if several else bounded.emit(aten.stack.default, columns, 1)


@_for("masked_select")
def _masked_select(bounded: Bounded, node: Node) -> Any:
    x = bounded.emit(aten.mul.Tensor, *node.args)
    shape = x.meta["val"].shape
    if any(n in bounded.sizes for n in node.args):
        raise unknown_shape(node)
    parts = [bounded.emit(aten.expand.default, part, list(shape)) for part in node.args]
    bounded.graph.erase_node(x)
    columns, count = _places(bounded, parts[1])
    _bind(bounded, node.meta["val"], 0, shape.numel(), count)
    return _there(bounded, bounded.emit(aten.index.Tensor, parts[0], columns), count)


def _there(bounded: Bounded, x: Node, count: Node) -> Node:
    """Where a mask is false everywhere, ones: they have finite gradients whatever becomes of them."""
    if not x.meta["val"].is_floating_point():
        return x
    some = bounded.emit(aten.gt.Scalar, count, 0)
    return bounded.emit(aten.where.ScalarOther, some, x, 1.0)


@_for("index", "_unsafe_index")
def _index(bounded: Bounded, node: Node) -> Any:
    x, indices = node.args
    opened, counts = _opened(bounded, indices)
    for _, count, room, dim_of_result in counts:
        _bind(bounded, node.meta["val"], dim_of_result, room, count)
    result = bounded.emit(node.target, x, opened)
    for _, count, _, _ in counts:
        result = _there(bounded, result, count)
    return result


def _opened(bounded: Bounded, indices: Any) -> tuple[list[Any], list[tuple[Node, Node, int, int]]]:
    """Indices with masks as places, and (mask, count, room, dim of the result) of each mask."""
    opened: list[Any] = []
    masks: list[tuple[Node, Node, int]] = []
    for index in indices:
        if index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8):
            columns, count = _places(bounded, index)
            masks.append((index, count, index.meta["val"].numel()))
            opened += columns
        else:
            opened.append(index)
    given = [place for place, index in enumerate(opened) if index is not None]
    together = given == list(range(given[0], given[-1] + 1))
    return opened, [(*mask, given[0] if together else 0) for mask in masks]


# Shapes.


def _sizes(bounded: Bounded, node: Node) -> list[int]:
    return [bounded.room(size) for size in bounded.shape_seen(node.meta["val"])]


@_for("expand", "broadcast_to")
def _expand(bounded: Bounded, node: Node) -> Any:
    return bounded.emit(aten.expand.default, _input(node), _sizes(bounded, node))


@_for("full", "zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty")
def _made(bounded: Bounded, node: Node) -> Any:
    if isinstance(fill := _named(node).get("fill_value"), Node):
        empty = bounded.emit(
            aten.new_empty.default, fill, _sizes(bounded, node), dtype=node.meta["val"].dtype
        )
        return bounded.emit(aten.copy.default, empty, fill)
    _replace(node, "size", _sizes(bounded, node))
    return node


@_for("scalar_tensor")
def _scalar(bounded: Bounded, node: Node) -> Any:
    return bounded.emit(aten.to.dtype, _input(node), node.meta["val"].dtype)


@_for("arange")
def _arange(bounded: Bounded, node: Node) -> Any:
    """Rows that do not count repeat the last that does, so that all of them stay within bounds."""
    named, value = _named(node), node.meta["val"]
    end = named["end"]
    size = bounded.shape_seen(value)[0]
    if named.get("start", 0) != 0 or named.get("step", 1) != 1 or not isinstance(end, Node):
        raise unknown_shape(node)
    rows = bounded.emit(
        aten.arange.default, bounded.room(size), dtype=value.dtype, device=value.device, pin_memory=False
    )
    last = bounded.emit(aten.clamp.default, bounded.emit(aten.sub.Tensor, end, 1), 0)
    return bounded.emit(aten.minimum.default, rows, bounded.emit(aten.to.dtype, last, value.dtype))


@_for("view", "reshape", "flatten", "unflatten", "view_as", "_unsafe_view")
def _reshape(bounded: Bounded, node: Node) -> Any:
    """Rows may be split into smaller ones and joined again, as the first of the dims that are joined."""
    before = bounded.seen(_input(node))
    after = bounded.shape_seen(node.meta["val"])
    if not _row_major(before, after):
        raise unknown_shape(node, "rows of a mask are mixed with other dims")
    return bounded.emit(aten.reshape.default, _input(node), _sizes(bounded, node))


def _row_major(before: Any, after: Any) -> bool:
    """Whether whatever is in front of an open dim, on both sides, has the same fixed size."""

    def fronts(shape: Any) -> list[Any]:
        front: Any = 1
        found = []
        for size in shape:
            if not isinstance(size, int) and size.free_symbols:
                found.append((front, size.free_symbols))
            front = front * size
        return found

    return fronts(before) == fronts(after)


@_for("select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind", "flip", "roll", "cat", "concat",
      "unfold", "repeat_interleave", "glu", "diff", "tensor_split")  # fmt: skip
def _other_dims(bounded: Bounded, node: Node) -> Any:
    """Taking apart and joining along dims whose rows all count; or the first rows of the others."""
    parts = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
    named = _named(node)
    name = "dims" if "dims" in named else "dim"
    for part in parts:
        met = set(_dims(node, part, name)) & set(bounded.open_dims(part))
        if met and not _whole(node, named):
            raise unknown_shape(node, "rows of a mask are cut, joined or counted from the end")
    return node


def _whole(node: Node, named: dict[str, Any]) -> bool:
    if node.target is aten.select.int:
        return isinstance(named["index"], int) and named["index"] >= 0
    full = (None, 0), (None, 2**63 - 1), (1,)
    return node.target is aten.slice.Tensor and all(
        named[key] in allowed for key, allowed in zip(("start", "end", "step"), full, strict=True)
    )


# Each row: layers that look at the trailing dims.

_TRAILING: dict[str, Callable[[dict[str, Any]], int]] = {
    "layer_norm": lambda named: len(named["normalized_shape"]),
    "rms_norm": lambda named: len(named["normalized_shape"]),
    "group_norm": lambda named: named["input"].meta["val"].ndim - 1,
    "instance_norm": lambda named: named["input"].meta["val"].ndim - 1,
    "scaled_dot_product_attention": lambda named: 2,
    "pixel_shuffle": lambda named: 3,
    **{f"conv{n}d": (lambda named, n=n: n + 1) for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": (lambda named, n=n: n) for n in (1, 2, 3) for kind in ("max", "avg", "adaptive_avg")},
    **{f"fft_{kind}": (lambda named: 2) for kind in ("fft2", "rfft2", "ifft2", "irfft2")},
}  # fmt: skip


@_for(*_TRAILING)
def _each_row(bounded: Bounded, node: Node) -> Node:
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    x = _input(node)
    fixed = _TRAILING[name](_named(node))
    if any(dim >= x.meta["val"].ndim - fixed for dim in bounded.open_dims(x)):
        raise unknown_shape(node)
    if any(n in bounded.sizes for n in node.all_input_nodes) and x not in bounded.sizes:
        raise unknown_shape(node)
    return node


@_for("batch_norm")
def _batch_norm(bounded: Bounded, node: Node) -> Node:
    if _named(node)["training"]:
        raise unknown_shape(node, "its statistics are of all rows")
    return node


# Along the rows: what does not count is neutral.

_NEUTRAL: dict[str, float] = {
    "sum": 0, "nansum": 0, "prod": 1, "amax": -torch.inf, "amin": torch.inf, "max": -torch.inf, "min": torch.inf,
    "argmax": -torch.inf, "argmin": torch.inf, "any": -1, "all": 1, "logsumexp": -torch.inf, "softmax": -torch.inf,
    "log_softmax": -torch.inf, "norm": 0, "linalg_vector_norm": 0, "count_nonzero": 0,
    "cumsum": 0, "cumprod": 1, "logcumsumexp": -torch.inf, "cummax": -torch.inf, "cummin": torch.inf,
}  # fmt: skip


@_for(*_NEUTRAL)
def _reduce(bounded: Bounded, node: Node) -> Node:
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    if name in ("max", "min") and isinstance(_named(node).get("other"), Node):
        return node
    x = _input(node)
    node.update_arg(0, bounded.filled(x, _NEUTRAL[name], _dims(node, x)))
    return node


@_for("topk", "sort", "argsort")
def _sorted(bounded: Bounded, node: Node) -> Node:
    """The rows that count come first."""
    named, x = _named(node), _input(node)
    falling = named.get("descending", named.get("largest"))
    node.update_arg(0, bounded.filled(x, -torch.inf if falling else torch.inf, _dims(node, x)))
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


@_for("mean")
def _mean(bounded: Bounded, node: Node) -> Node:
    x, named = _input(node), _named(node)
    dims = _dims(node, x)
    if not _is_met(bounded, x, dims):
        return node
    return _mean_of(bounded, x, dims, named.get("keepdim", False), named.get("dtype"))


@_for("var", "std", "var_mean", "std_mean")
def _variance(bounded: Bounded, node: Node) -> Any:
    x, named = _input(node), _named(node)
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    dims, keep = _dims(node, x), named.get("keepdim", False)
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


@_for("matmul", "mm", "bmm", "mv", "dot", "linear", "addmm", "baddbmm", "addbmm")
def _product(bounded: Bounded, node: Node) -> Node:
    """Dims that are summed over are filled with zeros on both sides."""
    first = 1 if "add" in node.target._schema.name else 0  # type: ignore[union-attr]
    a, b = node.args[first : first + 2]
    transposed = "linear" in node.target._schema.name  # type: ignore[union-attr]
    of_b = b.meta["val"].ndim - (1 if transposed or b.meta["val"].ndim == 1 else 2)  # type: ignore[union-attr]
    node.update_arg(first, bounded.filled(a, 0, (a.meta["val"].ndim - 1,)))  # type: ignore[union-attr,arg-type]
    node.update_arg(first + 1, bounded.filled(b, 0, (of_b,)))  # type: ignore[arg-type]
    return node


@_for("einsum")
def _einsum(bounded: Bounded, node: Node) -> Node:
    equation, operands = node.args[:2]
    inputs, arrow, output = str(equation).replace(" ", "").partition("->")
    if not arrow or "." in inputs:
        raise unknown_shape(node)
    terms = zip(inputs.split(","), operands, strict=True)  # type: ignore[arg-type]
    filled = [
        bounded.filled(x, 0, [dim for dim, label in enumerate(labels) if label not in output])
        for labels, x in terms
    ]
    node.update_arg(1, filled)
    return node


_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
           "binary_cross_entropy_with_logits", "soft_margin_loss", "kl_div", "poisson_nll_loss")  # fmt: skip


@_for(*_LOSSES)
def _loss(bounded: Bounded, node: Node) -> Any:
    """One loss a place, then the mean or the sum of those that count."""
    named = _named(node)
    reduction = named["reduction"]
    if reduction == 0:
        return node
    largest = max(node.all_input_nodes, key=lambda n: n.meta["val"].ndim)
    x, target, *_ = node.args
    given = {key: value for key, value in named.items() if key not in ("self", "target", "reduction")}
    losses = bounded.emit(node.target, x, target, **given, reduction=0)
    bounded.sizes[losses] = bounded.sizes[largest]
    dims = tuple(range(largest.meta["val"].ndim))
    if reduction == 1:
        return _mean_of(bounded, losses, dims, False)
    return bounded.emit(aten.sum.default, bounded.filled(losses, 0))


@_for("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def _classes(bounded: Bounded, node: Node) -> Node:
    """Classes of rows that do not count are those to ignore."""
    named = _named(node)
    target = named["target"]
    if target.meta["val"].is_floating_point() or named["reduction"] == 0:
        raise unknown_shape(node, "losses of single rows of a mask, or of shares of classes")
    _replace(node, "target", bounded.filled(target, named["ignore_index"]))
    return node


# By index.


@_for("index_select", "gather", "take", "embedding", "take_along_dim")
def _read(bounded: Bounded, node: Node) -> Node:
    return node


@_for("index_put", "_index_put_impl")
def _index_put(bounded: Bounded, node: Node) -> Node:
    """A mask alone stays one: its k-th true place takes the k-th row."""
    x, indices = node.args[:2]
    given = [(k, i) for k, i in enumerate(indices) if i is not None]  # type: ignore[arg-type]
    if len(given) == 1 and given[0][1].meta["val"].dtype == torch.bool and given[0][1] not in bounded.sizes:
        return node
    opened, masks = _opened(bounded, indices)
    if masks:
        raise unknown_shape(node, "masks beside other indices")
    for place, index in given:
        for dim in bounded.open_dims(index):
            size = x.meta["val"].shape[place]  # type: ignore[union-attr]
            opened[place] = bounded.filled(opened[place], size, (dim,))
    node.update_arg(1, opened)
    return node


@_for("index_add", "index_copy", "index_fill", "index_reduce", "scatter", "scatter_add", "scatter_reduce")
def _write(bounded: Bounded, node: Node) -> Node:
    named = _named(node)
    x, index, dim = _input(node), named["index"], named["dim"]
    size = x.meta["val"].shape[dim] if x.meta["val"].ndim else 1
    _replace(node, "index", bounded.filled(index, size))
    source = named.get("source", named.get("src"))
    if isinstance(source, Node) and source in bounded.sizes and index not in bounded.sizes:
        raise unknown_shape(node)
    return node
