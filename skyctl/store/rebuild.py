"""A fleet's processes without its state file: found by what their spawn put into the environment.

For a file that was corrupt and begun anew. What they were started with is not known then: `up`
replaces them, `down` stops them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.store.identity import ProcessIdentity, identify, own_processes

if TYPE_CHECKING:
    from skyctl.store.state import FleetState, ProcessRow, Role

TOKEN_VARIABLE = "SKYCTL_TOKEN"
"""Names one spawn; everything below it inherits it."""

LOG_VARIABLE = "SKYCTL_LOG"
"""The log of a spawn, `<directory of the fleet>/logs/<name>.log`: it says whose the process is."""

_UNKNOWN = "unknown"
_FRONTS: dict[str, Role] = {"router": "router", "tinker": "tinker"}


def remember_live_processes(state: FleetState, directory: Path) -> list[str]:
    """Record every process tree that runs for the fleet in `directory`; their names."""
    found = live_processes(directory)
    for row in found:
        state.save_process(row)
    return sorted({row.name for row in found})


def unrecorded_processes(state: FleetState, directory: Path) -> list[ProcessRow]:
    """Trees that run for the fleet and are not on record: their supervisor died while its disk
    failed, or between a spawn and its record."""
    known = {row.token for row in state.processes() if row.identity is not None}
    return [row for row in live_processes(directory) if row.token not in known]


def live_processes(directory: Path) -> list[ProcessRow]:
    """Every process tree that runs for the fleet in `directory`."""
    import psutil

    from skyctl.store.state import ProcessRow

    trees: dict[tuple[str, str], list[ProcessIdentity]] = {}
    for process in own_processes():
        try:
            environ = process.environ()
        except (psutil.Error, OSError):
            continue
        log = Path(environ.get(LOG_VARIABLE, ""))
        ours = log.parent.parent == directory and TOKEN_VARIABLE in environ
        if ours and (identity := identify(process.pid)) is not None and identity.alive():
            key = (log.stem, environ[TOKEN_VARIABLE])
            trees.setdefault(key, []).append(identity)
    found = []
    for (name, token), members in trees.items():
        # the leader was there first
        leader, *others = sorted(members, key=lambda one: one.create_time)
        found.append(
            ProcessRow(
                name=name,
                role=_FRONTS.get(name, "server"),
                phase="running",
                token=token,
                identity=leader,
                spec_hash=_UNKNOWN,
                host="127.0.0.1",
                port=0,
                started_at=time.time(),  # that it runs on is known, not since when
                descendants=tuple(others),
            )
        )
    return found
