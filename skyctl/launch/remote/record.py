"""What is known here of a server on another machine: a small file for each, by its tether.

It is there from before the spawn until the server's end is certain. So a process that finds one
knows that there may be something to end, and where.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from skyctl.errors import SkyctlError
from skyctl.launch.base import Node, RayCluster
from skyctl.store.paths import create_private_file, private_directory, state_root


@dataclass(frozen=True)
class Record:
    """A spawn on another machine, as it was heard of last."""

    node: Node
    """The machine it runs on, or what chooses one."""
    closed_by: str
    """The file here that keeps the server closed while it is there."""
    begun: bool = False
    """The other machine may have been told to start it."""
    beat: int = 0
    """How many reports came since."""
    lost: str = ""
    """Why none comes any more, "" while they do."""
    ended: str = ""
    """How the server ended, "" while it runs."""
    pid: int | None = None
    """The server's process there."""
    rss: int | None = None
    """Bytes of memory of its processes."""
    ports: tuple[int, ...] = ()
    """Ports that they listen at."""
    closed: bool = False
    """Whether the server is closed to users there."""
    port: int = 0
    """The port that was chosen for it with its `node`, 0 otherwise."""
    gpus: tuple[int, ...] = ()
    """The GPUs that were chosen for it with its `node`."""
    parts: int = 1
    """The number of its parts, each on a machine and with a record of its own (`tokens`)."""

    def follows(self) -> bool:
        """Whether the server is closed there as it is to be, as was heard of it."""
        return self.beat > 0 and self.closed == Path(self.closed_by).exists()


def hosted(token: str) -> str:
    """The token of a spawn on its machine. Another than here: that machine may be this one."""
    return f"hosted-{token}"


def tokens(token: str, parts: int) -> list[str]:
    """Of each part of a spawn; the first has the spawn's own."""
    return [token, *(f"{token}-{rank}" for rank in range(1, parts))]


def path_of(token: str) -> Path:
    """Where the record of a spawn is."""
    return state_root() / "remote" / f"{token}.json"


def read(token: str) -> Record | None:
    """The record of a spawn, None when there is none. Raises SkyctlError: it cannot be read, so
    that it is unknown what is left of the spawn.
    """
    path = path_of(token)
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        node = _node(fields.pop("node"))
        lists = {name: tuple(fields[name]) for name in ("ports", "gpus")}
        return Record(**{**fields, **lists, "node": node})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SkyctlError(
            f"{path}, the record of a server on another machine, cannot be read: {error!r}",
            hint="try again; if it is damaged, end the server there and remove the file",
        ) from error


def _node(fields: dict[str, Any]) -> Node:
    if (ray := fields["ray"]) is not None:
        ray = RayCluster(**{**ray, "labels": tuple(map(tuple, ray["labels"]))})
    return Node(**{**fields, "command": tuple(fields["command"]), "ray": ray})


def glance(token: str) -> Record | None:
    """As `read`, to show it only: None too where it cannot be read now."""
    with contextlib.suppress(SkyctlError):
        return read(token)
    return None


def of_parts(token: str, reader: Callable[[str], Record | None] = read) -> list[tuple[str, Record]]:
    """Token and record of each part of a spawn that is on record. Raises as `reader` does."""
    first = reader(token)
    others = tokens(token, first.parts if first else 1)[1:]
    parts = [(token, first), *((other, reader(other)) for other in others)]
    return [(part, recorded) for part, recorded in parts if recorded is not None]


def glances(token: str) -> list[Record]:
    """As `glance`, of each part of a spawn."""
    return [part for _, part in of_parts(token, glance)]


def begun(token: str) -> bool:
    """Whether a spawn may run on another machine: the end of it is not certain."""
    return any(part.begun for part in glances(token))


def write(token: str, record: Record, **changes: Any) -> Record:
    """Put a record, with changes, in the place of the one before it. Raises SkyctlError: it cannot
    be written.
    """
    record = replace(record, **changes)
    path = path_of(token)
    private_directory(path.parent)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")  # stop writes beside a tether, too
    try:
        with os.fdopen(create_private_file(temporary, os.O_TRUNC), "w") as file:
            json.dump(asdict(record), file)
        temporary.replace(path)
    except OSError as error:  # the disk is full
        raise SkyctlError(f"cannot write {path}: {error.strerror}") from error
    return record


def forget(token: str) -> None:
    """Nothing of the spawn is left anywhere."""
    first = glance(token)
    for part in reversed(tokens(token, first.parts if first else 1)):  # its own tells of the others
        path_of(part).unlink(missing_ok=True)
