"""Pieces of a program that are the same piece: structural keys, whatever things are called.

Two groups of nodes have one key if their equations are the same primitives with the same parameters on the
same shapes (in both traces), wired alike, with alike operands from outside and alike results given away.
Names, source lines, numbers of values and scalars written in the program do not count. So what is found out
about one layer holds for all its copies.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from jax.extend import core as jex

from rannc_jax.ir.graph import Graph
from rannc_jax.ir.trace import Program

Mark = Callable[[int], Hashable]


class Repeats:
    """Makes keys for groups of nodes of one graph.

    Args:
        graph: the graph.
        mark: what else counts about a value: its role, whether it has a gradient.
    """

    def __init__(self, graph: Graph, mark: Mark) -> None:
        self._graph, self._mark = graph, mark
        self._numbers: dict[Hashable, int] = {}
        self._jaxprs: dict[int, tuple[Any, int]] = {}
        program = graph.program
        self._readers: dict[int, list[int]] = {}
        for e in range(len(program.eqns)):
            for v in program.reads(e):
                self._readers.setdefault(v, []).append(e)
        self._outputs = {v for v in program.output_ids() if v is not None}
        pairs = zip(program.eqns, graph.twin.eqns, strict=True)
        self._equations = [self._equation(one, other) for one, other in pairs]

    def key(self, nodes: Iterable[int]) -> int:
        """The key of some nodes with the clones they need.

        Complexity: linear in their equations and operands.
        """
        picked = [self._graph.nodes[n] for n in nodes]
        own = {e for node in picked for e in node.equations}
        equations = sorted(own.union(*(node.clones for node in picked)))
        inside = set(equations)
        program = self._graph.program
        seen: dict[int, int] = {}
        lines: list[Hashable] = []
        for e in equations:
            reads = [self._read(program, atom, seen) for atom in program.eqns[e].invars]
            writes = []
            for v in program.writes(e):
                seen[v] = len(seen)
                leaves = v in self._outputs or any(r not in inside for r in self._readers.get(v, ()))
                writes.append((leaves and e in own, self._mark(v)))
            lines.append((self._equations[e], tuple(reads), tuple(writes)))
        return self._number(tuple(lines))

    def _read(self, program: Program, atom: Any, seen: dict[int, int]) -> Hashable:
        v = program.value_id(atom)
        if v is None:
            return None
        if v in seen:
            return seen[v]
        seen[v] = len(seen)
        return seen[v], self._mark(v)

    def _equation(self, one: jex.JaxprEqn, other: jex.JaxprEqn) -> int:
        """An equation with the shapes of both traces."""
        shapes = tuple(_aval(atom) for eqn in (one, other) for atom in (*eqn.invars, *eqn.outvars))
        return self._number((one.primitive.name, shapes, self._params(one.params)))

    def _params(self, params: Mapping[str, Any]) -> Hashable:
        return tuple((name, self._param(value)) for name, value in sorted(params.items()))

    def _param(self, value: Any) -> Hashable:
        if isinstance(value, jex.ClosedJaxpr):
            return self._jaxpr(value.jaxpr)
        if isinstance(value, jex.Jaxpr):
            return self._jaxpr(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._param(item) for item in value)
        try:
            hash(value)
        except TypeError:
            return id(value)  # the program keeps it alive; a stranger is at worst not recognised
        return value

    def _jaxpr(self, jaxpr: jex.Jaxpr) -> int:
        """A body, by structure; each object once."""
        if id(jaxpr) not in self._jaxprs:
            self._jaxprs[id(jaxpr)] = (jaxpr, self._number(self._body(jaxpr)))
        return self._jaxprs[id(jaxpr)][1]

    def _body(self, jaxpr: jex.Jaxpr) -> Hashable:
        numbers = {var: i for i, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}
        lines: list[Hashable] = [len(jaxpr.invars)]
        for eqn in jaxpr.eqns:
            reads = tuple(None if isinstance(a, jex.Literal) else numbers[a] for a in eqn.invars)
            avals = tuple(_aval(atom) for atom in (*eqn.invars, *eqn.outvars))
            for var in eqn.outvars:
                numbers[var] = len(numbers)
            lines.append((eqn.primitive.name, reads, avals, self._params(eqn.params)))
        lines.append(tuple(None if isinstance(a, jex.Literal) else numbers[a] for a in jaxpr.outvars))
        return tuple(lines)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _aval(atom: Any) -> Hashable:
    aval = atom.aval
    return (getattr(aval, "shape", None), getattr(aval, "dtype", None))
