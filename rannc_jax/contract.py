"""The words in which a user's function and the house talk to each other.

`Weighted` and `LossOut` are what a loss function may return besides a scalar; `Remat` and `Sharding`
are the closed choices a plan makes for a stage; `separable` marks code whose examples do not see each
other although the analysis cannot know it; `TrainableModel` is the protocol of objects (such as
`torch_bridge.JaxModule`) that bring function, parameters and batch along.
"""

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

Function = TypeVar("Function", bound=Callable[..., Any])

SEPARABLE_SCOPE = "rannc_separable"
COUPLED_SCOPE = "rannc_coupled"


class Remat(enum.Enum):
    """What a stage keeps from its forward for its backward.

    SAVE_ALL keeps every residual. SAVE_MATMULS keeps the results of matrix products, convolutions and
    attention and computes the cheap rest again. RECOMPUTE keeps only the inputs of the stage's blocks.
    """

    SAVE_ALL = "save_all"
    SAVE_MATMULS = "save_matmuls"
    RECOMPUTE = "recompute"


class Sharding(enum.Enum):
    """How a stage's parameters and optimizer state lie on its replicas."""

    REPLICATED = "replicated"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"

    @property
    def shards_optimizer(self) -> bool:
        """Every replica keeps and updates a part of the optimizer state."""
        return self is not Sharding.REPLICATED

    @property
    def shards_gradients(self) -> bool:
        """Every replica keeps a part of the sums of gradients."""
        return self in (Sharding.ZERO2, Sharding.FSDP)

    @property
    def shards_parameters(self) -> bool:
        """Every replica keeps a part of the parameters."""
        return self is Sharding.FSDP


@functools.lru_cache(maxsize=4096)
def shard_dim(shape: tuple[int, ...], parts: int) -> int | None:
    """The dim along which an array lies in equal parts: the longest that divides, the first of equals.

    None where none divides: such an array is whole on every replica. These are small (odd biases, scalars);
    padding them would show in the shapes that users see.

    Example:
        >>> shard_dim((6, 8), 4), shard_dim((8, 8), 4), shard_dim((6, 10), 4), shard_dim((), 4)
        (1, 0, None, None)
    """
    fitting = [(size, -dim) for dim, size in enumerate(shape) if size >= parts and size % parts == 0]
    return -max(fitting)[1] if fitting and parts > 1 else None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("loss", "weight"), meta_fields=())
@dataclass(frozen=True, slots=True)
class Weighted:
    """A loss that is a mean over `weight` things (tokens, say), so that unequal parts combine exactly.

    Args:
        loss: scalar, the mean over this batch's things.
        weight: scalar, how many things there were. A part of weight 0 contributes exactly nothing.
    """

    loss: Any
    weight: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("loss", "aux", "model_state", "weight"),
    meta_fields=(),
)
@dataclass(frozen=True, slots=True)
class LossOut:
    """Everything a loss function can return.

    Args:
        loss: scalar.
        aux: any pytree; leaves with a batch dim are concatenated over microbatches, batch-free floats
            averaged with the loss's weights, other leaves stacked, one a microbatch.
        model_state: the new value of the `model_state` the function took (same structure).
        weight: scalar, as in `Weighted`.
    """

    loss: Any
    aux: Any = None
    model_state: Any = None
    weight: Any = None


@runtime_checkable
class TrainableModel(Protocol):
    """An object that brings its own function, parameters and example batch (`auto_partition(model)`).

    Leaves may be `jax.ShapeDtypeStruct`s; then it also has `initialisers`, with the trees `params`, `frozen`
    and `model_state` again and a function of a key in the place of every shape.
    """

    @property
    def loss_fn(self) -> Callable[..., Any]: ...
    @property
    def params(self) -> Any: ...
    @property
    def frozen(self) -> Any: ...
    @property
    def model_state(self) -> Any: ...
    @property
    def batch(self) -> Any: ...
    @property
    def batch_dims(self) -> Any: ...


def separable(fn: Function) -> Function:
    """Mark `fn` as treating every example on its own, where the analysis cannot see it.

    Rows that are permuted and later put back (grouped experts, packed sequences) look coupled. The mark
    is the name scope `rannc_separable`, so code that does not import this package can set it too.

    Example:
        >>> import jax.numpy as jnp
        >>> separable(jnp.sin)(0.0).shape
        ()
    """

    @functools.wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(SEPARABLE_SCOPE):
            return fn(*args, **kwargs)

    return marked  # type: ignore[return-value]


def coupled(fn: Function) -> Function:
    """Mark `fn` as needing the batch whole, where the analysis cannot see it.

    The analysis looks into no backward that you wrote: a `jax.custom_vjp` that clips or normalises the
    gradient it is given, or compares rows of it, would see one microbatch at a time. The mark is the name
    scope `rannc_coupled`; as with everything that couples rows, the batch then stays whole unless
    `allow_coupled=True`.

    Example:
        >>> import jax.numpy as jnp
        >>> coupled(jnp.sin)(0.0).shape
        ()
    """

    @functools.wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(COUPLED_SCOPE):
            return fn(*args, **kwargs)

    return marked  # type: ignore[return-value]
