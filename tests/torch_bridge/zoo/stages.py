"""Networks cut into as many stages as they have atoms, up to four, against one device.

    python -m tests.torch_bridge.zoo.stages --out stages.jsonl

runs all of them and appends a JSON line each; names that are there are not run again.
"""

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import optax
import torch

import rannc_jax
import torch_bridge
from tests.parity.measure import Comparison, compare
from tests.parity.oracle import Outcome
from tests.parity.play import CLUSTER, NUM_STEPS, run
from tests.torch_bridge.zoo.catalogue import SPECIMENS
from tests.torch_bridge.zoo.specimen import build, split

ROWS = 8
TOPOLOGIES = [name for name, specimen in SPECIMENS.items() if specimen.group == "topologies"]
NETWORKS = ["bert", "gpt2", "llama", "mixtral batched", "t5", "vit", "swin", "convnext", "resnet", "u-net"]


def mean_square(outputs: Any) -> torch.Tensor:
    """A loss for networks that return none."""
    return outputs.square().mean()


def converted(name: str) -> torch_bridge.JaxModule:
    specimen = SPECIMENS[name]
    args, kwargs = split(specimen.batch(ROWS))
    module = build(specimen)
    plain = torch_bridge.convert(module, args, kwargs)
    if plain.programs.first.loss is not None:
        return plain
    return torch_bridge.convert(module, args, kwargs, loss=mean_square)


def on_one_device(module: torch_bridge.JaxModule, optimizer: optax.GradientTransformation) -> Outcome:
    """Two updates of the whole batch, without anything of the runtime."""
    extra = {"frozen": module.frozen} if module.frozen else {}

    def loss_fn(params: Any, state: Any) -> tuple[Any, Any]:
        given = {**extra, "model_state": state} if module.model_state else extra
        out = module.loss_fn(params, module.batch, **given)
        return (out.loss, out.model_state) if module.model_state else (out, None)

    grads_of = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    params, state = module.params, module.model_state or None
    opt_state, losses, first = optimizer.init(params), [], None
    for _ in range(NUM_STEPS):
        (loss, state), grads = grads_of(params, state)
        first = first or {"loss": loss, "grads": grads, "aux": None, "first_state": state}
        losses.append(loss)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert first is not None
    outcome = Outcome(**first, losses=tuple(losses), params=params, model_state=state)
    return Outcome(**jax.tree.map(np.asarray, vars(outcome)))


def play(name: str) -> tuple[int, Comparison]:
    """Number of stages, and how a few updates compare with one device."""
    module = converted(name)
    optimizer = optax.sgd(0.02, momentum=0.9)
    # Batch normalisation is over a microbatch: the reference has one.
    parts = 1 if module.model_state else 2
    step, stages = _cut(module, optimizer, parts)
    got = run(step, step.init(), module.batch)
    comparison = compare(got, on_one_device(module, optimizer), module.params, "sgd")
    assert len(step.plan.stages) == stages
    return stages, comparison


def _cut(module: Any, optimizer: Any, parts: int) -> tuple[rannc_jax.Step, int]:
    """A step of as many stages as can be had, up to four."""
    for stages in (4, 3, 2, 1):
        step = rannc_jax.auto_partition(
            module,
            optimizer=optimizer,
            mesh=CLUSTER,
            num_stages=stages,
            num_microbatches=parts,
        )
        try:
            step.init()
        except rannc_jax.PlanError:
            continue
        return step, stages
    raise AssertionError("no plan of any number of stages")


def main() -> int:
    """Run what is not in the file yet."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_bridge.zoo.stages", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only share K of N")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {json.loads(line)["network"] for line in lines}
    share, count = map(int, options.part.split("/"))
    bad = 0
    for name in [*TOPOLOGIES, *NETWORKS][share - 1 :: count]:
        if name in done:
            continue
        record = _record(name)
        bad += bool(record["problems"])
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
    return int(bad > 0)


def _record(name: str) -> dict[str, Any]:
    began = time.perf_counter()
    record: dict[str, Any] = {"network": name, "problems": [], "torch": torch.__version__}
    try:
        stages, comparison = play(name)
    except Exception as error:
        record["problems"] = [" ".join(f"{type(error).__name__}: {error}".split())[:400]]
    else:
        record |= {"stages": stages, "problems": comparison.problems}
        record["deviations"] = comparison.deviations.as_dict()
    return record | {"seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
