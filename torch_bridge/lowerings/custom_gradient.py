"""A backward that a user wrote, as a jax.custom_vjp around the outputs of its forward."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.errors import BridgeError, message


def custom_gradient(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    unknown: Sequence[Any],
    residuals: Sequence[Any],
    kept: Sequence[int | None],
    backward: Callable[..., tuple[Any, ...]],
    once: bool,
    function: str,
    *,
    rng: Any = None,
) -> tuple[Any, ...]:
    """The outputs, whose gradient with respect to the inputs is what `backward` makes of it.

    As in torch, the backward of the backward sees the history of what was saved: of inputs their own, of
    outputs this function again, of anything else none.

    Args:
        outputs: results of the forward.
        inputs: what the gradients belong to.
        unknown: inputs whose gradient is not known.
        residuals: what backward reads.
        kept: for each residual, which output it is, or None.
        backward: an `interpret.Subgraph` of residuals and cotangents, to gradients.
        once: whether backward itself must not be differentiated.
        function: the autograd.Function's name, for errors.
        rng: a key, if backward draws random numbers.
    """
    where = getattr(backward, "where", ())
    dtypes = [x.dtype for x in inputs]
    # Sizes that are numbers of Python stay numbers.
    numbers = [None if isinstance(x, jax.Array | np.ndarray) else x for x in residuals]

    @jax.custom_vjp
    def call(inputs: Any, unknown: Any, outputs: Any, residuals: Any, rng: Any) -> Any:
        del inputs, unknown, residuals, rng
        return outputs

    def forward(inputs: Any, unknown: Any, outputs: Any, residuals: Any, rng: Any) -> Any:
        results = call(inputs, unknown, outputs, residuals, rng)
        pairs = zip(residuals, kept, strict=True)
        saved = tuple(x if position is None else results[position] for x, position in pairs)
        return results, (saved, unknown, rng)

    def pull(saved_for_pull: Any, cotangents: Any) -> Any:
        saved, unknown, rng = saved_for_pull
        given = [x if number is None else number for x, number in zip(saved, numbers, strict=True)]
        # torch's gradient of a complex value is the conjugate of JAX's cotangent.
        found = backward(*given, *(g.conj() for g in cotangents), rng=rng)
        gradients = tuple(jnp.conj(g).astype(dtype) for g, dtype in zip(found, dtypes, strict=True))
        if once:
            what = f"the backward of {function} is differentiated, and is marked @once_differentiable."
            gradients = _refused(gradients, (cotangents, saved), message(what, *where))
        return gradients, tuple(map(jnp.zeros_like, unknown)), None, None, None

    call.defvjp(forward, pull)
    what = f"the backward of {function} gives no gradient for one of its inputs, and one is asked for."
    hint = "its backward does not have it, or raised an error when asked for it: .detach() that input"
    unknown = tuple(_refused(x, (), message(what, *where, hint=hint)) for x in unknown)
    arrays = tuple(x if number is None else None for x, number in zip(residuals, numbers, strict=True))
    return call(tuple(inputs), unknown, tuple(outputs), arrays, rng)


def _refused(values: Any, sources: Any, error: str) -> Any:
    """The values; to differentiate them with respect to themselves or the sources is an error."""

    @jax.custom_vjp
    def call(values: Any, sources: Any) -> Any:
        del sources
        return values

    def refuse(_residuals: None, _cotangents: Any) -> Any:
        raise BridgeError(error)

    call.defvjp(lambda values, sources: (values, None), refuse)
    return call(values, sources)
