"""Operators that leave rows apart: pointwise ones, views, numbers of rows, layers of each row."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from torch_bridge.bounded.registry import dims_of, name_of, named_arguments, replace_argument, rule_for
from torch_bridge.bounded.rewriting import Bounded
from torch_bridge.bounded.sources import nonzero
from torch_bridge.explain import unknown_shape

aten = torch.ops.aten


@rule_for(
    "getitem", "clone", "detach", "alias", "contiguous", "to", "_to_copy", "type_as", "dropout",
    "feature_dropout", "where", "masked_fill", "lift_fresh", "lift_fresh_copy", "zeros_like",
    "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "zero", "fill", "copy",
    "bernoulli", "native_dropout", "masked_scatter", "permute", "transpose", "t", "numpy_T", "mT",
    "unsqueeze", "movedim", "squeeze", "view_as_real", "view_as_complex", "real", "imag",
    "alpha_dropout", "prelu", "uniform", "normal", "random", "softplus", "one_hot", "expand_as", "stack",
    "_assert_tensor_metadata", "conj", "resolve_conj", "resolve_neg", "broadcast_tensors",
)  # fmt: skip
def _kept(bounded: Bounded, node: Any) -> Node:
    """Numbers of rows become tensors, which what takes a number takes too."""
    if node.target is aten.where.default:
        return nonzero(bounded, node)
    return node


@rule_for("number")
def _number(bounded: Bounded, node: Any) -> Any:
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


@rule_for("sym_size")
def _size(bounded: Bounded, node: Any) -> Any:
    tensor, dim = node.args
    return bounded.number(bounded.seen(tensor)[dim])


@rule_for("sym_numel")
def _numel(bounded: Bounded, node: Any) -> Any:
    count: Any = 1
    for size in bounded.seen(node.args[0]):
        number = bounded.number(size)
        count = bounded.emit(aten.mul.Tensor, number, count) if isinstance(number, Node) else count * number
    return count


def _sizes(bounded: Bounded, node: Any) -> list[int]:
    return [bounded.room(size) for size in bounded.shape_seen(node.meta["val"])]


@rule_for("expand", "broadcast_to")
def _expand(bounded: Bounded, node: Any) -> Any:
    return bounded.emit(aten.expand.default, node.args[0], _sizes(bounded, node))


@rule_for("full", "zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty")
def _made(bounded: Bounded, node: Any) -> Any:
    if isinstance(fill := named_arguments(node).get("fill_value"), Node):
        empty = bounded.emit(
            aten.new_empty.default, fill, _sizes(bounded, node), dtype=node.meta["val"].dtype
        )
        return bounded.emit(aten.copy.default, empty, fill)
    replace_argument(node, "size", _sizes(bounded, node))
    return node


@rule_for("scalar_tensor")
def _scalar(bounded: Bounded, node: Any) -> Any:
    return bounded.emit(aten.to.dtype, node.args[0], node.meta["val"].dtype)


@rule_for("arange")
def _arange(bounded: Bounded, node: Any) -> Any:
    """Rows that do not count repeat the last that does, so that all of them stay within bounds."""
    named, value = named_arguments(node), node.meta["val"]
    end = named["end"]
    size = bounded.shape_seen(value)[0]
    if named.get("start", 0) != 0 or named.get("step", 1) != 1 or not isinstance(end, Node):
        raise unknown_shape(node)
    rows = bounded.emit(
        aten.arange.default, bounded.room(size), dtype=value.dtype, device=value.device, pin_memory=False
    )
    last = bounded.emit(aten.clamp.default, bounded.emit(aten.sub.Tensor, end, 1), 0)
    return bounded.emit(aten.minimum.default, rows, bounded.emit(aten.to.dtype, last, value.dtype))


@rule_for("view", "reshape", "flatten", "unflatten", "view_as", "_unsafe_view")
def _reshape(bounded: Bounded, node: Any) -> Any:
    """Rows may be split into smaller ones and joined again, as the first of the dims that are joined."""
    before = bounded.seen(node.args[0])
    after = bounded.shape_seen(node.meta["val"])
    if not _row_major(before, after):
        raise unknown_shape(node, "rows of a mask are mixed with other dims")
    return bounded.emit(aten.reshape.default, node.args[0], _sizes(bounded, node))


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


@rule_for("select", "slice", "narrow", "split", "chunk", "unbind", "flip", "roll", "unfold",
      "glu", "diff", "tensor_split")  # fmt: skip
def _other_dims(bounded: Bounded, node: Any) -> Any:
    """Taking apart along dims whose rows all count; or the first rows of the others."""
    named = named_arguments(node)
    name = "dims" if "dims" in named else "dim"
    met = set(dims_of(node, node.args[0], name)) & set(bounded.open_dims(node.args[0]))
    if met and not _whole(node, named):
        raise unknown_shape(node, "rows of a mask are cut or counted from the end")
    return node


def _whole(node: Any, named: dict[str, Any]) -> bool:
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
    **{f"{kind}_pool{n}d": (lambda named, n=n: n) for n in (1, 2, 3) for kind in ("max", "avg")},
    **{f"fft_{kind}": (lambda named: 2) for kind in ("fft2", "rfft2", "ifft2", "irfft2")},
}  # fmt: skip


@rule_for(*_TRAILING)
def _each_row(bounded: Bounded, node: Any) -> Node:
    name = name_of(node)
    fixed = _TRAILING[name](named_arguments(node))
    for x in node.all_input_nodes:
        if any(dim >= x.meta["val"].ndim - fixed for dim in bounded.open_dims(x)):
            raise unknown_shape(node)
    if name == "instance_norm" and named_arguments(node)["running_mean"] is not None:
        raise unknown_shape(node, "its statistics are of all rows")
    return node


@rule_for("batch_norm")
def _batch_norm(bounded: Bounded, node: Any) -> Node:
    if named_arguments(node)["training"]:
        raise unknown_shape(node, "its statistics are of all rows")
    return node
