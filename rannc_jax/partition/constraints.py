"""What a user may fix of the decision; everything else is searched.

Each constraint also accepts "auto", its default. Values are checked here, alone and against each
other; whether any plan satisfies them is the search's business.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Protocol

from rannc_jax.cluster import DeviceSpec
from rannc_jax.contract import Remat, Sharding
from rannc_jax.errors import PlanError, message
from rannc_jax.partition.mode import Mode, modes_of
from rannc_jax.partition.rules import AUTO as AUTO
from rannc_jax.partition.rules import (
    BY_STAGE,
    Auto,
    is_auto,
    is_by_stage,
    map_values,
    of_stage,
    setting_text,
)


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

    `replicas`, `remat`, `sharding` and `offload` are one value for all stages; a tuple, one a stage, "auto"
    for those that are searched; or a dict by stage index (with a fixed number of stages; negative from the
    end) or module name (every stage that holds a part of the module). See `rules`.

    Args:
        num_stages: pipeline stages.
        num_microbatches: a number (the largest divisor of the rows up to it is taken, and the plan says
            so) or a range (least, most), both included.
        replicas: of a stage.
        schedule: a schedule, its name, or its actions as text (one line a rank, "0F0 0B0").
        remat: what a stage keeps from forward to backward.
        sharding: how state lies on the replicas.
        offload: whether the optimizer state lies in host memory; "auto" only where nothing else fits.
        memory_limit_bytes: device memory to assume; never more than the device has.
        memory_margin: share of the memory left free, in [0, 1); default: the device's.
        cuts: where stages begin: block indices, or module names (the first block of that module); all of
            them, so n cuts make n + 1 stages.
    """

    num_stages: int | Auto = AUTO
    num_microbatches: int | tuple[int, int] | Auto = AUTO
    replicas: int | tuple[int | Auto, ...] | Mapping[int | str, int] | Auto = AUTO
    schedule: NamedSchedule | str = AUTO
    remat: Remat | tuple[Remat | Auto, ...] | Mapping[int | str, Remat] | Auto = AUTO
    sharding: Sharding | tuple[Sharding | Auto, ...] | Mapping[int | str, Sharding] | Auto = AUTO
    offload: bool | tuple[bool | Auto, ...] | Mapping[int | str, bool] | Auto = AUTO
    memory_limit_bytes: int | Auto = AUTO
    memory_margin: float | Auto = AUTO
    cuts: tuple[str | int, ...] | Auto = AUTO

    def __post_init__(self) -> None:
        for name in ("cuts", "num_microbatches"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        kinds = {"remat": Remat, "sharding": Sharding}
        for name in BY_STAGE:
            member = functools.partial(_as_enum, kind=kinds.get(name))
            object.__setattr__(self, name, map_values(getattr(self, name), member))
        _check_values(self)
        _check_stage_counts(self)

    @property
    def fixed_num_stages(self) -> int | None:
        """The number of stages that num_stages, cuts and the settings by stage agree on, if any does."""
        return next(iter(_stage_counts(self).values()), None)

    @property
    def schedule_name(self) -> str | None:
        """Text form of the fixed schedule."""
        if isinstance(self.schedule, str):
            return None if self.schedule == AUTO else self.schedule
        return self.schedule.name

    @property
    def by_stage(self) -> dict[str, Any]:
        """The settings that may differ by stage."""
        return {name: getattr(self, name) for name in BY_STAGE}

    @property
    def fixed(self) -> dict[str, Any]:
        """All that is fixed."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in settings.items() if not is_auto(value)}

    def said(self, *names: str) -> str:
        """What is fixed of some settings, as keyword arguments; of all without names."""
        fixed = self.fixed
        return ", ".join(setting_text(name, fixed[name]) for name in names or fixed if name in fixed)

    def of_stage(self, name: str, stage: int) -> Any:
        """What setting `name` is for a stage, modules left out; None where it is searched."""
        setting = getattr(self, name)
        return of_stage(setting, stage, self.fixed_num_stages if isinstance(setting, Mapping) else None)

    def replicas_of(self, stage: int) -> int | None:
        """The fixed replicas of a stage, modules left out."""
        return self.of_stage("replicas", stage)

    def modes_of(
        self, stage: int, shardings: Sequence[Sharding], offloads: Sequence[bool]
    ) -> tuple[Mode, ...]:
        """The modes that a stage may take, of those that are there to choose from, modules left out."""
        choices = {"remat": tuple(Remat), "sharding": tuple(shardings), "offload": tuple(offloads)}
        fixed = {name: self.of_stage(name, stage) for name in choices}
        return modes_of(*(all_ if fixed[name] is None else (fixed[name],) for name, all_ in choices.items()))

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


def _as_enum(value: Any, kind: type[Enum] | None) -> Any:
    """The member that a text such as "save_all" names; anything else as it is."""
    named = {} if kind is None else {member.value: member for member in kind}
    return named.get(value, value) if isinstance(value, str) else value


def _check_values(constraints: Constraints) -> None:
    """Each value alone."""
    rules: dict[str, tuple[Any, str]] = {
        "num_stages": (_is_count, "a number from 1"),
        "num_microbatches": (_is_count_or_range, "a number from 1, or a range (least, most)"),
        "replicas": (_by_stage(_is_count), f"a number from 1{_FORMS}"),
        "remat": (_by_stage(lambda value: isinstance(value, Remat)), _one_of(Remat)),
        "schedule": (
            lambda value: isinstance(value, str) or hasattr(value, "name"),
            "a schedule or its name",
        ),
        "sharding": (_by_stage(lambda value: isinstance(value, Sharding)), _one_of(Sharding)),
        "offload": (_by_stage(lambda value: isinstance(value, bool)), f"True or False{_FORMS}"),
        "memory_limit_bytes": (_is_count, "a number of bytes from 1"),
        "memory_margin": (lambda value: isinstance(value, int | float) and 0 <= value < 1, "in [0, 1)"),
        "cuts": (_is_cuts, "a tuple of block indices from 1, or of module paths"),
    }
    assert set(rules) == {field.name for field in fields(constraints)}
    wrong = [
        f"{name}: got {getattr(constraints, name)!r}, expected {expected}"
        for name, (is_right, expected) in rules.items()
        if not is_auto(getattr(constraints, name)) and not is_right(getattr(constraints, name))
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
    if not is_auto(constraints.num_stages):
        counts["num_stages"] = int(constraints.num_stages)
    for name in BY_STAGE:
        if isinstance(getattr(constraints, name), tuple):
            counts[name] = len(getattr(constraints, name))
    if isinstance(constraints.cuts, tuple):
        counts["cuts"] = len(constraints.cuts) + 1
    return counts


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_count_or_range(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(map(_is_count, value)) and value[0] <= value[1]
    return _is_count(value)


_FORMS = ", one a stage, or by stage index or module name (a dict)"


def _by_stage(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda setting: is_by_stage(setting, is_right)


def _one_of(kind: type[Enum]) -> str:
    return "one of " + ", ".join(repr(member.value) for member in kind) + _FORMS


def _is_cuts(value: object) -> bool:
    return isinstance(value, tuple) and all(
        _is_count(item) or (isinstance(item, str) and item != "") for item in value
    )
