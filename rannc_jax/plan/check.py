"""Whether the parts of a plan agree: every index in range, every block in one stage, sane numbers.

This asks only what the plan itself can answer. Whether it belongs to a function or to the devices that
are there is asked where it is run.
"""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from rannc_jax.mistakes import Mistakes, nearest, one_of, shown

if TYPE_CHECKING:
    from rannc_jax.plan.data import Plan

BATCHINGS = ("separable", "batch statistics", "coupled")
LOSSES = ("mean", "sum", "weighted", "mean_of_means", "none")

Range = tuple[int, int]


def check_plan(plan: "Plan", mistakes: Mistakes) -> None:
    """Note everything in `plan` that cannot be, by key path. O(size of the plan)."""
    if not plan.rows >= 1:
        mistakes.add("rows", f"got {plan.rows}, expected 1 or more")
    if not 1 <= plan.num_microbatches <= max(plan.rows, 1):
        mistakes.add("num_microbatches", f"got {plan.num_microbatches}, expected 1 to rows ({plan.rows})")
    if not plan.schedule:
        mistakes.add("schedule", "got nothing, expected the text of a schedule")
    for name, options in (("batching", BATCHINGS), ("loss", LOSSES)):
        word = getattr(plan, name)
        if word not in options:
            mistakes.add(name, f"got {shown(word)}, expected {one_of(options)}{nearest(word, options)}")
    _check_numbers(mistakes, "", {"step_s": plan.step_s, "bound_s": plan.bound_s, "host_s": plan.host_s})
    if not 0 <= plan.bubble_fraction < 1:
        mistakes.add("bubble_fraction", f"got {plan.bubble_fraction}, expected 0 or more and below 1")
    _check_blocks(plan, mistakes)
    _check_stages(plan, mistakes)
    _check_between_stages(plan, mistakes)
    for i, runner_up in enumerate(plan.runners_up):
        _check_numbers(mistakes, f"runners_up[{i}].", {"step_s": runner_up.step_s})


def _check_blocks(plan: "Plan", mistakes: Mistakes) -> None:
    owner: list[tuple[Range, int]] = []
    for i, block in enumerate(plan.blocks):
        for name, ranges in (("equations", block.equations), ("anchors", block.anchors)):
            for j, (start, stop) in enumerate(ranges):
                if not 0 <= start < stop:
                    mistakes.add(
                        f"blocks[{i}].{name}[{j}]", f"got [{start}, {stop}], expected 0 <= start < stop"
                    )
        owner += [(span, i) for span in block.equations]
    owner.sort()
    for ((_, stop), first), ((start, _), second) in pairwise(owner):
        if start < stop:
            mistakes.add(f"blocks[{second}].equations", f"equation {start} is in blocks[{first}] too")


def _check_stages(plan: "Plan", mistakes: Mistakes) -> None:
    if not plan.stages:
        mistakes.add("stages", "got none, expected 1 or more")
    for i, stage in enumerate(plan.stages):
        path = f"stages[{i}]."
        _check_indices(mistakes, path + "blocks", stage.blocks, len(plan.blocks))
        _check_indices(mistakes, path + "devices", stage.devices, plan.cluster.num_devices)
        if not stage.devices:
            mistakes.add(path + "devices", "got none, expected 1 or more")
        if len(set(stage.devices)) < len(stage.devices):
            mistakes.add(path + "devices", f"got {list(stage.devices)}, expected each device once")
        times = {"forward_s": stage.forward_s, "backward_s": stage.backward_s}
        times |= {"weight_s": stage.weight_s, "tail_s": stage.tail_s}
        memory = {f"memory_bytes.{name}": size for name, size in stage.memory_bytes.items()}
        _check_numbers(mistakes, path, times | memory)
    _check_sharing(plan, mistakes)
    uses = Counter(block for stage in plan.stages for block in stage.blocks)
    for block in range(len(plan.blocks)):
        if uses[block] != 1:
            mistakes.add(f"blocks[{block}]", f"is in {uses[block]} stages, expected exactly one")


def _check_sharing(plan: "Plan", mistakes: Mistakes) -> None:
    """Stages share all of their devices, all alike, or none."""
    owner: dict[int, int] = {}
    for i, stage in enumerate(plan.stages):
        for device in stage.devices:
            first = owner.setdefault(device, i)
            if plan.stages[first].devices != stage.devices:
                said = f"shares device {device} with stages[{first}], expected all of its devices or none"
                mistakes.add(f"stages[{i}].devices", said)
                break
    sharing = Counter(stage.devices for stage in plan.stages)
    if len(set(sharing.values())) > 1:
        mistakes.add("stages", f"{dict(sharing)} stages by devices, expected as many on each")


def _check_between_stages(plan: "Plan", mistakes: Mistakes) -> None:
    for i, crossing in enumerate(plan.crossings):
        path = f"crossings[{i}]."
        _check_indices(mistakes, path + "source", (crossing.source,), plan.num_stages)
        _check_indices(mistakes, path + "targets", crossing.targets, plan.num_stages)
        if not crossing.targets or min(crossing.targets) <= crossing.source:
            said = f"got {list(crossing.targets)}, expected stages after its source ({crossing.source})"
            mistakes.add(path + "targets", said)
        sizes = {"bytes_per_row": crossing.bytes_per_row, "fixed_bytes": crossing.fixed_bytes}
        _check_numbers(mistakes, path, sizes)
    for i, tie in enumerate(plan.ties):
        _check_indices(mistakes, f"ties[{i}].owner", (tie.owner,), plan.num_stages)
        _check_indices(mistakes, f"ties[{i}].readers", tie.readers, plan.num_stages)


def _check_indices(mistakes: Mistakes, path: str, indices: Iterable[int], count: int) -> None:
    for index in indices:
        if not 0 <= index < count:
            mistakes.add(path, f"got {index}, expected an index below {count}")


def _check_numbers(mistakes: Mistakes, path: str, numbers: dict[str, float]) -> None:
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            mistakes.add(path + name, f"got {number}, expected a finite number of 0 or more")
