"""Seconds of compiled calls on a device: warmed up, waited for, and the median of many.

Calls are dispatched in batches that are waited for once, so what is measured is the pace of the device,
not the host's way there and back.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from rannc_jax.errors import CostError, message

BATCH_S = 0.02
"""A batch of calls lasts about this long: a thousand times the resolution of the clock and of the host."""


class Clock:
    """Times calls until its time is up.

    Args:
        seconds: after that many from now, `is_over` holds.
    """

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def seconds(self, call: Callable[[], Any], *, most_s: float = 1.0, batches: int = 7) -> float:
        """The median seconds of `call` over batches, within `most_s` and what is left.

        Args:
            call: dispatches work and returns arrays.
            most_s: time to spend, after the first call, which may compile.
            batches: how many.
        """
        jax.block_until_ready(call())
        start_s = time.monotonic()
        end_s = start_s + min(most_s, self.left_s)
        jax.block_until_ready(call())
        once_s = max(time.monotonic() - start_s, 1e-7)
        number = max(1, min(1000, round(BATCH_S / once_s)))
        found = [self._batch(call, number)]
        while len(found) < batches and time.monotonic() < end_s:
            found.append(self._batch(call, number))
        return statistics.median(found)

    @staticmethod
    def _batch(call: Callable[[], Any], number: int) -> float:
        start_s = time.perf_counter()
        for _ in range(number):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - start_s) / number


def attempt(call: Callable[[], Any], what: str) -> Any:
    """The result of `call`; a device that cannot do it ends in one kind of error.

    Raises:
        CostError: the compiler or the device refused, or memory was short.
    """
    try:
        return call()
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise CostError(message(f"{what} cannot be measured here.", *reason)) from error
