"""Constraints that cannot hold together, found before anything is searched.

What can be seen from the constraints, the blocks and the cuts alone is refused here, with the constraints
that contradict each other. What only the search can see (no cut parts two modules that want different
things) is explained by `infeasible`.
"""

import itertools
from collections.abc import Sequence

from rannc_jax.errors import PlanError, message
from rannc_jax.partition.constraints import Constraints
from rannc_jax.partition.rules import Rule, contradictions, setting_text, stage_indices


def check_indices(constraints: Constraints, num_stages: int | None) -> None:
    """Stages that are named by index must be there.

    Raises:
        PlanError: they are not, their number is searched, or one is named twice.
    """
    for name, setting in constraints.by_stage.items():
        said, indices = setting_text(name, setting), stage_indices(setting)
        if indices and num_stages is None:
            raise PlanError(
                message(
                    f"{said} names stage {indices[0]}, but the number of stages is searched.",
                    hint="num_stages or cuts as well, or the name of a module instead of the index.",
                )
            )
        for index in indices:
            if num_stages is not None and not -num_stages <= index < num_stages:
                raise PlanError(
                    message(
                        f"{said} names stage {index}, and there are {num_stages}.",
                        hint=f"0 to {num_stages - 1}, or -{num_stages} to -1 from the end.",
                    )
                )
            if num_stages is not None and index - num_stages in indices:
                raise PlanError(
                    message(
                        f"{said} names one stage twice, as {index} and as {index - num_stages}.",
                        hint="one of the two.",
                    )
                )


def check_rules(constraints: Constraints, rules: Sequence[Rule], boundaries: Sequence[int]) -> None:
    """With fixed cuts it is known which stages a module is in: what is fixed of each must agree.

    Args:
        constraints: what is fixed by stage.
        rules: what is fixed by module.
        boundaries: first block of every stage, and the number of blocks.

    Raises:
        PlanError: two modules, or a module and a stage, want different things.
    """
    stages = [range(first, last) for first, last in itertools.pairwise(boundaries)]
    for stage, one, other in contradictions(rules, stages):
        raise PlanError(
            message(
                f"{one.text} and {other.text} cannot both hold.",
                f"with these cuts both modules have a part in stage {stage}",
                hint=f"a cut between the two, or one {one.setting} for both.",
            )
        )
    for stage, blocks in enumerate(stages):
        for rule in rules:
            fixed = constraints.of_stage(rule.setting, stage)
            if fixed not in (None, rule.value) and not rule.blocks.isdisjoint(blocks):
                said = setting_text(rule.setting, getattr(constraints, rule.setting))
                raise PlanError(
                    message(
                        f"{said} asks for two things of stage {stage}.",
                        f"with these cuts module {rule.module!r} has a part in it",
                        hint="name the stage or the module.",
                    )
                )
