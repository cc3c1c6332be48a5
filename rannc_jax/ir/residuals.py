"""Which results are worth keeping from a forward for its backward.

`Remat.SAVE_MATMULS` keeps what is dear to compute again (matrix products, convolutions, attention) and
drops what is cheap. A T x T score that only feeds a softmax is not kept either: its bytes dwarf the
work of making it again.
"""

from collections.abc import Iterable, Sequence

from jax.extend import core as jex

MATMULS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
RESIDUAL_NAME = "rannc_residual"  # the checkpoint_name under which values are kept

# What may lie between a score and its softmax: scaling, bias, masks, casts.
_PASSES = frozenset(
    "mul div add sub select_n convert_element_type max min neg broadcast_in_dim reshape transpose "
    "squeeze stop_gradient custom_jvp_call reduce_precision".split()
)
_SOFTMAX = frozenset({"reduce_max", "exp", "exp2", "argmax"})


def kept_equations(eqns: Sequence[jex.JaxprEqn], among: Iterable[int]) -> frozenset[int]:
    """Indices of the equations whose results SAVE_MATMULS keeps.

    Args:
        eqns: all equations of a flat jaxpr.
        among: the indices to choose from.
    """
    readers: dict[jex.Var, list[int]] = {}
    chosen = [e for e in among if eqns[e].primitive.name in MATMULS]
    for index, eqn in enumerate(eqns):
        for atom in eqn.invars:
            if not isinstance(atom, jex.Literal):
                readers.setdefault(atom, []).append(index)
    return frozenset(e for e in chosen if not _feeds_softmax_only(eqns, readers, e))


def _feeds_softmax_only(eqns: Sequence[jex.JaxprEqn], readers: dict[jex.Var, list[int]], start: int) -> bool:
    """Whether every path from a result runs through cheap equations into a softmax."""
    reached = False
    stack, seen = [start], {start}
    while stack:
        following = [r for v in eqns[stack.pop()].outvars for r in readers.get(v, ())]
        if not following:
            return False
        for r in following:
            name = eqns[r].primitive.name
            if name in _SOFTMAX:
                reached = True
            elif name not in _PASSES:
                return False
            elif r not in seen:
                seen.add(r)
                stack.append(r)
    return reached
