"""Plans for people: a small table, and what is different between two.

Both are made of the same facts, so whatever the table shows a diff can find.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rannc_jax.words import count, gib, ms, schedule_words

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
    """One line for every fact of the table that is not the same, "name: first -> second"; of a stage only the
    columns that differ."""
    pairwise = first.num_stages == second.num_stages
    before, after = (_facts(plan, pairwise=pairwise) for plan in (first, second))
    names = [*before, *(name for name in after if name not in before)]
    lines = [_difference(name, before.get(name), after.get(name)) for name in names]
    if first.runners_up != second.runners_up:
        lines.append("runners-up: not the same")
    return "\n".join(line for line in lines if line)


def _difference(name: str, before: "_Fact | None", after: "_Fact | None") -> str:
    if before == after:
        return ""
    if isinstance(before, dict) and isinstance(after, dict):
        changed = [column for column in {**before, **after} if before.get(column) != after.get(column)]
        if PEAK in changed:  # its classes say little more
            changed = [column for column in changed if column not in MEMORY_WORDS.values()]
        pairs = (f"{column} {before.get(column, '-')} -> {after.get(column, '-')}" for column in changed)
        return f"{name}: {', '.join(pairs)}"
    return f"{name}: {_as_text(before)} -> {_as_text(after)}"


def _as_text(fact: "_Fact | None") -> str:
    if isinstance(fact, dict):
        return f"{fact['blocks']} on devices {fact['devices']}"
    return "(none)" if fact is None else fact


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
    if plan.host_s >= plan.step_s > 0:
        line += " (what the host takes to call the programs)"
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


_Fact = str | dict[str, str]
"""A text, or the cells of a line by column."""
PEAK = "peak"


def _facts(plan: "Plan", *, pairwise: bool) -> dict[str, _Fact]:
    """What a diff compares; values between stages pair by pair, or all together."""
    facts: dict[str, _Fact] = {
        "function": f"{plan.identity[:12]} (program {plan.program[:12]})",
        "plan": _headline(plan).removeprefix("plan: "),
        "predicted": _prediction(plan).removeprefix("predicted: "),
        "loss": plan.loss,
        "rows": plan.batching,
        "number of blocks": str(len(plan.blocks)),
    }
    head, rows = _stage_rows(plan)
    for row, stage in zip(rows, plan.stages, strict=True):
        cells = dict(zip(head[1:-1], row[1:-1], strict=True))
        facts[f"stage {row[0]}"] = cells | {PEAK: gib(stage.peak_bytes)}
    if pairwise:
        for crossing in _crossings(plan):
            pair, _, what = crossing.partition(": ")
            facts[f"values {pair.replace(' -> ', ' to ')}"] = what
    else:
        rows_each = plan.rows / plan.num_microbatches
        moved = sum(len(v.targets) * (v.bytes_per_row * rows_each + v.fixed_bytes) for v in plan.crossings)
        facts["values between stages"] = f"{gib(moved)} a microbatch"
    facts |= {f"tie {index}": item for index, item in enumerate(_ties(plan))}
    facts |= {f"note {index}": item for index, item in enumerate(plan.notes)}
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
