"""What the parameters of a `scan` say, whichever way this JAX writes them."""

from collections.abc import Mapping
from typing import Any


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of constants and carries among the operands of a scan; what it goes over follows them."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)
