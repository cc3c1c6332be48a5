"""Cuts that a person names: block indices or modules, in the blocks' own order."""

from collections.abc import Sequence

from rannc_jax.errors import PlanError, message
from rannc_jax.ir.paths import holds
from rannc_jax.partition.rules import unknown_module


def resolve_cuts(cuts: Sequence[str | int], paths: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """The block at which each stage but the first begins, ascending.

    Args:
        cuts: an index begins a stage at that block; a name at the first block that holds a part of a module
            that is called so.
        paths: module paths in each block.

    Raises:
        PlanError: a cut names no block, begins at block 0, or two cuts are the same.

    Example:
        >>> resolve_cuts(["layer_1", 3], [["net/embed"], ["net/layer_0"], ["net/layer_1/mlp"], ["head"]])
        (2, 3)
    """
    resolved = [_resolve(cut, paths) for cut in cuts]
    pairs = list(zip(cuts, resolved, strict=True))
    first = [cut for cut, at in pairs if at == 0]
    if first:
        raise PlanError(
            message(
                f"cuts names {first[0]!r}, with which the program begins: no stage would lie before it.",
                f"the first block is {_name(paths[0])}; a stage may begin at block 1 to {len(paths) - 1}",
                hint="leave that cut out: the first stage is there anyway.",
            )
        )
    outside = [cut for cut, at in pairs if at >= len(paths)]
    if outside:
        raise PlanError(
            message(
                f"cuts={tuple(outside)} leave a stage without blocks.",
                f"a stage may begin at block 1 to {len(paths) - 1}",
                hint="a module name: block numbers change with the program.",
            )
        )
    for index, (cut, at) in enumerate(pairs):
        same = [other for other, place in pairs[:index] if place == at]
        if same:
            raise PlanError(
                message(
                    f"two cuts fall on one block: {same[0]!r} and {cut!r}.",
                    f"both begin at block {at}, {_name(paths[at])}",
                    hint="leave one of them out.",
                )
            )
    return tuple(sorted(resolved))


def _name(paths: Sequence[str]) -> str:
    return repr(next((path for path in paths if path), "")) if any(paths) else "unnamed"


def _resolve(cut: str | int, paths: Sequence[Sequence[str]]) -> int:
    if isinstance(cut, int):
        return cut
    for index, inside in enumerate(paths):
        if any(holds(cut, path) for path in inside):
            return index
    raise PlanError(unknown_module("cuts", cut, (path for inside in paths for path in inside)))
