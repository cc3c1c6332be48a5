"""What the layers of an opened scan are called: "layers/3", wherever the name can be read from."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax
from jax.extend import core as jex

NAMELESS = "layers"
_KEY = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")  # as jax.tree_util.keystr writes them
_COLLECTIONS = frozenset({"params", "batch_stats", ""})


def layer_name(eqn: jex.JaxprEqn, paths: Sequence[str]) -> str:
    """The name of the module whose layers a scan runs.

    It is the deepest key that all sliced parameters share ("params['decoder']['layers']['kernel']" and its
    neighbours: "layers"); else the module around the loop; else "layers".

    Args:
        eqn: the scan.
        paths: pytree paths of the leaves it slices.
    """
    shared = shared_key(paths)
    around = str(eqn.source_info.name_stack).split("/")
    return shared or around[-1] or NAMELESS


def shared_key(paths: Sequence[str]) -> str:
    """The deepest key above all of some leaves, "" if there is none.

    Example:
        >>> shared_key(["params['layers']['up']['w']", "params['layers']['norm']"])
        'layers'
    """
    parents = [keys[:-1] or keys for keys in map(_keys, paths)]
    shared: list[str] = []
    for keys in zip(*parents, strict=False):
        if len(set(keys)) > 1 or not all(keys):
            break
        shared.append(keys[0])
    return next((key for key in reversed(shared) if key not in _COLLECTIONS and not key.isdigit()), "")


def _keys(path: str) -> list[str]:
    return [next(filter(None, found), "") for found in _KEY.findall(path)]


def layer_scope(eqn: jex.JaxprEqn, name: str, turn: int) -> str:
    """The name scope of one layer inside the module path of its scan, which may end with the name already
    (or with a layer of that name, where scans are nested)."""
    around = [part for part in str(eqn.source_info.name_stack).split("/") if not part.isdigit()]
    return str(turn) if around and around[-1] == name else f"{name}/{turn}"


def without_name(body: jex.ClosedJaxpr, name: str) -> jex.ClosedJaxpr:
    """The body of a scan without the module name that its layers now have with their number."""
    eqns = []
    for eqn in body.jaxpr.eqns:
        info = eqn.source_info
        if str(info.name_stack[:1]) == name:
            eqn = eqn.replace(source_info=info.replace(name_stack=info.name_stack[1:]))
        eqns.append(eqn)
    return jex.ClosedJaxpr(body.jaxpr.replace(eqns=eqns), body.consts)


def named(eqn: jex.JaxprEqn, name: str, turn: int) -> AbstractContextManager[object]:
    """A context in which equations lie in one layer."""
    return jax.named_scope(layer_scope(eqn, name, turn))
