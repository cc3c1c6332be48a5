"""Errors of torch.export in the words of somebody who wrote a module: what, where, and the way out."""

import re
import traceback
from collections.abc import Iterable
from typing import Any

from torch_bridge.errors import BridgeError, message
from torch_bridge.signature import OUTSIDE_USER_CODE

# (pattern in the error's class and text, what is wrong, the way out), first match counts.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"masked_select",
        "forward makes a tensor whose shape depends on the values of another (masked_select).",
        "keep the shape: torch.where(mask, x, fill) instead of x[mask]; a sum over x[mask] is (x * mask).sum()",
    ),
    (
        r"nonzero|aten\.unique|_unique2|bincount",
        "forward makes a tensor whose shape depends on the values of another.",
        "keep the shape: torch.where(mask, x, fill), one-hot sums, or sort and a fixed number of entries",
    ),
    (
        r"GuardOnDataDependent|data-dependent|DataDependentOutput|_local_scalar_dense",
        "forward needs the value of a tensor in Python (if, while, int(), .item(), a size).",
        "keep it a tensor: torch.where for a branch, torch.cond for one that is costly, scan for a loop; "
        "or pass the value as a Python argument",
    ),
)


def explained(error: Exception) -> BridgeError:
    """A BridgeError for whatever torch.export raised."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    what, hint = (
        "torch.export cannot follow this module.",
        "see whether the module runs with these arguments: module(*args, **kwargs)",
    )
    for pattern, known, way_out in _KNOWN:
        if re.search(pattern, f"{type(error).__name__}: {text}"):
            what, hint = known, way_out
            break
    return BridgeError(
        message(
            what,
            f"at {user_line(traceback.extract_tb(error.__traceback__))}",
            f"torch: {type(error).__name__}: {first[:300]}",
            hint=hint,
        )
    )


def user_line(frames: Iterable[Any]) -> str:
    """The innermost frame that is neither torch's nor ours."""
    for frame in reversed(list(frames)):
        if not frame.filename.startswith(OUTSIDE_USER_CODE) and "contextlib" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return "(unknown)"
