"""A program in two halves: some of its outputs now, the others later, nothing computed twice that is dear.

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024) want the gradients of a
stage's inputs (I) at once and those of its weights (W) whenever there is time. `known` are the equations
that the first outputs need, `rest` those that only the others need. Values that `known` defines and `rest`
reads are the *frontier*: further outputs of the first half, inputs of the second. Calls are opened, and so
are scans: the first half becomes a scan that stacks its frontier, the second one that consumes it.

What a few cheap equations make from inputs of the program is not handed over but made again, unless keeping
those inputs alive for it would take more memory than the value itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core as jex

from rannc_jax.ir.evaluate import bind, read
from rannc_jax.ir.flatten import open_calls
from rannc_jax.ir.graph import VIEWS
from rannc_jax.ir.loops import scan_counts
from rannc_jax.ir.stack_rules import ELEMENTWISE
from rannc_jax.ir.trace import aval_bytes

_CHEAP = VIEWS | ELEMENTWISE | frozenset("iota reduce_max reduce_min reduce_sum".split())

Values = dict[jex.Var, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Halves:
    """Two functions that together are one.

    `first(inputs) -> (first outputs, frontier)`; `second(inputs, frontier) -> other outputs`.

    Args:
        first_reads, second_reads: positions of the inputs that each half takes, ascending.
        frontier: shapes and dtypes of what the first half hands to the second.
    """

    first: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]
    second: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    first_reads: tuple[int, ...]
    second_reads: tuple[int, ...]
    frontier: tuple[jax.ShapeDtypeStruct, ...]


def halve(closed: jex.ClosedJaxpr, first: Sequence[int], kept: Iterable[int] = ()) -> Halves:
    """Cut a program in two.

    Args:
        closed: nothing of it is differentiated any more.
        first: positions of the outputs that are wanted first; the others come later, in their order.
        kept: positions of inputs that stay in memory anyway (parameters).

    Complexity: linear in the equations, and for every value that is handed over in what makes it.
    """
    closed = open_calls(closed)
    jaxpr = closed.jaxpr
    later = [k for k in range(len(jaxpr.outvars)) if k not in set(first)]
    free = {*jaxpr.constvars, *(jaxpr.invars[i] for i in kept)}
    cut = _Cut.of(jaxpr, first, later, free=free)
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    reads = [
        tuple(i for i, v in enumerate(jaxpr.invars) if v in wanted)
        for wanted in (cut.first_reads, cut.second_reads)
    ]

    def start(positions: Sequence[int], inputs: Sequence[Any]) -> Values:
        return constants | {jaxpr.invars[i]: x for i, x in zip(positions, inputs, strict=True)}

    def run_first(inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        env = start(reads[0], inputs)
        cut.run_first(env)
        return [read(env, jaxpr.outvars[k]) for k in first], [env[v] for v in cut.frontier]

    def run_second(inputs: Sequence[Any], frontier: Sequence[Any]) -> list[Any]:
        env = start(reads[1], inputs) | dict(zip(cut.frontier, frontier, strict=True))
        cut.run_second(env)
        return [read(env, jaxpr.outvars[k]) for k in later]

    return Halves(
        first=run_first,
        second=run_second,
        first_reads=reads[0],
        second_reads=reads[1],
        frontier=tuple(
            jax.ShapeDtypeStruct((*cut.stacked.get(v, ()), *v.aval.shape), v.aval.dtype) for v in cut.frontier
        ),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Cut:
    """The two halves of one level of equations.

    Args:
        eqns: all of them.
        known, rest: indices of the equations of each half; scans may be in both, then they are in `scans`.
        scans: index -> how a scan is cut.
        frontier: variables that are handed over, those of a scan's body stacked (see `stacked`).
        stacked: variable of a scan's body -> what its shape is preceded by.
        first_reads, second_reads: what each half reads from outside this level.
    """

    eqns: Sequence[jex.JaxprEqn]
    known: set[int] = field(default_factory=set)
    rest: set[int] = field(default_factory=set)
    scans: "dict[int, _ScanCut]" = field(default_factory=dict)
    frontier: list[jex.Var] = field(default_factory=list)
    stacked: dict[jex.Var, tuple[int, ...]] = field(default_factory=dict)
    first_reads: set[jex.Var] = field(default_factory=set)
    second_reads: set[jex.Var] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        jaxpr: jex.Jaxpr,
        first: Sequence[int],
        later: Sequence[int],
        *,
        free: set[jex.Var],
        given_late: Iterable[jex.Var] = (),
    ) -> "_Cut":
        """Cut a jaxpr.

        Args:
            jaxpr: its calls are open.
            first, later: positions of its outputs.
            free: inputs that cost nothing to keep.
            given_late: inputs that the second half can have from the first alone (carries of a scan).
        """
        cut = cls(eqns=jaxpr.eqns)
        made = cut._take_known(_variables(jaxpr.outvars[k] for k in first))
        known_values = set(made) | set(given_late)
        handed = cut._take_rest(_variables(jaxpr.outvars[k] for k in later), known_values)
        cut._hand_over(handed, made, free)
        return cut

    def _take_known(self, wanted: Iterable[jex.Var]) -> dict[jex.Var, int]:
        """Collect what the first outputs need; returns which equation makes which known value."""
        live, made = set(wanted), {}
        for index in reversed(range(len(self.eqns))):
            eqn = self.eqns[index]
            hit = [k for k, v in enumerate(eqn.outvars) if v in live]
            if not hit:
                continue
            self.known.add(index)
            if eqn.primitive.name == "scan":
                self.scans[index] = scan = _ScanCut.of(eqn, hit)
                live |= scan.first_operands()
                made.update((eqn.outvars[k], index) for k in scan.first)
            else:
                live.update(_variables(eqn.invars))
                made.update((v, index) for v in eqn.outvars)
        self.first_reads = live - set(made)
        return made

    def _take_rest(self, wanted: Iterable[jex.Var], known: set[jex.Var]) -> list[jex.Var]:
        """Collect what only the other outputs need; returns the known values among what it reads."""
        live, made = dict.fromkeys(wanted), set()
        for index in reversed(range(len(self.eqns))):
            eqn = self.eqns[index]
            hit = [k for k, v in enumerate(eqn.outvars) if v in live and v not in known]
            if not hit:
                continue
            self.rest.add(index)
            made.update(eqn.outvars[k] for k in hit)
            scan = self.scans.get(index)
            if scan is None:
                live.update(dict.fromkeys(_variables(eqn.invars)))
                continue
            live.update(dict.fromkeys(scan.add_later(hit)))
            for v in scan.body_cut.frontier:
                self.frontier.append(v)
                self.stacked[v] = (scan.length, *scan.body_cut.stacked.get(v, ()))
        self.second_reads = {v for v in live if v not in known and v not in made}
        return [v for v in live if v in known]

    def _hand_over(self, handed: Sequence[jex.Var], made: Mapping[jex.Var, int], free: set[jex.Var]) -> None:
        """Put known values on the frontier, or have the second half make them again where that is cheap."""
        for v in sorted(handed, key=lambda v: made.get(v, -1)):
            chain = self._cheap_chain(v, made)
            if chain is not None:
                equations, roots = chain
                extra = roots - self.second_reads - free
                if sum(aval_bytes(root.aval) for root in extra) <= aval_bytes(v.aval):
                    self.rest |= equations
                    self.second_reads |= roots
                    continue
            self.frontier.append(v)

    def _cheap_chain(
        self, value: jex.Var, made: Mapping[jex.Var, int]
    ) -> tuple[set[int], set[jex.Var]] | None:
        """The cheap equations that make a value, and the inputs they start from; None if there is more."""
        equations: set[int] = set()
        roots: set[jex.Var] = set()
        stack = [value]
        while stack:
            v = stack.pop()
            index = made.get(v)
            if index is None:
                if v not in self.first_reads or v is value:
                    return None
                roots.add(v)
            elif index not in equations:
                eqn = self.eqns[index]
                if eqn.primitive.name not in _CHEAP or eqn.effects:
                    return None
                equations.add(index)
                stack += _variables(eqn.invars)
        return equations, roots

    def run_first(self, env: Values) -> None:
        """Run the first half, extending `env`, with what is handed over under its variable."""
        for index in sorted(self.known):
            if index in self.scans:
                self.scans[index].run_first(env)
            else:
                _run(self.eqns[index], env)

    def run_second(self, env: Values) -> None:
        """Run the second half. `env` holds its reads and the frontier."""
        for index in sorted(self.rest):
            if index in self.scans:
                self.scans[index].run_second(env)
            else:
                _run(self.eqns[index], env)


@dataclass(slots=True, kw_only=True, eq=False)
class _ScanCut:
    """A scan in two: the first stacks, a step at a time, what the second needs of it.

    Args:
        eqn: the scan.
        body: its body, calls open.
        num_consts, num_carry: among its operands.
        first, later: positions of the outputs of each half.
        body_cut: of the body, once both are known.
    """

    eqn: jex.JaxprEqn
    body: jex.ClosedJaxpr
    num_consts: int
    num_carry: int
    first: tuple[int, ...]
    later: tuple[int, ...]
    body_cut: _Cut

    @classmethod
    def of(cls, eqn: jex.JaxprEqn, wanted: Iterable[int]) -> "_ScanCut":
        """The first half: the wanted outputs, and the carries they follow from."""
        body = _renamed(open_calls(eqn.params["jaxpr"]))
        num_consts, num_carry = scan_counts(eqn.params)
        carries = body.jaxpr.invars[num_consts : num_consts + num_carry]
        first = set(wanted)
        while True:
            cut = _Cut.of(body.jaxpr, sorted(first), (), free=set())
            more = {k for k, v in enumerate(carries) if v in cut.first_reads} - first
            if not more:
                break
            first |= more
        return cls(
            eqn=eqn, body=body, num_consts=num_consts, num_carry=num_carry, first=tuple(sorted(first)),
            later=(), body_cut=cut,
        )  # fmt: skip

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    @property
    def carries(self) -> list[jex.Var]:
        return self.body.jaxpr.invars[self.num_consts : self.num_consts + self.num_carry]

    def add_later(self, wanted: Iterable[int]) -> set[jex.Var]:
        """Set the second half; returns the operands of the scan that it reads."""
        later = set(wanted)
        first_carries = [self.carries[k] for k in self.first if k < self.num_carry]
        while True:
            self.body_cut = cut = _Cut.of(
                self.body.jaxpr, self.first, sorted(later), free=set(), given_late=first_carries
            )
            more = {k for k, v in enumerate(self.carries) if v in cut.second_reads} - later
            if not more:
                break
            later |= more
        self.later = tuple(sorted(later))
        return self._operands(self.later, cut.second_reads)

    def first_operands(self) -> set[jex.Var]:
        """The operands of the scan that the first half reads."""
        return self._operands(self.first, self.body_cut.first_reads)

    def _operands(self, outputs: Sequence[int], reads: set[jex.Var]) -> set[jex.Var]:
        positions = {i for i, v in enumerate(self.body.jaxpr.invars) if v in reads}
        positions |= {self.num_consts + k for k in outputs if k < self.num_carry}
        return set(_variables(self.eqn.invars[i] for i in positions))

    def run_first(self, env: Values) -> None:
        cut, outs = self.body_cut, self.body.jaxpr.outvars

        def step(inner: Values) -> tuple[list[Any], list[Any]]:
            cut.run_first(inner)
            return [read(inner, outs[k]) for k in self.first], [inner[v] for v in cut.frontier]

        self._run(env, self.first, cut.first_reads, step, stacks=cut.frontier)

    def run_second(self, env: Values) -> None:
        cut, outs = self.body_cut, self.body.jaxpr.outvars

        def step(inner: Values) -> tuple[list[Any], list[Any]]:
            cut.run_second(inner)
            return [read(inner, outs[k]) for k in self.later], []

        self._run(env, self.later, cut.second_reads, step, reads=cut.frontier)

    def _run(
        self,
        env: Values,
        outputs: Sequence[int],
        wanted: set[jex.Var],
        step: Callable[[Values], tuple[list[Any], list[Any]]],
        *,
        stacks: Sequence[jex.Var] = (),
        reads: Sequence[jex.Var] = (),
    ) -> None:
        """Scan with `step`, which takes the values of one step and returns outputs and more to stack.

        Args:
            env: extended by the outputs of the scan and by `stacks`.
            outputs: positions of the scan's outputs that `step` returns.
            wanted: variables of the body's inputs to give to it.
            step: see above.
            stacks, reads: variables of the body to stack, and stacked ones to give to it.
        """
        jaxpr, params = self.body.jaxpr, self.eqn.params
        first_x = self.num_consts + self.num_carry
        carried = [k for k in outputs if k < self.num_carry]
        whole = dict(zip(jaxpr.constvars, self.body.consts, strict=True))
        sliced: list[tuple[jex.Var, Any]] = [(v, env[v]) for v in reads]
        for i, v in enumerate(jaxpr.invars):
            if v in wanted and i < self.num_consts:
                whole[v] = read(env, self.eqn.invars[i])
            elif v in wanted and i >= first_x:
                sliced.append((v, read(env, self.eqn.invars[i])))

        def run(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            inner = dict(whole)
            inner.update((self.carries[k], x) for k, x in zip(carried, carry, strict=True))
            inner.update((v, x) for (v, _), x in zip(sliced, xs, strict=True))
            outs, more = step(inner)
            return outs[: len(carried)], (outs[len(carried) :], more)

        start = [read(env, self.eqn.invars[self.num_consts + k]) for k in carried]
        end, (ys, more) = jax.lax.scan(
            run, start, [x for _, x in sliced], params["length"], params["reverse"], params["unroll"]
        )
        env.update((self.eqn.outvars[k], x) for k, x in zip(outputs, [*end, *ys], strict=True))
        env.update(zip(stacks, more, strict=True))


def _renamed(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program with variables of its own: two scans may have one body."""
    return jax.make_jaxpr(lambda *args: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args))(
        *closed.in_avals
    )


def _run(eqn: jex.JaxprEqn, env: Values) -> None:
    outs = bind(eqn, [read(env, atom) for atom in eqn.invars])
    env.update(zip(eqn.outvars, outs, strict=True))


def _variables(atoms: Iterable[Any]) -> list[jex.Var]:
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]
