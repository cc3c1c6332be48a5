"""A set of nodes as a function with explicit inputs and outputs.

A `Slice` speaks in value ids and equation indices, so one slice serves every trace of the same
function, whatever its number of rows. Clones are part of each slice that needs them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from rannc_jax.ir.evaluate import Hook, evaluate, read
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.trace import Program

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Equations of some nodes, as a function.

    Args:
        equations: indices, clones included, in program order.
        inputs: value ids read from outside: program inputs, prologue values, values of other nodes.
        outputs: value ids that nodes elsewhere read.
        results: positions of the program outputs that this slice computes.
    """

    equations: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    results: tuple[int, ...] = ()


def slice_nodes(
    graph: Graph, nodes: Iterable[int], results: Iterable[int] = (), extra: Iterable[int] = ()
) -> Slice:
    """Cut nodes out of a graph.

    Args:
        graph: the graph.
        nodes: node indices.
        results: positions of program outputs to compute besides what other nodes read. Outputs that no
            node produces (a weight counted from the labels) are computed from clones.
        extra: further value ids to give out.
    """
    inside = set(nodes)
    program = graph.program
    results = tuple(results)
    equations = {e for i in inside for e in (*graph.nodes[i].equations, *graph.nodes[i].clones)}
    extra = tuple(extra)
    wanted = [v for k in results if (v := program.output_ids()[k]) is not None]
    equations |= _clones_of(graph, [*wanted, *extra], equations)
    outputs = [
        edge.value
        for edge in graph.edges
        if edge.producer in inside and any(c not in inside for c in edge.consumers)
    ]
    outputs += [v for v in extra if v not in outputs]
    ordered = tuple(sorted(equations))
    return Slice(
        equations=ordered,
        inputs=_free(program, ordered, [*wanted, *outputs]),
        outputs=tuple(outputs),
        results=results,
    )


def prologue_slice(graph: Graph, values: Iterable[int]) -> Slice:
    """The parameter-only work behind some prologue values, as a slice with those values as outputs."""
    wanted = tuple(sorted(set(values)))
    equations: set[int] = set()
    definer = graph.program.definer
    stack = list(wanted)
    while stack:
        e = definer.get(stack.pop())
        if e is not None and e not in equations:
            equations.add(e)
            stack += graph.program.reads(e)
    ordered = tuple(sorted(equations))
    return Slice(equations=ordered, inputs=_free(graph.program, ordered, wanted), outputs=wanted)


def as_function(
    program: Program, part: Slice, hooks: Mapping[int, Hook] | None = None
) -> Callable[[Sequence[Any]], list[Any]]:
    """The slice as a function of its inputs, in the given trace.

    Returns:
        A function from values in the order of `part.inputs` to those of `part.outputs`, followed by
        the program outputs `part.results`.
    """

    def run(values: Sequence[Any]) -> list[Any]:
        env = _start(program, part, values)
        evaluate([(e, program.eqns[e]) for e in part.equations], env, hooks)
        return _finish(program, part, env)

    return run


def as_block_function(
    program: Program,
    part: Slice,
    blocks: Sequence[Slice],
    wrap: Wrap,
    hooks: Mapping[int, Hook] | None = None,
) -> Callable[[Sequence[Any]], list[Any]]:
    """Like `as_function`, block after block, each wrapped (in `jax.checkpoint`, say)."""
    bodies = [wrap(as_function(program, block, hooks)) for block in blocks]

    def run(values: Sequence[Any]) -> list[Any]:
        env = _start(program, part, values)
        for block, body in zip(blocks, bodies, strict=True):
            outs = body([env[program.vars[v]] for v in block.inputs])
            env.update(zip((program.vars[v] for v in block.outputs), outs, strict=True))
        return _finish(program, part, env)

    return run


def blocks_of(graph: Graph, part: Slice, blocks: Sequence[Iterable[int]]) -> list[Slice]:
    """Slices of the blocks of a stage, each giving what later blocks and the stage's outputs need."""
    program = graph.program
    slices = [slice_nodes(graph, nodes) for nodes in blocks]
    last = slices[-1]
    wanted = {v for k in part.results if (v := program.output_ids()[k]) is not None} | set(part.outputs)
    extra = _clones_of(graph, sorted(wanted), {e for s in slices for e in s.equations})
    out: list[Slice] = []
    for s in slices:
        own = {v for e in s.equations for v in program.writes(e)}
        if s is last and extra:
            equations = tuple(sorted({*s.equations, *extra}))
            own |= {v for e in extra for v in program.writes(e)}
        else:
            equations = s.equations
        outputs = tuple(sorted({*s.outputs, *(wanted & own)}))
        out.append(Slice(equations=equations, inputs=_free(program, equations, outputs), outputs=outputs))
        wanted -= own
    return out


def _start(program: Program, part: Slice, values: Sequence[Any]) -> dict[jex.Var, Any]:
    env: dict[jex.Var, Any] = dict(zip(program.jaxpr.jaxpr.constvars, program.jaxpr.consts, strict=True))
    env.update(zip((program.vars[v] for v in part.inputs), values, strict=True))
    return env


def _finish(program: Program, part: Slice, env: Mapping[jex.Var, Any]) -> list[Any]:
    outs = [env[program.vars[v]] for v in part.outputs]
    return outs + [read(env, program.jaxpr.jaxpr.outvars[k]) for k in part.results]


def _free(program: Program, equations: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Value ids read but not defined by the equations, ascending."""
    defined = {v for e in equations for v in program.writes(e)}
    needed = {v for e in equations for v in program.reads(e)} | set(wanted)
    return tuple(sorted(needed - defined))


def _clones_of(graph: Graph, wanted: Sequence[int], have: set[int]) -> set[int]:
    """Equations outside nodes and prologue that some values need and that are not there yet."""
    program = graph.program
    owned = {e for node in graph.nodes for e in node.equations} | set(graph.prologue)
    definer = program.definer
    found: set[int] = set()
    stack = list(wanted)
    while stack:
        e = definer.get(stack.pop())
        if e is not None and e not in owned and e not in have and e not in found:
            found.add(e)
            stack += program.reads(e)
    return found


def avals(program: Program, values: Iterable[int]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of values in a trace."""
    return [jax.ShapeDtypeStruct(program.vars[v].aval.shape, program.vars[v].aval.dtype) for v in values]
