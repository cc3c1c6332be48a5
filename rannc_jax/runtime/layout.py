"""Where the work of a batch goes (`Layout`), and the list of operations that comes of it (`Lowered`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jax.sharding import Mesh

from rannc_jax.contract import Remat
from rannc_jax.ir.batch import RowLayout
from rannc_jax.runtime.ops import Key, Op, OpKind
from rannc_jax.runtime.stage import Compiled, Spread
from rannc_jax.schedule.action import Action


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Where the work goes: everything `lower` needs to know of a plan.

    Args:
        stages: per stage, the node indices of its blocks.
        remats: per stage.
        meshes: per stage.
        actions: all actions in an order that respects their dependencies.
        num_microbatches: parts of the batch.
        rows: rows of one microbatch (padding included).
        batch_rows: rows of the batch as given.
        spread: how replicas share rows.
    """

    stages: tuple[tuple[tuple[int, ...], ...], ...]
    remats: tuple[Remat, ...]
    meshes: tuple[Mesh, ...]
    actions: tuple[Action, ...]
    num_microbatches: int
    rows: int
    batch_rows: int
    spread: Spread

    @property
    def padded(self) -> bool:
        """Whether some rows of the last microbatches are padding."""
        return self.rows * self.num_microbatches != self.batch_rows


@dataclass(slots=True, kw_only=True, eq=False)
class Lowered:
    """Operations in order, the programs they name, where moved values lie, and what they make."""

    ops: list[Op] = field(default_factory=list)
    programs: dict[str, Compiled] = field(default_factory=dict)
    layouts: dict[Key, RowLayout | None] = field(default_factory=dict)
    wanted: list[Key] = field(default_factory=list)

    def run(
        self,
        name: str,
        stage: int,
        inputs: Sequence[Key],
        outputs: Sequence[Key],
        donates: Sequence[Key] = (),
        label: str = "",
    ) -> None:
        """Append a RUN."""
        self.ops.append(
            Op(
                kind=OpKind.RUN,
                name=name,
                stage=stage,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                donates=frozenset(donates),
                label=label or name,
            )
        )

    def move(
        self, stage: int, inputs: Sequence[Key], outputs: Sequence[Key], layouts: Sequence[RowLayout | None]
    ) -> None:
        """Append a MOVE of all values that go to a stage at one time."""
        if inputs:
            self.layouts.update(zip(outputs, layouts, strict=True))
            self.ops.append(
                Op(kind=OpKind.MOVE, name="move", stage=stage, inputs=tuple(inputs), outputs=tuple(outputs))
            )
