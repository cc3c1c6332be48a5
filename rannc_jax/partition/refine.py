"""The last touch: small changes to a good plan, each tried on the clock.

The fast search estimates; the clock knows transfers between unequal replica counts, skips and tails.
So blocks are moved over the boundaries of neighbouring stages and replicas between stages, as long as
that makes the step faster. Greedy, in a fixed order, with a limit on how many plans are tried.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rannc_jax.partition.candidate import Candidate, Evaluation, Evaluator
from rannc_jax.partition.order import predecessor_masks
from rannc_jax.partition.space import replica_counts
from rannc_jax.partition.stage import Placement, StagePrice


def refine(evaluator: Evaluator, start: Evaluation, *, most_tried: int) -> Evaluation:
    """A plan that no single move makes faster, or the best one after `most_tried` plans."""
    best, tried, improved = start, {start.candidate}, True
    while improved:
        improved = False
        for candidate in _neighbours(evaluator, best.candidate):
            if len(tried) > most_tried:
                return _other_modes(evaluator, best)
            if candidate in tried:
                continue
            tried.add(candidate)
            found = evaluator(candidate)
            if found is not None and found.rank < best.rank:
                best, improved = found, True
                break
    return _other_modes(evaluator, best)


def _other_modes(evaluator: Evaluator, start: Evaluation) -> Evaluation:
    """Each rank once in every mode that fits: what is slower for itself may suit the whole."""
    best, candidate = start, start.candidate
    for rank in range(candidate.num_ranks):
        stages = candidate.stages_of(rank)
        for option in evaluator.options(candidate, rank):
            if option[0].fullness <= 1.0 and _may_win(best, stages, option):
                prices = list(best.prices)
                for stage, price in zip(stages, option, strict=True):
                    prices[stage] = price
                found = evaluator.evaluate(candidate, tuple(prices))
                best = found if found.rank < best.rank else best
    return best


def _may_win(best: Evaluation, stages: Sequence[int], option: Sequence[StagePrice]) -> bool:
    """Whether other prices of a rank may make a step faster, or as fast and emptier."""
    m, old = best.candidate.num_microbatches, [best.prices[stage] for stage in stages]
    if sum(price.step_s(m) for price in option) > best.step_s * (1 + 1e-9):
        return False
    return option[0].fullness < old[0].fullness == best.fullness or any(
        new.forward_s < was.forward_s or new.backward_s < was.backward_s or new.tail_s < was.tail_s
        for new, was in zip(option, old, strict=True)
    )


def _neighbours(evaluator: Evaluator, candidate: Candidate) -> Iterator[Candidate]:
    space = evaluator.space
    if space.boundaries is None:
        yield from _moved_blocks(evaluator, candidate)
    if not isinstance(space.constraints.replicas, int) and candidate.schedule.num_chunks == 1:
        yield from _moved_replicas(evaluator, candidate)


def _moved_blocks(evaluator: Evaluator, candidate: Candidate) -> Iterator[Candidate]:
    """One block goes to the stage before or after, where order allows it."""
    needs = predecessor_masks(evaluator.model.num_blocks, evaluator.model.values)
    for stage, (first, second) in enumerate(pairwise(candidate.placements)):
        here, there = _mask(first), _mask(second)
        down = [b for b in first.blocks if not any(needs[c] >> b & 1 for c in first.blocks)]
        up = [b for b in second.blocks if needs[b] & there == 0]
        moves = [(here & ~(1 << b), there | 1 << b) for b in down if len(first.blocks) > 1]
        moves += [(here | 1 << b, there & ~(1 << b)) for b in up if len(second.blocks) > 1]
        for masks in moves:
            placements = list(candidate.placements)
            for offset, (mask, old) in enumerate(zip(masks, (first, second), strict=True)):
                blocks = tuple(b for b in range(mask.bit_length()) if mask >> b & 1)
                placements[stage + offset] = Placement(blocks, old.first_device, old.num_replicas)
            yield Candidate(candidate.schedule, candidate.num_microbatches, tuple(placements))


def _moved_replicas(evaluator: Evaluator, candidate: Candidate) -> Iterator[Candidate]:
    """One stage gets the next larger or smaller number of replicas, or two stages trade."""
    model = evaluator.model
    allowed = replica_counts(model, model.rows // candidate.num_microbatches, None)
    counts = tuple(placed.num_replicas for placed in candidate.placements)
    position = [allowed.index(count) for count in counts]
    steps = [{stage: by} for stage in range(len(counts)) for by in (1, -1)]
    steps += [{a: 1, b: -1} for a in range(len(counts)) for b in (a - 1, a + 1) if 0 <= b < len(counts)]
    for step in steps:
        at = [p + step.get(stage, 0) for stage, p in enumerate(position)]
        if all(0 <= p < len(allowed) for p in at):
            moved = _packed(candidate, [allowed[p] for p in at], model.num_devices)
            if moved is not None:
                yield moved


def _packed(candidate: Candidate, counts: list[int], num_devices: int) -> Candidate | None:
    """The same stages with other replica counts, the idle devices between them kept."""
    placements, device, end = [], 0, 0
    for placed, count in zip(candidate.placements, counts, strict=True):
        device += placed.first_device - end
        end = placed.first_device + placed.num_replicas
        placements.append(Placement(placed.blocks, device, count))
        device += count
    if device > num_devices:
        return None
    return Candidate(candidate.schedule, candidate.num_microbatches, tuple(placements))


def _mask(placement: Placement) -> int:
    return sum(1 << block for block in placement.blocks)
