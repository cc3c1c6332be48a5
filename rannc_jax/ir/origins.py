"""Which parameters a value comes from, and along which dim: what tells a loop over layers from others."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from rannc_jax.ir.roles import Role
from rannc_jax.ir.stack_rules import Call, each

# What holds numbers of the model. Constants may be sliced by a loop too, but then stay as they are.
_MODEL = frozenset({Role.PARAM, Role.FROZEN, Role.MODEL_STATE})
_LASTING = _MODEL | {Role.CONST}


class Origins:
    """Looks backwards from values of a program to its inputs.

    Args:
        jaxpr: the program.
        roles: of its invars.
    """

    def __init__(self, jaxpr: jex.Jaxpr, roles: Sequence[Role]) -> None:
        self._eqns = jaxpr.eqns
        self._position = {var: k for k, var in enumerate(jaxpr.invars)}
        self._roles = roles
        self._invars = jaxpr.invars
        self._definer = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._lasting = set(jaxpr.constvars)
        self._lasting |= {var for var, role in zip(jaxpr.invars, roles, strict=True) if role in _LASTING}
        for eqn in jaxpr.eqns:
            if all(isinstance(atom, jex.Literal) or atom in self._lasting for atom in eqn.invars):
                self._lasting.update(eqn.outvars)

    def sliced(self, atom: Any, dim: int) -> list[tuple[int, int]]:
        """Inputs of which the slices of a value along `dim` are slices, as (position, dim), by work that
        treats every slice alike: casts, transposes, scalings."""
        return [(k, d) for k, d in self._walk(atom, dim) if k is not None and self._roles[k] in _MODEL]

    def is_sliced(self, atom: Any, dim: int) -> bool:
        """Whether slicing a value slices parameters, of a stacked leaf or of leaves that were stacked."""
        found = self._walk(atom, dim)
        return any(k is None or self._roles[k] in _MODEL for k, _ in found)

    def parameters(self, atoms: Iterable[Any]) -> dict[int, int]:
        """Bytes, by position, of the parameters behind values that nothing but the model goes into."""
        found: dict[int, int] = {}
        stack = [a for a in atoms if not isinstance(a, jex.Literal) and a in self._lasting]
        seen = set(stack)
        while stack:
            var = stack.pop()
            k = self._position.get(var)
            if k is not None and self._roles[k] in (Role.PARAM, Role.FROZEN):
                found[k] = _nbytes(var.aval)
            eqn = self._definer.get(var)
            fresh = [] if eqn is None else [a for a in eqn.invars if not isinstance(a, jex.Literal)]
            fresh = [a for a in fresh if a not in seen]
            seen.update(fresh)
            stack += fresh
        return found

    def _walk(self, atom: Any, dim: int) -> list[tuple[int | None, int]]:
        """(position, dim) of inputs behind a value; (None, dim) for leaves that the program stacks."""
        if isinstance(atom, jex.Literal) or atom not in self._lasting:
            return []
        if atom in self._position:
            return [(self._position[atom], dim)]
        eqn = self._definer.get(atom)
        if eqn is None or len(eqn.outvars) != 1:
            return []
        if _stacks(eqn, dim):
            return [(None, dim)] if self.parameters(eqn.invars) else []
        found: list[tuple[int | None, int]] = []
        for k, operand in enumerate(eqn.invars):
            d = _operand_dim(eqn, k, dim)
            found += [] if d is None else self._walk(operand, d)
        return list(dict.fromkeys(found))


def _stacks(eqn: jex.JaxprEqn, dim: int) -> bool:
    name = eqn.primitive.name
    if name == "stack":
        return eqn.params["axis"] == dim
    return (
        name == "concatenate"
        and eqn.params["dimension"] == dim
        and all(a.aval.shape[dim] == 1 for a in eqn.invars)
    )


def _operand_dim(eqn: jex.JaxprEqn, k: int, dim: int) -> int | None:
    """The dim of operand k whose slices make the result's slices along `dim`."""
    shapes = tuple(atom.aval.shape for atom in eqn.invars)
    if eqn.primitive.name == "slice" and k == 0:
        return dim  # a choice of slices, or a slice of each
    for d in range(len(shapes[k])):
        dims = tuple(d if j == k else None for j in range(len(shapes)))
        how = each(Call(name=eqn.primitive.name, params=eqn.params, shapes=shapes, dims=dims))
        if how is not None and how.combine is None and how.dim == dim:
            return d
    return None


def _nbytes(aval: Any) -> int:
    return int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize
