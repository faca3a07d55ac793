"""What is known here of a server on another machine: a small file for each, by its tether.

It is there from before the spawn until the server's end is certain. So whoever finds one knows that
there may be something to end, and where.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from skyctl.launch.base import Node
from skyctl.store.paths import create_private_file, private_directory, state_root


@dataclass(frozen=True)
class Record:
    """`closed_by` is the file here that keeps the server closed while it is there.

    `begun`: the other machine may have been told to start it. `beat` counts what was heard since;
    `lost` says why nothing is, `ended` how the server ended. The rest is as it was heard last.
    """

    node: Node
    closed_by: str
    begun: bool = False
    beat: int = 0
    lost: str = ""
    ended: str = ""
    pid: int | None = None
    rss: int | None = None
    ports: tuple[int, ...] = ()
    held: bool = False

    def follows(self) -> bool:
        """Whether the server is closed there as it is to be."""
        return self.held == Path(self.closed_by).exists()


def hosted(token: str) -> str:
    """The token of a spawn on its machine. Another than here: that machine may be this one."""
    return f"hosted-{token}"


def path_of(token: str) -> Path:
    """Where the record of a spawn is."""
    return state_root() / "ssh" / f"{token}.json"


def read(token: str) -> Record | None:
    """The record of a spawn, None when there is none."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path_of(token).read_text())
        node = found.pop("node")
        node = Node(**{**node, "command": tuple(node["command"])})
        return Record(**{**found, "node": node, "ports": tuple(found["ports"])})
    return None


def write(token: str, record: Record, **changes: Any) -> Record:
    """Put a record, with changes, in the place of the one before it.

    Raises:
        SkyctlError: it cannot be written.
    """
    record = replace(record, **changes)
    path = path_of(token)
    private_directory(path.parent)
    temporary = path.with_suffix(".tmp")
    with os.fdopen(create_private_file(temporary, os.O_TRUNC), "w") as file:
        json.dump(asdict(record), file)
    temporary.replace(path)
    return record


def forget(token: str) -> None:
    """Nothing of the spawn is left anywhere."""
    path_of(token).unlink(missing_ok=True)
