"""Reading one table key by key, collecting mistakes instead of raising at the first.

A `Section` hands out checked values; asking for a key makes it known, so `finish` can call every other
key unknown and name the nearest known one. A value that is wrong is noted and stands in as None; the
caller goes on reading and raises once, at the end.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rannc_jax.mistakes import Mistakes, nearest, one_of, shown

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")  # what TOML writes without quotes


class Section:
    """One table of a file.

    Args:
        table: what the file holds; anything but a mapping is a mistake and reads as empty.
        path: key path of the table, "" for the file itself.
        mistakes: where mistakes go.
    """

    def __init__(self, table: Any, path: str, mistakes: Mistakes) -> None:
        self._is_table = isinstance(table, Mapping)
        if not self._is_table:
            mistakes.add(path, f"got {shown(table)}, expected a table")
        self._table: Mapping[str, Any] = table if self._is_table else {}
        self._path = path
        self._mistakes = mistakes
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def path(self, key: str) -> str:
        """The full path of a key of this table."""
        word = key if _BARE_KEY.fullmatch(key) else shown(key)
        return f"{self._path}.{word}" if self._path else word

    def wrong(self, key: str, text: str) -> None:
        """Note a mistake at `key`."""
        self._mistakes.add(self.path(key), text)

    def take(self, key: str, *, required: bool = False, expected: str = "a value") -> Any:
        """The raw value of `key`, None if it is not there (a mistake when required)."""
        self._known.append(key)
        if key not in self._table and required and self._is_table:
            self.wrong(key, f"missing, expected {expected}")
        return self._table.get(key)

    def text(self, key: str, *, required: bool = False, choices: Iterable[str] | None = None) -> str | None:
        """A string, one of `choices` if given."""
        options = None if choices is None else list(choices)
        expected = "a string" if options is None else one_of(options)
        value = self.take(key, required=required, expected=expected)
        if value is None:
            return None
        if not isinstance(value, str) or (options is not None and value not in options):
            self.wrong(key, f"got {shown(value)}, expected {expected}{nearest(value, options or ())}")
            return None
        return value

    def number(
        self, key: str, *, required: bool = False, below: float = math.inf, zero: bool = False
    ) -> float | None:
        """A finite number above 0 (or from 0, if `zero`) and below `below`."""
        expected = "a number of 0 or more" if zero else "a number above 0"
        expected += f" and below {below:g}" if below < math.inf else ""
        value = self.take(key, required=required, expected=expected)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not (0 <= value < below) or (value == 0 and not zero):
            self.wrong(key, f"got {shown(value)}, expected {expected}")
            return None
        return float(value)

    def count(
        self, key: str, *, required: bool = False, default: int | None = None, words: Sequence[str] = ()
    ) -> int | str | None:
        """An integer of 1 or more, or one of `words`; `default` where the key is not there."""
        expected = "an integer of 1 or more" + "".join(f' or "{word}"' for word in words)
        value = self.take(key, required=required, expected=expected)
        if value is None:
            return default
        if isinstance(value, str) and value in words:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.wrong(key, f"got {shown(value)}, expected {expected}{nearest(value, words)}")
            return None
        return value

    def table(self, key: str) -> "Section | None":
        """A sub-table, None if it is not there."""
        value = self.take(key)
        return None if value is None else Section(value, self.path(key), self._mistakes)

    def tables(self, key: str) -> "list[Section]":
        """A list of one or more tables (`[[key]]`); required."""
        expected = f"one or more [[{key}]] tables"
        value = self.take(key, required=True, expected=expected)
        if value is None:
            return []
        if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not value:
            self.wrong(key, f"got {shown(value)}, expected {expected}")
            return []
        return [Section(item, f"{self.path(key)}[{i}]", self._mistakes) for i, item in enumerate(value)]

    def finish(self) -> None:
        """Call every key that nobody asked for unknown."""
        for key in self._table:
            if key not in self._known:
                self.wrong(str(key), f"unknown key{nearest(key, self._known) or known(self._known)}")


def known(options: Sequence[str]) -> str:
    """'; known here: a, b'."""
    return f"; known here: {', '.join(options)}" if options else ""
