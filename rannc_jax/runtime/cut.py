"""Cut a whole-tree program into one program a stage and round, with small exchanges between them.

Work of a stage's own leaves runs on the stage. What follows from scalar state or from values of several
stages (step counts, a global norm) is computed once, on one stage, the *hub*, and sent to those that
need it, so that all stages see the same bits. In round k every stage computes what the hub needs of it
and sends that; the hub computes what it can and sends that; the last round computes the results.
Sums over stages are not reordered: the terms are sent and the hub adds them as the user's program does.
The result is a list of `StageProgram`s and `Send`s in an order in which they may run.
"""

import enum
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core as jex
from jax.sharding import NamedSharding

from rannc_jax.errors import PlanError, message
from rannc_jax.ir.evaluate import evaluate
from rannc_jax.runtime.homes import (
    FREE,
    SHARED,
    Homes,
    Rule,
    backward_slice,
    home_of,
    is_small,
    outputs,
    propagate,
)
from rannc_jax.runtime.shares import Shares


class Kind(enum.Enum):
    """What a value is. PACKED are small values on their way, CARRY stay on a stage between two rounds."""

    GRAD = "grad"
    PARAM = "param"
    STATE = "state"
    LOSS = "loss"
    PACKED = "packed"
    CARRY = "carry"
    NEW_PARAM = "new_param"
    NEW_STATE = "new_state"


@dataclass(frozen=True, slots=True)
class Value:
    """A single-assignment value on one stage's sub-mesh. `index` is a leaf's position in its flat tree."""

    kind: Kind
    index: int
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageProgram:
    """One program of one stage.

    Args:
        stage, round: where and when it runs.
        inputs, outputs: what it takes and gives, in order.
        input_types, output_types: their shapes and dtypes.
        donates: positions of inputs that are used here for the last time and fit an output.
        function: from the inputs to a list of the outputs; pure.
    """

    stage: int
    round: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    input_types: tuple[jax.ShapeDtypeStruct, ...]
    output_types: tuple[jax.ShapeDtypeStruct, ...]
    donates: tuple[int, ...]
    function: Callable[..., list[jax.Array]]

    def compiled(self, shares: Shares, donates: tuple[int, ...] = ()) -> Callable[..., list[jax.Array]]:
        """The jitted program for a stage's devices, the same object every time; results lie as it says."""
        return _compiled(self, shares, donates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Move `values` (all of one stage) to `target`: they then exist as `replace(value, stage=target)`."""

    values: tuple[Value, ...]
    target: int

    @property
    def arrived(self) -> tuple[Value, ...]:
        return tuple(replace(value, stage=self.target) for value in self.values)


Op = StageProgram | Send


@functools.cache
def _compiled(
    program: StageProgram, shares: Shares, donates: tuple[int, ...]
) -> Callable[..., list[jax.Array]]:
    def layout(value: Value, shape: tuple[int, ...]) -> NamedSharding:
        if value.kind is Kind.NEW_PARAM:
            return shares.on_mesh(shares.parameter(shape))
        return shares.on_mesh(None if value.kind is Kind.PACKED else shares.update(shape))

    def run(*arrays: jax.Array) -> list[jax.Array]:
        """Whole parameters too are updated share by share, and put together afterwards."""
        taken = [
            jax.lax.with_sharding_constraint(x, layout(value, x.shape)) if value.kind is Kind.PARAM else x
            for value, x in zip(program.inputs, arrays, strict=True)
        ]
        return program.function(*taken)

    run.__name__ = program.function.__name__  # type: ignore[attr-defined]
    outs = zip(program.outputs, program.output_types, strict=True)
    return jax.jit(
        run,
        donate_argnums=donates,
        out_shardings=[layout(value, x.shape) for value, x in outs],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A whole-tree program and where its inputs lie and its outputs shall lie.

    Args:
        closed: inlined and with split conditionals.
        homes: home of every input; SHARED inputs lie on the hub.
        results: `reach` of every output.
        inputs, outputs: kind and index of each; the outputs' `stage` says where they are wanted.
        labels: name of every stage.
        hub: the stage that does the shared work.
        name: with the label, what the programs are called in profiles.
    """

    name: str
    closed: jex.ClosedJaxpr
    homes: tuple[int, ...]
    results: tuple[int, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    labels: tuple[str, ...]
    hub: int

    @property
    def num_stages(self) -> int:
        return len(self.labels)


def cut(task: Task) -> tuple[Op, ...]:
    """Cut a program: programs and sends, in an order in which they may run.

    Raises:
        PlanError: whole arrays of several stages would have to meet.
    """
    return _Cutter(task).ops()


@dataclass(eq=False, kw_only=True)
class _Draft:
    """A program in the making: `results` grow when later rounds turn out to need what it computes."""

    stage: int
    round: int
    eqns: list[int]
    external: list[jex.Var]
    results: list[tuple[Any, Value]]
    packs: list[tuple[Value, list[jex.Var]]]

    def given(self, var: jex.Var) -> Value | None:
        """The value as which a variable already leaves the program."""
        return next((value for atom, value in self.results if atom is var), None)


class _Cutter:
    """Finds rounds, then what must be sent, then the programs, round after round."""

    def __init__(self, task: Task) -> None:
        self.task = task
        jaxpr = task.closed.jaxpr
        self.eqns: Sequence[jex.JaxprEqn] = jaxpr.eqns
        self.consts = dict(zip(jaxpr.constvars, task.closed.consts, strict=True))
        self.homes: Homes = propagate(jaxpr, task.homes, task.results, Rule(task.num_stages))
        self.inputs = dict(zip(jaxpr.invars, task.inputs, strict=True))
        self.definition = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.results: dict[int, list[tuple[Any, Value]]] = defaultdict(list)
        for atom, value in zip(jaxpr.outvars, task.outputs, strict=True):
            self.results[value.stage].append((atom, value))
        self.others = [stage for stage in range(task.num_stages) if stage != task.hub]
        self.round: dict[jex.Var, int] = self._rounds()
        wanted = [self._available(atom, s) for s, pairs in self.results.items() for atom, _ in pairs]
        self.last_round = max(wanted, default=0)
        # Per stage: what earlier programs compute there, and as which value later ones take it.
        self.computed: dict[int, dict[jex.Var, _Draft]] = defaultdict(dict)
        self.carried: dict[int, dict[jex.Var, Value]] = defaultdict(dict)
        # (variable, on its way to the hub) -> the packed value in which it travels, and the offset there.
        self.packed: dict[tuple[jex.Var, bool], tuple[int, int]] = {}
        self.numbers = itertools.count()
        self.types = {value: _type(var) for var, value in self.inputs.items()}
        self.types.update({value: _type(atom) for pairs in self.results.values() for atom, value in pairs})
        self.received = self._received()

    def place(self, var: jex.Var) -> int:
        """The stage that computes or holds a value."""
        home = self.homes[var]
        return self.task.hub if home == SHARED else home

    def _rounds(self) -> dict[jex.Var, int]:
        """The first round in which a value can be computed at its place."""
        self.round = dict.fromkeys(self.inputs, 0)
        for eqn in self.eqns:
            home = home_of(self.homes, eqn.outvars[0]) if eqn.outvars else FREE
            if home != FREE:
                place = self.place(eqn.outvars[0])
                first = max((self._available(atom, place) for atom in eqn.invars), default=0)
                self.round.update(dict.fromkeys(eqn.outvars, first))
        return self.round

    def _available(self, atom: Any, stage: int) -> int:
        """The first round in which `stage` can use a value, sent or computed there."""
        if home_of(self.homes, atom) == FREE:
            return 0
        if self.place(atom) == stage:
            return self.round[atom]
        if is_small(atom.aval):
            return self.round[atom] + (0 if stage == self.task.hub else 1)
        if self.homes[atom] == SHARED and atom in self.definition:
            return max((self._available(a, stage) for a in self.definition[atom].invars), default=0)
        raise PlanError(
            message(
                f"the optimizer cannot be cut: stage {stage} needs an array of stage {self.place(atom)}.",
                f"got {atom.aval.str_short()}",
                hint="parameters and optimizer state that are combined must be in one stage: "
                "num_stages=1, or optimizer=optax.identity() and an update of your own.",
            )
        )

    def _is_external(self, var: jex.Var, stage: int) -> bool:
        """Whether a program of `stage` takes this value from outside."""
        home = self.homes[var]
        if home == FREE:
            return False
        if self.place(var) == stage:
            return var in self.inputs or var in self.computed[stage]
        return is_small(var.aval) or home != SHARED

    def _slice(self, stage: int, roots: Iterable[Any]) -> tuple[list[int], list[jex.Var]]:
        """Equations for `roots` on a stage, and the values from outside."""
        eqns, needed = backward_slice(self.eqns, roots, lambda var: self._is_external(var, stage))
        return eqns, [var for var in needed if self._is_external(var, stage)]

    def _received(self) -> dict[int, dict[jex.Var, None]]:
        """Per stage, the small values that it takes from others: stages from the hub, the hub from stages."""
        received: dict[int, dict[jex.Var, None]] = {stage: {} for stage in range(self.task.num_stages)}
        self.received = received
        before = -1
        while before != (before := sum(map(len, received.values()))):
            for stage in [*self.others, self.task.hub]:
                roots = [*(atom for atom, _ in self.results[stage]), *self._sent_by(stage)]
                _, external = self._slice(stage, roots)
                received[stage].update(dict.fromkeys(v for v in external if self.place(v) != stage))
        return received

    def _sent_by(self, stage: int) -> list[jex.Var]:
        """What other stages take from this one; the hub also passes on."""
        if stage == self.task.hub:
            return list(dict.fromkeys(var for other in self.others for var in self.received[other]))
        return [var for var in self.received[self.task.hub] if self.place(var) == stage]

    def ops(self) -> tuple[Op, ...]:
        """The programs and sends, round after round; the hub comes last in each."""
        order: list[_Draft | Send] = []
        for number in range(self.last_round + 1):
            for stage in [*self.others, self.task.hub]:
                draft = self._draft(stage, number)
                if draft is not None:
                    order += [draft, *self._sends(draft)]
        finished = [item if isinstance(item, Send) else self._finished(item) for item in order]
        return self._with_donation(finished)

    def _draft(self, stage: int, number: int) -> _Draft | None:
        """What `stage` does in a round: what must be sent then, and in the last round the results."""
        sent = [var for var in self._sent_by(stage) if self.round[var] == number]
        results: list[tuple[Any, Value]] = []
        for atom, value in self.results[stage] if number == self.last_round else ():
            earlier = None if isinstance(atom, jex.Literal) else self.computed[stage].get(atom)
            (results if earlier is None else earlier.results).append((atom, value))
        if not sent and not results:
            return None
        eqns, external = self._slice(stage, [*sent, *(atom for atom, _ in results)])
        for var in external:
            if var in self.computed[stage] and var not in self.carried[stage]:
                self.carried[stage][var] = self._carry(var, self.computed[stage][var])
        draft = _Draft(
            stage=stage,
            round=number,
            eqns=eqns,
            external=external,
            results=results,
            packs=self._pack(stage, sent),
        )
        for var in (var for index in eqns for var in self.eqns[index].outvars):
            if self.homes[var] != FREE and self.place(var) == stage:
                self.computed[stage].setdefault(var, draft)
        return draft

    def _carry(self, var: jex.Var, producer: _Draft) -> Value:
        """Have an earlier program of the stage hand a value out."""
        value = producer.given(var)
        if value is None:
            value = Value(Kind.CARRY, next(self.numbers), producer.stage)
            producer.results.append((var, value))
            self.types[value] = _type(var)
        return value

    def _pack(self, stage: int, sent: Sequence[jex.Var]) -> list[tuple[Value, list[jex.Var]]]:
        """Join small values into one vector a dtype, so that a send costs the same however many there are."""
        groups: dict[Any, list[jex.Var]] = defaultdict(list)
        for var in sent:
            groups[var.aval.dtype].append(var)
        packs: list[tuple[Value, list[jex.Var]]] = []
        for group in groups.values():
            value, offset = Value(Kind.PACKED, next(self.numbers), stage), 0
            for var in group:
                self.packed[var, stage != self.task.hub] = (value.index, offset)
                offset += math.prod(var.aval.shape)
            self.types[value] = jax.ShapeDtypeStruct((offset,), group[0].aval.dtype)
            packs.append((value, group))
        return packs

    def _sends(self, draft: _Draft) -> list[Send]:
        """The sends that follow a program: to the hub, or from it to the stages that need something."""
        targets = self.others if draft.stage == self.task.hub else [self.task.hub]
        sends: list[Send] = []
        for target in targets:
            wanted = self.received[target]
            values = tuple(value for value, group in draft.packs if any(var in wanted for var in group))
            if values:
                sends.append(Send(values=values, target=target))
                self.types.update(
                    zip(sends[-1].arrived, [self.types[value] for value in values], strict=True)
                )
        return sends

    def _finished(self, draft: _Draft) -> StageProgram:
        sources: dict[jex.Var, tuple[Value, int | None]] = {}
        for var in draft.external:
            if var in self.carried[draft.stage]:
                sources[var] = (self.carried[draft.stage][var], None)
            elif var in self.inputs and self.place(var) == draft.stage:
                sources[var] = (self.inputs[var], None)
            else:
                index, offset = self.packed[var, draft.stage == self.task.hub]
                sources[var] = (Value(Kind.PACKED, index, draft.stage), offset)
        inputs = tuple(dict.fromkeys(value for value, _ in sources.values()))
        function = functools.partial(
            _run,
            consts=self.consts,
            eqns=[(index, self.eqns[index]) for index in draft.eqns],
            sources={var: (inputs.index(value), offset) for var, (value, offset) in sources.items()},
            results=[atom for atom, _ in draft.results],
            packs=[group for _, group in draft.packs],
        )
        function.__name__ = f"{self.task.name}_{self.task.labels[draft.stage]}_round{draft.round}"  # type: ignore[attr-defined]
        outs = (*(value for _, value in draft.results), *(value for value, _ in draft.packs))
        return StageProgram(
            stage=draft.stage,
            round=draft.round,
            inputs=inputs,
            outputs=outs,
            input_types=tuple(self.types[value] for value in inputs),
            output_types=tuple(self.types[value] for value in outs),
            donates=(),
            function=function,
        )

    def _with_donation(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """Donate what a program is the last to use, as far as an output has the same type."""
        last: dict[Value, Op] = {v: op for op in ops if isinstance(op, StageProgram) for v in op.inputs}
        return tuple(
            op if isinstance(op, Send) else replace(op, donates=self._donates(op, last)) for op in ops
        )

    def _donates(self, program: StageProgram, last: dict[Value, Op]) -> tuple[int, ...]:
        free = Counter(program.output_types)
        donates: list[int] = []
        for kind in (Kind.PARAM, Kind.STATE, Kind.CARRY, Kind.GRAD):
            for position, value in enumerate(program.inputs):
                if value.kind is kind and last[value] is program and free[self.types[value]] > 0:
                    free[self.types[value]] -= 1
                    donates.append(position)
        return tuple(sorted(donates))


def _type(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _run(
    *arrays: jax.Array,
    consts: dict[jex.Var, Any],
    eqns: Sequence[tuple[int, jex.JaxprEqn]],
    sources: dict[jex.Var, tuple[int, int | None]],
    results: Sequence[Any],
    packs: Sequence[Sequence[jex.Var]],
) -> list[jax.Array]:
    """What a stage's program does: unpack, compute, pack."""
    env: dict[jex.Var, Any] = dict(consts)
    for var, (position, offset) in sources.items():
        array, shape = arrays[position], var.aval.shape
        if offset is not None:
            array = jax.lax.reshape(array[offset : offset + math.prod(shape)], shape)
        env[var] = array
    evaluate(eqns, env)
    vectors = [
        jax.lax.concatenate([jax.lax.reshape(env[var], (math.prod(var.aval.shape),)) for var in group], 0)
        for group in packs
    ]
    return [*outputs(env, results), *vectors]
