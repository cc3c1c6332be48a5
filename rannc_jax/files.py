"""Files that are there whole or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write UTF-8 text beside its place and move it there: whoever reads, or has the power cut, finds the old
    file or the new one.

    Raises:
        OSError: it could not be written; what was there is as it was.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    """What new files may not have."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
