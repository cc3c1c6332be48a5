"""Whether a backward that a user wrote is linear in the gradient that it is given.

A derivative is. One that clips, normalises or counts gradients is not: it sees other values in a
microbatch, where the loss is a mean over fewer rows. Whoever splits the batch cannot look into a backward,
so its node gets the scope `rannc_coupled` at the end of its path (see `rannc_jax.coupled`). Operators that
are not listed here are taken to be nonlinear: that costs speed, the other mistake would be another gradient.
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch

from torch_bridge.program import Graph, Node, Ref, refs

SCOPE = "rannc_coupled"

# Linear in the first argument: the others say where, how much, or are what is known.
_FIRST = frozenset(
    "_conj _to_copy _unsafe_view alias as_strided avg_pool1d avg_pool2d avg_pool3d chunk clone conj "
    "contiguous cumsum detach diag diag_embed diagonal expand expand_as flatten flip gather imag index "
    "index_select mean movedim narrow neg permute positive real repeat repeat_interleave reshape "
    "resolve_conj roll select slice split split_with_sizes squeeze sum swapaxes t tile to trace transpose "
    "tril triu unbind unflatten unfold unsafe_split unsqueeze view view_as view_as_complex view_as_real "
    "custom_gradient".split()
)
# Linear in these arguments together: each is moved by the gradient, or zero.
_TOGETHER: dict[str, tuple[int, ...]] = {
    "add": (0, 1), "sub": (0, 1), "where": (1, 2), "masked_fill": (0, 2), "cat": (0,), "stack": (0,),
    "scatter_add": (0, 3), "scatter": (0, 3), "index_add": (0, 3), "index_put": (0, 2),
    "slice_scatter": (0, 1), "select_scatter": (0, 1), "constant_pad_nd": (0, 2), "gradient": (2,),
}  # fmt: skip
# Linear in each factor; a third argument is an offset.
_PRODUCTS = frozenset("mul mm bmm mv dot vdot outer matmul linear kron".split())
_PRODUCTS |= {f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)} | {"convolution"}
_SIZES_ONLY = frozenset("empty_like full_like new_empty new_full new_ones ones_like".split())
_ZEROS = frozenset("new_zeros zeros zeros_like".split())


def is_linear(graph: Graph, inputs: Iterable[int]) -> bool:
    """Whether a graph is linear in these inputs, as far as its operators tell.

    Args:
        graph: every node of it counts.
        inputs: numbers of the inputs; the others are constants.
    """
    moving, zeros = set(inputs), set[int]()
    for number, node in enumerate(graph.nodes, graph.num_inputs):
        name = _name(node)
        if name in _SIZES_ONLY or name.startswith("sym_"):
            continue
        if name in _ZEROS or _is_zero(node, name, zeros):
            zeros.add(number)
        elif any(ref.index in moving for ref in refs((node.args, node.kwargs))):
            if not _node_is_linear(node, name, moving, zeros):
                return False
            moving.add(number)
    return all(_is_of(output, moving | zeros) for output in graph.outputs)


def _name(node: Node) -> str:
    """The operator without namespace and overload."""
    called: Any = node.operator
    if called is operator.getitem:
        return "select"
    return called._schema.name.partition("::")[2] if isinstance(called, torch._ops.OpOverload) else ""


def _is_zero(node: Node, name: str, zeros: set[int]) -> bool:
    """Whether it is made of zeros alone."""
    positions = (0,) if name in _FIRST else _TOGETHER.get(name, ())
    used = [node.args[i] for i in positions if i < len(node.args)]
    return bool(used) and all(_is_of(arg, zeros) for arg in used)


def _is_of(arg: Any, values: set[int]) -> bool:
    """Whether an argument is one of these values, or the number 0."""
    if isinstance(arg, tuple):
        return all(_is_of(item, values) for item in arg)
    return (
        arg.index in values if isinstance(arg, Ref) else arg is None or (type(arg) in _NUMBERS and arg == 0)
    )


_NUMBERS = (bool, int, float, complex)


def _node_is_linear(node: Node, name: str, moving: set[int], zeros: set[int]) -> bool:
    """Whether a node that takes moving values is linear in them."""
    if name == "custom_gradient":
        return _is_of(node.args[0], moving | zeros)  # its other arguments only make a gradient of it
    taken = {i for i, arg in enumerate(node.args) if any(ref.index in moving for ref in refs(arg))}
    if any(ref.index in moving for ref in refs(node.kwargs)):
        return False
    if name == "div":
        return taken == {0} and "rounding_mode" not in node.kwargs
    if name == "einsum":
        return sum(ref.index in moving for ref in refs(node.args[1])) == 1
    if name in _PRODUCTS:
        factors, offset = node.args[:2], node.args[2:3] if name.startswith(("linear", "conv")) else ()
        return len(taken) == 1 and max(taken) < len(factors) and _is_of(offset, zeros)
    if name in _FIRST or name.endswith("_backward"):
        return taken == {0}
    positions = _TOGETHER.get(name, ())
    values = [node.args[i] for i in positions if i < len(node.args)]
    return taken <= set(positions) and all(_is_of(arg, moving | zeros) for arg in values)
