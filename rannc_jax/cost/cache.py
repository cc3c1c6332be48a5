"""Measurements that outlive a process: small JSON files, named by what was measured.

An entry is written beside its place and moved there, so a reader sees a whole file or none, however many
processes write; one that is damaged, or of another release, counts as missing. Where nothing can be
written, nothing is remembered.
"""

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rannc_jax.files import write_whole

VARIABLE = "RANNC_JAX_CACHE"
_VERSION = 1
_MOST_S = 1e6
"""No program was measured that long: such a number was damaged."""


def cache_folder() -> Path:
    """Where measurements are kept: $RANNC_JAX_CACHE, else the user's cache folder of the platform."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    try:
        platformdirs = importlib.import_module("platformdirs")
    except ImportError:
        home = os.environ.get("XDG_CACHE_HOME")
        return (Path(home) if home else Path.home() / ".cache") / "rannc_jax"
    return Path(platformdirs.user_cache_dir("rannc_jax", appauthor=False))


class Cache:
    """Numbers by content.

    Args:
        folder: `cache_folder()` by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (cache_folder() if folder is None else folder) / "costs"

    @staticmethod
    def key(*parts: str) -> str:
        """The name of what these texts describe."""
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def read(self, key: str) -> dict[str, float] | None:
        """The numbers under a key, None if there are none that can be read."""
        try:
            entry: Any = json.loads(self._path(key).read_text(encoding="utf-8"))
            if entry["version"] != _VERSION or entry["key"] != key:
                return None
            numbers = {str(name): float(value) for name, value in entry["numbers"].items()}
            return numbers if all(0 <= value < _MOST_S for value in numbers.values()) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, key: str, numbers: Mapping[str, float]) -> None:
        """Keep numbers under a key, if the folder lets us."""
        path = self._path(key)
        text = json.dumps({"version": _VERSION, "key": key, "numbers": dict(numbers)})
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
