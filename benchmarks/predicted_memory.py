"""Predicted against compiled: what a plan says its stage programs take, give and need, and what XLA says.

    python -m benchmarks.predicted_memory [--models gpt,unet] [--json FILE]

Six networks are planned for CPU devices and cut into 2 to 4 stages. The runtime's own programs of every
stage are lowered with the shapes they are called with, compiled (XLA's default flags), and their
`memory_analysis()` is set against `rannc_jax.cost.programs`. Arguments, outputs and donated bytes must be
equal; temporaries should be within a quarter (or 64 KiB, below which alignment decides).
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import jax
import jax.numpy as jnp
import optax

import rannc_jax
from benchmarks.memory_models import MODELS, Model
from rannc_jax.contract import Remat, TrainableModel
from rannc_jax.cost.programs import ProgramBytes, stage_programs
from rannc_jax.ir.align import align
from rannc_jax.ir.example import make_example, subject
from rannc_jax.ir.trace import trace
from rannc_jax.mesh import stage_meshes
from rannc_jax.runtime.engine import Engine, Prepared, Routine
from rannc_jax.runtime.follow import planned_stages
from rannc_jax.runtime.ops import Key, OpKind

TOLERANCE = 0.25
NEGLIGIBLE_BYTES = 64 * 1024
NUM_MICROBATCHES = 4
_NAMES = {
    "prologue": "prologue",
    "zeros": "zeros",
    "forward": "F",
    "backward": "B",
    "forward and backward": "FB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program: predicted and compiled bytes."""

    model: str
    remat: str
    program: str
    arguments: tuple[int, int]
    outputs: tuple[int, int]
    aliases: tuple[int, int]
    temporaries: tuple[int, int]

    @property
    def is_exact(self) -> bool:
        return all(a == b for a, b in (self.arguments, self.outputs, self.aliases))

    @property
    def is_close(self) -> bool:
        predicted, compiled = self.temporaries
        return abs(predicted - compiled) <= max(TOLERANCE * compiled, NEGLIGIBLE_BYTES)

    def __str__(self) -> str:
        predicted, compiled = self.temporaries
        ratio = f"{predicted / compiled:5.2f}" if compiled else "     "
        exact = "exact" if self.is_exact else f"NOT EXACT {self.arguments} {self.outputs} {self.aliases}"
        return (
            f"{self.model:12s} {self.remat:12s} {self.program:10s} {self.arguments[1]:10d} "
            f"{self.outputs[1]:10d} {self.aliases[1]:10d} {exact:6s} {predicted:10d} {compiled:10d} "
            f"{ratio} {'' if self.is_close else 'FAR'}"
        )


def compare(name: str, model: Model, remat: Remat) -> Iterator[Row]:
    """Every program of every stage of a model under one remat."""
    prepared, engine = _prepared(model, remat)
    layout, graph = prepared.layout, prepared.graph
    traces = [align(graph.program, trace(engine.who, prepared.example, layout.rows)) for _ in layout.meshes]
    compiled = lowered(prepared)
    joined = {s for s in range(len(layout.stages)) if f"F{s}" not in compiled}
    predicted = stage_programs(graph, layout.stages, layout.remats, traces, joined=joined)
    for stage, programs in enumerate(predicted):
        for program in programs:
            called = f"{_NAMES[program.name]}{stage}"
            yield _row(name, remat, called, program, compiled[called].compile().memory_analysis())


def _row(name: str, remat: Remat, called: str, program: ProgramBytes, analysis: Any) -> Row:
    return Row(
        model=name,
        remat=remat.name,
        program=called,
        arguments=(program.argument_bytes, analysis.argument_size_in_bytes),
        outputs=(program.output_bytes, analysis.output_size_in_bytes),
        aliases=(program.aliases, analysis.alias_size_in_bytes),
        temporaries=(program.temporaries, analysis.temp_size_in_bytes),
    )


def _prepared(model: Model, remat: Remat) -> tuple[Prepared, Engine]:
    """The model, planned and lowered: what `Step.init` does before any array is there."""
    optimizer = optax.adamw(1e-3)
    plan = rannc_jax.make_plan(
        model.fn,
        model.params,
        model.batch,
        optimizer=optimizer,
        num_stages=model.num_stages,
        num_microbatches=NUM_MICROBATCHES,
        replicas=1,
        remat=remat,
        **model.given,
    )
    fn, params, batch, dims, given = model.fn, model.params, model.batch, "auto", dict(model.given)
    if isinstance(fn, TrainableModel):
        given |= {"frozen": fn.frozen or None, "model_state": fn.model_state or None}
        fn, params, batch, dims = fn.loss_fn, fn.params, fn.batch, fn.batch_dims or "auto"
    given = {name: given.get(name) for name in ("frozen", "model_state", "rng")}
    who = subject(fn, None, is_loss=True).with_given(**given)
    routine = Routine(
        remats=tuple(stage.remat for stage in plan.stages),
        meshes=stage_meshes(plan, None),
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        train=True,
    )
    example = make_example(who, params, batch, batch_dims=dims, **given)
    engine = Engine(who, example, planned_stages(plan), routine, batch_dims=dims, allow_coupled=True)
    return engine.prepared(example.batch), engine


def lowered(prepared: Prepared) -> Mapping[str, Any]:
    """Every program of a step, lowered with the shapes it is called with."""
    known: dict[Key, jax.ShapeDtypeStruct] = {}
    found: dict[str, Any] = {}
    for op in prepared.lowered.ops:
        given = [known[key] if key in known else _given(prepared, key) for key in op.inputs]
        if op.kind is OpKind.RUN:
            if op.name not in found:
                found[op.name] = prepared.lowered.programs[op.name].lower(*given)
            given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(found[op.name].out_info)]
        known.update(zip(op.outputs, given, strict=False))
    return found


def _given(prepared: Prepared, key: Key) -> jax.ShapeDtypeStruct:
    """What comes from outside the step."""
    kind, program = key[0], prepared.graph.program
    if kind == "step_key":
        return jax.eval_shape(lambda: jax.random.key(0))
    if kind == "part_weight":
        return jax.ShapeDtypeStruct((1,), jnp.float32)
    if kind == "batch":
        program = prepared.table.code[key[3]].program  # at the rows of a microbatch
    aval = program.vars[key[1]].aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def report(rows: Sequence[Row]) -> str:
    """Counts, and the programs that are off."""
    exact, close = sum(row.is_exact for row in rows), sum(row.is_close for row in rows)
    lines = [
        f"{len(rows)} programs: arguments, outputs and donated bytes exact in {exact}, "
        f"temporaries within {TOLERANCE:.0%} in {close}."
    ]
    return "\n".join([*lines, *(str(row) for row in rows if not (row.is_exact and row.is_close))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return 1 where anything that must be exact is not."""
    parser = argparse.ArgumentParser(description="Predicted against compiled bytes of stage programs.")
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--json", default=None, help="write the rows to a file")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    print(f"{'model':12s} {'remat':12s} {'program':10s} {'arguments':>10s} {'outputs':>10s} ", end="")
    print(f"{'donated':>10s}        {'predicted':>10s} {'temporary':>10s} ratio")
    for name in options.models.split(","):
        for remat in Remat:
            for row in compare(name, MODELS[name](), remat):
                print(row, flush=True)
                rows.append(row)
    print("\n" + report(rows))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.is_exact for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
