"""Padding by a constant and by what the array itself holds; torch lists widths from the last dim on."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.layout import place
from torch_bridge.lowerings.layouts import in_space
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


@lowering(aten.constant_pad_nd.default, layouts=in_space())
def constant_pad(x: Any, pad: Sequence[int], value: Any = 0, *, channels_last: bool = False) -> Any:
    """`pad` lists (before, after) from the last dim on; negative numbers cut off."""
    config = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        config[_dim(x, i, channels_last)] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def _dim(x: Any, i: int, channels_last: bool) -> int:
    """The i-th dim from the last on in torch's order."""
    dim = x.ndim - 1 - i
    return place(dim, x.ndim) if channels_last else dim


_PAD_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@lowering(aten.pad.default, layouts=in_space())
def pad(
    x: Any,
    pad: Sequence[int],
    mode: str = "constant",
    value: Any = None,
    *,
    channels_last: bool = False,
) -> Any:
    if mode == "constant":
        return constant_pad(x, pad, 0 if value is None else value, channels_last=channels_last)
    return _mode_pad(x, pad, _PAD_MODES[mode], channels_last)


def _mode_pad(x: Any, pad: Sequence[int], mode: str, channels_last: bool) -> Any:
    widths = [(0, 0)] * x.ndim
    cuts = [slice(None)] * x.ndim
    for i in range(len(pad) // 2):
        before, after = pad[2 * i], pad[2 * i + 1]
        dim = _dim(x, i, channels_last)
        widths[dim] = (max(before, 0), max(after, 0))
        length = widths[dim][0] + x.shape[dim] + widths[dim][1]
        cuts[dim] = slice(max(-before, 0), length + min(after, 0))
    # Cut last: what is padded mirrors the whole of x.
    return jnp.pad(x, widths, mode=mode)[tuple(cuts)]


@lowering(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    layouts=in_space(),
)
def reflection_pad(x: Any, pad: Sequence[int], *, channels_last: bool = False) -> Any:
    return _mode_pad(x, pad, "reflect", channels_last)


@lowering(
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    layouts=in_space(),
)
def replication_pad(x: Any, pad: Sequence[int], *, channels_last: bool = False) -> Any:
    return _mode_pad(x, pad, "edge", channels_last)
