"""Saying how far a long piece of work has come. `NoProgress` is the null object and the default."""

import sys
import time
from typing import Protocol


class Progress(Protocol):
    """Receives short lines about what is being done."""

    def note(self, text: str) -> None:
        """Say `text` (one line)."""
        ...


class NoProgress:
    """Says nothing."""

    def note(self, text: str) -> None:
        del text


class StderrProgress:
    """Plain lines on standard error, with the seconds since it was made."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def note(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start_s:6.1f} s] {text}", file=sys.stderr, flush=True)
