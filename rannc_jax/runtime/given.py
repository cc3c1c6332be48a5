"""What a user hands a step, checked: states, batches and names of batch leaves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rannc_jax.errors import RuntimeFailure, TraceError, message
from rannc_jax.ir.example import abstract, path_leaves
from rannc_jax.runtime.stacked import StackedArray
from rannc_jax.runtime.state import TrainState


def check_one_batch(more: Sequence[Any], spread: bool) -> None:
    """Only functions without a loss take several positional arguments after the parameters."""
    if more and not spread:
        raise TraceError(
            message(
                f"init takes params and one batch, got {len(more)} more arguments.",
                hint="put what the loss reads into one pytree: init(params, (x, y)).",
            )
        )


def filled(given: Mapping[str, Any], initialisers: Callable[[], Any] | None) -> dict[str, Any]:
    """Trees to start from, with the model's own initialisers where it only has shapes.

    Args:
        given: trees by role ("params", "frozen", "model_state").
        initialisers: what the model brings: by role, trees of arrays and of functions of a key.
    """
    if initialisers is None or not any(_has_shapes(tree) for tree in given.values()):
        return dict(given)
    own = initialisers()

    def leaf(value: Any, maker: Any) -> Any:
        return maker if isinstance(value, jax.ShapeDtypeStruct) else value

    return {
        role: jax.tree.map(leaf, tree, getattr(own, role)) if _has_shapes(tree) else tree
        for role, tree in given.items()
    }


def _has_shapes(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def check_start(params: Any, batch: Any, rng: Any, *, frozen: Any = None, model_state: Any = None) -> None:
    """See that there is all that a first state is made from.

    Raises:
        TraceError: something is missing, or a leaf is a shape.
    """
    for name, tree in (("parameters", params), ("frozen leaves", frozen), ("model_state", model_state)):
        if _has_shapes(tree):
            raise TraceError(
                message(
                    f"init needs arrays for the {name}, not shapes.",
                    hint="init_fn(key) with rng= makes parameters on the devices; make_plan takes shapes.",
                )
            )
    if params is None or batch is None:
        raise TraceError(message("init needs params and a batch.", hint="step.init(params, batch)."))
    if rng is None and any(callable(leaf) for leaf in jax.tree.leaves((params, frozen, model_state))):
        raise TraceError(
            message(
                "values are to be made from a key, but no key was given.",
                hint="init(..., rng=jax.random.key(0)).",
            )
        )


def check_state(state: Any) -> None:
    """See that this is a state whose memory no step has taken over.

    Raises:
        TraceError: it is something else.
        RuntimeFailure: its arrays were donated.
    """
    if not isinstance(state, TrainState):
        raise TraceError(
            message(
                f"the first argument of a step is its state, got {type(state).__name__}.",
                hint="state, out = step(state, batch).",
            )
        )
    if is_gone(state):
        raise RuntimeFailure(
            message(
                "this state was given to an earlier step, which took over its memory.",
                hint="go on with the state that step returned, or use donate=False.",
            )
        )


def is_gone(state: TrainState) -> bool:
    """Whether a step has taken over memory of a state."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return any(isinstance(leaf, jax.Array | StackedArray) and leaf.is_deleted() for leaf in leaves)


def check_concrete(tree: Any) -> None:
    """Refuse tracers: a step is called, not traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        raise TraceError(
            message(
                "a step cannot be traced by jit, grad or vmap: it runs programs on several meshes.",
                hint="call it as it is (its programs are compiled), or use step.reference, the pure "
                "function it equals.",
            )
        )


def check_like(tree: Any, like: Any, name: str) -> None:
    """Refuse a tree that a user has put into the state with another structure, shape or dtype."""
    if jax.tree.structure(tree) != jax.tree.structure(like):
        raise TraceError(
            message(
                f"{name} has another structure than at init.",
                f"got {jax.tree.structure(tree)}",
                f"expected {jax.tree.structure(like)}",
            )
        )
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True))
    differs = [k for k, (x, y) in enumerate(pairs) if x.shape != y.shape or x.dtype != y.dtype]
    if differs:
        leaf, wanted = pairs[differs[0]]
        raise TraceError(
            message(
                f"{path_leaves(tree, name)[0][differs[0]]} has another shape or dtype than at init.",
                f"got {leaf.dtype}{list(leaf.shape)}, expected {wanted.dtype}{list(wanted.shape)}",
            )
        )


def batch_leaves(batch: Any, names: Sequence[str]) -> dict[str, int]:
    """Positions of the batch leaves that `wrt_batch` names (top-level names or pytree paths).

    Raises:
        TraceError: there is no such leaf, or it has no gradient.
    """
    paths, leaves = path_leaves(abstract(batch), "")
    chosen: dict[str, int] = {}
    for name in names:
        hits = [k for k, p in enumerate(paths) if p in (name, f"['{name}']", f"[{name}]", f".{name}")]
        if len(hits) != 1:
            raise TraceError(
                message(
                    f"wrt_batch names {name!r}, which is no batch leaf.", f"there are: {', '.join(paths)}"
                )
            )
        if not jnp.issubdtype(leaves[hits[0]].dtype, jnp.inexact):
            raise TraceError(
                message(
                    f"wrt_batch names {name!r}, which has no gradient.",
                    f"got {leaves[hits[0]].dtype}, expected a floating dtype",
                )
            )
        chosen[name] = hits[0]
    return chosen
