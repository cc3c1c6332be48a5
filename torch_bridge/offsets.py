"""Parameters that forward writes: `Embedding(max_norm=)`, weights clamped, normalised or averaged in place.

A frozen one is state, as a buffer is. A trainable one is written by two, forward and the optimizer, which
knows nothing of forward. So forward's part is a state of its own, the offset: forward reads
`params[name] + offset`, and leaves there what it has changed since. Then the optimizer's update comes on top
of what forward wrote, as in torch; microbatches hand the offset on as they do the statistics of a norm.

What reads `params` alone (decay of weights, trust ratios) does not see the offset.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

OFFSET = ".offset"


def offset_like(parameter: Any) -> Any:
    """The first offset of a parameter: zeros of its shape, in float32 at least; a shape for a shape."""
    dtype = jnp.promote_types(parameter.dtype, np.float32)
    if isinstance(parameter, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(parameter.shape, dtype)
    return jnp.zeros(parameter.shape, dtype)


def without_offsets(state: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """State in which the parameters are as forward reads them: every offset zero, where it lies."""
    return {name: _zero(value, params.get(_parameter_of(name))) for name, value in state.items()}


def _zero(held: Any, parameter: Any) -> Any:
    if parameter is None:
        return held
    if isinstance(held, jax.ShapeDtypeStruct):
        return offset_like(parameter)
    return jnp.zeros_like(held, device=held.sharding)


def with_offsets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, every parameter with its offset added and that dropped."""
    offsets = {name: value for name, value in values.items() if _parameter_of(name) in values}
    result = {name: value for name, value in values.items() if name not in offsets}
    for name, offset in offsets.items():
        value = values[_parameter_of(name)]
        result[_parameter_of(name)] = (value.astype(offset.dtype) + offset).astype(value.dtype)
    return result


def as_offsets(written: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """New values by name, those of parameters as offsets from what the optimizer holds."""
    return {name: _moved(name, value, params) for name, value in written.items()}


def _moved(name: str, value: Any, params: Mapping[str, Any]) -> Any:
    held = params.get(_parameter_of(name))
    if held is None:
        return value
    dtype = jnp.promote_types(held.dtype, np.float32)
    return jax.lax.stop_gradient(value.astype(dtype) - held.astype(dtype))


def _parameter_of(name: str) -> str:
    """The parameter of an offset; no module has a buffer of such a name, as a parameter has no parts."""
    return name.removesuffix(OFFSET) if name.endswith(OFFSET) else ""
