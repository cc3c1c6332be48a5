"""What the door runs of a converted module: its results, its loss with them, and their products.

A *product* is the sum of a module's results times given cotangents: its gradient is what torch's backward
asks of a module whose loss is computed outside. Results are flat, in the order in which the module's own
structure has its tensors; `rebuilt` puts them together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from torch_bridge.interpret import run
from torch_bridge.module import (
    JaxModule,
    ModuleLoss,
    array_of,
    graph_inputs,
    new_state,
    num_tensors,
    shapes_of,
)
from torch_bridge.program import Ref, refs
from torch_bridge.signature import Destination, Source

Function = Callable[..., Any]


def results(jm: JaxModule) -> Function:
    """`fn(params, batch, *, ...) -> [results]`, forward only."""

    def fn(params: Mapping[str, Any], batch: Any, **given: Any) -> list[Any]:
        return list(_run(jm, params, batch, given)[1])

    return jm.pure(jm.takes, fn)


def loss_with_results(jm: JaxModule) -> Function:
    """`fn(params, batch, *, ...) -> ModuleLoss` with the module's own loss and, as aux, its results."""

    def fn(params: Mapping[str, Any], batch: Any, **given: Any) -> ModuleLoss:
        loss, values, state = _run(jm, params, batch, given)
        return ModuleLoss(loss=loss, aux=list(values), model_state=state)

    return jm.pure(jm.takes, fn)


def product(jm: JaxModule, wanted: Sequence[int]) -> Function:
    """`fn(params, {"call": batch, "cotangents": [...]}, *, ...) -> ModuleLoss`, with results as aux.

    Args:
        jm: the module.
        wanted: numbers of the results that have a cotangent.
    """

    def fn(params: Mapping[str, Any], batch: Any, **given: Any) -> ModuleLoss:
        _, values, state = _run(jm, params, batch["call"], given)
        pairs = zip(wanted, batch["cotangents"], strict=True)
        total = sum(jnp.sum(values[k].astype(jnp.float32) * ct) for k, ct in pairs)
        return ModuleLoss(loss=jnp.asarray(total, jnp.float32), aux=list(values), model_state=state)

    return jm.pure(jm.takes, fn)


def _run(
    jm: JaxModule, params: Any, batch: Any, given: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Any]:
    """Loss (None without one), results, and the new model state (None if the module writes no buffer)."""
    tensors = [array_of(value) for value in jm.programs.wrapper.inputs.bind_batch(batch)]
    program, rows = jm.programs.at(shapes_of(tensors))
    state = given.get("model_state") or {}
    known = {**params, **(given.get("frozen") or {}), **jm.buffers, **state}
    values = program.outputs(Destination.RESULT)[: num_tensors(program)]
    inputs = graph_inputs(program, known, tensors)
    outputs = (program.loss, values, program.written)
    loss, values, new = run(program.graph, inputs, outputs, rows=rows, rng=given.get("rng"))
    if not jm.model_state:
        return loss, values, None
    fresh = new_state(program, new, params)
    return loss, values, {name: fresh.get(name, value) for name, value in state.items()}


def result_dtypes(jm: JaxModule) -> list[Any]:
    """Torch's dtype of every result; None where the program does not say."""
    program = jm.programs.first
    found = []
    for value in program.outputs(Destination.RESULT)[: num_tensors(program)]:
        position = value.index - program.graph.num_inputs if isinstance(value, Ref) else -1
        dtypes = program.graph.nodes[position].dtypes if position >= 0 else ()
        found.append(dtypes[0] if len(dtypes) == 1 else None)
    return found


def used_parameters(jm: JaxModule, wanted: Sequence[int] | None) -> frozenset[str]:
    """Names of the parameters on which results (by number; None: the loss) depend: torch leaves the gradients
    of the others None."""
    program = jm.programs.first
    values = program.outputs(Destination.RESULT)
    outputs = [program.loss] if wanted is None else [values[k] for k in wanted]
    nodes = (program.graph.nodes[position] for position in program.graph.needed(outputs))
    trees = (tuple(outputs), *((node.args, node.kwargs) for node in nodes))
    read = {ref.index for tree in trees for ref in refs(tree)}
    return frozenset(
        name
        for position, (source, name) in enumerate(program.signature.inputs)
        if source is Source.TENSOR and position in read and name in jm.params
    )
