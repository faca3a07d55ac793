"""A fleet's processes: as recorded, and as found without a record, by the environment of their
spawn.

What found processes were started with is unknown: `up` replaces them, `down` stops them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from skyctl.store.identity import ProcessIdentity, environment, identify, own_processes

SPAWN_VARIABLE = "SKYCTL_TOKEN"
"""Identifies one spawn; everything below it inherits it."""

LOG_VARIABLE = "SKYCTL_LOG"
"""The log of a spawn, `<directory of the fleet>/logs/<name>.log`: it shows which fleet the process
belongs to.
"""

RecordedPhase = Literal["intended", "running", "ready", "stale"]
Role = Literal["server", "router", "tinker"]

_FRONTS: dict[str, Role] = {"router": "router", "tinker": "tinker"}


@dataclass(frozen=True)
class ProcessRow:
    """One child of a supervisor."""

    name: str
    """Of the server or the front."""
    role: Role
    """What it is."""
    phase: RecordedPhase
    """`intended` before its spawn, `running` with an identity after it, and `ready` once it has
    answered, if it is a server.
    """
    token: str
    """In its environment (SKYCTL_TOKEN): a child spawned just before a crash is recognised."""
    identity: ProcessIdentity | None
    """Of the process; None before its spawn, and once it is gone."""
    spec_hash: str
    """Of what it was started with (`wire.spec_hash`)."""
    host: str
    """The address it binds."""
    port: int
    """Where it listens."""
    gpus: tuple[int, ...] = ()
    """Physical indices."""
    started_at: float = 0.0
    """In epoch seconds."""
    descendants: tuple[ProcessIdentity, ...] = ()
    """The processes seen below it while it lived."""
    settings: dict[str, str] = field(default_factory=dict)
    """What it was started with, by name (`reconcile.settings_of`); empty if not on record."""

    def alive(self) -> bool:
        """Whether exactly the recorded process runs."""
        return self.identity is not None and self.identity.alive()


def live_processes(directory: Path) -> list[ProcessRow]:
    """Every process tree that runs for the fleet in `directory`."""
    trees: dict[tuple[str, str], list[ProcessIdentity]] = {}
    for process in own_processes():
        environ = environment(process.pid)
        log = Path(environ.get(LOG_VARIABLE, ""))
        ours = log.parent.parent == directory and SPAWN_VARIABLE in environ
        if ours and (identity := identify(process.pid)) is not None and identity.alive():
            key = (log.stem, environ[SPAWN_VARIABLE])
            trees.setdefault(key, []).append(identity)
    running = []
    for (name, token), members in trees.items():
        # the leader came first
        leader, *others = sorted(members, key=lambda member: member.create_time)
        running.append(
            ProcessRow(
                name=name,
                role=_FRONTS.get(name, "server"),
                phase="running",
                token=token,
                identity=leader,
                spec_hash="unknown",
                host="127.0.0.1",
                port=0,
                started_at=time.time(),  # since when it runs is unknown
                descendants=tuple(others),
            )
        )
    return running
