"""Operators that torch orders by tokens of their side effects.

Checks of values compute nothing that leaves the program, so their tokens are never asked for. Anything
else with a side effect (printing, say) has no counterpart in a pure function.
"""

from typing import Any

import torch

from torch_bridge.errors import UnsupportedOpError, message
from torch_bridge.lowerings.registry import lowering
from torch_bridge.signature import IGNORED


@lowering(torch.ops.higher_order.with_effects)
def with_effects(token: Any, operator: Any, *_: Any, **__: Any) -> tuple[Any]:
    if operator not in IGNORED:
        raise UnsupportedOpError(message(f"{operator} has a side effect, which a pure function cannot have."))
    return (token,)
