"""Open scans over layers: a `scan` that slices parameters becomes copies of its body.

A network written as `lax.scan` over stacked parameters (flax `nn.scan`, scanned nnx layers, equinox style)
is one equation that nobody could cut. Where most of the parameters that the loop reads are sliced by it,
every turn is a layer: the loop becomes `length` copies of its body, each under a name ("layers/3"), and
each stacked leaf becomes one input a layer. Loops that read the same parameters every turn (over time, over
chunks of a sequence) stay whole: their copies would all need the same weights, so cutting gains nothing.
Only what a trace of the parameters says decides, so all traces of a function are opened alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core as jex

from rannc_jax.ir.checkpoints import CHECKPOINTS, body_of, inside_out
from rannc_jax.ir.evaluate import bind, read
from rannc_jax.ir.flatten import drop_dead, flatten, scope
from rannc_jax.ir.leaves import WHOLE, InputLeaf, OutputLeaf, Part, Slicing, leaf_path
from rannc_jax.ir.loops import scan_counts
from rannc_jax.ir.origins import Origins
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.ir.scan_names import layer_name, named, without_name
from rannc_jax.ir.stacks import Stack, apply, joined, slice_of, slices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A program with its layers in the open: the jaxpr, and what its inputs and outputs now are."""

    jaxpr: jex.ClosedJaxpr
    inputs: tuple[InputLeaf, ...]
    outputs: tuple[OutputLeaf, ...]


def open_scans(closed: jex.ClosedJaxpr, inputs: Sequence[InputLeaf], outputs: Sequence[OutputLeaf]) -> Opened:
    """Open every scan over layers, those inside its copies too.

    Args:
        closed: flat.
        inputs, outputs: what its invars and outvars are.

    Complexity: linear in the equations of the result, once a level of nested scans.
    """
    roles = [leaf.role for leaf in inputs]
    opened = Opened(jaxpr=_spread(closed, roles), inputs=tuple(inputs), outputs=tuple(outputs))
    while (choice := _choose(opened)) is not None:
        opened = _open(opened, choice)
    return opened


def _spread(closed: jex.ClosedJaxpr, roles: Sequence[Role]) -> jex.ClosedJaxpr:
    """The program with checkpoints around loops over layers moved into the loops."""
    candidates = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name in CHECKPOINTS]
    origins = Origins(closed.jaxpr, roles) if candidates else None
    found = {id(eqn) for eqn in candidates if origins is not None and _holds_layers(eqn, origins)}
    if not found:
        return closed

    def run(*args: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
        for eqn in jaxpr.eqns:
            apply_one = inside_out if id(eqn) in found else bind
            env.update(zip(eqn.outvars, apply_one(eqn, [read(env, a) for a in eqn.invars]), strict=True))
        return [read(env, atom) for atom in jaxpr.outvars]

    return jax.make_jaxpr(run)(
        *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars)
    )


def _holds_layers(eqn: jex.JaxprEqn, origins: Origins) -> bool:
    body = body_of(eqn).jaxpr
    inside = Origins(body, [Role.PARAM if origins.parameters([a]) else Role.BATCH for a in eqn.invars])
    return any(one.primitive.name == "scan" and _is_over_layers(one, inside) for one in body.eqns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What to open: equation index -> name of its layers; position of an input -> dim it is sliced along."""

    scans: Mapping[int, str]
    dims: Mapping[int, int]


def _choose(program: Opened) -> _Choice | None:
    jaxpr = program.jaxpr.jaxpr
    if not any(eqn.primitive.name == "scan" for eqn in jaxpr.eqns):
        return None
    origins = Origins(jaxpr, [leaf.role for leaf in program.inputs])
    scans: dict[int, str] = {}
    dims: dict[int, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "scan" or not _is_over_layers(eqn, origins):
            continue
        found = [pair for x in _xs(eqn) for pair in origins.sliced(x, 0)]
        leaves = [program.inputs[k] for k, _ in found]
        trained = [leaf for leaf in leaves if leaf.role is Role.PARAM]
        scans[index] = layer_name(eqn, [leaf_path(leaf) for leaf in trained or leaves])
        for position, dim in found:
            dims.setdefault(position, dim)
    return _Choice(scans=scans, dims=_alike(program, dims)) if scans else None


def _xs(eqn: jex.JaxprEqn) -> Sequence[Any]:
    return eqn.invars[sum(scan_counts(eqn.params)) :]


def closed_scans(jaxpr: jex.Jaxpr, roles: Sequence[Role]) -> list[tuple[jex.JaxprEqn, str]]:
    """The loops with parameters that were not opened, and why.

    Args:
        jaxpr: after `open_scans`.
        roles: of its invars.
    """
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    origins = Origins(jaxpr, roles) if loops else None
    found = []
    for eqn in loops:
        assert origins is not None
        sliced, shared, _ = _parameters(eqn, origins)
        if sliced:
            why = f"its turns share {shared} bytes of parameters and have {sliced} of their own"
            found.append((eqn, why))
        elif shared:
            found.append((eqn, "every turn reads the same parameters"))
    return found


def _is_over_layers(eqn: jex.JaxprEqn, origins: Origins) -> bool:
    """Whether the copies of a loop would have more parameters of their own than in common.

    A loop over time may slice a table of positions, a vector a turn, beside the matrices that all turns
    share: without a matrix in the slices a loop is one over layers only if nothing is shared.
    """
    sliced, shared, has_matrices = _parameters(eqn, origins)
    return sliced > 0 and sliced >= shared and (has_matrices or shared == 0)


def _parameters(eqn: jex.JaxprEqn, origins: Origins) -> tuple[int, int, bool]:
    """Bytes of parameters that a loop slices, and that it reads every turn; whether slices are matrices."""
    sliced: dict[int, int] = {}
    shared = dict(origins.parameters(eqn.invars[: scan_counts(eqn.params)[0]]))
    has_matrices = False
    for x in _xs(eqn):
        roots = origins.parameters([x])
        if origins.is_sliced(x, 0):
            sliced.update(roots)
            has_matrices |= bool(roots) and len(x.aval.shape) > 2
        else:
            shared.update(roots)
    return sum(sliced.values()), sum(shared.values()), has_matrices


def _alike(program: Opened, dims: Mapping[int, int]) -> dict[int, int]:
    """The parts of one leaf are sliced alike: what one of them needs, all of them get."""
    by_path = {part.path: dims[k] for k in sorted(dims, reverse=True) if (part := program.inputs[k].part)}
    found = dict(dims)
    for k, leaf in enumerate(program.inputs):
        if leaf.part is not None and leaf.part.path in by_path:
            found[k] = by_path[leaf.part.path]
    return found


def _open(program: Opened, choice: _Choice) -> Opened:
    """Trace the program again with the chosen scans as copies and the chosen inputs in parts."""
    inputs = [_input_parts(leaf, choice.dims.get(k)) for k, leaf in enumerate(program.inputs)]
    dims = _output_dims(program, choice.dims)

    def run(*args: Any) -> list[Any]:
        given = iter(args)
        values = []
        for k, group in enumerate(inputs):
            parts = tuple(next(given) for _ in group)
            values.append(Stack(slices=parts, dim=choice.dims[k]) if k in choice.dims else parts[0])
        results = []
        for k, value in enumerate(_run(program.jaxpr, values, choice.scans)):
            results += slices_of(value, dims[k]) if k in dims else [joined(value)]
        return results

    flat = tuple(leaf for group in inputs for leaf in group)
    closed = jax.make_jaxpr(run)(*(leaf.aval for leaf in flat))
    return Opened(jaxpr=drop_dead(closed), inputs=flat, outputs=_output_parts(program, dims))


def _output_dims(program: Opened, dims: Mapping[int, int]) -> dict[int, int]:
    """Positions of the outputs that are the new value of a sliced model_state leaf."""
    states = [k for k, leaf in enumerate(program.inputs) if leaf.role is Role.MODEL_STATE]
    outs = [k for k, leaf in enumerate(program.outputs) if leaf.kind is OutputKind.MODEL_STATE]
    return {out: dims[k] for k, out in zip(states, outs, strict=False) if k in dims}


def _input_parts(leaf: InputLeaf, dim: int | None) -> list[InputLeaf]:
    """An input as its slices along a dim; as it is without one."""
    if dim is None:
        return [leaf]
    shape = Slicing(dims=(dim,)).part_shape(leaf.aval.shape)
    aval = jax.ShapeDtypeStruct(shape, leaf.aval.dtype)
    return [replace(leaf, path=p, part=part, aval=aval) for p, part in _parts(leaf, dim, leaf.aval)]


def _output_parts(program: Opened, dims: Mapping[int, int]) -> tuple[OutputLeaf, ...]:
    found: list[OutputLeaf] = []
    for k, (leaf, aval) in enumerate(zip(program.outputs, program.jaxpr.out_avals, strict=True)):
        if k in dims:
            found += [replace(leaf, path=p, part=part) for p, part in _parts(leaf, dims[k], aval)]
        else:
            found.append(leaf)
    return tuple(found)


def _parts(leaf: InputLeaf | OutputLeaf, dim: int, aval: Any) -> list[tuple[str, Part]]:
    """Path and place of every slice of an input or output along a dim."""
    whole = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    before = leaf.part or Part(path=leaf.path, aval=whole, slicing=WHOLE, index=())
    slicing = before.slicing.then(dim, aval.shape[dim])
    return [
        (f"{leaf.path}[{':, ' * dim}{i}]", replace(before, slicing=slicing, index=(*before.index, i)))
        for i in range(aval.shape[dim])
    ]


# --- running ----------------------------------------------------------------------------------


def _run(closed: jex.ClosedJaxpr, values: Sequence[Any], scans: Mapping[int, str]) -> list[Any]:
    jaxpr = closed.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *values], strict=True))
    for index, eqn in enumerate(jaxpr.eqns):
        operands = [read(env, atom) for atom in eqn.invars]
        outs = _copies(eqn, operands, scans[index]) if index in scans else apply(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def _copies(eqn: jex.JaxprEqn, operands: Sequence[Any], name: str) -> list[Any]:
    """The results of a scan, turn by turn."""
    (num_consts, num_carry), length = scan_counts(eqn.params), eqn.params["length"]
    consts = [joined(x) for x in operands[:num_consts]]
    carry = [joined(x) for x in operands[num_consts : num_consts + num_carry]]
    xs = operands[num_consts + num_carry :]
    body = without_name(flatten(eqn.params["jaxpr"]), name)
    ys: list[list[Any]] = [[] for _ in eqn.outvars[num_carry:]]
    turns = range(length)
    for i in reversed(turns) if eqn.params["reverse"] else turns:
        with scope(eqn), named(eqn, name, i):
            outs = _evaluate(body, [*consts, *carry, *(slice_of(x, 0, i) for x in xs)])
        carry = outs[:num_carry]
        for collected, y in zip(ys, outs[num_carry:], strict=True):
            collected.append(y)
    if eqn.params["reverse"]:
        ys = [collected[::-1] for collected in ys]
    return [*carry, *(Stack(slices=tuple(collected), dim=0) for collected in ys)]


def _evaluate(body: jex.ClosedJaxpr, values: Iterable[Any]) -> list[Any]:
    jaxpr = body.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*body.consts, *values], strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, bind(eqn, [read(env, a) for a in eqn.invars]), strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]
