"""Convolutions, in torch's layout: batch, channels, then space; kernels out, in, then space."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.matmul import biased
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


def _each(value: Any, count: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def _dimensions(space: int) -> tuple[str, str, str]:
    letters = "DHW"[3 - space :]
    return "NC" + letters, "OI" + letters, "NC" + letters


def convolve(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Any:
    """x `[batch, in, ...]` (or without batch), weight `[out, in / groups, ...]`."""
    space = weight.ndim - 2
    if x.ndim == space + 1:
        return convolve(x[None], weight, bias, stride, padding, dilation, groups)[0]
    pads = padding.upper() if isinstance(padding, str) else [(p, p) for p in _each(padding, space)]
    dilation = _each(dilation, space)
    if pads == "SAME":  # torch puts the odd element at the end
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    out = lax.conv_general_dilated(
        x,
        weight,
        window_strides=_each(stride, space),
        padding=pads,
        rhs_dilation=dilation,
        dimension_numbers=_dimensions(space),
        feature_group_count=groups,
    )
    return _biased(out, bias)


def transposed(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Any:
    """The gradient of a convolution by its input: weight `[in, out / groups, ...]`."""
    space = weight.ndim - 2
    if x.ndim == space + 1:
        return transposed(x[None], weight, bias, stride, padding, output_padding, groups, dilation)[0]
    stride, padding = _each(stride, space), _each(padding, space)
    output_padding, dilation = _each(output_padding, space), _each(dilation, space)
    extents = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(e - p, e - p + o) for e, p, o in zip(extents, padding, output_padding, strict=True)]
    # [in, out/g, ...] -> [out, in/g, ...], turned round in space.
    in_channels, per_group = weight.shape[:2]
    kernel = weight.reshape(groups, in_channels // groups, per_group, *weight.shape[2:])
    kernel = jnp.swapaxes(kernel, 1, 2).reshape(groups * per_group, in_channels // groups, *weight.shape[2:])
    kernel = jnp.flip(kernel, tuple(range(2, weight.ndim)))
    out = lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1,) * space,
        padding=pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=_dimensions(space),
        feature_group_count=groups,
    )
    return _biased(out, bias)


def _biased(out: Any, bias: Any) -> Any:
    return out if bias is None else biased(out, bias.reshape((1, -1) + (1,) * (out.ndim - 2)))


@lowering(
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
)
def conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    return convolve(x, weight, bias, stride, padding, dilation, groups)


@lowering(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    return transposed(x, weight, bias, stride, padding, output_padding, groups, dilation)


@lowering(aten.convolution.default)
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
) -> Any:
    if is_transposed:
        return transposed(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return convolve(x, weight, bias, stride, padding, dilation, groups)
