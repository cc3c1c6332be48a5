"""What to say when nothing fits: the smallest peak there is, where it is, and the nearest ways out."""

from rannc_jax.errors import message
from rannc_jax.partition.constraints import AUTO
from rannc_jax.partition.remedies import Question, blocks_too_large, plans, remedies, smallest_plans
from rannc_jax.partition.space import Space
from rannc_jax.partition.stage import MEMORY_CLASSES, StagePrice
from rannc_jax.words import count, gib


def explain_infeasible(question: Question, space: Space) -> str:
    """The text of the PlanError.

    Args:
        question: what was to be planned.
        space: what was searched.
    """
    smallest = min(
        smallest_plans(question.model, space, question.simulate), key=lambda e: e.fullness, default=None
    )
    if smallest is None:
        return _contradiction(question)
    worst = max(range(len(smallest.prices)), key=lambda stage: smallest.prices[stage].fullness)
    price = smallest.prices[worst]
    limit = price.peak_bytes / price.fullness
    too_large = blocks_too_large(question.model, space)
    return message(
        f"no plan fits {gib(limit)} per device.",
        f"smallest peak found: {gib(price.peak_bytes)}, {gib(price.peak_bytes - limit)} too much "
        f"(stage {worst} of {len(smallest.prices)}: {_classes(price)})",
        *_blame(question, too_large),
        hint=", or ".join(remedies(question, smallest)) + ".",
    )


def _classes(price: StagePrice) -> str:
    """Bytes by class, but for those that hardly count."""
    pairs = zip(MEMORY_CLASSES, price.memory_bytes, strict=True)
    return ", ".join(f"{name} {gib(amount)}" for name, amount in pairs if amount > price.peak_bytes / 100)


def _blame(question: Question, too_large: list[tuple[int, StagePrice]]) -> list[str]:
    """What is said of the largest block that fits nowhere."""
    if not too_large:
        return []
    index, price = too_large[0]
    blocks = question.model.blocks
    path, pieces = blocks[index].path, blocks[index].pieces
    name = f"{path!r} (block {index} of {len(blocks)})" if path else f"block {index} of {len(blocks)}"
    whole = "cannot be cut" if pieces == 1 else f"is not cut further ({count(pieces, 'operation')})"
    more = f"; so it is with {len(too_large) - 1} more" if len(too_large) > 1 else ""
    return [f"{name} {whole} and alone needs {gib(price.peak_bytes)}: {_classes(price)}{more}"]


def _contradiction(question: Question) -> str:
    """Constraints of which each may hold alone, but no plan keeps to all: those that one could do without."""
    constraints, model = question.constraints, question.model
    names = [name for name in constraints.fixed if name not in ("memory_limit_bytes", "memory_margin")]
    guilty = [name for name in names if next(plans(question, {name: AUTO}), None) is not None]
    return message(
        f"no plan keeps to {constraints.said(*names)}.",
        f"{model.num_blocks} blocks, {model.num_devices} devices, {model.rows} rows",
        hint=" or ".join(f"{name}={AUTO!r}" for name in guilty) + ": then there are plans."
        if guilty
        else "fix less: 'auto' searches a value.",
    )
