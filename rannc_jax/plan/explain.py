"""Why a plan is as it is: where its step goes, what limits it, and why the others lost.

Everything is read off the plan; nothing is searched or simulated again.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rannc_jax.cluster import LinkSpec
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
    return (
        f"a pipeline of {plan.num_stages} stages{over} x {replicas} replicas, {schedule_words(plan.schedule)}"
    )


def _work_s(plan: "Plan", stages: list[int]) -> float:
    each = (plan.stages[s].forward_s + plan.stages[s].backward_s for s in stages)
    return plan.num_microbatches * sum(each)


def _where_it_goes(plan: "Plan", ranks: dict[tuple[int, ...], list[int]]) -> Iterator[str]:
    """The step in three parts, and the gap."""
    busiest_s = max(_work_s(plan, stages) for stages in ranks.values())
    tail_s = max(sum(plan.stages[s].tail_s for s in stages) for stages in ranks.values())
    waiting_s = max(0.0, plan.step_s - busiest_s - tail_s)
    whole = plan.step_s or 1.0
    yield (
        f"the busiest rank works {ms(busiest_s)} ms ({busiest_s / whole:.0%}); filling, draining and "
        f"transfers {ms(waiting_s)} ms ({waiting_s / whole:.0%}); reduction and update up to {ms(tail_s)} ms"
    )
    parts = count(plan.num_microbatches, "microbatch")
    yield f"idle share of the timeline {plan.bubble_fraction:.1%}, {parts}"
    if plan.bound_s > 0:
        gap = plan.step_s / plan.bound_s - 1
        yield f"no plan is faster than {ms(plan.bound_s)} ms: this one is at most {gap:.1%} above the best"


def _limits(plan: "Plan", ranks: dict[tuple[int, ...], list[int]]) -> Iterator[str]:
    found = [*_balance(plan, ranks), *_memory(plan, ranks), *_links(plan, ranks)]
    yield from found or ["compute: devices are evenly busy, memory and links leave room"]


def _balance(plan: "Plan", ranks: dict[tuple[int, ...], list[int]]) -> Iterator[str]:
    works = {devices: _work_s(plan, stages) for devices, stages in ranks.items()}
    mean = sum(works.values()) / len(works)
    devices = max(works, key=lambda d: works[d])
    if mean > 0 and works[devices] > UNBALANCED * mean:
        stages = ranks[devices]
        names = ", ".join(map(str, stages))
        alone = len(stages) == 1 and len(plan.stages[stages[0]].blocks) == 1
        path = plan.blocks[plan.stages[stages[0]].blocks[0]].path
        why = f": its one block ({path or 'unnamed'}) cannot be cut further" if alone else ""
        yield f"a heavy block: stage {names} works {works[devices] / mean - 1:.0%} more than the mean{why}"


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
        names = ", ".join(map(str, ranks[fullest]))
        yield f"memory: stage {names} fills {share:.0%} of what its devices may use ({parts})"
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
    tails = {devices: sum(plan.stages[s].tail_s for s in stages) for devices, stages in ranks.items()}
    devices = max(tails, key=lambda d: tails[d])
    if plan.step_s and tails[devices] > MUCH * plan.step_s:
        names = ", ".join(map(str, ranks[devices]))
        yield f"the end of the step: reduction and update of stage {names} take {ms(tails[devices])} ms"
    rows = plan.rows / plan.num_microbatches
    moved: dict[tuple[int, int], float] = {}
    for crossing in plan.crossings:
        for target in crossing.targets:
            pair = (crossing.source, target)
            moved[pair] = moved.get(pair, 0.0) + crossing.bytes_per_row * rows + crossing.fixed_bytes
    for (source, target), num_bytes in sorted(moved.items()):
        fewer = min(plan.stages[source].num_replicas, plan.stages[target].num_replicas)
        seconds = _link(plan, source, target).seconds(num_bytes / fewer)
        work_s = min(plan.stages[s].forward_s for s in (source, target))
        if seconds > work_s > 0:
            yield (
                f"links: values from stage {source} to {target} take {ms(seconds)} ms a microbatch, "
                f"longer than the forward they hide behind ({ms(work_s)} ms)"
            )


def _link(plan: "Plan", source: int, target: int) -> LinkSpec:
    """The slowest link that rows may take between two stages."""
    hosts = {plan.cluster.host(device) for s in (source, target) for device in plan.stages[s].devices}
    return plan.cluster.intra_host if len(hosts) == 1 else plan.cluster.inter_host


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
                ms(sum(plan.stages[s].tail_s for s in stages)),
                gib(peak),
                gib(limit),
                *map(gib, classes),
            ]
        )
    yield from grid(head, rows)


def _indented(lines: Iterator[str]) -> list[str]:
    return [f"  {line}" for line in lines]
