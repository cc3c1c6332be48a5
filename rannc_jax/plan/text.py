"""Plans for people: a small table, and what is different between two.

Both are made of the same facts, so whatever the table shows a diff can find.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rannc_jax.words import count, ms, schedule_words

if TYPE_CHECKING:
    from rannc_jax.plan.data import Crossing, Plan, Stage

# Column heads of `Stage.memory_bytes`, in the order in which a step fills them.
MEMORY_WORDS = {
    "parameters": "params",
    "constants": "const",
    "optimizer": "optim",
    "gradients": "grads",
    "residuals": "resid",
    "working": "work",
    "transfers": "trans",
}
# A path longer than this keeps its last parts only: the table must fit a terminal.
PATH_WIDTH = 28


def table(plan: "Plan") -> str:
    """The plan as text, about 110 columns wide: what runs where, what it costs, and why it was chosen."""
    lines = [_headline(plan), _prediction(plan), f"loss: {plan.loss}; rows: {plan.batching}", ""]
    lines += grid(*_stage_rows(plan))
    for title, facts in (
        ("crossings", _crossings(plan)),
        ("ties", _ties(plan)),
        ("notes", plan.notes),
        ("runners-up", _runners_up(plan)),
    ):
        if facts:
            lines += ["", f"{title}:", *(f"  {fact}" for fact in facts)]
    if plan.versions:
        lines += ["", "made by " + ", ".join(f"{name} {what}" for name, what in plan.versions.items())]
    return "\n".join(lines)


def diff(first: "Plan", second: "Plan") -> str:
    """One line for every fact of the table that is not the same, "name: first -> second"."""
    before, after = _facts(first), _facts(second)
    names = [*before, *(name for name in after if name not in before)]
    return "\n".join(
        f"{name}: {before.get(name, '(none)')} -> {after.get(name, '(none)')}"
        for name in names
        if before.get(name) != after.get(name)
    )


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under their heads; a column whose cells are all numbers is set right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [all(cell[:1].isdigit() or cell in ("", "-") for cell in column[1:]) for column in columns]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in (head, *rows)
    ]


def _headline(plan: "Plan") -> str:
    kinds = [plan.cluster.device(i).kind for i in range(plan.cluster.num_devices)]
    there = " + ".join(f"{len(list(run))} x {kind}" for kind, run in groupby(kinds))
    used = len({device for stage in plan.stages for device in stage.devices})
    stages = count(plan.num_stages, "stage")
    microbatches = count(plan.num_microbatches, "microbatch")
    return (
        f"plan: {stages} on {used} of {count(len(kinds), 'device')} ({there}), "
        f"{count(plan.rows, 'row')} in {microbatches}, {schedule_words(plan.schedule)}"
    )


def _prediction(plan: "Plan") -> str:
    line = f"predicted: step {ms(plan.step_s)} ms, bubble {100 * plan.bubble_fraction:.1f} %"
    if plan.bound_s > 0:
        gap = 100 * (plan.step_s / plan.bound_s - 1)
        line += f", {gap:.1f} % above the lower bound of {ms(plan.bound_s)} ms"
    return line


def _stage_rows(plan: "Plan") -> tuple[list[str], list[list[str]]]:
    classes = list(dict.fromkeys([*MEMORY_WORDS, *(c for s in plan.stages for c in s.memory_bytes)]))
    classes = [c for c in classes if any(stage.memory_bytes.get(c) for stage in plan.stages)]
    peak = max((stage.peak_bytes for stage in plan.stages), default=0)
    unit, size = ("GiB", 2**30) if peak >= 2**29 else ("MiB", 2**20)
    head = ["stage", "blocks", "devices", "remat", "F ms", "B ms"]
    head += [MEMORY_WORDS.get(c, c) for c in classes] + [f"{unit} / limit"]
    rows = []
    for index, stage in enumerate(plan.stages):
        limit = min(plan.cluster.device(device).usable_bytes for device in stage.devices)
        row = [str(index), _blocks(plan, stage), devices_text(stage.devices), _keeping(stage)]
        row += [ms(stage.forward_s), ms(stage.backward_s)]
        row += [f"{stage.memory_bytes.get(c, 0) / size:.2f}" for c in classes]
        rows.append([*row, f"{stage.peak_bytes / size:.2f} / {limit / size:.2f}"])
    return head, rows


def _facts(plan: "Plan") -> dict[str, str]:
    facts = {
        "function": f"{plan.identity[:12]} (program {plan.program[:12]})",
        "plan": _headline(plan).removeprefix("plan: "),
        "predicted": _prediction(plan).removeprefix("predicted: "),
        "loss": plan.loss,
        "rows": plan.batching,
        "number of blocks": str(len(plan.blocks)),
    }
    head, rows = _stage_rows(plan)
    for row in rows:
        cells = (f"{name} {cell}" for name, cell in zip(head[1:], row[1:], strict=True))
        facts[f"stage {row[0]}"] = ", ".join(cells)
    listed = {
        "crossing": _crossings(plan),
        "tie": _ties(plan),
        "note": plan.notes,
        "runner-up": _runners_up(plan),
    }
    for name, items in listed.items():
        facts |= {f"{name} {index}": item for index, item in enumerate(items)}
    return facts | {f"version of {name}": version for name, version in plan.versions.items()}


def _blocks(plan: "Plan", stage: "Stage") -> str:
    """The first and the last path of a stage's blocks, and how many blocks there are."""
    if not stage.blocks:
        return "none"
    paths = [plan.blocks[index].path for index in stage.blocks if plan.blocks[index].path]
    if not paths:
        paths = [f"block {stage.blocks[0]}", f"block {stage.blocks[-1]}"]
    first, last = _short(paths[0]), _short(paths[-1])
    return f"{first if first == last else f'{first} .. {last}'} ({len(stage.blocks)})"


def _short(path: str) -> str:
    """A path, or as many of its last parts as fit."""
    parts = path.split("/")
    while len(parts) > 1 and len("/".join(parts)) > PATH_WIDTH:
        parts = ["...", *parts[2:]] if parts[0] == "..." else ["...", *parts[1:]]
    return "/".join(parts) if len(parts) > 1 else path[-PATH_WIDTH:]


def devices_text(devices: Sequence[int]) -> str:
    """Runs of neighbours: "0-3, 6"."""
    spans: list[list[int]] = []
    for device in devices:
        if spans and device == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], device]
        else:
            spans.append([device])
    return ", ".join("-".join(str(end) for end in span) for span in spans)


def _keeping(stage: "Stage") -> str:
    words = [stage.remat.value]
    words += [] if stage.sharding.value == "replicated" else [stage.sharding.value]
    return ", ".join(words + ["offload"] * stage.offload)


def _crossings(plan: "Plan") -> list[str]:
    """One line for every pair of stages that values go between."""
    pairs: dict[tuple[int, int], list[Crossing]] = {}
    for crossing in plan.crossings:
        for target in crossing.targets:
            pairs.setdefault((crossing.source, target), []).append(crossing)
    rows = plan.rows / plan.num_microbatches
    lines = []
    for (source, target), values in sorted(pairs.items(), key=lambda pair: pair[0]):
        num_bytes = sum(value.bytes_per_row * rows + value.fixed_bytes for value in values)
        names = ", ".join(_short(value.name) for value in values[:3]) + (", ..." if len(values) > 3 else "")
        size = f"{count(len(values), 'value')}, {num_bytes / 2**20:.3f} MiB a microbatch"
        lines.append(f"{source} -> {target}: {size} ({names})")
    return lines


def _ties(plan: "Plan") -> list[str]:
    return [
        f"{tie.path}: lives on stage {tie.owner}, read by {', '.join(str(reader) for reader in tie.readers)}"
        for tie in plan.ties
    ]


def _runners_up(plan: "Plan") -> list[str]:
    return [f"{ms(other.step_s)} ms  {other.summary}: {other.reason}" for other in plan.runners_up]
