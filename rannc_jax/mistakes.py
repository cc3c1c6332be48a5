"""Collecting everything that is wrong with a file before saying so once.

Readers of files (mesh files, saved plans) note mistakes by key path and go on reading; at the end one
error lists them all. `shown` and `nearest` are the words they use for values and for near misses.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rannc_jax.errors import RanncError, message


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """All that is wrong with one source ("mesh.toml", or "the mesh mapping")."""

    source: str
    lines: list[str] = field(default_factory=list)

    def add(self, path: str, text: str) -> None:
        """Note that the value at key path `path` ("" for the whole source) is wrong."""
        self.lines.append(f"{path}: {text}" if path else text)

    def raise_if_any(self, error: type[RanncError], *, hint: str | None = None) -> None:
        """Raise one `error` that lists every mistake noted so far."""
        if self.lines:
            count = "1 mistake" if len(self.lines) == 1 else f"{len(self.lines)} mistakes"
            raise error(message(f"{self.source} has {count}.", *self.lines, hint=hint))


def nearest(word: Any, options: Iterable[str]) -> str:
    """'; did you mean "h200"?' when an option is close to `word`, else ''."""
    close = difflib.get_close_matches(str(word).lower(), list(options), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""


def one_of(options: Iterable[str]) -> str:
    """Words for a closed choice."""
    return "one of " + ", ".join(f'"{option}"' for option in options)


def shown(value: Any) -> str:
    """A value as its file has it, short and on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(_short(value))
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    return "null" if value is None else _short(str(value))


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
