"""What a schedule has left behind, as the user's function would have returned it, and what went wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rannc_jax.contract import LossOut
from rannc_jax.errors import RuntimeFailure, message
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.runtime.engine import Prepared
from rannc_jax.runtime.stacked import flat_parts, packed, slicings_of

Environment = Mapping[Any, Any]


def outputs(prepared: Prepared, env: Environment) -> Any:
    """The outputs of a forward-only function."""
    program = prepared.graph.program
    return program.out_tree.unflatten([env["aux", k] for k in range(len(program.outputs))])


def loss_out(prepared: Prepared, env: Environment, old_state: Any) -> LossOut:
    """The loss of the whole batch with aux and the model state after it.

    Args:
        prepared, env: what ran and its values.
        old_state: the model state before, for leaves that nothing writes.
    """
    program, table = prepared.graph.program, prepared.table
    groups = program.leaves(Role.MODEL_STATE)
    states = [v for leaf in groups for v in leaf.positions]
    unwritten = dict(zip(states, flat_parts(old_state, slicings_of(groups)), strict=True))
    in_order = iter(states)
    last = prepared.layout.num_microbatches
    leaves = []
    for k, leaf in enumerate(program.outputs):
        if leaf.kind is OutputKind.LOSS:
            leaves.append(env["loss",])
        elif leaf.kind is OutputKind.WEIGHT:
            leaves.append(env["total_weight",])
        elif leaf.kind is OutputKind.MODEL_STATE:
            v = next(in_order)
            leaves.append(env["state", v, last] if v in table.written else unwritten[v])
        else:
            leaves.append(env["aux", k])
    return packed(program.out_tree, slicings_of(program.output_leaves()), leaves)


def wait(loss: Any, grads: Sequence[Any]) -> None:
    """Wait until all gradients are there: an error before the update leaves the state intact.

    Raises:
        RuntimeFailure: the devices failed.
    """
    try:
        jax.block_until_ready((loss, list(grads)))
    except jax.errors.JaxRuntimeError as error:
        raise failure(error) from error


def check_finite(loss: Any, grads: Sequence[Any], paths: Sequence[str]) -> None:
    """Refuse a loss or a gradient that is not finite.

    Raises:
        RuntimeFailure: it names the first few of them.
    """
    flags = [jnp.isfinite(loss), *(jnp.all(jnp.isfinite(g)) for g in grads)]
    names = ["the loss", *paths]
    bad = [name for name, flag in zip(names, flags, strict=True) if not bool(flag)]
    if bad:
        raise RuntimeFailure(
            message("not finite: " + ", ".join(bad[:5]) + ".", hint="the state is unchanged; lower the rate.")
        )


def failure(error: Exception, *, lost: bool = False) -> RuntimeFailure:
    """What a device said, in the house's form.

    Args:
        error: JAX's.
        lost: the memory of the state was taken over already.
    """
    if lost:
        what = "the devices failed during the update; the state is lost."
        hint = (
            "go on from the last checkpoint. donate=False keeps the old state, at the price of a second one."
        )
    else:
        what = "the devices failed before the update; the state is as it was."
        hint = "if memory ran out: a smaller memory_limit_bytes makes the planner leave more room."
    return RuntimeFailure(message(what, str(error).splitlines()[0], hint=hint))
