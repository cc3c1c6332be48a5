"""Conditionals on the platform (`jax.lax.platform_dependent`): which branch speaks for the program.

All branches compute the same. Those for one platform may be kernels that nothing is known about, and are
there only if the tracing process has that platform; the default one is made of ordinary operations and
is there everywhere, so reading it gives the same plan on every machine.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex


def readable_branches(eqn: jex.JaxprEqn) -> Sequence[Any]:
    """The branches of a `cond` to read: the default one of a choice by platform, else all."""
    branches, platforms = eqn.params["branches"], eqn.params.get("branches_platforms")
    if platforms is None or None not in platforms:
        return branches
    return (branches[list(platforms).index(None)],)
