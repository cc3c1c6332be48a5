"""Errors of torch.export in the words of somebody who wrote a module: what, where, and the way out."""

import re
import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torch_bridge.errors import BridgeError, message
from torch_bridge.signature import OUTSIDE_USER_CODE, source_line

_IN_PYTHON = "forward needs the value of a tensor in Python (if, while, assert, int(), .item(), a size)."
_SHAPE = "forward makes a tensor whose shape depends on the values of another."
_KEEP_TENSOR = (
    "keep it a tensor: torch.where for a branch, torch.cond for one that is costly, scan for a loop; or pass "
    "the value as a Python argument"
)
_KEEP_SHAPE = (
    "keep the shape: torch.where(mask, x, fill) for x[mask], (x * mask).sum() for x[mask].sum(), a fixed "
    "number of entries (topk, num_classes=, output_size=)"
)
# (pattern in the error's class, text and source line; what is wrong; the way out), first match counts.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"Constant .* is mutated",
        "forward writes a tensor that is a plain attribute of a module.",
        "register it: self.register_buffer(name, tensor)",
    ),
    (
        r"one_hot\(",
        "one_hot looks for the number of classes in the values.",
        "say it: one_hot(x, num_classes=n)",
    ),
    (r"masked_select|nonzero|aten\.unique|_unique2|bincount", _SHAPE, _KEEP_SHAPE),
    (
        r"GuardOnDataDependent|data-dependent|DataDependentOutput|_local_scalar_dense|Cannot cast FakeTensor"
        r"|\.numpy\(\) is not supported|format string passed to FakeTensor",
        _IN_PYTHON,
        _KEEP_TENSOR,
    ),
    (
        r"not linked with support for cuda|not compiled with CUDA|No CUDA GPUs",
        "forward moves a tensor to a GPU.",
        "leave devices to JAX: drop .cuda() and .to('cuda'), make new tensors with device=x.device",
    ),
)


def explained(error: Exception) -> BridgeError:
    """A BridgeError for whatever torch.export raised."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    frames = list(traceback.extract_tb(error.__traceback__))
    place = user_line(frames)
    what = "torch.export cannot follow this module."
    if frames and not frames[-1].filename.startswith(OUTSIDE_USER_CODE):
        what = "forward raises an error with these arguments, in train or eval mode as the module stands."
    hint = "see whether the module runs in torch: module(*args, **kwargs)"
    for pattern, known, way_out in _KNOWN:
        if re.search(pattern, f"{type(error).__name__}: {text}\n{place}"):
            what, hint = known, way_out
            break
    where = [*([f"at {place}"] if place else []), *getattr(error, "__notes__", ())]
    return BridgeError(message(what, *where, f"torch: {type(error).__name__}: {first[:300]}", hint=hint))


def user_line(frames: Iterable[Any]) -> str:
    """The innermost frame that is neither torch's nor ours, "" if there is none."""
    for frame in reversed(list(frames)):
        if not frame.filename.startswith(OUTSIDE_USER_CODE) and "contextlib" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""


def refuse_unknown_shapes(program: torch.export.ExportedProgram) -> None:
    """See that no size is left open until the program runs: XLA fixes all shapes when it compiles.

    Raises:
        BridgeError: for the first operator that leaves one open, with the user's source line.
    """
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and _has_open_shape(node.meta.get("val")):
            raise unknown_shape(node)


def unknown_shape(node: torch.fx.Node, *why: str) -> BridgeError:
    """The error of an operator whose result's shape depends on values."""
    line = source_line(node.meta.get("stack_trace"))
    where = [f"at {line}"] if line else []
    return BridgeError(message(_SHAPE, *where, f"operator: {node.target}", *why, hint=_KEEP_SHAPE))


def _has_open_shape(value: Any) -> bool:
    values = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(x, torch.Tensor) and bool(free_unbacked_symbols(x)) for x in values)
