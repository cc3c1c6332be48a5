"""The one ordered list of operations that a step is, and the checks it must pass before it runs.

Values are single-assignment keys: tuples such as ("act", value id, microbatch, stage). A list is made
before anything runs; `check` proves that every key is defined once before it is read and never read
after it was freed or donated. `freed` puts a FREE behind the last use of everything that is not kept.
"""

import enum
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from rannc_jax.errors import ScheduleError, message

Key = tuple[Hashable, ...]


class OpKind(enum.Enum):
    """RUN a compiled program, MOVE values to another sub-mesh, FREE keys."""

    RUN = "run"
    MOVE = "move"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    Args:
        kind: what is done.
        name: the program of a RUN ("F0", "update1"), a label otherwise.
        stage: where it runs; the target of a MOVE.
        inputs, outputs: keys, in the order of the program's arguments and results.
        donates: inputs whose memory the program takes over.
        label: what a person reads in a timeline ("2F0").
    """

    kind: OpKind
    name: str
    stage: int
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...] = ()
    donates: frozenset[Key] = frozenset()
    label: str = ""


def check(ops: Sequence[Op], given: Iterable[Key], wanted: Iterable[Key]) -> None:
    """Prove that a list of operations can run.

    Args:
        ops: in order.
        given: keys defined before the list starts.
        wanted: keys that must be alive at its end.

    Raises:
        ScheduleError: a key is read before it is defined or after it is gone, defined twice, or missing.
    """
    alive: set[Key] = set(given)
    gone: set[Key] = set()
    for position, op in enumerate(ops):
        for key in op.inputs:
            if key not in alive:
                raise _broken(
                    position, op, key, "was freed or donated before" if key in gone else "is not defined"
                )
        leaving = set(op.inputs) if op.kind is OpKind.FREE else set(op.donates)
        if not leaving <= set(op.inputs):
            raise _broken(position, op, next(iter(leaving - set(op.inputs))), "is donated but no input")
        alive -= leaving
        gone |= leaving
        for key in op.outputs:
            if key in alive or key in gone:
                raise _broken(position, op, key, "is defined twice")
            alive.add(key)
    missing = [key for key in wanted if key not in alive]
    if missing:
        raise ScheduleError(
            message("the operations do not make what is wanted.", *(f"missing: {key}" for key in missing))
        )


def freed(ops: Sequence[Op], keep: Iterable[Key]) -> list[Op]:
    """The same operations with every key freed right behind its last use.

    Args:
        ops: in order, without FREE.
        keep: keys that stay: what is wanted at the end, and what somebody else owns.
    """
    kept = set(keep)
    last: dict[Key, int] = {}
    for position, op in enumerate(ops):
        for key in (*op.inputs, *op.outputs):
            last[key] = position
        for key in op.donates:
            kept.add(key)
    dying: dict[int, list[Key]] = {}
    for key, position in last.items():
        if key not in kept:
            dying.setdefault(position, []).append(key)
    out: list[Op] = []
    for position, op in enumerate(ops):
        out.append(op)
        if position in dying:
            keys = tuple(dying[position])
            out.append(Op(kind=OpKind.FREE, name="free", stage=op.stage, inputs=keys))
    return out


def _broken(position: int, op: Op, key: Key, why: str) -> ScheduleError:
    return ScheduleError(
        message(f"operation {position} ({op.kind.value} {op.name}) cannot run.", f"{key} {why}")
    )
