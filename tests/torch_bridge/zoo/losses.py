"""Every loss of torch.nn, as part of the module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.torch_bridge.zoo.specimen import Specimen, add, integers, normal


class Loss(nn.Module):
    """A small network whose outputs meet several losses; their sum is trained, all are returned."""

    def __init__(self, *losses: nn.Module, squash: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.body, self.losses, self.squash = nn.Linear(6, 5), nn.ModuleList(losses), squash

    def forward(self, x: torch.Tensor, *targets: torch.Tensor) -> list[torch.Tensor]:
        predicted = self.squash(self.body(x))
        return [loss(predicted, *targets) for loss in self.losses]


def _add(
    name: str, make: Callable[[], nn.Module], *targets: Callable[[int], torch.Tensor], **options: Any
) -> None:
    def batch(rows: int) -> tuple[torch.Tensor, ...]:
        return (normal(rows, 6), *(target(rows) for target in targets))

    add(
        Specimen(
            name=name, group="losses", make=lambda _: make(), batch=batch, drops=False, listed=True, **options
        )
    )


def likes(rows: int) -> torch.Tensor:
    return normal(rows, 5, seed=2)


def shares(rows: int) -> torch.Tensor:
    return normal(rows, 5, seed=2).softmax(-1)


def labels(rows: int) -> torch.Tensor:
    return integers(5, rows)


def some_ignored(rows: int) -> torch.Tensor:
    return torch.where(torch.arange(rows) % 3 == 1, -100, labels(rows))


def many_labels(rows: int) -> torch.Tensor:
    return integers(2, rows, 5).float()


def signs(rows: int) -> torch.Tensor:
    return integers(2, rows, 5).float() * 2 - 1


def row_signs(rows: int) -> torch.Tensor:
    return integers(2, rows).float() * 2 - 1


def _all(cls: Any, **more: Any) -> list[nn.Module]:
    return [cls(reduction=r, **more) for r in ("mean", "sum", "none")]


WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0])
_add(
    "regression losses",
    lambda: Loss(
        *_all(nn.MSELoss), *_all(nn.L1Loss), *_all(nn.SmoothL1Loss, beta=0.5), *_all(nn.HuberLoss, delta=0.3)
    ),
    likes,
)
_add(
    "cross entropy",
    lambda: Loss(
        *_all(nn.CrossEntropyLoss),
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
        nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum"),
    ),
    some_ignored,
)
_add(
    "cross entropy of shares",
    lambda: Loss(*_all(nn.CrossEntropyLoss), nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1)),
    shares,
)
_add(
    "nll loss",
    lambda: Loss(
        *_all(nn.NLLLoss), nn.NLLLoss(weight=WEIGHTS, ignore_index=2), squash=lambda x: x.log_softmax(-1)
    ),
    labels,
)
_add(
    "binary losses",
    lambda: Loss(
        *_all(nn.BCEWithLogitsLoss),
        nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS),
        *_all(nn.MultiLabelSoftMarginLoss),
        nn.MultiLabelSoftMarginLoss(weight=WEIGHTS),
    ),
    many_labels,
)
_add(
    "bce loss", lambda: Loss(*_all(nn.BCELoss), nn.BCELoss(weight=WEIGHTS), squash=torch.sigmoid), many_labels
)
_add(
    "kl divergence",
    lambda: Loss(
        nn.KLDivLoss(reduction="batchmean"), *_all(nn.KLDivLoss), squash=lambda x: x.log_softmax(-1)
    ),
    shares,
)
_add(
    "kl divergence of logs",
    lambda: Loss(nn.KLDivLoss(reduction="batchmean", log_target=True), squash=lambda x: x.log_softmax(-1)),
    lambda rows: shares(rows).log(),
)
_add(
    "poisson losses",
    lambda: Loss(
        *_all(nn.PoissonNLLLoss),
        nn.PoissonNLLLoss(log_input=False, full=True),
        squash=lambda x: x.abs() + 0.1,
    ),
    lambda rows: integers(5, rows, 5).float(),
)
_add(
    "gaussian loss",
    lambda: Loss(nn.GaussianNLLLoss(), nn.GaussianNLLLoss(full=True, reduction="sum")),
    likes,
    lambda rows: normal(rows, 5, seed=4).abs(),
)
_add(
    "hinge losses",
    lambda: Loss(*_all(nn.HingeEmbeddingLoss, margin=0.5), *_all(nn.SoftMarginLoss)),
    signs,
    input_gradients=False,
)
_add(
    "multi margin losses",
    lambda: Loss(*_all(nn.MultiMarginLoss), nn.MultiMarginLoss(p=2, margin=0.5, weight=WEIGHTS)),
    labels,
)
_add(
    "multi label margin loss",
    lambda: Loss(*_all(nn.MultiLabelMarginLoss)),
    lambda rows: torch.tensor([[1, 3, -1, 0, 2]]).expand(rows, 5).contiguous(),
)
_add("ranking losses", lambda: Loss(*_all(nn.MarginRankingLoss, margin=0.2)), likes, signs)
_add("cosine loss", lambda: Loss(*_all(nn.CosineEmbeddingLoss, margin=0.1)), likes, row_signs)
_add(
    "triplet losses",
    lambda: Loss(
        *_all(nn.TripletMarginLoss),
        nn.TripletMarginLoss(swap=True, p=1),
        nn.TripletMarginWithDistanceLoss(distance_function=nn.PairwiseDistance()),
    ),
    likes,
    lambda rows: normal(rows, 5, seed=3),
)


class Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.loss, self.per_row = (
            nn.Linear(6, 5),
            nn.CTCLoss(),
            nn.CTCLoss(reduction="none", zero_infinity=True),
        )

    def forward(self, x: Any, targets: Any, lengths: Any, target_lengths: Any) -> Any:
        logs = self.body(x).log_softmax(-1).transpose(0, 1)
        return self.loss(logs, targets, lengths, target_lengths), self.per_row(
            logs, targets, lengths, target_lengths
        )


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8], div_value=2.0)

    def forward(self, x: Any, target: Any) -> Any:
        return self.loss.log_prob(x) if target is None else self.loss(x, target)


def _ctc_batch(rows: int) -> tuple[torch.Tensor, ...]:
    return (
        normal(rows, 9, 6),
        integers(5, rows, 3, least=1),
        torch.full((rows,), 9),
        1 + torch.arange(rows) % 3,
    )


add(Specimen(name="ctc", group="losses", make=lambda _: Ctc(), batch=_ctc_batch, drops=False, listed=True))
add(
    Specimen(
        name="adaptive log softmax",
        group="losses",
        make=lambda _: Adaptive(),
        batch=lambda rows: {"x": normal(rows, 6), "target": integers(12, rows)},
        drops=False,
    )
)
add(
    Specimen(
        name="adaptive log probabilities",
        group="losses",
        make=lambda _: Adaptive(),
        batch=lambda rows: {"x": normal(rows, 6), "target": None},
        drops=False,
    )
)
