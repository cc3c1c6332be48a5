"""What a step carries from one batch to the next."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from rannc_jax.runtime.stacked import StackedArray


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "opt_state", "model_state", "frozen", "rng", "step"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The user's trees, each leaf one array on the sub-mesh of its stage.

    A leaf that is stacked over layers of an opened scan is a `StackedArray`: it has the shape of the user's
    leaf, and one array a layer on the layer's stage.

    Args:
        params: trained parameters.
        opt_state: what `optimizer.init` returns for them, None without an optimizer.
        model_state: batch statistics and the like, None if the function takes none.
        frozen: parameters without gradients, None if the function takes none.
        rng: the key that steps fold their number into, None if the function takes none.
        step: int32 scalar, how many calls have consumed a key.
    """

    params: Any
    opt_state: Any = None
    model_state: Any = None
    frozen: Any = None
    rng: Any = None
    step: Any = None

    def replace(self, **changes: Any) -> "TrainState":
        """A copy with other values for some fields."""
        return dataclasses.replace(self, **changes)


def gather(tree: Any) -> Any:
    """The tree as numpy arrays on the host (typed keys stay keys)."""

    def leaf(x: Any) -> Any:
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return np.asarray(x) if isinstance(x, StackedArray) else jax.device_get(x)

    return jax.tree.map(leaf, tree)
