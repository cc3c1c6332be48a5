"""Convolutions. Images are `[batch, channels, *space]` as torch has them or, where XLA had rather have them
so, `[batch, *space, channels]`; kernels `[out, in, *space]` in either case."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.layouts import convolving
from torch_bridge.lowerings.matmul import biased
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


def each(value: Any, count: int) -> tuple[int, ...]:
    """One number a spatial dim, from torch's number or list of one or of `count`."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def convolve(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    channels_last: bool = False,
) -> Any:
    """x `[batch, in, ...]` (or without batch), weight `[out, in / groups, ...]`."""
    space = weight.ndim - 2
    dilation = each(dilation, space)
    if padding == "same":  # torch puts the odd element at the end
        reach = _reach(weight, dilation)
        pads = [(total // 2, total - total // 2) for total in reach]
    else:
        pads = [(p, p) for p in each(0 if padding == "valid" else padding, space)]
    ones = (1,) * space
    return _correlated(x, weight, bias, pads, each(stride, space), ones, dilation, groups, channels_last)


def transposed(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
    channels_last: bool = False,
) -> Any:
    """The gradient of a convolution by its input: weight `[in, out / groups, ...]`."""
    space = weight.ndim - 2
    dilation = each(dilation, space)
    sizes = zip(_reach(weight, dilation), each(padding, space), each(output_padding, space), strict=True)
    pads = [(reach - p, reach - p + extra) for reach, p, extra in sizes]
    # [in, out/g, ...] -> [out, in/g, ...], turned round in space.
    channels, per_group = weight.shape[0] // groups, weight.shape[1]
    kernel = weight.reshape(groups, channels, per_group, *weight.shape[2:])
    kernel = jnp.swapaxes(kernel, 1, 2).reshape(groups * per_group, channels, *weight.shape[2:])
    kernel = jnp.flip(kernel, tuple(range(2, weight.ndim)))
    ones, spread = (1,) * space, each(stride, space)
    return _correlated(x, kernel, bias, pads, ones, spread, dilation, groups, channels_last)


def _reach(weight: Any, dilation: Sequence[int]) -> list[int]:
    """How far a kernel extends beyond the element it starts at, a spatial dim."""
    return [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]


def _correlated(
    x: Any,
    kernel: Any,
    bias: Any,
    pads: Sequence[tuple[int, int]],
    stride: Sequence[int],
    spread: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    channels_last: bool,
) -> Any:
    """lax's convolution; `spread` puts zeros between the elements of x."""
    batched = x.ndim == kernel.ndim
    letters = "DHW"[5 - kernel.ndim :]
    image = f"N{letters}C" if channels_last else f"NC{letters}"
    out = lax.conv_general_dilated(
        x if batched else x[None],
        kernel,
        window_strides=stride,
        padding=pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=(image, "OI" + letters, image),
        feature_group_count=groups,
    )
    if bias is not None:
        out = biased(out, bias if channels_last else bias.reshape((1, -1) + (1,) * len(letters)))
    return out if batched else out[0]


@lowering(
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    layouts=convolving,
)
def conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    channels_last: bool = False,
) -> Any:
    return convolve(x, weight, bias, stride, padding, dilation, groups, channels_last)


@lowering(
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    layouts=convolving,
)
def conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    channels_last: bool = False,
) -> Any:
    return transposed(x, weight, bias, stride, padding, output_padding, groups, dilation, channels_last)


@lowering(aten.convolution.default, layouts=convolving)
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    channels_last: bool = False,
) -> Any:
    if is_transposed:
        return transposed(x, weight, bias, stride, padding, output_padding, groups, dilation, channels_last)
    return convolve(x, weight, bias, stride, padding, dilation, groups, channels_last)
