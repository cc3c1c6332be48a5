"""Which plans are compared for which networks: the full cross, and a part that covers every pair.

A case fixes everything of a plan but where it is cut. `ALL_CASES` is the cross of all factors as far as
it fits on 8 devices; `chosen()` is a small deterministic part of it in which every feasible pair of
factor values occurs (greedy all-pairs covering).
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np

from rannc_jax import Remat
from tests.parity.models import MODELS

NUM_DEVICES = 8
# Replicas a stage; their number is the number of stages.
LAYOUTS = ((1,), (2,), (1, 1), (2, 2), (3, 1), (1, 2), (1, 1, 1, 1), (2, 2, 2, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network and a plan for it, apart from the cut.

    Args:
        model: name of the network.
        dropout: whether it draws random numbers.
        replicas: of each stage.
        num_microbatches: parts of the batch.
        schedule: "gpipe" or "1f1b".
        remat: of every stage.
        optimizer: "sgd" or "adam" (AdamW after clipping by the global norm).
        offload: whether the optimizer state of every stage lies on the host.
    """

    model: str
    dropout: bool
    replicas: tuple[int, ...]
    num_microbatches: int
    schedule: str
    remat: Remat
    optimizer: str
    offload: bool = False

    def __post_init__(self) -> None:
        assert sum(self.replicas) <= NUM_DEVICES

    @property
    def num_stages(self) -> int:
        return len(self.replicas)

    def __str__(self) -> str:
        dropout = "dropout" if self.dropout else "plain"
        copies = "+".join(map(str, self.replicas))
        parts = f"{copies}-{self.num_microbatches}mb-{self.schedule}-{self.remat.value}"
        return f"{self.model}-{dropout}-{parts}-{self.optimizer}" + "-offload" * self.offload


FACTORS = {
    "model": tuple(MODELS),
    "dropout": (False, True),
    "replicas": LAYOUTS,
    "num_microbatches": (1, 4),
    "schedule": ("gpipe", "1f1b"),
    "remat": tuple(Remat),
    "optimizer": ("sgd", "adam"),
}
RESIDENT_CASES = tuple(
    Case(**dict(zip(FACTORS, values, strict=True))) for values in itertools.product(*FACTORS.values())
)
# An update does not know how its gradients came about: offloading is crossed with one schedule, and with the
# optimizer that has more state.
ALL_CASES = (
    *RESIDENT_CASES,
    *(
        replace(case, offload=True)
        for case in RESIDENT_CASES
        if (case.optimizer, case.schedule) == ("adam", "1f1b")
    ),
)


def chosen() -> list[Case]:
    """Cases of the cross, state on the devices, that cover every pair of factor values.

    Each is the one that adds most pairs; among equals the one that adds most triples, so that the last
    cases, which are there for one pair each, differ in everything else.
    """
    pairs, triples = _combinations(2), _combinations(3)
    open_pairs, open_triples = np.ones(pairs.max() + 1, bool), np.ones(triples.max() + 1, bool)
    found = []
    while True:
        gain = open_pairs[pairs].sum(axis=1)
        best = int((gain * (triples.shape[1] + 1) + open_triples[triples].sum(axis=1)).argmax())
        if not gain.any():
            return found
        found.append(RESIDENT_CASES[best])
        open_pairs[pairs[best]] = False
        open_triples[triples[best]] = False


def offloaded() -> list[Case]:
    """A few of the chosen ones with offload, of different networks and cuts."""
    of_model = {
        case.model: replace(case, offload=True)
        for case in chosen()
        if case.optimizer == "adam" and case.model in ("batch_norm", "transformer", "unet")
    }
    return list(of_model.values())


def _combinations(size: int) -> np.ndarray:
    """[cases, ways to choose so many factors]: a number for the values that a case has of them."""
    levels = np.array(
        [[values.index(getattr(case, name)) for name, values in FACTORS.items()] for case in RESIDENT_CASES]
    )
    counts = levels.max(axis=0) + 1
    columns, offset = [], 0
    for factors in itertools.combinations(range(len(counts)), size):
        columns.append(offset + np.ravel_multi_index(levels[:, factors].T, counts[list(factors)]))
        offset += int(np.prod(counts[list(factors)]))
    return np.stack(columns, axis=1)
