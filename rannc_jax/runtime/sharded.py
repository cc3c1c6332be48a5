"""The list of operations of stages that keep only shares of their state.

`lower` writes the list as if parameters and sums were whole on every replica. Here its programs are wrapped,
by the keys they take and give: a parameter that lies in shares is gathered inside each program that computes
with it, and freed with it; sums that lie in shares take the sum over replicas of what a microbatch adds.
Neither the list's order nor what a stage computes is touched.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rannc_jax.contract import Sharding
from rannc_jax.ir.batch import RowLayout
from rannc_jax.runtime.layout import Lowered
from rannc_jax.runtime.once import finish_program, prologue_program
from rannc_jax.runtime.ops import Key, Op, OpKind
from rannc_jax.runtime.optimizer import grad_dtype
from rannc_jax.runtime.shares import Shares, gathered, reduced
from rannc_jax.runtime.stage import Compiled, Spread
from rannc_jax.runtime.table import StageTable

_HELD = ("param", "pro")
_LATE = ("res", "act", "ct", "front", "seed")


def share_state(table: StageTable, lowered: Lowered, shares: Sequence[Shares]) -> Lowered:
    """The same list over state that lies as `shares` say, one for each stage."""
    if all(share.sharding is Sharding.REPLICATED or share.mesh.size == 1 for share in shares):
        return lowered
    return _Sharer(table, lowered, shares).lowered()


def value_of(key: Key) -> int:
    """The value id in a key of a parameter, a prologue value, sums or a gradient."""
    value = key[1]
    assert isinstance(value, int)
    return value


class _Sharer:
    def __init__(self, table: StageTable, lowered: Lowered, shares: Sequence[Shares]) -> None:
        self.table, self.old, self.shares = table, lowered, shares

    def lowered(self) -> Lowered:
        new = Lowered(
            programs=dict(self.old.programs), layouts=dict(self.old.layouts), wanted=self.old.wanted
        )
        done: set[str] = set()
        for op in self.old.ops:
            if op.kind is OpKind.RUN and op.name not in done:
                done.add(op.name)
                new.programs[op.name] = self._program(op)
            if op.kind is OpKind.MOVE:
                op = self._moved(op, new)
            new.ops.append(op)
        return new

    # --- how keys lie -------------------------------------------------------------------------

    def _layout(self, key: Key) -> RowLayout | None:
        """Of a parameter, a prologue value, sums or a gradient."""
        kind, *rest = key
        if kind not in (*_HELD, "acc", "grad"):
            return None
        v, *stages = (n for n in rest if isinstance(n, int))
        shape = self.table.graph.program.vars[v].aval.shape
        stage = stages[0] if stages else self.table.owner[v]
        share = self.shares[stage]
        if kind in _HELD:
            return share.parameter(shape)
        if kind == "acc":
            return share.sums(shape)
        return share.update(shape)

    # --- programs -----------------------------------------------------------------------------

    def _program(self, op: Op) -> Compiled:
        share, program = self.shares[op.stage], self.old.programs[op.name]
        if share.mesh.size == 1 or share.sharding is Sharding.REPLICATED:
            return program
        if op.name.startswith("zeros"):
            return self._zeros(op)
        layouts = [self._layout(key) for key in op.outputs]
        outs = tuple(map(share.on_mesh, layouts))
        if op.name.startswith("finish"):
            return finish_program(self.table.code[op.stage], share, layouts)
        if op.name.startswith("prologue"):
            prologue = self.table.shapes[op.stage].prologue
            assert prologue is not None
            return prologue_program(self.table.graph.program, prologue, outs)
        if op.name.startswith("grads"):
            return jax.jit(program, out_shardings=outs)
        if any(key[0] in _HELD for key in op.inputs):
            program = self._gathering(program, op)
        if share.sharding.shards_gradients and any(key[0] == "acc" for key in op.inputs):
            program = self._adding(program, op)
        return program

    def _zeros(self, op: Op) -> Compiled:
        """Sums of nothing: of whole gradients one a replica, as `lower` has it, else shares."""
        code, share = self.table.code[op.stage], self.shares[op.stage]
        if not share.sharding.shards_gradients:
            return self.old.programs[op.name]
        wide = self._wide(op.outputs)
        outs = tuple(share.on_mesh(self._layout(key)) for key in op.outputs)
        assert len(wide) == len(code.shape.accumulated)
        return jax.jit(lambda: tuple(jnp.zeros(x.shape, x.dtype) for x in wide), out_shardings=outs)

    def _wide(self, sums: Sequence[Key]) -> list[jax.ShapeDtypeStruct]:
        avals = [self.table.graph.program.vars[value_of(key)].aval for key in sums]
        return [jax.ShapeDtypeStruct(aval.shape, grad_dtype(aval.dtype)) for aval in avals]

    def _gathering(self, program: Compiled, op: Op) -> Compiled:
        """The program behind a gathering of its parameters.

        A backward gathers again rather than keep what its forward gathered: behind a barrier that waits for
        something only the forward makes, XLA cannot take the two for one. Whole parameters are said to be
        whole, or XLA takes them for shares because the update does.
        """
        mesh = self.shares[op.stage].mesh
        held = [n for n, key in enumerate(op.inputs) if key[0] in _HELD]
        shared = [n for n in held if self._layout(op.inputs[n]) is not None]
        kinds = [key[0] for key in op.inputs]
        late = next((n for n, kind in enumerate(kinds) if kind in _LATE), None)
        late = next((n for n, kind in enumerate(kinds) if kind == "batch"), None) if late is None else late
        donates = tuple(n for n, key in enumerate(op.inputs) if key in op.donates)

        def run(*args: Any) -> Sequence[Any]:
            values = list(args)
            if late is not None and shared:
                shares, _ = jax.lax.optimization_barrier(([values[n] for n in shared], values[late]))
                for n, x in zip(shared, shares, strict=True):
                    values[n] = x
            for n in held:
                values[n] = gathered(values[n], mesh)
            return program(*values)

        return jax.jit(run, donate_argnums=donates)

    def _adding(self, program: Compiled, op: Op) -> Compiled:
        """The program with its sums in shares: what it adds to zeros is reduced, then added to them."""
        share, code = self.shares[op.stage], self.table.code[op.stage]
        old = [n for n, key in enumerate(op.inputs) if key[0] == "acc"]
        new = [n for n, key in enumerate(op.outputs) if key[0] == "acc"]
        wide = self._wide([op.inputs[n] for n in old])
        layouts = [self._layout(op.inputs[n]) for n in old]
        per_replica = code.spread is Spread.PER_REPLICA

        def run(*args: Any) -> tuple[Any, ...]:
            values = list(args)
            for n, x in zip(old, wide, strict=True):
                shape = (share.mesh.size, *x.shape) if per_replica else x.shape
                values[n] = jnp.zeros(shape, x.dtype)
            outs = list(program(*values))
            added = [outs[n] for n in new]
            if per_replica:
                added = reduced(added, layouts, share.mesh)
            for n, m, x, layout in zip(new, old, added, layouts, strict=True):
                outs[n] = jax.lax.with_sharding_constraint(args[m] + x, share.on_mesh(layout))
            return tuple(outs)

        return jax.jit(run, donate_argnums=tuple(old))

    # --- ties ---------------------------------------------------------------------------------

    def _moved(self, op: Op, new: Lowered) -> Op:
        """A move of whole values: a tied parameter is gathered before, and may lie in shares after."""
        renamed: dict[Key, Key] = {}
        for source, target in zip(op.inputs, op.outputs, strict=True):
            if source[0] != "param":
                continue
            new.layouts[target] = self._layout(target)
            if self._layout(source) is not None:
                renamed[source] = (*source, "whole", op.stage)
        for stage in sorted({self.table.owner[value_of(key)] for key in renamed}):
            mine = [key for key in renamed if self.table.owner[value_of(key)] == stage]
            name = f"gather{stage}to{op.stage}"
            whole = self.shares[stage].on_mesh(None)
            new.programs[name] = jax.jit(lambda *xs: xs, out_shardings=(whole,) * len(mine))
            new.run(name, stage, mine, [renamed[key] for key in mine])
        return replace(op, inputs=tuple(renamed.get(key, key) for key in op.inputs))
