"""What the search hands back: the decision as frozen data, ready to be put into a `Plan`."""

from collections.abc import Sequence
from dataclasses import dataclass

from rannc_jax.partition.candidate import Evaluation
from rannc_jax.partition.constraints import NamedSchedule
from rannc_jax.partition.stage import MEMORY_CLASSES, StageModel
from rannc_jax.plan import Crossing, RunnerUp, Stage, Tie
from rannc_jax.words import ms, schedule_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How a program should run on a cluster, and how good that is.

    Args:
        stages: in pipeline order; blocks by index of the cost table.
        num_microbatches: parts the batch is cut into.
        schedule: one of those handed to the search.
        step_s: predicted seconds of one step, gradient reduction and update included.
        bubble_fraction: idle share of the timeline, mean over ranks.
        host_s: of the step, in which the busiest host calls programs.
        transfers: (source, target, seconds of values, of cotangents or None), as the simulator takes
            them with the stages' `forward_s` and `backward_s`.
        bound_s: no plan of this program on this cluster is faster.
        is_optimal: the search was exhaustive: no other plan with one chunk a rank and whole backwards is
            faster under the same costs.
        crossings: values that go from one stage to others.
        ties: parameters that several stages read.
        runners_up: best first.
        notes: what a user might not expect, one sentence each.
    """

    stages: tuple[Stage, ...]
    num_microbatches: int
    schedule: NamedSchedule
    step_s: float
    bubble_fraction: float
    host_s: float
    transfers: tuple[tuple[int, int, float, float | None], ...]
    bound_s: float
    is_optimal: bool
    crossings: tuple[Crossing, ...]
    ties: tuple[Tie, ...]
    runners_up: tuple[RunnerUp, ...]
    notes: tuple[str, ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)


def decide(
    model: StageModel,
    best: Evaluation,
    others: Sequence[Evaluation],
    *,
    bound_s: float,
    is_optimal: bool,
    notes: Sequence[str],
    too_large: Sequence[RunnerUp] = (),
) -> Decision:
    """Put an evaluation into words and numbers that outlive the search."""
    candidate = best.candidate
    stages = tuple(
        Stage(
            blocks=placed.blocks,
            devices=tuple(placed.devices),
            remat=price.mode.remat,
            sharding=price.mode.sharding,
            offload=price.mode.offload,
            forward_s=price.forward_s,
            backward_s=price.backward_s,
            weight_s=price.weight_s,
            tail_s=price.tail_s,
            memory_bytes=dict(zip(MEMORY_CLASSES, price.memory_bytes, strict=True)),
        )
        for placed, price in zip(candidate.placements, best.prices, strict=True)
    )
    stage_of = {block: index for index, stage in enumerate(stages) for block in stage.blocks}
    idle = model.num_devices - len({device for stage in stages for device in stage.devices})
    idle_note = [f"{idle} of {model.num_devices} devices stay idle: no faster use of them was found."]
    return Decision(
        stages=stages,
        num_microbatches=candidate.num_microbatches,
        schedule=candidate.schedule,
        step_s=best.step_s,
        bubble_fraction=best.bubble_fraction,
        host_s=best.host_s,
        transfers=best.transfers,
        bound_s=bound_s,
        is_optimal=is_optimal,
        crossings=_crossings(model, stage_of),
        ties=_ties(model, stage_of),
        runners_up=(*_runners_up(best, others), *too_large),
        notes=(*notes, *(idle_note if idle else [])),
    )


def summary(evaluation: Evaluation) -> str:
    """One line a person can tell plans apart by."""
    candidate = evaluation.candidate
    counts = [placed.num_replicas for placed in candidate.placements[: candidate.num_ranks]]
    replicas = str(counts[0]) if len(set(counts)) == 1 else "+".join(map(str, counts))
    words = {price.mode.sharding.value for price in evaluation.prices} - {"replicated"}
    words |= {"offload"} if any(price.mode.offload for price in evaluation.prices) else set()
    return (
        f"{candidate.num_stages} stage{'s' if candidate.num_stages > 1 else ''} x {replicas}, "
        f"{candidate.num_microbatches} microbatch{'es' if candidate.num_microbatches > 1 else ''}, "
        f"{schedule_words(candidate.schedule.name)}" + "".join(f", {word}" for word in sorted(words))
    )


def _runners_up(best: Evaluation, others: Sequence[Evaluation], most: int = 5) -> list[RunnerUp]:
    """The best of each other number of stages and schedule; one stage is the same by any schedule."""
    seen = {_kind(best)}
    result: list[RunnerUp] = []
    for other in sorted(others, key=lambda other: other.rank):
        key = _kind(other)
        if key not in seen and len(result) < most:
            seen.add(key)
            result.append(RunnerUp(summary=summary(other), step_s=other.step_s, reason=_reason(best, other)))
    return result


def _kind(evaluation: Evaluation) -> tuple[int, str]:
    candidate = evaluation.candidate
    return candidate.num_stages, candidate.schedule.name if candidate.num_stages > 1 else ""


def _reason(best: Evaluation, other: Evaluation) -> str:
    """Where the other plan loses most of its time."""
    parts = (
        ("the busiest rank works", other.busiest_s, best.busiest_s),
        (
            "filling, draining and transfers take",
            other.pipeline_s - other.busiest_s,
            best.pipeline_s - best.busiest_s,
        ),
        (
            "gradient reduction and update take",
            other.devices_s - other.pipeline_s,
            best.devices_s - best.pipeline_s,
        ),
    )
    if other.host_s > max(other.devices_s, best.step_s):
        parts = (("calling its programs takes the host", other.host_s, best.host_s),)
    name, loses_s, wins_s = max(parts, key=lambda part: part[1] - part[2])
    if other.rank[:2] <= best.rank[:2]:
        return "as fast; the plan with fewer parts and less memory was taken"
    return f"{name} {ms(loses_s)} ms, against {ms(wins_s)} ms"


def _crossings(model: StageModel, stage_of: dict[int, int]) -> tuple[Crossing, ...]:
    crossings = []
    for value in model.values:
        source = stage_of[value.producer]
        targets = tuple(sorted({stage_of[consumer] for consumer in value.consumers} - {source}))
        if targets:
            crossings.append(
                Crossing(
                    name=value.name,
                    source=source,
                    targets=targets,
                    bytes_per_row=value.bytes_per_row,
                    fixed_bytes=value.fixed_bytes,
                    needs_grad=value.needs_grad,
                )
            )
    return tuple(crossings)


def _ties(model: StageModel, stage_of: dict[int, int]) -> tuple[Tie, ...]:
    ties = []
    for tie in model.ties:
        readers = tuple(sorted({stage_of[block] for block in tie.blocks}))
        if len(readers) > 1:
            ties.append(Tie(path=tie.path, owner=stage_of[tie.blocks[0]], readers=readers))
    return tuple(ties)
