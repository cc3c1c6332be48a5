"""From the flow of a loss to the rule by which losses of parts combine into the loss of the whole."""

from dataclasses import dataclass

from rannc_jax.ir.batch_flow import Divisor, Flow, Kind
from rannc_jax.ir.batch_info import LossKind, LossRule


@dataclass(frozen=True, slots=True)
class LossFinding:
    """`coupled`: the loss is not a sum over rows in any known way, and must be computed whole."""

    rule: LossRule
    coupled: bool = False


MEAN = LossFinding(LossRule(kind=LossKind.MEAN))
WHOLE = LossFinding(LossRule(kind=LossKind.MEAN), coupled=True)
MEAN_OF_MEANS = LossFinding(LossRule(kind=LossKind.MEAN_OF_MEANS))


def loss_rule(loss: Flow) -> LossFinding:
    """The rule for a loss without a weight of the user's.

    A loss is sum(rows) * rows^power / divisor. Only three scales have an exact rule: power -1 (MEAN),
    power 0 (SUM), and power 0 with a divisor that is a function of one sum w without parameters
    (WEIGHTED). A loss that does not depend on rows is its own mean.
    """
    if loss.kind is Kind.FREE and not loss.varies:
        return {0: MEAN, 1: LossFinding(LossRule(kind=LossKind.SUM))}.get(loss.power, WHOLE)
    if loss.kind is not Kind.SUM or loss.varies:
        return WHOLE
    if loss.several:
        return MEAN_OF_MEANS
    if loss.divisor is not None:
        return _ratio(loss, loss.divisor)
    return {-1: MEAN, 0: LossFinding(LossRule(kind=LossKind.SUM))}.get(loss.power, WHOLE)


def _ratio(loss: Flow, divisor: Divisor) -> LossFinding:
    if loss.power != 0:
        return WHOLE
    if not divisor.linear and not divisor.named:
        return WHOLE
    if not divisor.named or divisor.param:
        return MEAN_OF_MEANS if divisor.linear else WHOLE
    if loss.affine and not divisor.additive:
        return MEAN_OF_MEANS
    return LossFinding(LossRule(kind=LossKind.WEIGHTED, weight=divisor.weight, divisor=divisor.value))


def weighted_rule(loss: Flow, weight: Flow, weight_id: int | None) -> LossFinding:
    """The rule for a loss that comes with the user's weight: the loss is a mean over `weight` things."""
    coupled = loss.degree != 0 or loss.varies or loss.kind not in (Kind.SUM, Kind.FREE)
    if weight_id is None or (weight.kind is Kind.FREE and weight.plain):
        return LossFinding(MEAN.rule, coupled or weight.kind is not Kind.FREE)
    rule = LossRule(kind=LossKind.WEIGHTED, weight=weight_id, divisor=weight_id)
    return LossFinding(rule, coupled or not _adds_up(weight))


def _adds_up(weight: Flow) -> bool:
    """Do weights of parts add up to the weight of the whole?"""
    if weight.varies or weight.several or weight.affine:
        return False
    if weight.kind is Kind.SUM:
        return weight.power == 0 and weight.divisor is None
    return weight.kind is Kind.FREE and weight.power == 1
