"""Ideals: sets of groups that hold everything which comes before their members.

What the first devices hold together is always an ideal, so a plan is a chain of them.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rannc_jax.dag.groups import Groups


def all_ideals(groups: Groups, limit: int) -> list[int] | None:
    """Every ideal, or None if there are more than `limit`."""
    found = {0}
    frontier = [0]
    while frontier:
        frontier = [larger for larger in _grown(groups, frontier) if larger not in found]
        frontier = list(dict.fromkeys(frontier))
        found.update(frontier)
        if len(found) > limit:
            return None
    return list(found)


def _grown(groups: Groups, ideals: Iterable[int]) -> Iterable[int]:
    for ideal in ideals:
        for group, needs in enumerate(groups.needs):
            if not ideal >> group & 1 and needs & ~ideal == 0:
                yield ideal | 1 << group


def _shrunk(groups: Groups, ideal: int) -> Iterable[int]:
    for group in range(len(groups.needs)):
        if ideal >> group & 1:
            smaller = ideal & ~(1 << group)
            if all(not smaller >> g & 1 or not needs >> group & 1 for g, needs in enumerate(groups.needs)):
                yield smaller


def nearby(groups: Groups, ideals: Iterable[int], limit: int) -> set[int]:
    """Ideals that differ by few groups from the given ones, nearest first, at most about `limit`."""
    found = set(ideals)
    frontier = sorted(found)
    while frontier and len(found) < limit:
        reached: dict[int, None] = {}
        for ideal in frontier:
            for other in (*_grown(groups, [ideal]), *_shrunk(groups, ideal)):
                if other not in found:
                    reached[other] = None
        frontier = list(reached)[: limit - len(found)]
        found.update(frontier)
    return found


def prefixes(order: Sequence[int]) -> list[int]:
    """The ideals that a topological order passes through."""
    ideals, ideal = [0], 0
    for group in order:
        ideal |= 1 << group
        ideals.append(ideal)
    return ideals


Choice = Callable[[int, int, float], Any]
"""The least comes next: of a group, since which position it could, and the seconds it leaves open."""


def orders(groups: Groups, through: Sequence[int], count: int, seed: int) -> list[list[int]]:
    """Topological orders that pass through a chain of ideals: by number, depth first, narrow, and random."""
    generator = random.Random(seed)
    choices: list[Choice] = [
        lambda group, since, opened: group,
        lambda group, since, opened: (-since, group),
        lambda group, since, opened: (opened, group),
    ]
    choices += [lambda group, since, opened: generator.random()] * (count - len(choices))
    touched = _touched_values(groups)
    return [_ordered(groups, through, choice, touched) for choice in choices]


def _touched_values(groups: Groups) -> list[list[tuple[int, float]]]:
    """For each group the values that it makes or reads: the mask of all who do, seconds."""
    touched: list[list[tuple[int, float]]] = [[] for _ in groups.needs]
    for value in groups.values:
        mask = value.consumers | 1 << value.producer
        for group in range(len(groups.needs)):
            if mask >> group & 1:
                touched[group].append((mask, value.seconds))
    return touched


def _ordered(
    groups: Groups, through: Sequence[int], choice: Choice, touched: Sequence[Sequence[tuple[int, float]]]
) -> list[int]:
    order: list[int] = []
    done = 0
    since: dict[int, int] = {}
    for target in [*through, groups.everything]:
        while todo := target & ~done:
            ready = [g for g in range(len(groups.needs)) if todo >> g & 1 and not groups.needs[g] & ~done]
            for group in ready:
                since.setdefault(group, len(order))
            opened = {group: _opened(touched[group], done, group) for group in ready}
            best = min(ready, key=lambda g, opened=opened: choice(g, since[g], opened[g]))
            order.append(best)
            done |= 1 << best
    return order


def _opened(values: Sequence[tuple[int, float]], done: int, group: int) -> float:
    """Seconds of values that are left open when this group comes next, less those that were open."""
    after = done | 1 << group
    return sum(seconds * ((mask & ~after != 0) - (mask & done != 0)) for mask, seconds in values)
