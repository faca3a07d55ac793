"""Keep logs within a size while their writers go on."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from skyctl.errors import SkyctlError
from skyctl.store.paths import create_private_file


def rotate(log: Path, max_bytes: int, keep: int) -> bool:
    """Copy a log of more than `max_bytes` to `<log>.1`, and empty it; True if it was emptied.

    Older copies move on, up to `<log>.<keep>`. Writers hold the file open for appending, so it can
    be neither moved nor replaced; what they write between the end of the copy and the truncation is
    lost. If there is no room for a copy, the log is emptied without one.
    """
    try:
        if log.stat().st_size <= max_bytes:
            return False
        with contextlib.suppress(OSError, SkyctlError):
            _copy_aside(log, keep)
        os.truncate(log, 0)
    except OSError:  # gone, or on a read-only disk
        return False
    return True


def earlier(log: Path, number: int = 1) -> Path:
    """The copy of a log that was made `number` rotations ago."""
    return log.with_name(f"{log.name}.{number}")


def _copy_aside(log: Path, keep: int) -> None:
    if keep == 0:
        return
    temporary = log.with_name(f"{log.name}.tmp")
    descriptor = create_private_file(temporary, os.O_TRUNC)
    try:
        with os.fdopen(descriptor, "wb") as copy, log.open("rb") as source:
            shutil.copyfileobj(source, copy, 1024 * 1024)
        for number in range(keep, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                earlier(log, number - 1).replace(earlier(log, number))
        temporary.replace(earlier(log))
    finally:
        temporary.unlink(missing_ok=True)
