"""torch functions that torch.export cannot follow, in words that it can.

Some look at values only to check them, some have shapes that follow from sizes alone but are computed
from values, and some have no shape rule. While a module is exported, calls of these go to the functions
here, which compute the same. Where no torch operator says it, one of ours stands in the graph.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from torch_bridge.errors import BridgeError, message


def combinations(x: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """Which elements meet follows from the length alone."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    chosen = list(choose(range(x.shape[0]), r))
    index = torch.tensor(chosen, dtype=torch.int64, device=x.device).reshape(len(chosen), r)
    return x[index] if r else x[:0]


def cov(
    x: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Variables in rows; weights are not checked for negative ones."""
    x = x.reshape(1, -1) if x.ndim < 2 else x
    parts = [w for w in (fweights, aweights) if w is not None]
    if not parts:
        count: Any = x.shape[1]
        centred = x - x.mean(1, keepdim=True) if x.is_floating_point() or x.is_complex() else None
        centred = x - x.double().mean(1, keepdim=True) if centred is None else centred
        weighted, free = centred, count - correction
    else:
        weight = math.prod(parts[1:], start=parts[0])
        total = weight.sum()
        centred = x - (x * weight).sum(1, keepdim=True) / total
        weighted = centred * weight
        share = 1 if aweights is None or correction == 0 else (weight * aweights).sum() / total
        free = total - correction * share
    divisor = torch.as_tensor(free, dtype=centred.real.dtype, device=x.device).clamp_min(0)
    return (weighted @ centred.mH / divisor).squeeze()


def corrcoef(x: torch.Tensor) -> torch.Tensor:
    """Covariances over the deviations, clipped to the unit square."""
    covariance = cov(x)
    if covariance.ndim == 0:
        return covariance / covariance
    deviation = covariance.diagonal().real.sqrt()
    ratio = covariance / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    if not ratio.is_complex():
        return ratio.clip(-1, 1)
    return torch.complex(ratio.real.clip(-1, 1), ratio.imag.clip(-1, 1))


def gaussian_nll_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Variances are not checked for negative ones (they are clipped to eps)."""
    if not isinstance(var, torch.Tensor):
        var = torch.full_like(x, var)
    if var.shape != x.shape and x.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    # torch clips the values behind the gradient's back.
    var = var + (var.clamp_min(eps) - var).detach()
    loss = 0.5 * (var.log() + (x - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(loss, reduction)


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return loss if reduction == "none" else getattr(loss, reduction)()


@functools.cache
def ctc_losses() -> Any:
    """An operator for one loss a sequence; log_probs `[time, batch, classes]`."""

    @torch.library.custom_op("torch_bridge::ctc_loss", mutates_args=())
    def losses(
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: torch.Tensor,
        target_lengths: torch.Tensor,
        blank: int,
        zero_infinity: bool,
    ) -> torch.Tensor:
        return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)

    losses.register_fake(lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1]))
    return losses


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Lengths as tensors; the operator beneath it has no shape rule in torch."""
    alone = log_probs.ndim == 2
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    lengths = [
        torch.as_tensor(given, dtype=torch.int64, device=targets.device).reshape(-1)
        for given in (input_lengths, target_lengths)
    ]
    loss = ctc_losses()(log_probs, targets, *lengths, blank, zero_infinity)
    named = {0: "none", 1: "mean", 2: "sum"}.get(reduction, reduction)  # type: ignore[call-overload]
    if named == "mean":
        loss = loss / lengths[1].clamp_min(1).to(loss.dtype)
    loss = loss.squeeze(0) if alone and named == "none" else loss
    return _reduced(loss, named)


@functools.cache
def counts() -> Any:
    """An operator: how often each of 0 to length - 1 is there; all are -1 (or NaN) if one is not below."""

    @torch.library.custom_op("torch_bridge::counts", mutates_args=())
    def counted(x: torch.Tensor, weights: torch.Tensor | None, length: int) -> torch.Tensor:
        found = torch.bincount(x, weights, length)
        return found if found.shape[0] == length else torch.full_like(found[:length], -1)

    @counted.register_fake
    def _(x: torch.Tensor, weights: torch.Tensor | None, length: int) -> torch.Tensor:
        narrow = weights is not None and weights.dtype == torch.float32
        dtype = torch.int64 if weights is None else torch.float32 if narrow else torch.float64
        return x.new_empty(length, dtype=dtype)

    return counted._opoverload


def bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """With a length that is said, just that long: torch makes it longer where a value is not below it."""
    if not minlength:
        return torch.bincount(x, weights)
    return counts()(x, weights, minlength)


@functools.cache
def least_squares() -> Any:
    """An operator: (solution of least norm, rank); singular values up to rcond of the largest count as 0."""

    @torch.library.custom_op("torch_bridge::least_squares", mutates_args=())
    def solved(a: torch.Tensor, b: torch.Tensor, rcond: float) -> tuple[torch.Tensor, torch.Tensor]:
        inverse = torch.linalg.pinv(a, rtol=rcond)
        return inverse @ b, torch.linalg.matrix_rank(a, rtol=rcond)

    @solved.register_fake
    def _(a: torch.Tensor, b: torch.Tensor, rcond: float) -> tuple[torch.Tensor, torch.Tensor]:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        solution = b.new_empty(*batch, a.shape[-1], b.shape[-1])
        return solution, a.new_empty(a.shape[:-2], dtype=torch.int64)

    return solved


def lstsq(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> torch.return_types.linalg_lstsq:
    """The drivers whose results have shapes that follow from sizes.

    Raises:
        BridgeError: for the drivers gelsd and gelss, whose residuals are there or not as the rank is.
    """
    driver = driver or "gelsy"
    if driver not in ("gels", "gelsy"):
        raise BridgeError(
            message(
                f"the shapes of what torch.linalg.lstsq(driver={driver!r}) returns depend on values.",
                hint="driver='gelsy' (torch's choice on CPU), or 'gels' for matrices of full rank",
            )
        )
    rows, columns = a.shape[-2:]
    # torch's rule for a vector on the right.
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    right = b.unsqueeze(-1) if vector else b
    unset = torch.finfo(a.dtype).eps * max(rows, columns)
    full_rank = driver == "gels"
    solution, rank = least_squares()(a, right, 0.0 if full_rank else unset if rcond is None else rcond)
    residuals = b.new_empty(0).real
    if full_rank and rows > columns:
        error = a @ solution - right
        residuals = (error * error.conj()).real.sum(-2)
    if full_rank:
        rank = rank.new_empty(0)
    parts = (solution.squeeze(-1) if vector else solution, residuals, rank, a.new_empty(0).real)
    return torch.return_types.linalg_lstsq(parts)


_REWRITTEN: dict[Any, Callable[..., Any]] = {
    torch.combinations: combinations,
    torch.cov: cov,
    torch.Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    torch.Tensor.corrcoef: corrcoef,
    functional.gaussian_nll_loss: gaussian_nll_loss,
    functional.ctc_loss: ctc_loss,
    torch.ctc_loss: ctc_loss,
    torch.linalg.lstsq: lstsq,
    torch.bincount: bincount,
    torch.Tensor.bincount: bincount,
}


def rewritten(function: Any) -> Callable[..., Any] | None:
    """What to call in place of a torch function while a module is exported."""
    return _REWRITTEN.get(function)
