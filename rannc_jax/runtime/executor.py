"""Walk a checked list of operations: dispatch without waiting, free at the last use.

One Python thread dispatches everything; JAX runs programs and copies asynchronously. Nothing here
reads an array's contents.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from jax.sharding import Mesh

from rannc_jax.ir.batch import RowLayout
from rannc_jax.runtime.ops import Key, Op, OpKind
from rannc_jax.runtime.transfer import move

Env = MutableMapping[Key, Any]
Watch = Callable[[Op], None]


def execute(
    ops: Sequence[Op],
    env: Env,
    *,
    programs: Mapping[str, Callable[..., Sequence[Any]]],
    meshes: Sequence[Mesh],
    layouts: Mapping[Key, RowLayout | None],
    watch: Watch | None = None,
) -> None:
    """Run operations in order.

    Args:
        ops: a checked list.
        env: key -> array; holds what is given, extended and shrunk in place.
        programs: by name; each takes the arrays of an op's inputs and returns those of its outputs.
        meshes: one sub-mesh a stage.
        layouts: where the rows of a moved key are (None or absent: replicated).
        watch: called before each operation is dispatched.
    """
    for op in ops:
        if watch is not None:
            watch(op)
        if op.kind is OpKind.RUN:
            # No local name holds an array, or it would outlive its last use by an operation.
            _bind(env, op, programs[op.name](*[env[key] for key in op.inputs]))
            for key in op.donates:
                del env[key]
        elif op.kind is OpKind.MOVE:
            where = [layouts.get(key) for key in op.outputs]
            _bind(env, op, move([env[key] for key in op.inputs], where, meshes[op.stage]))
        else:
            for key in op.inputs:
                del env[key]


def _bind(env: Env, op: Op, results: Sequence[Any]) -> None:
    env.update(zip(op.outputs, results, strict=True))
