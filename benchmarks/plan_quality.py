"""How good plans are: ours, RaNNC's, three equal splits and the lower bound, on one clock.

    python -m benchmarks.plan_quality                                  # all models on all clusters
    python -m benchmarks.plan_quality --models t5-3b --json quality.json
    python -m benchmarks.plan_quality --max-load                       # eight stages, by the public objective

All planners get the same blocks with the same prices, and `partition.candidate.Evaluator` times their plans.
Equal splits take the best number of stages (powers of two), microbatches, schedule and remat.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optax

from benchmarks.clusters import CLUSTERS, matmul_dtype
from benchmarks.max_load import loads_of, shared_graph
from benchmarks.models import CASES, Case, make_case
from rannc_jax import planning
from rannc_jax.cluster import ClusterSpec
from rannc_jax.cost import open_graph
from rannc_jax.dag import solve_graph
from rannc_jax.errors import PlanError
from rannc_jax.ir import prepare
from rannc_jax.ir.graph import Graph
from rannc_jax.partition.baselines import (
    Problem,
    equal_cut,
    equal_plan,
    layer_weights,
    parameter_weights,
    rannc_plan,
)
from rannc_jax.partition.block import NodeBlock
from rannc_jax.partition.candidate import Evaluation
from rannc_jax.partition.constraints import Constraints
from rannc_jax.partition.decision import summary
from rannc_jax.partition.search import search
from rannc_jax.partition.space import Menu
from rannc_jax.schedule import GPipe, OneFOneB, simulate
from rannc_jax.words import schedule_words

SCHEDULES = (OneFOneB(), GPipe())
MENU = Menu(schedules=SCHEDULES)
EQUAL = ("layers", "parameters", "flops")
PLANNERS = ("ours", "rannc", *EQUAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model on a cluster, priced.

    Args:
        problem: what the planners get.
        weights: of the blocks, by kind of equal split.
        splittable: whether the batch may be split.
    """

    problem: Problem
    weights: dict[str, list[float]]


def make_task(case: Case, cluster: ClusterSpec) -> Task:
    """Trace a model and price its blocks, as `plan_function` does."""
    rows = case.rows_per_device * cluster.num_devices
    graph = prepare(case.subject(), case.example(rows))
    request = planning.Request(cluster=cluster, constraints=Constraints(), optimizer=optax.adamw(1e-4))
    blocks, table = planning.price_blocks(graph, case.params, request)
    weights = {
        "layers": layer_weights([[graph.nodes[n].path for n in block.nodes] for block in blocks]),
        "parameters": parameter_weights(table),
        "flops": flops(graph, blocks),
    }
    problem = Problem(table=table, cluster=cluster, rows=rows, menu=MENU, simulate=simulate)
    return Task(problem=problem, weights=weights)


def flops(graph: Graph, blocks: Sequence[NodeBlock]) -> list[float]:
    """Operations of one forward, by block."""
    opened = open_graph(graph)
    works = opened.twins.works[0]
    return [float(sum(works[index].flops for index in opened.operations(block.nodes))) for block in blocks]


def compare(task: Task) -> dict[str, dict[str, Any]]:
    """Seconds of a step and the plan, by planner; None where nothing fits."""
    problem = task.problem
    found: dict[str, dict[str, Any]] = {"ours": ours(problem)}
    began = time.process_time()
    answer = rannc_plan(problem, GPipe())
    found["rannc"] = _row(None if answer is None else answer.plan, began)
    for kind in EQUAL:
        began = time.process_time()
        found[kind] = _row(equal_plan(problem, task.weights[kind], SCHEDULES), began)
    return found


def ours(problem: Problem, constraints: Constraints | None = None) -> dict[str, Any]:
    """What the search decides."""
    began = time.process_time()
    try:
        decision = search(
            problem.table,
            problem.cluster,
            constraints,
            rows=problem.rows,
            menu=problem.menu,
            simulate=simulate,
            splittable=problem.splittable,
        )
    except PlanError:
        return _row(None, began)
    counts = [len(stage.devices) for stage in decision.stages]
    replicas = str(counts[0]) if len(set(counts)) == 1 else "+".join(map(str, counts))
    plan = f"{len(counts)} stages x {replicas}, {decision.num_microbatches} microbatches"
    return {
        "step_s": decision.step_s,
        "plan": f"{plan}, {schedule_words(decision.schedule.name)}",
        "remat": sorted({stage.remat.value for stage in decision.stages}),
        "bound_s": decision.bound_s,
        "cpu_s": time.process_time() - began,
        "stages": [stage.blocks for stage in decision.stages],
    }


def _row(plan: Evaluation | None, began: float) -> dict[str, Any]:
    cpu_s = time.process_time() - began
    if plan is None:
        return {"step_s": None, "cpu_s": cpu_s}
    remats = sorted({price.mode.remat.value for price in plan.prices})
    return {"step_s": plan.step_s, "plan": summary(plan), "remat": remats, "cpu_s": cpu_s}


def max_load(task: Task) -> dict[str, float | None]:
    """Largest load of eight devices, one stage each, by who cut; by the objective of the graph door."""
    problem, stages = task.problem, 8
    graph = shared_graph(problem)
    answer: dict[str, float | None] = {"optimum": solve_graph(graph, stages).objective}
    decided = ours(problem, Constraints(num_stages=stages, replicas=1))
    cuts: dict[str, Sequence[Sequence[int]]] = {}
    if decided["step_s"] is not None:
        cuts["ours"] = decided["stages"]
    forced = rannc_plan(problem, GPipe(), num_stages=stages)
    if forced is not None and forced.plan is not None:
        cuts["rannc"] = [placed.blocks for placed in forced.plan.candidate.placements]
    cuts |= {kind: equal_cut(task.weights[kind], stages) for kind in EQUAL}
    for planner in PLANNERS:
        cut = cuts.get(planner)
        answer[planner] = None if cut is None else max(loads_of(graph, cut))
    return answer


def _text(found: dict[str, Any], best: float | None) -> str:
    if found["step_s"] is None:
        return f"{'does not fit':>19}"
    ratio = f"({found['step_s'] / best:.2f}x)" if best else ""
    return f"{1e3 * found['step_s']:10.1f} {ratio:>8}"


def line(model: str, cluster: str, found: dict[str, dict[str, Any]]) -> str:
    """One row of the table: milliseconds, and how many times ours."""
    best, bound = found["ours"]["step_s"], found["ours"].get("bound_s")
    columns = " ".join(_text(found[planner], best) for planner in PLANNERS)
    limit = f"{1e3 * bound:9.1f}" if bound else f"{'':9}"
    seconds = found["ours"]["cpu_s"]
    return f"{model:14} {cluster:21} {columns} {limit} {seconds:6.1f}  {found['ours'].get('plan', '')}"


def worse(found: dict[str, dict[str, Any]]) -> list[str]:
    """Planners that beat ours."""
    times = {planner: found[planner]["step_s"] or float("inf") for planner in PLANNERS}
    return [planner for planner in PLANNERS if times[planner] < times["ours"] * (1 - 1e-9)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES), metavar="MODEL")
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--max-load", action="store_true", help="score cuts by the public objective")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures there")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        for name in arguments.clusters:
            cluster = CLUSTERS[name]()
            task = make_task(make_case(model, matmul_dtype(cluster)), cluster)
            if arguments.max_load:
                loads = max_load(task)
                print(f"{model:14} {name:21} " + " ".join(_load(k, v, loads) for k, v in loads.items()))
                rows.append({"model": model, "cluster": name, "max_load": loads})
            else:
                found = compare(task)
                beaten = worse(found)
                note = f"  WORSE than {', '.join(beaten)}" if beaten else ""
                print(line(model, name, found) + note, flush=True)
                rows.append({"model": model, "cluster": name, **found})
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))


def _load(planner: str, load: float | None, loads: dict[str, float | None]) -> str:
    if load is None:
        return f"{planner}: does not fit"
    return f"{planner}: {1e3 * load:.2f} ({load / (loads['optimum'] or load):.3f}x)"


if __name__ == "__main__":
    main()
