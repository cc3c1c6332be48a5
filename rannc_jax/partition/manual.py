"""Cuts that a person names: block indices or module paths, in the blocks' own order."""

from collections.abc import Sequence

from rannc_jax.errors import PlanError, message


def resolve_cuts(cuts: Sequence[str | int], paths: Sequence[str]) -> tuple[int, ...]:
    """The block at which each stage but the first begins, ascending.

    Args:
        cuts: an index begins a stage at that block; a path at the first block of that module (the
            block's path is it or lies below it).
        paths: module paths of the blocks.

    Raises:
        PlanError: a cut names no block, begins at block 0, or two cuts are the same.

    Example:
        >>> resolve_cuts(["net/layer_1", 3], ["net/embed", "net/layer_0", "net/layer_1/mlp", "head"])
        (2, 3)
    """
    resolved = [_resolve(cut, paths) for cut in cuts]
    outside = [cut for cut, at in zip(cuts, resolved, strict=True) if not 0 < at < len(paths)]
    if outside:
        raise PlanError(
            message(
                f"cuts={tuple(outside)} leave a stage without blocks.",
                f"a stage may begin at block 1 to {len(paths) - 1}",
                hint="leave out a cut at the very beginning: the first stage is there anyway.",
            )
        )
    if len(set(resolved)) < len(resolved):
        raise PlanError(message("two cuts fall on one block.", f"cuts={tuple(cuts)} begin at {resolved}"))
    return tuple(sorted(resolved))


def _resolve(cut: str | int, paths: Sequence[str]) -> int:
    if isinstance(cut, int):
        return cut
    for index, path in enumerate(paths):
        if path == cut or path.startswith(f"{cut}/"):
            return index
    known = sorted({path for path in paths if path})
    shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    raise PlanError(message(f"no block begins in module {cut!r}.", f"modules where blocks begin: {shown}"))
