"""Pictures that commands write to files."""

from __future__ import annotations

from pathlib import Path


def write_picture(path: Path, drawn: str) -> None:
    """Write an SVG, and say where.

    Raises:
        UsageError: the file cannot be written.
    """
    from skyctl import output
    from skyctl.errors import UsageError

    try:
        path.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    output.note(f"wrote {path}")
