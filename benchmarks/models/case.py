"""A training problem as shapes: everything that planning needs, and not one weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from rannc_jax.ir.example import Example, Subject, make_example, subject

Shapes = Any
"""A tree of `jax.ShapeDtypeStruct`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network, its loss, and the shapes it is trained at.

    Args:
        name: in tables.
        loss: `loss(params, batch)`, with `model_state` where the network has batch statistics.
        params: shapes of the parameters.
        batch: from a number of rows to shapes of the batch.
        rows_per_device: rows of the global batch for every device of the cluster.
        model_state: shapes of what the network carries besides parameters.
    """

    name: str
    loss: Callable[..., Any]
    params: Shapes
    batch: Callable[[int], Mapping[str, Shapes]]
    rows_per_device: int
    model_state: Shapes = None

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def subject(self) -> Subject:
        """The loss and which keywords it takes."""
        return subject(self.loss)

    def example(self, rows: int) -> Example:
        """Shapes of all arguments with a number of rows."""
        return make_example(self.subject(), self.params, self.batch(rows), model_state=self.model_state)
