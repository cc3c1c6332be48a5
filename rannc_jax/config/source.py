"""From a path or a mapping to a table: the only place that opens a TOML file.

A file that is not there, and text that is not TOML, end in a ConfigError that names the nearest file of
the folder, or shows the line.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rannc_jax.errors import ConfigError, message


def read_table(source: str | Path | Mapping[str, Any], what: str) -> tuple[Mapping[str, Any], str, Path]:
    """Read a file, or pass a mapping on.

    Args:
        source: path of a TOML file, or what one would hold.
        what: what the file is for, in messages ("mesh file").

    Returns:
        The table, its name for messages, and the folder that paths inside it are relative to.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    if isinstance(source, Mapping):
        return source, f"the {what} mapping", Path()
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(_missing(path, what)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(message(f"{what} {str(path)!r} cannot be read.", str(error))) from error
    try:
        return tomllib.loads(text), str(path), path.parent
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_not_toml(path, text, error)) from error


def _missing(path: Path, what: str) -> str:
    here = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, here, n=1, cutoff=0.5)
    hint = f"{str(path.parent / close[0])!r}, which is there." if close else None
    return message(f"there is no {what} {str(path)!r}.", f"looked in: {path.parent.resolve()}", hint=hint)


def _not_toml(path: Path, text: str, error: tomllib.TOMLDecodeError) -> str:
    # The parser says "(at line 3, column 7)" or "(at end of document)" and has no other way to tell.
    match = re.search(r"at line (\d+)", str(error))
    lines = text.splitlines()
    number = int(match[1]) if match else len(lines)
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return message(f"{path} is not TOML.", f"line {number}: {line}", str(error))
