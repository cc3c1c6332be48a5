"""Ideals: sets of groups that hold everything which comes before their members.

What the first devices hold together is always an ideal, so a plan is a chain of them.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rannc_jax.dag.groups import Groups, bits

_NARROW = 500
"""Groups, at most, for the order whose choice is made anew at every step."""


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


def _shrunk(followers: Sequence[int], ideal: int) -> Iterable[int]:
    for group in bits(ideal):
        if not followers[group] & ideal:
            yield ideal & ~(1 << group)


def _followers(groups: Groups) -> list[int]:
    """For each group the mask of those that need it."""
    masks = [0] * len(groups.needs)
    for group, needs in enumerate(groups.needs):
        for before in bits(needs):
            masks[before] |= 1 << group
    return masks


def nearby(groups: Groups, ideals: Iterable[int], limit: int) -> set[int]:
    """Ideals that differ by few groups from the given ones, nearest first, at most about `limit`."""
    found = set(ideals)
    followers = _followers(groups)
    frontier = sorted(found)
    while frontier and len(found) < limit:
        reached: dict[int, None] = {}
        for ideal in frontier:
            for other in (*_grown(groups, [ideal]), *_shrunk(followers, ideal)):
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


Key = Callable[[int, int], Any]
"""The least comes next: of a group, and since which position it could."""


def orders(groups: Groups, through: Sequence[int], count: int, seed: int) -> list[list[int]]:
    """Topological orders that pass through a chain of ideals: by number, depth first, narrow, and random."""
    generator = random.Random(seed)
    keys: list[Key] = [lambda group, since: group, lambda group, since: (-since, group)]
    keys += [lambda group, since: generator.random()] * (count - len(keys) - 1)
    followers = [list(bits(mask)) for mask in _followers(groups)]
    stage = [0] * len(groups.needs)
    for ideal in through:
        for group in bits(groups.everything & ~ideal):
            stage[group] += 1
    found = [_ordered(groups, followers, stage, key) for key in keys]
    if len(groups.needs) <= _NARROW:
        found.append(_narrow(groups, followers, stage))
    return found


def _ordered(groups: Groups, followers: Sequence[Sequence[int]], stage: Sequence[int], key: Key) -> list[int]:
    """By stages of the chain, and within one by the keys that groups get when they become ready."""
    waits = [needs.bit_count() for needs in groups.needs]
    ready = [(stage[group], key(group, 0), group) for group, number in enumerate(waits) if not number]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        group = heapq.heappop(ready)[2]
        order.append(group)
        for follower in followers[group]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, (stage[follower], key(follower, len(order)), follower))
    return order


def _narrow(groups: Groups, followers: Sequence[Sequence[int]], stage: Sequence[int]) -> list[int]:
    """Next comes what leaves the fewest seconds of values open."""
    touched: list[list[tuple[int, float]]] = [[] for _ in groups.needs]
    for value in groups.values:
        mask = value.consumers | 1 << value.producer
        for group in bits(mask):
            touched[group].append((mask, value.seconds))
    waits = [needs.bit_count() for needs in groups.needs]
    ready = {group for group, number in enumerate(waits) if not number}
    order: list[int] = []
    done = 0
    while ready:
        best = min(ready, key=lambda group: (stage[group], _opened(touched[group], done, group), group))
        ready.remove(best)
        order.append(best)
        done |= 1 << best
        for follower in followers[best]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.add(follower)
    return order


def _opened(values: Sequence[tuple[int, float]], done: int, group: int) -> float:
    """Seconds of values that are left open when this group comes next, less those that were open."""
    after = done | 1 << group
    return sum(seconds * ((mask & ~after != 0) - (mask & done != 0)) for mask, seconds in values)
