"""From a user's function and abstract arguments to a `Program`: what the network is, as data.

A `Program` is a flat closed jaxpr (inline `jit` opened, `custom_jvp`, `custom_vjp`, `checkpoint` and
`scan` whole) whose inputs and outputs carry their roles and pytree paths. Values are numbered: inputs
first, then the outputs of the equations in order. The numbers, unlike `Var` objects, mean the same in
every trace of the same function, whatever the number of batch rows, so everything decided about a
program (graph, batch analysis, plan) speaks in value ids and equation indices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from rannc_jax.ir.roles import OutputKind, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLeaf:
    """One input: where it sits in the user's arguments ("params['w']"), its role and abstract value.

    `batch_dim` is the dim that carries the batch rows, for leaves of the batch that have one.
    """

    path: str
    role: Role
    aval: jax.ShapeDtypeStruct
    batch_dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLeaf:
    """One output: its pytree path within its kind, and what it is."""

    path: str
    kind: OutputKind


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

    def __post_init__(self) -> None:
        core = self.jaxpr.jaxpr
        numbered = [*core.invars, *(v for eqn in core.eqns for v in eqn.outvars)]
        object.__setattr__(self, "vars", tuple(numbered))
        object.__setattr__(self, "value_ids", {v: i for i, v in enumerate(numbered)})

    @property
    def eqns(self) -> Sequence[jex.JaxprEqn]:
        return self.jaxpr.jaxpr.eqns

    def value_id(self, atom: Any) -> int | None:
        """The number of a variable; None for literals and closed-over small constants."""
        return None if isinstance(atom, jex.Literal) else self.value_ids.get(atom)

    def reads(self, equation: int) -> tuple[int, ...]:
        """Value ids that an equation reads, each once, in operand order."""
        ids = (self.value_id(atom) for atom in self.eqns[equation].invars)
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def writes(self, equation: int) -> tuple[int, ...]:
        """Value ids that an equation defines, in output order."""
        return tuple(self.value_ids[v] for v in self.eqns[equation].outvars)

    def output_ids(self) -> tuple[int | None, ...]:
        """Value id of every output; None where an output is a literal or small constant."""
        return tuple(self.value_id(atom) for atom in self.jaxpr.jaxpr.outvars)

    def nbytes(self, value: int) -> int:
        """Bytes of a value, at this trace's number of rows."""
        return aval_bytes(self.vars[value].aval)


def aval_bytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype (typed PRNG keys count their raw words)."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return int(np.prod(aval.shape, dtype=np.int64)) * 8
    return int(np.prod(aval.shape, dtype=np.int64)) * np.dtype(aval.dtype).itemsize
