"""The fleet's weights tensor by tensor, as of the last push: a file beside its state."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyctl.errors import SkyctlError
from skyctl.store.paths import place_private_file

_FILE = "content.json"


@dataclass(frozen=True)
class Content:
    """`digest` is a checkpoint's content digest, `crc32` has those of its tensors, by name."""

    digest: str
    crc32: Mapping[str, int]


def remember_content(directory: Path, content: Content) -> None:
    """Replace the remembered content. If it cannot be written, nothing is remembered: the next
    delta push then sends everything.
    """
    path = directory / _FILE
    text = json.dumps({"digest": content.digest, "crc32": dict(content.crc32)})
    try:
        place_private_file(path, text.encode(), replace=True)
    except SkyctlError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def known_content(directory: Path) -> Content | None:
    """The remembered content; None if there is none, or none that can be read."""
    try:
        found = json.loads((directory / _FILE).read_bytes())
        crc32 = {str(name): int(value) for name, value in found["crc32"].items()}
        return Content(str(found["digest"]), crc32)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
