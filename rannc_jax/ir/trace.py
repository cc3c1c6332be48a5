"""From a user's function and abstract arguments to a `Program`: what the network is, as data.

A `Program` is a flat closed jaxpr (inline `jit` opened, a `scan` over layers as its layers; `custom_jvp`,
`custom_vjp`, `checkpoint` and other loops whole) whose inputs and outputs carry their roles and pytree
paths. A leaf that is stacked over opened layers is one input a layer. Values are numbered: inputs first,
then the outputs of the equations in order. The numbers, unlike `Var` objects, mean the same in every trace
of the same function, whatever the number of batch rows, so everything decided about a program (graph, batch
analysis, plan) speaks in value ids and equation indices.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from rannc_jax.contract import LossOut, Weighted
from rannc_jax.errors import TraceError, message
from rannc_jax.ir.example import Example, Subject, path_leaves
from rannc_jax.ir.flatten import flatten
from rannc_jax.ir.leaves import InputLeaf, Leaf, OutputLeaf, group_leaves
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.ir.scans import open_scans


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A traced function.

    Args:
        jaxpr: flat, closed; `jaxpr.jaxpr.constvars` holds small constants only.
        inputs: one per invar, in order.
        outputs: one per outvar, in order.
        out_tree: structure of the user's result (a `LossOut`, or any tree for forward-only functions).
        rows: number of batch rows it was traced with.
        const_values: the arrays of the inputs with role CONST, in input order.
    """

    jaxpr: jex.ClosedJaxpr
    inputs: tuple[InputLeaf, ...]
    outputs: tuple[OutputLeaf, ...]
    out_tree: Any
    rows: int
    const_values: tuple[Any, ...] = ()
    vars: tuple[jex.Var, ...] = field(init=False)
    value_ids: dict[jex.Var, int] = field(init=False)
    definer: dict[int, int] = field(init=False)  # value id -> index of the equation that makes it
    _reads: tuple[tuple[int, ...], ...] = field(init=False)
    _writes: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        core = self.jaxpr.jaxpr
        numbered = [*core.invars, *(v for eqn in core.eqns for v in eqn.outvars)]
        object.__setattr__(self, "vars", tuple(numbered))
        ids = {v: i for i, v in enumerate(numbered)}
        object.__setattr__(self, "value_ids", ids)
        read = ([ids[a] for a in e.invars if not isinstance(a, jex.Literal) and a in ids] for e in core.eqns)
        object.__setattr__(self, "_reads", tuple(tuple(dict.fromkeys(found)) for found in read))
        object.__setattr__(self, "_writes", tuple(tuple(ids[v] for v in e.outvars) for e in core.eqns))
        object.__setattr__(self, "definer", {v: e for e, made in enumerate(self._writes) for v in made})

    @property
    def eqns(self) -> Sequence[jex.JaxprEqn]:
        return self.jaxpr.jaxpr.eqns

    def value_id(self, atom: Any) -> int | None:
        """The number of a variable; None for literals and closed-over small constants."""
        return None if isinstance(atom, jex.Literal) else self.value_ids.get(atom)

    def reads(self, equation: int) -> tuple[int, ...]:
        """Value ids that an equation reads, each once, in operand order."""
        return self._reads[equation]

    def writes(self, equation: int) -> tuple[int, ...]:
        """Value ids that an equation defines, in output order."""
        return self._writes[equation]

    def leaves(self, role: Role) -> tuple[Leaf, ...]:
        """The user's leaves with a role, in order; a stacked one has several inputs."""
        return group_leaves(self.inputs, [v for v, leaf in enumerate(self.inputs) if leaf.role is role])

    def output_leaves(self) -> tuple[Leaf, ...]:
        """The leaves of the user's result, in order."""
        return group_leaves(self.outputs, range(len(self.outputs)))

    def output_ids(self) -> tuple[int | None, ...]:
        """Value id of every output; None where an output is a literal or small constant."""
        return tuple(self.value_id(atom) for atom in self.jaxpr.jaxpr.outvars)

    def nbytes(self, value: int) -> int:
        """Bytes of a value, at this trace's number of rows."""
        return aval_bytes(self.vars[value].aval)


def aval_bytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype (typed PRNG keys count their raw words)."""
    return math.prod(aval.shape) * _itemsize(aval.dtype)


@functools.cache
def _itemsize(dtype: Any) -> int:
    return 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize


_CONST_BYTES = 1024  # closure constants up to this size stay inside the program
_CONST_WARN_BYTES = 64 * 2**20


def trace(who: Subject, example: Example, rows: int | None = None) -> Program:
    """Trace a function with a number of batch rows into a flat program.

    Args:
        who: the function and which keywords it takes.
        example: shapes of its arguments.
        rows: batch rows; the example's own number by default.

    Raises:
        TraceError: the loss is no floating scalar, model_state is taken but not returned, or the
            function has ordered effects or calls collectives.
    """
    rows = example.rows if rows is None else rows
    arguments = {
        Role.PARAM: example.params,
        Role.FROZEN: example.frozen,
        Role.MODEL_STATE: example.model_state,
        Role.BATCH: example.with_rows(rows),
        Role.RNG: example.rng,
    }
    inputs, flat, treedefs = _input_leaves(arguments, example)
    results: list[_Result] = []

    def run(*leaves: Any) -> list[Any]:
        trees, offset = {}, 0
        for role, treedef in treedefs.items():
            trees[role] = treedef.unflatten(leaves[offset : offset + treedef.num_leaves])
            offset += treedef.num_leaves
        keywords = {
            "frozen": trees[Role.FROZEN],
            "model_state": trees[Role.MODEL_STATE],
            "rng": trees[Role.RNG],
        }
        out = who(trees[Role.PARAM], trees[Role.BATCH], keywords)
        results.append(_normalise(who, out, trees[Role.MODEL_STATE]))
        return results[-1].leaves

    closed = jax.make_jaxpr(run)(*flat)
    result = results[-1]
    closed = flatten(closed)
    _refuse_effects(closed)
    opened = open_scans(closed, inputs, result.outputs)
    closed, constants = _lift_constants(opened.jaxpr)
    lifted = tuple(
        InputLeaf(path=f"constant[{i}]", role=Role.CONST, aval=jax.ShapeDtypeStruct(c.shape, c.dtype))
        for i, c in enumerate(constants)
    )
    return Program(
        jaxpr=closed,
        inputs=(*opened.inputs, *lifted),
        outputs=opened.outputs,
        out_tree=result.tree,
        rows=rows,
        const_values=constants,
    )


def same_structure(one: Program, other: Program) -> bool:
    """Whether two traces are the same equations wired the same way (shapes may differ)."""
    return structure(one) == structure(other)


def structure(program: Program) -> list[tuple[Any, ...]]:
    """Primitive names and wiring of every equation, and of the outputs."""
    rows: list[tuple[Any, ...]] = []
    for eqn in program.eqns:
        wires = tuple(program.value_id(atom) for atom in eqn.invars)
        rows.append((eqn.primitive.name, wires, len(eqn.outvars)))
    rows.append(("outputs", program.output_ids(), len(program.inputs)))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    leaves: list[Any]
    outputs: tuple[OutputLeaf, ...]
    tree: Any


def _input_leaves(
    arguments: dict[Role, Any], example: Example
) -> tuple[tuple[InputLeaf, ...], list[jax.ShapeDtypeStruct], dict[Role, Any]]:
    names = {Role.PARAM: "params", Role.FROZEN: "frozen", Role.MODEL_STATE: "model_state"}
    inputs: list[InputLeaf] = []
    treedefs = {}
    for role, tree in arguments.items():
        paths, leaves = path_leaves(tree, names.get(role, role.value))
        treedefs[role] = jax.tree.structure(tree)
        dims = example.batch_dims if role is Role.BATCH else (None,) * len(leaves)
        inputs += [
            InputLeaf(path=path, role=role, aval=leaf, batch_dim=dim)
            for path, leaf, dim in zip(paths, leaves, dims, strict=True)
        ]
    return tuple(inputs), [leaf.aval for leaf in inputs], treedefs


def _normalise(who: Subject, out: Any, old_state: Any) -> _Result:
    if not who.is_loss:
        paths, leaves = path_leaves(out, "output")
        outputs = tuple(OutputLeaf(path=p, kind=OutputKind.OUTPUT) for p in paths)
        arrays = [_array(who, path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        return _Result(leaves=arrays, outputs=outputs, tree=jax.tree.structure(out))
    parts = as_loss_out(out)
    loss = parts.loss
    if not hasattr(loss, "shape"):
        loss = jnp.asarray(loss) if isinstance(loss, (int, float)) else loss
    if not hasattr(loss, "shape") or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        got = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise TraceError(
            message(
                f"the loss of {who.name} is not a floating scalar.",
                f"got {got}, expected float[]",
                hint="return loss.mean(), or rannc_jax.LossOut(loss=..., aux=...) for more than a loss; "
                "for a function without a loss use optimizer=None.",
            )
        )
    if "model_state" in who.takes:
        _check_state(who, parts.model_state, old_state)
    kinds = {
        OutputKind.LOSS: loss,
        OutputKind.AUX: parts.aux,
        OutputKind.MODEL_STATE: parts.model_state,
        OutputKind.WEIGHT: parts.weight,
    }  # in the order of the fields of LossOut
    leaves, outputs = [], []
    for kind, tree in kinds.items():
        paths, found = path_leaves(tree, kind.value)
        leaves += [_array(who, path, leaf) for path, leaf in zip(paths, found, strict=True)]
        outputs += [OutputLeaf(path=path, kind=kind) for path in paths]
    whole = LossOut(loss=loss, aux=parts.aux, model_state=parts.model_state, weight=parts.weight)
    return _Result(leaves=leaves, outputs=tuple(outputs), tree=jax.tree.structure(whole))


def _array(who: Subject, path: str, leaf: Any) -> Any:
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise TraceError(
            message(
                f"{who.name} returns something that is no array.",
                f"{path}: {type(leaf).__name__}",
                hint="return arrays and numbers only; None and empty containers are fine.",
            )
        ) from error


def as_loss_out(out: Any) -> LossOut:
    """Whatever a loss function may return, as a `LossOut` (see `contract`)."""
    if isinstance(out, LossOut):
        return out
    if isinstance(out, Weighted):
        return LossOut(loss=out.loss, weight=out.weight)
    if hasattr(out, "loss") and hasattr(out, "model_state"):  # the same by another package's name
        aux, weight = getattr(out, "aux", None), getattr(out, "weight", None)
        return LossOut(loss=out.loss, aux=aux, model_state=out.model_state, weight=weight)
    if isinstance(out, tuple) and len(out) == 2 and getattr(out[0], "shape", None) == ():
        return LossOut(loss=out[0], aux=out[1])
    return LossOut(loss=out)


def _check_state(who: Subject, new: Any, old: Any) -> None:
    if new is None:
        raise TraceError(
            message(
                f"{who.name} takes model_state but returns none.",
                hint="return rannc_jax.LossOut(loss=loss, model_state=new_state).",
            )
        )
    shapes = [jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree) for tree in (old, new)]
    if shapes[0] != shapes[1]:
        raise TraceError(
            message(
                f"the model_state that {who.name} returns differs from the one it takes.",
                f"got {shapes[1]}",
                f"expected {shapes[0]}",
                hint="return every leaf, written or not, with its shape and dtype.",
            )
        )


def warn_of_large_constants(program: Program) -> None:
    """One warning that names the arrays above 64 MiB that a function closes over."""
    large = [
        f"{leaf.aval.dtype}{list(leaf.aval.shape)} ({aval_bytes(leaf.aval) / 2**20:.0f} MiB)"
        for leaf in program.inputs
        if leaf.role is Role.CONST and aval_bytes(leaf.aval) > _CONST_WARN_BYTES
    ]
    if large:
        warnings.warn(
            f"the function closes over large constants: {', '.join(large)}. Each is copied to every stage "
            "that reads it; as frozen= it counts as what it is and can be replaced.",
            stacklevel=3,
        )


_COLLECTIVES = {
    "psum",
    "psum2",
    "all_gather",
    "all_to_all",
    "ppermute",
    "reduce_scatter",
    "axis_index",
    "pmin",
}
_CALLBACKS = {"io_callback"}


def _refuse_effects(closed: jex.ClosedJaxpr) -> None:
    for eqn in closed.jaxpr.eqns:
        name = eqn.primitive.name
        effects = [type(effect).__name__ for effect in eqn.effects]
        ordered = any(effect.startswith(("Ordered", "IO")) for effect in effects)
        if ordered or name in _CALLBACKS or name in _COLLECTIVES or name == "shard_map":
            raise TraceError(
                message(
                    f"{name} cannot be part of a function that is cut.",
                    f"at {source_line(eqn)}",
                    hint="leave collectives and ordered effects to the runtime; "
                    "jax.debug.print(..., ordered=False) is fine.",
                )
            )


def source_line(eqn: jex.JaxprEqn) -> str:
    """The user's file and line an equation comes from, "" if unknown."""
    return source_info_util.summarize(eqn.source_info)


def module_path(eqn: jex.JaxprEqn) -> str:
    """The name scopes around an equation, "" if none."""
    return str(eqn.source_info.name_stack)


def _lift_constants(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, tuple[Any, ...]]:
    small, large = [], []
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        (large if aval_bytes(var.aval) > _CONST_BYTES else small).append((var, value))
    jaxpr = closed.jaxpr.replace(
        constvars=[var for var, _ in small],
        invars=[*closed.jaxpr.invars, *(var for var, _ in large)],
    )
    return jex.ClosedJaxpr(jaxpr, [value for _, value in small]), tuple(value for _, value in large)
