"""Servers on other machines as a `Host`: each has a tether here, which is the process on record.

So whatever is decided by a process's identity is decided about a process of this machine, and
nothing here takes another machine's boot for a death. What runs there is ended by asking there: a
server counts as gone when its machine has said so.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.launch.base import ChildProcess, ChosenPlace, Host, Node
from skyctl.launch.local.host import LOCAL
from skyctl.launch.remote import record
from skyctl.launch.remote.session import ask, connect_timeout_s, silence
from skyctl.launch.remote.tether import VARIABLE, Task
from skyctl.store.identity import ProcessIdentity

LOST_S = 5.0
_POLL_S = 0.05
_END_S = 20.0
_TETHER_S = 2.0


class RemoteProcess:
    """A `ChildProcess`: a tether, which `identity` and `descendants` are of, and the server that it
    stands for, whose `pid` is that on its machine."""

    def __init__(self, tether: ChildProcess) -> None:
        self._tether = tether
        self.identity = tether.identity
        self.token = tether.token
        self.descendants = tether.descendants
        self.exited = tether.exited

    @property
    def pid(self) -> int | None:
        found = record.glance(self.token)
        return found.pid if found else None

    def alive(self) -> bool:
        return self._tether.alive()

    def exit_text(self) -> str:
        found = record.glance(self.token)
        if found is not None and found.ended:
            return found.ended
        return f"lost its connection: the process that held it {self._tether.exit_text()}"

    def record_descendants(self) -> bool:
        changed = self._tether.record_descendants()
        self.descendants = self._tether.descendants
        return changed

    def record_segments(self) -> None:
        """They are its keeper's to know."""

    def place(self) -> ChosenPlace | None:
        found = record.glance(self.token)
        return ChosenPlace(found.node, found.port, found.gpus) if found and found.port else None

    def connection_lost(self) -> str:
        found = record.glance(self.token)
        return found.lost if found else ""

    def listens_at(self, port: int) -> bool:
        found = record.glance(self.token)
        return found is not None and port in found.ports

    def members(self) -> list[Any]:
        """The tether's, and the server as long as its end is not certain."""
        try:
            found = record.read(self.token)
            there = [SimpleNamespace(pid=found.pid)] if found and found.begun else []
        except SkyctlError:  # `stop` raises it
            there = [SimpleNamespace(pid=None)]
        return [*self._tether.members(), *there]

    def resident_bytes(self) -> int | None:
        found = record.glance(self.token)
        return found.rss if found else None

    async def lost(self) -> str:
        """ "" once its machine has said that it runs, or how it ended."""
        before, deadline = None, time.monotonic() + LOST_S
        while not self.exited.is_set():
            try:
                now = record.read(self.token)
            except SkyctlError as error:
                return error.message
            if now is None:
                break
            before = before or now
            heard = now.beat != before.beat
            if heard and now.pid is not None:
                break
            if time.monotonic() > deadline:
                silent = now.lost or silence(now.node)
                return "" if heard else silent
            await asyncio.sleep(_POLL_S)
        return ""

    async def settled(self) -> None:
        """Once its machine has told that the server is closed there as it is here."""
        while not self.exited.is_set():
            with suppress(SkyctlError):
                if (found := record.read(self.token)) is None or found.follows():
                    return
            await asyncio.sleep(_POLL_S)

    async def stop(self, timeout_s: float) -> bool:
        """End the server first, for certain, then its tether.

        Raises:
            HostUnreachable: its machine cannot be asked. The tether is gone, so that the server
                ends by itself; the record stays.
            SkyctlError: its record cannot be read.
        """
        found, gently = record.read(self.token), True
        if found is not None and not (found.begun and found.node.chosen):
            await self._tether.stop(_TETHER_S)  # may be just about to begin
            found = record.read(self.token)
        if found is not None and found.begun:
            node = found.node
            request = {"do": "stop", "token": record.hosted(self.token), "timeout_s": timeout_s}
            if node.ray:
                target = node.target if node.chosen else ""
                request |= {"token": self.token, "hosted": request["token"], "target": target}
            patience_s = connect_timeout_s(node) + timeout_s + _END_S
            try:
                answer = await ask(node.cluster, request, patience_s)
            except HostUnreachable as error:
                await self._tether.stop(_TETHER_S)
                raise HostUnreachable(
                    f"{error.message}; its server ends by itself after {found.node.grace_s:g} s "
                    f"without us (gone for good? remove {record.path_of(self.token)})",
                    hint=error.hint,
                ) from error
            gently = bool(answer["gently"])
        await self._tether.stop(_TETHER_S)
        record.forget(self.token)
        return gently


def spawn(
    node: Node, argv: Sequence[str], env: Mapping[str, str], log: Path, token: str
) -> ChildProcess:
    """Start `argv` on a node. The variables that name the file which keeps the server closed
    (`FleetPaths.held`) name one there, which follows ours."""
    held = str(log.parent.parent / f"{log.stem}.held")
    closed = [name for name, value in env.items() if value == held]
    record.write(token, record.Record(node, held))
    number = log.stem.rpartition("-")[2]  # of the replica
    turn = int(number) if number.isdecimal() else 0
    task = json.dumps(asdict(Task(list(argv), dict(env), closed, turn)))
    tether = [sys.executable, "-m", "skyctl.launch.remote.tether"]
    try:
        return RemoteProcess(LOCAL.spawn(tether, {VARIABLE: task}, log, token))
    except SkyctlError:
        record.forget(token)
        raise


def adopt(
    identity: ProcessIdentity | None, token: str, descendants: Sequence[ProcessIdentity]
) -> ChildProcess:
    """A front runs here, a server where its record says.

    Raises:
        SkyctlError: its record cannot be read.
    """
    process = LOCAL.adopt(identity, token, descendants)
    return process if record.read(token) is None else RemoteProcess(process)


def on(node: Node) -> Host:
    """A node as a `Host`. Its GPUs, CPUs and ports come with the plan (`machines.py`)."""
    return replace(
        SSH,
        spawn=partial(spawn, node),
        environment=lambda paths: {},  # its keeper has its own
        port_holder=lambda host, port: None,
    )


SSH = replace(LOCAL, name="ssh", adopt=adopt, on=on)
RAY = replace(SSH, name="ray")
