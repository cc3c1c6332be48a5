"""What follows the last microbatch: the loss of the whole, outputs put together, one gradient a parameter."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rannc_jax.ir.batch import LossKind, RowLayout
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.runtime.layout import Lowered
from rannc_jax.runtime.loss import combine_free, combine_rows, divisor_function, total_loss
from rannc_jax.runtime.once import finish_program
from rannc_jax.runtime.ops import Key
from rannc_jax.runtime.optimizer import grad_dtype
from rannc_jax.runtime.stage import Compiled
from rannc_jax.runtime.table import StageTable


def end_loss(table: StageTable, out: Lowered) -> None:
    """The loss of all parts together, and the scale of their gradients, on every stage."""
    rule = table.graph.info.loss
    if table.loss_position is None or rule is None:
        return
    s = table.loss_stage
    microbatches = range(table.layout.num_microbatches)
    finish = total_loss(rule, divisor_function(table.graph.program, rule))
    losses = [("out", table.loss_position, i) for i in microbatches]
    extra = table.extra(s)
    weights = [("act", extra[0], i, s) if extra else ("part_weight", i) for i in microbatches]
    whole = NamedSharding(table.layout.meshes[s], PartitionSpec())
    m = table.layout.num_microbatches

    def run(*args: Any) -> tuple[Any, ...]:
        loss, scale, total = finish(args[:m], args[m:])
        per_microbatch = (
            jnp.ones((m,), jnp.float32)
            if rule.kind is LossKind.SUM
            else jnp.stack([jnp.sum(w.astype(jnp.float32)) for w in args[m:]])
        )
        return loss, scale, total, per_microbatch

    out.programs["loss"] = jax.jit(run, out_shardings=whole)
    made = [("loss",), ("scale", s), ("total_weight",), ("weights", s)]
    out.run("loss", s, [*losses, *weights], made)
    out.wanted += [("loss",), ("total_weight",)]
    for t in range(table.num_stages):
        if t != s:
            out.move(t, [("scale", s), ("weights", s)], [("scale", t), ("weights", t)], [None, None])


def end_outputs(table: StageTable, out: Lowered) -> None:
    """Put the auxiliary outputs of microbatches together, on the stages that made them."""
    outs = table.graph.program.outputs
    skip = (OutputKind.LOSS, OutputKind.WEIGHT, OutputKind.MODEL_STATE)
    microbatches = range(table.layout.num_microbatches)
    for s, (shape, code) in enumerate(zip(table.shapes, table.code, strict=True)):
        mine = [k for k in shape.part.results if outs[k].kind not in skip]
        for k in mine:
            kind = code.output_kind(len(shape.part.outputs) + shape.part.results.index(k))
            name = f"out{k}"
            keys: list[Key] = [("out", k, i) for i in microbatches]
            if isinstance(kind, RowLayout):
                rows = table.layout.batch_rows if table.layout.padded else None
                out.programs[name] = _rows_program(kind, rows)
            else:
                out.programs[name] = _free_program(table, k, kind == "stacked", s)
                keys.append(("weights", s) if table.loss_position is not None else ("even",))
            out.run(name, s, keys, [("aux", k)])
            out.wanted.append(("aux", k))
    for v in table.written:
        out.wanted.append(("state", v, table.layout.num_microbatches))


def _free_program(table: StageTable, position: int, stacked: bool, stage: int) -> Compiled:
    whole = NamedSharding(table.layout.meshes[stage], PartitionSpec())
    value = table.graph.program.output_ids()[position]
    reduction = table.graph.info.reductions.get(value, "mean") if value is not None else "mean"

    def join(x: Any) -> Any:
        if not stacked or x.shape[0] == 1:
            return x[0] if stacked else x
        total = jnp.sum(x, axis=0)
        return total if reduction == "sum" else (total / x.shape[0]).astype(x.dtype)

    return jax.jit(lambda *args: (combine_free([join(x) for x in args[:-1]], args[-1]),), out_shardings=whole)


def end_gradients(table: StageTable, out: Lowered, version: Sequence[int]) -> None:
    """Reduce over replicas, divide, transpose prologues, add the parts of tied parameters.

    Args:
        table: the stages.
        out: the list, with all backwards.
        version: the last version of each stage's accumulators.
    """
    readers = _gradient_stages(table)
    for s, (shape, code) in enumerate(zip(table.shapes, table.code, strict=True)):
        targets = [v for v in shape.params if s in readers.get(v, ())]
        if targets:
            accumulators: list[Key] = [("acc", v, s, version[s]) for v in shape.accumulated]
            reads = [table.lasting(v, s) for v in shape.prologue.inputs] if shape.prologue else []
            out.programs[f"finish{s}"] = finish_program(code)
            made = [_part_key(table, readers, v, s) for v in targets]
            out.run(f"finish{s}", s, [*accumulators, ("scale", s), *reads], made)
    for s in range(table.num_stages):
        foreign = [
            ("part", v, t) for v, stages in readers.items() if table.owner[v] == s for t in stages if t != s
        ]
        out.move(s, foreign, [(*key, "home") for key in foreign], [None] * len(foreign))
        _total_gradients(table, out, readers, s)
    _batch_gradients(table, out)


def _gradient_stages(table: StageTable) -> dict[int, list[int]]:
    """Parameter -> the stages that sum a gradient for it."""
    found: dict[int, list[int]] = {}
    for s, (shape, code) in enumerate(zip(table.shapes, table.code, strict=True)):
        for v in shape.params if code.differentiates else ():
            if v in table.graph.flows:
                found.setdefault(v, []).append(s)
    return found


def _part_key(table: StageTable, readers: Mapping[int, Sequence[int]], v: int, s: int) -> Key:
    """A stage's share of a gradient: the gradient itself, if no other stage has a share."""
    return ("grad", v) if list(readers[v]) == [table.owner[v]] else ("part", v, s)


def _total_gradients(table: StageTable, out: Lowered, readers: Mapping[int, Sequence[int]], s: int) -> None:
    """Gradients of a stage's parameters that have several shares, or none, in the dtype of the sums."""
    program = table.graph.program
    owned = [v for v, leaf in enumerate(program.inputs) if leaf.role is Role.PARAM and table.owner[v] == s]
    out.wanted += [("grad", v) for v in owned]
    mine = [v for v in owned if list(readers.get(v, ())) != [s]]
    if not mine:
        return
    wide = [(program.vars[v].aval.shape, grad_dtype(program.vars[v].aval.dtype)) for v in mine]
    shares: list[list[Key]] = [
        [("part", v, t) if t == s else ("part", v, t, "home") for t in readers.get(v, ())] for v in mine
    ]
    counts = [len(keys) for keys in shares]

    def add(*xs: Any) -> tuple[Any, ...]:
        taken = iter(xs)
        terms = [[next(taken) for _ in range(count)] for count in counts]
        pairs = zip(terms, wide, strict=True)
        return tuple(sum(x[1:], x[0]) if x else jnp.zeros(*shape) for x, shape in pairs)

    whole = NamedSharding(table.layout.meshes[s], PartitionSpec())
    out.programs[f"grads{s}"] = jax.jit(add, out_shardings=whole)
    out.run(f"grads{s}", s, [key for keys in shares for key in keys], [("grad", v) for v in mine])


def _batch_gradients(table: StageTable, out: Lowered) -> None:
    """Gradients of batch leaves: summed over the stages that read them, rows in order."""
    m = table.layout.num_microbatches
    for v in sorted(table.batch_grads):
        readers = [s for s, code in enumerate(table.code) if v in code.gradient_ids]
        layout = table.graph.info.layouts[v]
        if not readers:
            continue
        home = readers[0]
        for s in readers[1:]:
            keys: list[Key] = [("batch_grad", v, i, s) for i in range(m)]
            out.move(home, keys, [(*key, home) for key in keys], [layout] * m)
        rows = table.layout.batch_rows if table.layout.padded else None

        def join(
            *args: Any, layout: RowLayout | None = layout, count: int = len(readers), rows: Any = rows
        ) -> tuple[Any]:
            totals = [sum(args[i * count + 1 : (i + 1) * count], args[i * count]) for i in range(m)]
            joined = sum(totals[1:], totals[0]) if layout is None else combine_rows(totals, layout, rows)
            return ((joined * args[-1]).astype(joined.dtype),)

        inputs = [
            ("batch_grad", v, i, s) if s == home else ("batch_grad", v, i, s, home)
            for i in range(m)
            for s in readers
        ]
        out.programs[f"batch_grad{v}"] = jax.jit(join)
        out.run(f"batch_grad{v}", home, [*inputs, ("scale", home)], [("batch_grad", v)])
        out.wanted.append(("batch_grad", v))


def _rows_program(layout: RowLayout, rows: int | None) -> Compiled:
    return jax.jit(lambda *parts: (combine_rows(parts, layout, rows),))
