"""Module paths: name scopes joined by "/", as `jax.named_scope` leaves them on every equation."""

from collections.abc import Iterable, Sequence


def shared_depth(one: Sequence[str], other: Sequence[str]) -> int:
    """How many leading components two split paths share."""
    for depth, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return depth
    return min(len(one), len(other))


def holds(name: str, path: str) -> bool:
    """Whether a module path lies in a module that is called so.

    A name is one component of the path or several in a row; "." parts components as well as "/" does, as
    PyTorch writes them.

    Example:
        >>> holds("layer.3", "encoder/layer/3/attention"), holds("layer", "encoder/layers/3")
        (True, False)
    """
    return f"/{_slashed(name)}/" in f"/{_slashed(path)}/"


def outer_paths(paths: Iterable[str]) -> list[str]:
    """The paths and every module around them, sorted.

    Example:
        >>> outer_paths(["a/b", "", "a/c"])
        ['a', 'a/b', 'a/c']
    """
    parts = (path.split("/") for path in set(paths) if path)
    return sorted({"/".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)})


def _slashed(path: str) -> str:
    return path.replace(".", "/").strip("/")


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
