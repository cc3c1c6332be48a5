"""What a user may fix of the decision; everything else is searched.

Each constraint also accepts "auto", its default. Values are checked here, alone and against each
other; whether any plan satisfies them is the search's business.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, Protocol

from rannc_jax.cluster import DeviceSpec
from rannc_jax.contract import Remat, Sharding
from rannc_jax.errors import PlanError, message
from rannc_jax.partition.mode import Mode, modes_of

Auto = Literal["auto"]
AUTO: Auto = "auto"


class NamedSchedule(Protocol):
    """What the search must know of a schedule; `rannc_jax.schedule.Schedule` is one."""

    @property
    def name(self) -> str: ...
    @property
    def has_backward(self) -> bool: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def splits_backward(self) -> bool: ...
    def runs(self, num_stages: int, num_microbatches: int) -> bool: ...
    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """Must depend on `num_stages - stage` and `num_microbatches` alone, where there is one chunk and the
        backward is whole."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What is fixed; "auto" is searched.

    Args:
        num_stages: pipeline stages.
        num_microbatches: a number (the largest divisor of the rows up to it is taken, and the plan says
            so) or a range (least, most), both included.
        replicas: of every stage, or one number a stage.
        schedule: a schedule or its name.
        remat: one `Remat` for all stages, or one a stage.
        sharding: how state lies on the replicas: one `Sharding` for all stages, or one a stage.
        offload: whether the optimizer state lies in host memory; "auto" only where nothing else fits.
        memory_limit_bytes: device memory to assume; never more than the device has.
        memory_margin: share of the memory left free, in [0, 1); default: the device's.
        cuts: where stages begin: block indices, or module paths (the first block of that path).
    """

    num_stages: int | Auto = AUTO
    num_microbatches: int | tuple[int, int] | Auto = AUTO
    replicas: int | tuple[int, ...] | Auto = AUTO
    schedule: NamedSchedule | str = AUTO
    remat: Remat | tuple[Remat, ...] | Auto = AUTO
    sharding: Sharding | tuple[Sharding, ...] | Auto = AUTO
    offload: bool | Auto = AUTO
    memory_limit_bytes: int | Auto = AUTO
    memory_margin: float | Auto = AUTO
    cuts: tuple[str | int, ...] | Auto = AUTO

    def __post_init__(self) -> None:
        for name in ("replicas", "remat", "sharding", "cuts", "num_microbatches"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, kind in (("remat", Remat), ("sharding", Sharding)):
            object.__setattr__(self, name, _as_enum(getattr(self, name), kind))
        _check_values(self)
        _check_stage_counts(self)

    @property
    def fixed_num_stages(self) -> int | None:
        """The number of stages that num_stages, replicas, remat, sharding and cuts agree on, if any does."""
        return next(iter(_stage_counts(self).values()), None)

    @property
    def schedule_name(self) -> str | None:
        """Text form of the fixed schedule."""
        if isinstance(self.schedule, str):
            return None if self.schedule == AUTO else self.schedule
        return self.schedule.name

    def replicas_of(self, stage: int) -> int | None:
        """The fixed replicas of a stage."""
        if isinstance(self.replicas, tuple):
            return self.replicas[stage]
        return None if self.replicas == AUTO else self.replicas

    def modes_of(
        self, stage: int, shardings: Sequence[Sharding], offloads: Sequence[bool]
    ) -> tuple[Mode, ...]:
        """The modes that a stage may take, of those that are there to choose from."""
        offload = self.offload
        return modes_of(
            _fixed(self.remat, stage, tuple(Remat)),
            _fixed(self.sharding, stage, tuple(shardings)),
            (offload,) if isinstance(offload, bool) else tuple(offloads),
        )

    def limit_bytes(self, device: DeviceSpec) -> int:
        """Memory that a plan may fill on `device`."""
        limit, margin = device.memory_bytes, device.memory_margin
        if self.memory_limit_bytes != AUTO:
            limit = min(limit, self.memory_limit_bytes)
        if self.memory_margin != AUTO:
            margin = self.memory_margin
        return int(limit * (1 - margin))

    def with_axes(self, axes: Mapping[str, int]) -> "Constraints":
        """These constraints and what a mesh fixes: axis "stage" and axis "data".

        Raises:
            PlanError: both fix the same thing differently.
        """
        merged = self
        for axis, name in (("stage", "num_stages"), ("data", "replicas")):
            if axis not in axes:
                continue
            fixed = getattr(merged, name)
            if fixed not in (AUTO, axes[axis]):
                raise PlanError(
                    message(
                        f"{name} and the mesh do not agree.",
                        f"{name}={fixed}, mesh axis {axis!r}={axes[axis]}",
                        hint=f"leave {name} to the mesh, or take {axis!r} out of its axes.",
                    )
                )
            merged = replace(merged, **{name: axes[axis]})
        return merged


def _fixed(value: Any, stage: int, choices: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a stage may take of a setting: the fixed value, of all or of this stage, or every choice."""
    if isinstance(value, tuple):
        return (value[stage],)
    return choices if _is_auto(value) else (value,)


def _as_enum(value: Any, kind: type[Enum]) -> Any:
    """The member that a text such as "save_all" names; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_as_enum(item, kind) for item in value)
    named = {member.value: member for member in kind}
    return named.get(value, value) if isinstance(value, str) else value


def _check_values(constraints: Constraints) -> None:
    """Each value alone."""
    rules: dict[str, tuple[Any, str]] = {
        "num_stages": (_is_count, "a number from 1"),
        "num_microbatches": (_is_count_or_range, "a number from 1, or a range (least, most)"),
        "replicas": (_is_count_or_counts, "a number from 1, or one a stage"),
        "remat": (_each(Remat), _one_of(Remat)),
        "schedule": (
            lambda value: isinstance(value, str) or hasattr(value, "name"),
            "a schedule or its name",
        ),
        "sharding": (_each(Sharding), _one_of(Sharding)),
        "offload": (lambda value: isinstance(value, bool), "True or False"),
        "memory_limit_bytes": (_is_count, "a number of bytes from 1"),
        "memory_margin": (lambda value: isinstance(value, int | float) and 0 <= value < 1, "in [0, 1)"),
        "cuts": (_is_cuts, "a tuple of block indices from 1, or of module paths"),
    }
    assert set(rules) == {field.name for field in fields(constraints)}
    wrong = [
        f"{name}: got {getattr(constraints, name)!r}, expected {expected}"
        for name, (is_right, expected) in rules.items()
        if not _is_auto(getattr(constraints, name)) and not is_right(getattr(constraints, name))
    ]
    if wrong:
        raise PlanError(message("constraints are not usable.", *wrong, hint='"auto" searches a value.'))


def _check_stage_counts(constraints: Constraints) -> None:
    counts = _stage_counts(constraints)
    if len(set(counts.values())) > 1:
        raise PlanError(
            message(
                "constraints do not agree on the number of stages.",
                *(f"{name} asks for {count}" for name, count in counts.items()),
            )
        )


def _stage_counts(constraints: Constraints) -> dict[str, int]:
    counts: dict[str, int] = {}
    if not _is_auto(constraints.num_stages):
        counts["num_stages"] = int(constraints.num_stages)
    if isinstance(constraints.replicas, tuple):
        counts["replicas"] = len(constraints.replicas)
    for name in ("remat", "sharding"):
        if isinstance(getattr(constraints, name), tuple):
            counts[name] = len(getattr(constraints, name))
    if isinstance(constraints.cuts, tuple):
        counts["cuts"] = len(constraints.cuts) + 1
    return counts


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_count_or_range(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(map(_is_count, value)) and value[0] <= value[1]
    return _is_count(value)


def _is_count_or_counts(value: object) -> bool:
    return len(value) > 0 and all(map(_is_count, value)) if isinstance(value, tuple) else _is_count(value)


def _each(kind: type[Enum]) -> Callable[[object], bool]:
    """Whether a value is a member, or one a stage."""

    def is_member(value: object) -> bool:
        if isinstance(value, tuple):
            return len(value) > 0 and all(isinstance(item, kind) for item in value)
        return isinstance(value, kind)

    return is_member


def _one_of(kind: type[Enum]) -> str:
    return "one of " + ", ".join(repr(member.value) for member in kind) + ", or one a stage"


def _is_cuts(value: object) -> bool:
    return isinstance(value, tuple) and all(
        _is_count(item) or (isinstance(item, str) and item != "") for item in value
    )
