"""A plan of one stage as one compiled program: its list of operations, traced.

The list that an executor would walk is walked once, under `jax.jit`: the programs it names become calls
that XLA inlines. So a step has one meaning, whether it runs as many programs or as one. Microbatches are the
turns of a loop, which keeps what one of them needs from being there for all of them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from rannc_jax.runtime.executor import execute
from rannc_jax.runtime.layout import Layout, Lowered
from rannc_jax.runtime.ops import Key, Op, OpKind
from rannc_jax.runtime.shares import gathered

Env = dict[Key, Any]


class Update(Protocol):
    """An optimizer's update, part by part; equal ones compile once."""

    @property
    def donate(self) -> bool:
        """Whether parameters and state may be overwritten."""
        ...

    def parts(self, grads: Any, state: Any, params: Any, loss: Any) -> tuple[list[Any], list[Any]]:
        """New parameters and new state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A list of one stage with its microbatches rolled up. All keys are those of the first microbatch.

    Args:
        before, turn, after: what runs ahead of the microbatches, the first of them, what follows the last.
        fed: read by a turn and another in each -> the keys of all turns.
        carried: read by a turn and made by the turn before -> what it makes for the next, and what the last
            turn leaves.
        made: what a turn makes and is read behind the loop -> the keys of all turns.
    """

    before: tuple[Op, ...]
    turn: tuple[Op, ...]
    after: tuple[Op, ...]
    fed: Mapping[Key, tuple[Key, ...]]
    carried: Mapping[Key, tuple[Key, Key]]
    made: Mapping[Key, tuple[Key, ...]]


def rolled(ops: Sequence[Op], wanted: Sequence[Key], turns: int) -> Loop:
    """Roll the microbatches of a list up.

    Args:
        ops: of one stage; every program that serves microbatches occurs once for each, in their order.
        wanted: keys that are read at the end.
        turns: number of microbatches, at least 2.
    """
    runs = [op for op in ops if op.kind is OpKind.RUN]
    count = Counter(op.name for op in runs)
    assert all(n in (1, turns) for n in count.values()), count
    columns: dict[str, list[Op]] = {}
    for op in runs:
        if count[op.name] == turns:
            columns.setdefault(op.name, []).append(op)
    start = next(n for n, op in enumerate(runs) if op.name in columns)
    after = tuple(op for op in runs[start:] if op.name not in columns)
    reads = _rows([[op.inputs for op in column] for column in columns.values()])
    makes = _rows([[op.outputs for op in column] for column in columns.values()])
    origin = {key: (first, turn) for first, keys in makes.items() for turn, key in enumerate(keys)}
    fed, carried = {}, {}
    for first, keys in reads.items():
        if keys[1] not in origin:
            fed.update({first: keys} if keys[1] != first else {})
            continue
        source, turn = origin[keys[1]]
        if turn == 0:
            carried[first] = (source, makes[source][-1])
    behind = {*wanted, *(key for op in after for key in op.inputs)} - {end for _, end in carried.values()}
    return Loop(
        before=tuple(runs[:start]),
        turn=tuple(column[0] for column in columns.values()),
        after=after,
        fed=fed,
        carried=carried,
        made={first: keys for first, keys in makes.items() if behind & set(keys)},
    )


def _rows(columns: Sequence[Sequence[Sequence[Key]]]) -> dict[Key, tuple[Key, ...]]:
    """Key of the first microbatch -> the keys in its place, of all microbatches."""
    return {keys[0]: keys for column in columns for keys in zip(*column, strict=True)}


class Fused:
    """Compiles the list of one stage, for one shape of batch.

    Args:
        layout: where the work goes.
        lowered: the list and its programs.
        ops: the list as it would be executed.
    """

    def __init__(self, layout: Layout, lowered: Lowered, ops: Sequence[Op]) -> None:
        (self._mesh,) = layout.meshes
        self._lowered, self._turns = lowered, layout.num_microbatches
        self._ops = [op for op in ops if op.kind is OpKind.RUN]
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, env: Env) -> Env:
        """What is wanted of the given values."""
        keys = tuple(env)
        if keys not in self._programs:
            self._programs[keys] = jax.jit(lambda values: self.traced(dict(zip(keys, values, strict=True))))
        return self._programs[keys](list(env.values()))

    def step(self, env: Env, state: Sequence[Any], update: Update) -> tuple[list[Any], list[Any], Env]:
        """The same and the update behind it, in one program.

        Args:
            env: what the list starts from, parameters included.
            state: the parts of the optimizer state.
            update: what to do with the gradients.

        Returns:
            New parameters and new state, whose memory may be that of the old ones, and what else is wanted.
        """
        params = {key: x for key, x in env.items() if key[0] == "param"}
        others = {key: x for key, x in env.items() if key[0] != "param"}
        program = self.step_program(tuple(params), tuple(others), update)
        return program(list(params.values()), list(state), list(others.values()))

    def step_program(
        self, params: Sequence[Key], others: Sequence[Key], update: Update
    ) -> Callable[..., Any]:
        """From values of `params`, parts of the state and values of `others` to what `step` returns."""

        def run(old: Sequence[Any], state: Sequence[Any], given: Sequence[Any]) -> Any:
            env = self.traced(dict(zip((*params, *others), (*old, *given), strict=True)))
            grads = [env.pop(("grad", key[1])) for key in params]
            return (*update.parts(grads, state, old, env["loss",]), env)

        name = (update, params, others)
        if name not in self._programs:
            self._programs[name] = jax.jit(run, donate_argnums=(0, 1) if update.donate else ())
        return self._programs[name]

    def traced(self, given: Mapping[Key, Any]) -> Env:
        """The same inside a program."""
        env = dict(given)
        if self._turns == 1:
            self._run(self._ops, env)
        else:
            loop = rolled(self._ops, self._lowered.wanted, self._turns)
            self._run(loop.before, env)
            self._turn(loop, env)
            self._run(loop.after, env)
        return {key: env[key] for key in self._lowered.wanted}

    def _turn(self, loop: Loop, env: Env) -> None:
        """Run the loop, adding what it leaves to `env`."""

        def body(carry: Sequence[Any], fed: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            here = dict(env)
            here.update(zip(loop.carried, carry, strict=True))
            here.update(zip(loop.fed, fed, strict=True))
            self._run(loop.turn, here)
            return [here[new] for new, _ in loop.carried.values()], [here[key] for key in loop.made]

        fed = [jnp.stack([env[key] for key in keys]) for keys in loop.fed.values()]
        first = [env[key] for key in loop.carried]
        last, made = jax.lax.scan(body, first, fed, length=self._turns)
        env.update(zip((end for _, end in loop.carried.values()), last, strict=True))
        self._spread(loop.made.values(), made, env)
        self._spread(loop.fed.values(), fed, env)

    def _spread(self, rows: Any, stacks: Sequence[Any], env: Env) -> None:
        """Take stacks over the microbatches apart. One number a replica is gathered first: all at once."""
        for keys, stacked in zip(rows, stacks, strict=True):
            numbers = stacked.shape[1:] == (self._mesh.size,)
            env.update(zip(keys, gathered(stacked, self._mesh) if numbers else stacked, strict=True))

    def _run(self, ops: Sequence[Op], env: Env) -> None:
        execute(ops, env, programs=self._lowered.programs, meshes=(), layouts={})
