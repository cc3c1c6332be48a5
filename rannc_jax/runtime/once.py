"""What a stage runs once a step: the prologue before the microbatches, and the end of its gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rannc_jax.ir.batch import RowLayout
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.slice import Slice, as_function
from rannc_jax.ir.stage_shape import StageShape
from rannc_jax.ir.trace import Program
from rannc_jax.runtime.optimizer import grad_dtype
from rannc_jax.runtime.shares import Shares, reduced
from rannc_jax.runtime.stage import Compiled, Spread, StagePrograms


def prologue_program(program: Program, prologue: Slice, results: Any) -> Compiled:
    """`(*prologue.inputs) -> (*prologue.outputs)`, which lie as `results` say: a sharding, or one each."""
    run = as_function(program, prologue)
    return jax.jit(lambda *xs: tuple(run(xs)), out_shardings=results)


def _casts_of_parameters(program: Program, shape: StageShape) -> dict[int, int]:
    """Prologue values that only cast a parameter: their float32 sums are the parameter's gradient, and
    must not be rounded to the narrow dtype on the way back."""
    found: dict[int, int] = {}
    for e in shape.prologue.equations if shape.prologue is not None else ():
        (source, *others), outs = program.reads(e) or (-1,), program.writes(e)
        if program.eqns[e].primitive.name == "convert_element_type" and source in shape.params and not others:
            found[outs[0]] = source
    return {v: p for v, p in found.items() if v in shape.accumulated}


def finish_program(
    programs: StagePrograms, shares: Shares | None = None, layouts: Sequence[RowLayout | None] | None = None
) -> Compiled:
    """`(*accumulators, scale, *prologue.inputs) -> (*gradients of shape.params that flow)`, in `grad_dtype`.

    The one reduction over replicas a step (unless sums are kept in shares: those are reduced already), the
    division by the total weight, and the transpose of the prologue.

    Args:
        programs: of the stage.
        shares: how its state lies; whole by default.
        layouts: of the results; whole by default.
    """
    shares = shares or Shares(programs.mesh)
    shape, graph = programs.shape, programs.graph
    program = graph.program
    direct = {v: v for v in shape.accumulated if v < len(program.inputs)}
    casts = _casts_of_parameters(program, shape)
    made = [v for v in shape.accumulated if v not in direct and v not in casts]
    targets = [v for v in shape.params if v in graph.flows]
    per_replica = programs.spread is Spread.PER_REPLICA
    prologue = shape.prologue

    def totals(sums: Sequence[Any]) -> Sequence[Any]:
        if shares.sharding.shards_gradients or not per_replica:
            return sums
        if shares.sharding.shards_optimizer:
            return reduced(sums, [shares.update(x.shape[1:]) for x in sums], shares.mesh)
        return [jnp.sum(x, axis=0) for x in sums]

    def run(*args: Any) -> tuple[Any, ...]:
        sums = totals(args[: len(shape.accumulated)])
        scale = args[len(shape.accumulated)]
        by_id = {v: g * scale.astype(g.dtype) for v, g in zip(shape.accumulated, sums, strict=True)}
        grads: dict[int, Any] = {}
        for v, parameter in {**direct, **casts}.items():
            grads[parameter] = grads[parameter] + by_id[v] if parameter in grads else by_id[v]
        if prologue is not None and made:
            given = dict(zip(prologue.inputs, args[len(shape.accumulated) + 1 :], strict=True))
            through = _through_prologue(graph, prologue, given, {v: by_id[v] for v in made})
            for v, g in through.items():
                grads[v] = grads[v] + g if v in grads else g
        found = []
        for v in targets:
            aval = program.vars[v].aval
            wide = grad_dtype(aval.dtype)
            found.append(grads[v].astype(wide) if v in grads else jnp.zeros(aval.shape, wide))
        return tuple(found)

    layouts = [None] * len(targets) if layouts is None else layouts
    return jax.jit(run, out_shardings=tuple(map(shares.on_mesh, layouts)))


def _through_prologue(
    graph: Graph, prologue: Slice, given: Mapping[int, Any], sums: Mapping[int, Any]
) -> dict[int, Any]:
    """Gradients of the prologue's inputs from those of some of its outputs."""
    wrt = [v for v in prologue.inputs if v in graph.flows]
    compute = as_function(graph.program, prologue)

    def forward(chosen: list[Any]) -> list[Any]:
        values = {**given, **dict(zip(wrt, chosen, strict=True))}
        outs = compute([values[v] for v in prologue.inputs])
        by_id = dict(zip(prologue.outputs, outs, strict=True))
        return [by_id[v] for v in sums]

    outs, pull = jax.vjp(forward, [given[v] for v in wrt])
    (grads,) = pull([g.astype(o.dtype) for g, o in zip(sums.values(), outs, strict=True)])
    return dict(zip(wrt, grads, strict=True))
