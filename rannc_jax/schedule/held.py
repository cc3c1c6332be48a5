"""How many microbatches a rank holds at a time, read off its actions."""

from collections import Counter
from collections.abc import Sequence

from rannc_jax.schedule.action import Action, Kind


def most_held(row: Sequence[Action]) -> Counter[int]:
    """By stage, the most forwards whose last gradient has not run; 0 for stages without gradients."""
    last = {
        (action.stage, action.microbatch): position
        for position, action in enumerate(row)
        if action.kind is not Kind.FORWARD
    }
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for position, action in enumerate(row):
        key = (action.stage, action.microbatch)
        if action.kind is Kind.FORWARD:
            held[action.stage] += key in last
            most[action.stage] = max(most[action.stage], held[action.stage])
        elif last[key] == position:
            held[action.stage] -= 1
    return most
