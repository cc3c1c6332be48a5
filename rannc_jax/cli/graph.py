"""`plan --graph`: a device for every node of a cost-annotated graph."""

import json
from collections import Counter
from typing import Any

from rannc_jax.dag import CostGraph, GraphPlan, load_graph, solve_graph
from rannc_jax.errors import InfeasibleError


def main(path: str, num_devices: int, *, objective: str, num_microbatches: int | None, as_json: bool) -> int:
    """Solve a graph and print the answer.

    Returns:
        0, or 1 where nothing fits the devices (said in the form that was asked for).
    """
    graph = load_graph(path)
    try:
        plan = solve_graph(graph, num_devices, objective, num_microbatches=num_microbatches)
    except InfeasibleError as error:
        print(json.dumps({"feasible": False, "reason": str(error)}) if as_json else error)
        return 1
    print(json.dumps(as_table(plan, objective)) if as_json else as_text(graph, plan, objective))
    return 0


def as_table(plan: GraphPlan, objective: str) -> dict[str, Any]:
    """The answer as JSON has it; node ids become its strings."""
    return {
        "feasible": True,
        "objective_name": objective,
        "objective": plan.objective,
        "lower_bound": plan.lower_bound,
        "proven": plan.is_optimal,
        "seconds": plan.seconds,
        "loads": list(plan.loads),
        "devices": {str(node): device for node, device in plan.devices.items()},
    }


def as_text(graph: CostGraph, plan: GraphPlan, objective: str) -> str:
    """The answer for people: what was reached, and every device's share."""
    gap = plan.objective / plan.lower_bound - 1 if plan.lower_bound else 0.0
    known = "proved to be the best" if plan.is_optimal else f"at most {gap:.1%} above the best"
    nodes = Counter(plan.devices.values())
    held = [0.0] * len(plan.loads)
    for node in graph.nodes:
        held[plan.devices[node.id]] += node.bytes
    lines = [
        f"{objective} {plan.objective:.6g}, {known}; {plan.num_ideals} ideals, {plan.seconds:.2f} s",
        "",
        "device      load  nodes          bytes",
    ]
    for device, load in enumerate(plan.loads):
        lines.append(f"{device:6d}  {load:8.4g}  {nodes[device]:5d}  {held[device]:13,.0f}")
    return "\n".join(lines)
