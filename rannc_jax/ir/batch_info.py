"""What is known about the batch of a program: the words of the batch analysis.

`RowLayout` says where rows lie, `Dependence` how a value depends on them, `LossRule` how losses of parts
combine, `Coupling` which equation lets examples see each other. `ir.batch` finds all of it.
"""

import enum
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Batch rows lie in `dim`, whose size is `outer * rows * inner` with the row index in the middle.

    Only layouts with `outer == 1` are contiguous: a block of rows is then a block of the dim.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def contiguous(self) -> bool:
        return self.outer == 1


class Dependence(enum.Enum):
    """How a value depends on the batch."""

    FREE = "free"  # not at all
    ROWS = "rows"  # row by row: row i of the value needs row i of the batch only (or shared statistics)
    REDUCED = "reduced"  # a sum or (weighted) mean over rows
    COUPLED = "coupled"  # any other way


class LossKind(enum.Enum):
    """How losses of parts of a batch combine into the loss of the whole."""

    MEAN = "mean"  # mean over rows: weight = rows of the part
    SUM = "sum"  # sum over rows
    WEIGHTED = "weighted"  # weight is a value of the program (given by the user, or a found denominator)
    MEAN_OF_MEANS = "mean_of_means"  # not exactly separable: mean over microbatches, as the field does


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """`weight` is the value id of a scalar w; `divisor` that of g(w) when the loss divides by g(w), such
    as max(w, 1), else the same id. Parts combine as sum(g(w_i) * loss_i) / g(sum(w_i))."""

    kind: LossKind
    weight: int | None = None
    divisor: int | None = None


class CouplingKind(enum.Enum):
    """BATCH_STATISTICS (batch normalisation) is computed a microbatch at a time, as the field does."""

    BATCH_STATISTICS = "batch statistics"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupling:
    """An equation that lets examples see each other."""

    kind: CouplingKind
    equation: int
    primitive: str
    path: str  # module path (name stack), "" if none
    source: str  # user's file and line, "" if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMask:
    """Operand `operand` of `equation` is summed over its rows on the way to the loss: where padded rows
    must be replaced by zeros."""

    equation: int
    operand: int
    layout: RowLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInfo:
    """Everything about the batch that the rest of the house needs.

    Args:
        layouts: per value id, where the rows lie; None where the shape has none.
        dependence: per value id.
        loss: how parts combine; None for forward-only programs.
        couplings: empty if rows never see each other.
        row_masks: see `RowMask`; None if padded rows cannot be kept out of the loss.
        random: layout of the output of every equation that draws random numbers row by row
            (equation index -> layout): its bits must not depend on how rows are spread.
        unspreadable: indices of equations whose numbers would change if a program traced at fewer rows
            ran on every replica (permutations over the batch, draws inside loops, keys folded with a row
            number, values scaled by a number of rows that reach other rows). Such programs run on one
            replica or under plain jit sharding.
        reductions: value id -> "sum" or "mean" for values that are one of these over the rows.

    A FREE value may have a layout: `jnp.zeros((rows, 3))`, or random bits of that shape.
    """

    layouts: tuple[RowLayout | None, ...]
    dependence: tuple[Dependence, ...]
    loss: LossRule | None
    couplings: tuple[Coupling, ...]
    row_masks: tuple[RowMask, ...] | None
    random: dict[int, RowLayout]
    unspreadable: tuple[int, ...] = ()
    reductions: dict[int, str] = field(default_factory=dict)
