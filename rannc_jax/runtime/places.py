"""Where the parts of an update run: on stages, or, where optimizer state lies on the host, on groups of a
stage's leaves, one after the other.

Both are *places*: the optimizer is cut over places by one dataflow, and what belongs to all of them is done
on the last one, the hub. A stage without offload is one place. A stage with offload has one place a group,
and one that owns no parameter, for what stays on its devices.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

Group = Hashable


@dataclass(frozen=True, slots=True)
class Place:
    """One place.

    Args:
        stage: whose devices compute.
        group: number of the group of leaves, whose state lies on the host between updates; None for state
            that stays.
    """

    stage: int
    group: int | None = None

    @property
    def offload(self) -> bool:
        """Whether state is fetched from the host for each update."""
        return self.group is not None

    @property
    def label(self) -> str:
        """What the programs of the place are called."""
        return f"stage{self.stage}" + (f"_group{self.group}" if self.offload else "")


def find_places(
    owner: Sequence[int], groups: Sequence[Group | None], num_stages: int
) -> tuple[tuple[Place, ...], tuple[int, ...]]:
    """A place for every group as it is given.

    Args:
        owner: stage of every parameter.
        groups: per parameter, any name for the group of its stage in which its state is fetched; None: it
            stays.
        num_stages: number of stages.

    Returns:
        The places in the order in which they work, the hub last, and the place of every parameter.
    """
    numbers: dict[tuple[int, Group], Place] = {}
    count: dict[int, int] = defaultdict(int)
    mine: list[Place] = []
    for stage, group in zip(owner, groups, strict=True):
        if group is not None and (stage, group) not in numbers:
            numbers[stage, group] = Place(stage, count[stage])
            count[stage] += 1
        mine.append(Place(stage) if group is None else numbers[stage, group])
    places = _in_turns(numbers.values(), num_stages)
    position = {place: index for index, place in enumerate(places)}
    return places, tuple(position[place] for place in mine)


def joined(
    places: Sequence[Place], num_bytes: Mapping[int, int]
) -> tuple[tuple[Place, ...], tuple[int, ...]]:
    """Neighbouring groups of a stage as one, as long as none becomes larger than the stage's largest.

    Args:
        places: from `find_places`.
        num_bytes: position of a place -> bytes of its state.

    Returns:
        The places that are left, in order, and the new position of each old place.
    """
    num_stages = places[-1].stage + 1
    into: dict[Place, Place] = {place: place for place in places}
    for stage in range(num_stages):
        groups = sorted((p for p in places if p.stage == stage and p.offload), key=places.index)
        sizes = {place: num_bytes.get(places.index(place), 0) for place in groups}
        largest, number, filled = max(sizes.values(), default=0), -1, 0
        for place in groups:
            if number < 0 or filled + sizes[place] > largest:
                number, filled = number + 1, 0
            filled += sizes[place]
            into[place] = replace(place, group=number)
    left = _in_turns((p for p in into.values() if p.offload), num_stages)
    position = {place: index for index, place in enumerate(left)}
    return left, tuple(position[into[place]] for place in places)


def _in_turns(groups: Iterable[Place], num_stages: int) -> tuple[Place, ...]:
    """Groups of all stages take turns, so that no stage waits for another; the last stage's own place, the
    hub, is last."""
    *others, hub = (Place(stage) for stage in range(num_stages))
    turns = sorted(set(groups), key=lambda place: (place.group or 0, place.stage))
    return (*others, *turns, hub)
