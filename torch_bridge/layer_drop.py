"""Layer dropout that is switched off: a draw from [0, 1) is never below zero.

Encoders of speech and language skip a layer `if torch.rand([]) < rate`. With a positive rate that is a
branch on a random value, which no graph can hold; with rate 0 it is no branch at all, but torch.export
sees a tensor in an `if` and refuses the module.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_BELOW = (torch.Tensor.lt, torch.Tensor.__lt__, torch.lt)


class LayerDropOff(TorchFunctionMode):
    """Answers `torch.rand([]) < rate` with False where the rate is 0 or less."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: list[torch.Tensor] = []  # held, so that no other tensor takes their place in memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BELOW and len(args) == 2 and self._never_below(*args):
            return False
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.ndim == 0:
            self._draws.append(result)
        return result

    def _never_below(self, value: Any, bound: Any) -> bool:
        return isinstance(bound, int | float) and bound <= 0 and any(value is draw for draw in self._draws)
