"""The files of a server on its own machine, by which agents and its keeper agree.

<state directory>/hosted/fleets/<token>/
    lease          touched while the supervisor is heard
    server.json    the identities of the server and of its keeper
    ended          how it ended, once it did
    server.held    there while it must not answer users yet
    logs/, tmp/    its output until that was sent; its TMPDIR
<state directory>/hosted/<token>.stopped    it was ended; a late request does not start it
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyctl.errors import SkyctlError
from skyctl.launch.local.host import LOCAL
from skyctl.store.identity import ProcessIdentity
from skyctl.store.paths import FleetPaths, create_private_file, private_directory, state_root

MARKED_S = 24 * 3600.0


ROOM_BYTES = 4096


NAME = "server"


def hosted_paths(token: str) -> FleetPaths:
    return FleetPaths(state_root() / "hosted", token)


def stopped_mark(paths: FleetPaths) -> Path:
    """Is there once `stop` was asked to end the server."""
    return paths.root / f"{paths.name}.stopped"


def mark_stopped(paths: FleetPaths) -> None:
    private_directory(paths.root)
    os.close(create_private_file(stopped_mark(paths)))
    for mark in paths.root.glob("*.stopped"):
        with contextlib.suppress(OSError):
            if time.time() - mark.stat().st_mtime > MARKED_S:
                mark.unlink()


def remove_files(paths: FleetPaths) -> None:
    LOCAL.sweep(paths)
    shutil.rmtree(paths.directory, ignore_errors=True)


def is_alive(identity: Mapping[str, Any]) -> bool:
    return ProcessIdentity(**identity).alive()


def server_identity(paths: FleetPaths) -> ProcessIdentity | None:
    recorded = read_json(paths.directory / "server.json")
    return ProcessIdentity(**recorded["server"]) if recorded else None


def set_closed(paths: FleetPaths, closed: bool) -> None:
    file = paths.hold_file(NAME)
    if closed and not file.exists():
        os.close(create_private_file(file))
    elif not closed:
        file.unlink(missing_ok=True)


def touch_lease(paths: FleetPaths) -> None:
    # not made again where it is gone: what ends the server removes it, and its keeper with it
    with contextlib.suppress(FileNotFoundError):
        os.utime(paths.directory / "lease", follow_symlinks=False)


def lease_time(paths: FleetPaths, unreadable: int | None = None) -> int | None:
    """None where it is gone. A network file system that fails for a moment says nothing of that."""
    try:
        return (paths.directory / "lease").stat().st_mtime_ns
    except FileNotFoundError:
        return None
    except OSError:
        return unreadable


def reserve_room(paths: FleetPaths) -> None:
    """Take the room of what is written later: a full disk would hide that it started, or ended.
    Raises SkyctlError: there is none.
    """
    try:
        for name in ("server.tmp", "ended.tmp"):
            (paths.directory / name).write_bytes(b" " * ROOM_BYTES)
    except OSError as error:
        raise SkyctlError(f"cannot write in {paths.directory}: {error.strerror}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Into the room that was taken for it, where that is still there."""
    temporary = path.with_suffix(".tmp")
    with contextlib.suppress(OSError):  # its directory was removed: the server was ended
        temporary.touch()
        with temporary.open("r+b") as file:
            file.write(json.dumps(content).encode().ljust(ROOM_BYTES))
        temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return None
