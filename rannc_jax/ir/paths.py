"""Module paths: name scopes joined by "/", as `jax.named_scope` leaves them on every equation."""

from collections.abc import Iterable, Sequence


def shared_depth(one: Sequence[str], other: Sequence[str]) -> int:
    """How many leading components two split paths share."""
    for depth, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return depth
    return min(len(one), len(other))


def common_path(paths: Iterable[str]) -> str:
    """The deepest module path that holds all of the given ones; empty paths do not count.

    Example:
        >>> common_path(["layer/3/attn", "", "layer/3/mlp"])
        'layer/3'
    """
    common: list[str] | None = None
    for path in paths:
        if path:
            parts = path.split("/")
            common = parts if common is None else common[: shared_depth(common, parts)]
    return "/".join(common or ())


def spanned_path(paths: Iterable[str]) -> str:
    """The common module path, and which of its numbered layers these are.

    Args:
        paths: in the order in which the modules run.

    Example:
        >>> spanned_path(["layers/3/attn", "layers/4", "", "layers/5/mlp"])
        'layers/3-5'
    """
    known = [path for path in paths if path]
    common = common_path(known)
    depth = len(common.split("/")) if common else 0
    below = [path.split("/")[depth : depth + 1] for path in known]
    numbers = [int(part[0]) for part in below if part and part[0].isdigit()]
    if len(set(numbers)) < 2 or len(numbers) < len(below):
        return common
    return "/".join(filter(None, (common, f"{numbers[0]}-{numbers[-1]}")))
