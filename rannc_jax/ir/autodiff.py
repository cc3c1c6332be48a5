"""A forward piece becomes forward, residuals and backward.

The backward is the vjp of the slice. Residuals that the runtime holds anyway are stripped: inputs
(parameters above all, so that no program copies a weight), results that are also outputs, and views
of inputs, which the backward computes again. What is left is what a microbatch in flight costs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

from rannc_jax.contract import Remat
from rannc_jax.ir.evaluate import Hook, bind, read
from rannc_jax.ir.graph import VIEWS
from rannc_jax.ir.residuals import RESIDUAL_NAME, kept_equations
from rannc_jax.ir.slice import Slice, as_block_function, as_function
from rannc_jax.ir.trace import Program

Function = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Differentiated:
    """A function with its backward.

    `forward(inputs) -> (outputs, residuals)`;
    `backward(held, kept_outputs, residuals, cotangents) -> gradients of the inputs `wrt``.

    Args:
        held: positions of the inputs that the backward reads.
        kept_outputs: positions of the outputs that the backward reads.
        residuals: shapes and dtypes of the values that only the backward reads.
        wrt: positions of the inputs gradients are given for.
        cotangents: positions of the outputs that take a cotangent.
    """

    forward: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]
    backward: Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], list[Any]]
    held: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    residuals: tuple[jax.ShapeDtypeStruct, ...]
    wrt: tuple[int, ...]
    cotangents: tuple[int, ...]


def differentiate(
    fn: Function,
    avals: Sequence[jax.ShapeDtypeStruct],
    *,
    wrt: Sequence[int],
    cotangents: Sequence[int],
) -> Differentiated:
    """Split a function into forward and backward by tracing its vjp.

    Args:
        fn: from a list of arrays to a list of arrays.
        avals: shapes of its inputs.
        wrt: positions of the inputs that want gradients (floating).
        cotangents: positions of the outputs that will get a cotangent (floating).
    """
    trees: list[Any] = []
    with_grad = set(cotangents)

    def whole(*inputs: Any) -> tuple[list[Any], list[Any]]:
        def split(chosen: list[Any]) -> tuple[list[Any], list[Any]]:
            values = list(inputs)
            for i, x in zip(wrt, chosen, strict=True):
                values[i] = x
            outs = fn(values)
            return [outs[k] for k in cotangents], outs

        _, pull, outs = jax.vjp(split, [inputs[i] for i in wrt], has_aux=True)
        leaves, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return outs, leaves

    closed, shape = jax.make_jaxpr(whole, return_shape=True)(*avals)
    num_outputs = len(shape[0])
    sources, kept = _sources(closed, num_outputs)
    recompute = _views(closed, sources)
    tree = trees[-1]
    held = sorted({i for s in sources for i in s.inputs})
    kept_outputs = sorted({s.output for s in sources if s.output is not None})

    def forward(inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        wanted = [*closed.jaxpr.outvars[:num_outputs], *kept]
        outs = jax.core.eval_jaxpr(closed.jaxpr.replace(outvars=wanted), closed.consts, *inputs)
        return outs[:num_outputs], outs[num_outputs:]

    def backward(
        values: Sequence[Any], outputs: Sequence[Any], residuals: Sequence[Any], given: Sequence[Any]
    ) -> list[Any]:
        env: dict[jex.Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update((closed.jaxpr.invars[i], x) for i, x in zip(held, values, strict=True))
        env.update((closed.jaxpr.outvars[k], x) for k, x in zip(kept_outputs, outputs, strict=True))
        env.update(zip(kept, residuals, strict=True))
        for eqn in recompute:
            if not all(v in env for v in eqn.outvars):
                outs = bind(eqn, [read(env, atom) for atom in eqn.invars])
                env.update(zip(eqn.outvars, outs, strict=True))
        leaves = [read(env, atom) for atom in closed.jaxpr.outvars[num_outputs:]]
        (grads,) = tree.unflatten(leaves)(list(given))
        return grads

    return Differentiated(
        forward=forward,
        backward=backward,
        held=tuple(held),
        kept_outputs=tuple(kept_outputs),
        residuals=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept),
        wrt=tuple(wrt),
        cotangents=tuple(k for k in range(num_outputs) if k in with_grad),
    )


def stage_function(
    program: Program,
    part: Slice,
    blocks: Sequence[Slice],
    remat: Remat,
    hooks: Mapping[int, Hook] | None = None,
) -> Function:
    """The slice as a function whose vjp keeps what `remat` says, block by block."""
    if remat is Remat.SAVE_ALL:
        return as_function(program, part, hooks)
    named: dict[int, Hook] = dict(hooks or {})
    if remat is Remat.SAVE_MATMULS:
        kept = kept_equations(program.eqns, part.equations)
        named.update({e: _naming(named.get(e)) for e in kept})
        named.update(
            {
                e: _name_scan
                for e in part.equations
                if program.eqns[e].primitive.name == "scan" and e not in named
            }
        )

    def wrap(body: Function) -> Function:
        policy = jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME)
        if remat is Remat.RECOMPUTE:
            policy = jax.checkpoint_policies.nothing_saveable
        return jax.checkpoint(body, policy=policy)

    return as_block_function(program, part, blocks, wrap, named)


def _naming(inner: Hook | None) -> Hook:
    def hook(eqn: jex.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        outs = inner(eqn, values) if inner is not None else bind(eqn, values)
        return [checkpoint_name(x, RESIDUAL_NAME) for x in outs]

    return hook


def _name_scan(eqn: jex.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Name the matrix products inside a scan's body, so that it keeps them a step."""
    body = eqn.params["jaxpr"]
    kept = kept_equations(body.jaxpr.eqns, range(len(body.jaxpr.eqns)))
    if not kept:
        return bind(eqn, values)

    def run(*args: Any) -> list[Any]:
        env: dict[jex.Var, Any] = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        env.update(zip(body.jaxpr.invars, args, strict=True))
        for i, inner in enumerate(body.jaxpr.eqns):
            operands = [read(env, atom) for atom in inner.invars]
            outs = bind(inner, operands)
            if i in kept:
                outs = [checkpoint_name(x, RESIDUAL_NAME) for x in outs]
            env.update(zip(inner.outvars, outs, strict=True))
        return [read(env, atom) for atom in body.jaxpr.outvars]

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.jaxpr.invars]
    return bind(eqn.replace(params={**eqn.params, "jaxpr": jax.make_jaxpr(run)(*shapes)}), values)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the backward finds one residual: inputs (itself or its view), an output, or kept."""

    inputs: tuple[int, ...] = ()
    output: int | None = None
    view: bool = False


def _sources(closed: jex.ClosedJaxpr, num_outputs: int) -> tuple[list[_Source], list[jex.Var]]:
    jaxpr = closed.jaxpr
    inputs = {v: i for i, v in enumerate(jaxpr.invars)}
    outputs = {
        v: k for k, v in reversed(list(enumerate(jaxpr.outvars[:num_outputs]))) if isinstance(v, jex.Var)
    }
    definer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    sources: list[_Source] = []
    kept: dict[jex.Var, None] = {}
    for atom in jaxpr.outvars[num_outputs:]:
        if isinstance(atom, jex.Literal) or atom in jaxpr.constvars:
            sources.append(_Source())
        elif (roots := _view_roots(atom, definer, inputs)) is not None:
            sources.append(_Source(inputs=tuple(sorted(inputs[v] for v in roots)), view=True))
        elif atom in outputs:
            sources.append(_Source(output=outputs[atom]))
        else:
            kept[atom] = None
            sources.append(_Source())
    return sources, list(kept)


def _view_roots(
    atom: jex.Var, definer: Mapping[jex.Var, jex.JaxprEqn], inputs: Mapping[jex.Var, int]
) -> set[jex.Var] | None:
    """The inputs a value is a view of; None if it is anything else."""
    roots: set[jex.Var] = set()
    stack = [atom]
    while stack:
        v = stack.pop()
        if v in inputs:
            roots.add(v)
        elif (eqn := definer.get(v)) is not None and eqn.primitive.name in VIEWS and not eqn.effects:
            stack += [a for a in eqn.invars if not isinstance(a, jex.Literal)]
        else:
            return None
    return roots


def _views(closed: jex.ClosedJaxpr, sources: Sequence[_Source]) -> list[jex.JaxprEqn]:
    """The equations that make the views among the residuals, in order."""
    jaxpr = closed.jaxpr
    wanted = {
        atom
        for atom, source in zip(jaxpr.outvars[len(jaxpr.outvars) - len(sources) :], sources, strict=True)
        if source.view
    }
    needed: list[jex.JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in VIEWS and any(v in wanted for v in eqn.outvars):
            needed.append(eqn)
            wanted.update(a for a in eqn.invars if not isinstance(a, jex.Literal))
    return needed[::-1]
