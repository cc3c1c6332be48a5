"""Settings that may differ by stage: one value for all stages, one a stage, or some by index or module.

    replicas=2                                    every stage
    remat=("recompute", "auto")                   one a stage; "auto" is searched
    sharding={0: "fsdp", -1: "replicated"}        by stage index, from the end where negative
    remat={"encoder/layer/3": "recompute"}        every stage that holds a part of that module

A *rule* is the last form, once it is known which blocks the module is in.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from rannc_jax.errors import PlanError, message
from rannc_jax.ir.paths import holds, outer_paths
from rannc_jax.partition.mode import Mode
from rannc_jax.words import schedule_words

Auto = Literal["auto"]
AUTO: Auto = "auto"

BY_STAGE = ("replicas", "remat", "sharding", "offload")
"""The constraints that may be given by stage."""


def is_auto(value: object) -> bool:
    """Whether a setting is left to the search."""
    return isinstance(value, str) and value == AUTO


def each_value(setting: Any) -> tuple[Any, ...]:
    """Every value that is fixed somewhere."""
    if isinstance(setting, Mapping):
        setting = tuple(setting.values())
    values = setting if isinstance(setting, tuple) else (setting,)
    return tuple(value for value in values if not is_auto(value))


def map_values(setting: Any, change: Callable[[Any], Any]) -> Any:
    """The same form with other values; lists become tuples, and a mapping that fixes nothing "auto"."""
    if isinstance(setting, Mapping):
        fixed = {key: change(value) for key, value in setting.items() if not is_auto(value)}
        return fixed or AUTO
    if isinstance(setting, tuple | list):
        return tuple(value if is_auto(value) else change(value) for value in setting)
    return setting if is_auto(setting) else change(setting)


def is_by_stage(setting: object, is_right: Callable[[object], bool]) -> bool:
    """Whether a setting has one of the four forms, with values that are right."""
    if isinstance(setting, Mapping) and not all(map(_is_place, setting)):
        return False
    return (not isinstance(setting, tuple) or len(setting) > 0) and all(map(is_right, each_value(setting)))


def _is_place(key: object) -> bool:
    return (isinstance(key, int) and not isinstance(key, bool)) or (isinstance(key, str) and key != "")


def stage_indices(setting: Any) -> tuple[int, ...]:
    """The stages that a mapping names by index."""
    return tuple(key for key in setting if isinstance(key, int)) if isinstance(setting, Mapping) else ()


def modules(setting: Any) -> tuple[str, ...]:
    """The modules that a mapping names."""
    return tuple(key for key in setting if isinstance(key, str)) if isinstance(setting, Mapping) else ()


def of_stage(setting: Any, stage: int, num_stages: int | None) -> Any:
    """What a setting fixes of a stage, its modules left out; None where it is searched.

    A setting by index has a meaning only where the number of stages is known.
    """
    if isinstance(setting, Mapping):
        value = setting.get(stage, AUTO)
        if is_auto(value) and num_stages is not None:
            value = setting.get(stage - num_stages, AUTO)
    else:
        value = setting[stage] if isinstance(setting, tuple) else setting
    return None if is_auto(value) else value


@dataclass(frozen=True, slots=True)
class Rule:
    """What is fixed of every stage that holds a block of a module.

    Args:
        setting: name of the constraint.
        value: what it must be.
        module: as the user wrote it.
        blocks: indices of the blocks that hold a part of the module.
    """

    setting: str
    value: Any
    module: str
    blocks: frozenset[int]

    @property
    def text(self) -> str:
        """As the user wrote it."""
        return setting_text(self.setting, {self.module: self.value})


def setting_text(name: str, setting: Any) -> str:
    """A constraint as a keyword argument.

    Example:
        >>> setting_text("replicas", (2, "auto")), setting_text("offload", {"head": True})
        ("replicas=(2, 'auto')", "offload={'head': True}")
    """
    return f"{name}={map_values(setting, _plain)!r}"


def _plain(value: Any) -> Any:
    """The text of an enum's member or of a schedule."""
    if isinstance(value, Enum):
        return value.value
    return schedule_words(value.name) if hasattr(value, "name") else value


def rules_of(settings: Mapping[str, Any], paths: Sequence[Sequence[str]]) -> tuple[Rule, ...]:
    """The rules that settings by module make.

    Args:
        settings: by name of the constraint.
        paths: module paths in each block.

    Raises:
        PlanError: a module is in no block, or two rules contradict each other in one block.
    """
    rules = []
    for name, setting in settings.items():
        for module in modules(setting):
            blocks = frozenset(b for b, inside in enumerate(paths) if any(holds(module, p) for p in inside))
            if not blocks:
                raise PlanError(unknown_module(name, module, (path for inside in paths for path in inside)))
            rules.append(Rule(name, setting[module], module, blocks))
    for block, first, second in contradictions(rules, [[block] for block in range(len(paths))]):
        raise PlanError(
            message(
                f"{first.text} and {second.text} cannot both hold.",
                f"block {block} ({_path_of(paths[block])}) holds parts of both modules, and is not cut",
                hint=f"one {first.setting} for both modules.",
            )
        )
    return tuple(rules)


def modes_under(rules: Sequence[Rule], modes: Sequence[Mode], num_replicas: int) -> tuple[Mode, ...]:
    """The modes that rules leave; none where they want other replicas."""
    for rule in rules:
        if rule.setting == "replicas":
            modes = modes if rule.value == num_replicas else ()
        else:
            modes = [mode for mode in modes if getattr(mode, rule.setting) == rule.value]
    return tuple(modes)


def contradictions(
    rules: Sequence[Rule], groups: Iterable[Iterable[int]]
) -> Iterator[tuple[int, Rule, Rule]]:
    """(group, rule, other rule) where groups of blocks fall under rules that want different things."""
    for index, group in enumerate(groups):
        here: dict[str, Rule] = {}
        for rule in rules:
            if not rule.blocks.isdisjoint(group):
                other = here.setdefault(rule.setting, rule)
                if other.value != rule.value:
                    yield index, other, rule


def _path_of(paths: Sequence[str]) -> str:
    return next((path for path in paths if path), "unnamed")


def unknown_module(setting: str, module: str, paths: Iterable[str]) -> str:
    """The text of the error: no part of the program is called so."""
    known = outer_paths(paths)
    near = difflib.get_close_matches(module, known, n=3, cutoff=0.0)
    return message(
        f"{setting} names {module!r}, but no module of the program is called so.",
        f"nearest names: {', '.join(near) or 'none (the function has no name scopes)'}",
        hint="jax.named_scope gives a part of a function a name.",
    )
