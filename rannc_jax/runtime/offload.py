"""Optimizer state that lies on the host between updates: fetched a group at a time, and put back.

A group's programs run on the device. Its state comes ahead of them, under the programs of the group before,
and goes back behind them. Copies claim device memory when they are dispatched, so a group is fetched only
when the one before the last of its devices has arrived on the host: at most two groups are there at a time.
Values are those of a cut optimizer (`cut.Value`); nothing here knows what an update computes.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from rannc_jax.runtime.cut import Kind, Op, StageProgram, Value
from rannc_jax.runtime.homes import is_small
from rannc_jax.runtime.shares import Shares
from rannc_jax.runtime.transfer import detached_from, is_on_host, settled

Fetched = dict[int, jax.Array]


class Ferry:
    """Carries the state of offloaded places to their programs and back, for one list of operations.

    Args:
        ops: the list.
        shares: of every place.
        values: of the list, extended in place.
        donate: state that was given is deleted when it is fetched for the last time, and other inputs are
            donated. Copies on the devices always are.
    """

    def __init__(
        self, ops: Sequence[Op], shares: Sequence[Shares], values: dict[Value, jax.Array], *, donate: bool
    ) -> None:
        self._shares, self._values, self._donate = shares, values, donate
        self._fetched: dict[StageProgram, Fetched] = {}
        self._leaving: dict[Mesh, Sequence[jax.Array]] = {}
        self._following: dict[StageProgram, StageProgram] = {}
        last: dict[Mesh, StageProgram] = {}
        for op in ops:
            if isinstance(op, StageProgram) and shares[op.stage].offload and self._carries(op):
                mesh = shares[op.stage].mesh
                if mesh in last:
                    self._following[last[mesh]] = op
                last[mesh] = op

    def run(self, program: StageProgram) -> None:
        """Run a program of an offloaded place, and fetch ahead for the one that follows on its devices."""
        if self._carries(program):
            if program not in self._fetched:
                self._fetch(program)
            following = self._following.get(program)
            if following is not None and all(v in self._values for _, v in self._hosted_inputs(following)):
                self._fetch(following)
        self._dispatch(program, self._fetched.pop(program, {}))

    def _is_hosted(self, value: Value, type_: jax.ShapeDtypeStruct) -> bool:
        """Whether a value of an offloaded place waits on the host: state, and what is too large to keep from
        round to round."""
        is_state = value.kind in (Kind.STATE, Kind.NEW_STATE)
        return is_state or (value.kind is Kind.CARRY and not is_small(type_))

    def _hosted_inputs(self, program: StageProgram) -> list[tuple[int, Value]]:
        pairs = zip(program.inputs, program.input_types, strict=True)
        return [(n, value) for n, (value, type_) in enumerate(pairs) if self._is_hosted(value, type_)]

    def _carries(self, program: StageProgram) -> bool:
        outs = zip(program.outputs, program.output_types, strict=True)
        return bool(self._hosted_inputs(program)) or any(self._is_hosted(*out) for out in outs)

    def _fetch(self, program: StageProgram) -> None:
        """Dispatch the copies for a program, once what left its devices last is on the host."""
        shares = self._shares[program.stage]
        jax.block_until_ready([x for x in self._leaving.pop(shares.mesh, ()) if not x.is_deleted()])
        hosted = self._hosted_inputs(program)
        arrays = [self._values[value] for _, value in hosted]
        here = to_device(arrays, shares)
        self._fetched[program] = {n: array for (n, _), array in zip(hosted, here, strict=True)}
        for n, value in hosted:
            if self._donate and n in program.donates:
                self._values[value].delete()

    def _dispatch(self, program: StageProgram, fetched: Fetched) -> None:
        shares = self._shares[program.stage]
        donates = tuple(n for n in program.donates if self._donate or n in fetched)
        arrays = [
            fetched[n] if n in fetched else self._values[value] for n, value in enumerate(program.inputs)
        ]
        outs = program.compiled(shares, donates)(*arrays)
        hosted = [self._is_hosted(*out) for out in zip(program.outputs, program.output_types, strict=True)]
        gone = to_host([x for x, leaves in zip(outs, hosted, strict=True) if leaves], shares)
        if any(hosted) or fetched:
            self._leaving[shares.mesh] = gone or outs
        there = iter(gone)
        for value, x, leaves in zip(program.outputs, outs, hosted, strict=True):
            self._values[value] = next(there) if leaves else x


def to_device(arrays: Sequence[jax.Array], shares: Shares) -> list[jax.Array]:
    """Copies of state on its devices, dispatched in one call."""
    places = [shares.on_mesh(shares.update(x.shape)) for x in arrays]
    return jax.device_put(list(arrays), places, may_alias=False) if arrays else []


def to_host(arrays: Sequence[jax.Array], shares: Shares) -> list[jax.Array]:
    """Copies of state where it lies between updates, dispatched in one call."""
    places = [shares.at_rest(x.shape) for x in arrays]
    return jax.device_put(list(arrays), places, may_alias=False) if arrays else []


def at_rest(value: Any, shares: Shares) -> Any:
    """A leaf of optimizer state, which a user may have put in, where it lies between updates."""
    wanted, layout = shares.at_rest(value.shape), shares.update(value.shape)
    if isinstance(value, jax.Array):
        lies = value.sharding
        if lies is wanted or lies.is_equivalent_to(wanted, value.ndim):
            return value
    if wanted.memory_kind == shares.on_mesh(layout).memory_kind:
        return settled(value, shares.mesh, layout)
    if isinstance(value, jax.Array) and not is_on_host(value):
        value = settled(value, shares.mesh, layout)
    return jax.device_put(detached_from(value, shares.mesh), wanted, may_alias=False)
