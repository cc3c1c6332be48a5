"""Why a plan is as it is: where its step goes, what limits it, and why the others lost.

Everything is read off the plan; nothing is searched or simulated again.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rannc_jax.plan.moves import transfers
from rannc_jax.plan.text import MEMORY_WORDS, devices_text, grid
from rannc_jax.words import count, gib, ms, schedule_words

if TYPE_CHECKING:
    from rannc_jax.plan.data import Plan

UNBALANCED = 1.1
"""A rank that works so many times the mean is worth a word."""
NEARLY_FULL = 0.9
"""Share of its limit from which a device counts as full."""
MUCH = 0.1
"""Share of the step from which reduction, update or waiting counts as a limit."""


def explain(plan: "Plan") -> str:
    """The text; see `Plan.explain`."""
    ranks = ranks_of(plan)
    lines = [f"{_shape(plan)}: step {ms(plan.step_s)} ms"]
    lines += _indented(_where_it_goes(plan, ranks))
    lines += ["", "what limits it:", *_indented(_limits(plan, ranks))]
    lines += ["", "devices:", *_indented(_rank_table(plan, ranks))]
    losers = [f"{other.summary}: {ms(other.step_s)} ms; {other.reason}" for other in plan.runners_up]
    lines += ["", "why the others lost:", *_indented(iter(losers or ["no other plan was found to compare"]))]
    if plan.notes:
        lines += ["", "notes:", *_indented(iter(plan.notes))]
    return "\n".join(lines)


def ranks_of(plan: "Plan") -> dict[tuple[int, ...], list[int]]:
    """Stages by the devices they run on; several where a schedule has chunks."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for index, stage in enumerate(plan.stages):
        ranks.setdefault(stage.devices, []).append(index)
    return ranks


def _shape(plan: "Plan") -> str:
    counts = sorted({stage.num_replicas for stage in plan.stages})
    replicas = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if plan.num_stages == 1:
        kept = plan.stages[0].sharding.value
        kind = {"replicated": "data parallel", "fsdp": "fully sharded data parallel (FSDP)"}
        name = kind.get(kept, f"data parallel with sharded state ({kept})")
        return f"{name} over {count(counts[0], 'device')}" if counts[0] > 1 else "one device"
    ranks = len(ranks_of(plan))
    over = "" if ranks == plan.num_stages else f" over {ranks} groups of devices"
    copies = "1 replica" if replicas == "1" else f"{replicas} replicas"
    return f"a pipeline of {plan.num_stages} stages{over} x {copies}, {schedule_words(plan.schedule)}"


def _work_s(plan: "Plan", stages: list[int]) -> float:
    each = (plan.stages[s].forward_s + plan.stages[s].backward_s for s in stages)
    return plan.num_microbatches * sum(each)


def _tail_s(plan: "Plan", stages: list[int]) -> float:
    return sum(plan.stages[s].tail_s for s in stages)


def _where_it_goes(plan: "Plan", ranks: dict[tuple[int, ...], list[int]]) -> Iterator[str]:
    """The step in three parts, on the devices that have most to do, and the gap."""
    devices = max(ranks, key=lambda d: _work_s(plan, ranks[d]) + _tail_s(plan, ranks[d]))
    work_s, tail_s = _work_s(plan, ranks[devices]), _tail_s(plan, ranks[devices])
    whole = plan.step_s or 1.0
    parts = {"forward and backward": work_s, "reduction and update": tail_s}
    if len(ranks) > 1:
        parts["filling, draining and waiting"] = max(0.0, plan.step_s - work_s - tail_s)
    said = ", ".join(f"{ms(part_s)} ms ({part_s / whole:.0%}) {name}" for name, part_s in parts.items())
    yield f"most to do on {_stages(ranks[devices])}: {said}" if len(ranks) > 1 else said
    parts = count(plan.num_microbatches, "microbatch")
    yield f"idle share of the timeline {plan.bubble_fraction:.1%}, {parts}"
    if plan.bound_s > 0:
        times = plan.step_s / plan.bound_s
        yield f"no plan is faster than {ms(plan.bound_s)} ms; this one takes {times:.2f} times as long"


def _stages(stages: list[int]) -> str:
    """As a sentence has it: stage 2, or stages 0, 4."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _limits(plan: "Plan", ranks: dict[tuple[int, ...], list[int]]) -> Iterator[str]:
    found = [*_host(plan), *_balance(plan, ranks), *_memory(plan, ranks), *_links(plan, ranks)]
    yield from found or ["compute: devices are evenly busy, memory and links leave room"]


def _host(plan: "Plan") -> Iterator[str]:
    if plan.step_s and plan.host_s >= plan.step_s:
        yield f"the host: calling programs takes {ms(plan.host_s)} ms, longer than the devices need"


def _balance(plan: "Plan", ranks: dict[tuple[int, ...], list[int]]) -> Iterator[str]:
    works = {devices: _work_s(plan, stages) for devices, stages in ranks.items()}
    mean = sum(works.values()) / len(works)
    devices = max(works, key=lambda d: works[d])
    if mean > 0 and works[devices] > UNBALANCED * mean:
        stages = ranks[devices]
        more = f"{works[devices] / mean - 1:.0%} more than the mean"
        if len(stages) == 1 and len(plan.stages[stages[0]].blocks) == 1:
            path = plan.blocks[plan.stages[stages[0]].blocks[0]].path or "unnamed"
            yield f"a heavy block: stage {stages[0]} works {more}, and is a single block ({path})"
        else:
            yield f"balance: {more} to do on {_stages(stages)}"


def _memory(plan: "Plan", ranks: dict[tuple[int, ...], list[int]]) -> Iterator[str]:
    fullest = max(ranks, key=lambda devices: _fullness(plan, devices, ranks[devices]))
    share = _fullness(plan, fullest, ranks[fullest])
    saved = sorted({stage.remat.value for stage in plan.stages} - {"save_all"})
    sharded = sorted({stage.sharding.value for stage in plan.stages} - {"replicated"})
    if share > NEARLY_FULL:
        classes: dict[str, int] = {}
        for stage in (plan.stages[s] for s in ranks[fullest]):
            for name, size in stage.memory_bytes.items():
                classes[name] = classes.get(name, 0) + size
        most = sorted(classes.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{name} {gib(size)}" for name, size in most)
        yield f"memory: {share:.0%} of what devices may use is filled on {_stages(ranks[fullest])} ({parts})"
        if saved:
            yield f"memory: residuals are computed again ({', '.join(saved)}) to fit"
    if sharded:
        yield f"memory: state is sharded over replicas ({', '.join(sharded)})"
    if any(stage.offload for stage in plan.stages):
        yield "memory: optimizer state lies in host memory, fetched for every update"
    lost = [other for other in plan.runners_up if other.reason.startswith("needs ")]
    for other in lost[:1]:
        yield f"memory: {other.summary} {other.reason}"


def _fullness(plan: "Plan", devices: tuple[int, ...], stages: list[int]) -> float:
    limit = min(plan.cluster.device(device).usable_bytes for device in devices)
    return sum(plan.stages[s].peak_bytes for s in stages) / limit


def _links(plan: "Plan", ranks: dict[tuple[int, ...], list[int]]) -> Iterator[str]:
    devices = max(ranks, key=lambda d: _tail_s(plan, ranks[d]))
    tail_s = _tail_s(plan, ranks[devices])
    if plan.step_s and tail_s > MUCH * plan.step_s:
        yield f"the end of the step: reduction and update of {_stages(ranks[devices])} take {ms(tail_s)} ms"
    slow = []
    for source, target, seconds, _ in transfers(plan):
        work_s = min(plan.stages[s].forward_s for s in (source, target))
        if seconds > work_s > 0:
            slow.append((seconds - work_s, source, target, seconds, work_s))
    if slow:
        _, source, target, seconds, work_s = max(slow)
        more = f"; {count(len(slow) - 1, 'other pair')} of stages likewise" if len(slow) > 1 else ""
        yield (
            f"links: values from stage {source} to {target} take {ms(seconds)} ms a microbatch, "
            f"longer than the forward they hide behind ({ms(work_s)} ms){more}"
        )


def _rank_table(plan: "Plan", ranks: dict[tuple[int, ...], list[int]]) -> Iterator[str]:
    """Time and memory of every group of devices."""
    head = ["devices", "stages", "works ms", "of step", "tail ms", "peak", "limit", *MEMORY_WORDS.values()]
    rows = []
    for devices, stages in ranks.items():
        limit = min(plan.cluster.device(device).usable_bytes for device in devices)
        peak = sum(plan.stages[s].peak_bytes for s in stages)
        work_s = _work_s(plan, stages)
        classes = [sum(plan.stages[s].memory_bytes.get(name, 0) for s in stages) for name in MEMORY_WORDS]
        rows.append(
            [
                devices_text(devices),
                ", ".join(map(str, stages)),
                ms(work_s),
                f"{work_s / plan.step_s:.0%}" if plan.step_s else "-",
                ms(_tail_s(plan, stages)),
                gib(peak),
                gib(limit),
                *map(gib, classes),
            ]
        )
    yield from grid(head, rows)


def _indented(lines: Iterator[str]) -> list[str]:
    return [f"  {line}" for line in lines]
