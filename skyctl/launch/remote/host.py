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
from skyctl.launch.base import ChildProcess, ChosenPlace, Follower, Host, Node
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
    stands for, whose `pid` is that on its machine. Of a server on several machines `pid`, port and
    closing are its leader's, all else is of every part."""

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
        for rank, found in enumerate(record.glances(self.token)):
            if found.ended:
                return f"its part on {found.node.target} {found.ended}" if rank else found.ended
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
        return next((found.lost for found in record.glances(self.token) if found.lost), "")

    def listens_at(self, port: int) -> bool:
        found = record.glance(self.token)
        return found is not None and port in found.ports

    def members(self) -> list[Any]:
        """The tether's, and the server as long as its end is not certain."""
        try:
            parts = [found for _, found in record.of_parts(self.token) if found.begun]
            there = [SimpleNamespace(pid=found.pid) for found in parts]
        except SkyctlError:  # `stop` raises it
            there = [SimpleNamespace(pid=None)]
        return [*self._tether.members(), *there]

    def resident_bytes(self) -> int | None:
        known = [found.rss for found in record.glances(self.token) if found.rss is not None]
        return sum(known) if known else None

    async def lost(self) -> str:
        """ "" once its machines have said that it runs, or how it ended."""
        try:
            tokens = [token for token, _ in record.of_parts(self.token)]
        except SkyctlError as error:
            return error.message
        return next(filter(None, await asyncio.gather(*map(self._part_lost, tokens))), "")

    async def _part_lost(self, token: str) -> str:
        before, deadline = None, time.monotonic() + LOST_S
        while not self.exited.is_set():
            try:
                now = record.read(token)
            except SkyctlError as error:
                return error.message
            if now is None:
                break
            before = before or now
            heard = now.beat != before.beat
            if heard and now.pid is not None:
                break
            if time.monotonic() > deadline:
                return "" if heard else now.lost or silence(now.node)
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
            HostUnreachable: a machine of it cannot be asked. The tether is gone, so that what runs
                there ends by itself; its record stays.
            SkyctlError: its record cannot be read.
        """
        parts = record.of_parts(self.token)
        if not all(found.begun and found.node.chosen for _, found in parts):
            await self._tether.stop(_TETHER_S)  # may be just about to begin
            parts = record.of_parts(self.token)
        begun = [(token, found) for token, found in parts if found.begun]
        asked = (_stopped(token, found, timeout_s) for token, found in begun)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if not failed or any(isinstance(error, HostUnreachable) for error in failed):
            await self._tether.stop(_TETHER_S)
        if failed:
            for (token, found), answer in zip(begun, answers, strict=True):
                if not isinstance(answer, BaseException):
                    with suppress(SkyctlError):  # else that machine is asked again
                        record.write(token, found, begun=False)
            raise failed[0]
        record.forget(self.token)
        return all(answers)


async def _stopped(token: str, found: record.Record, timeout_s: float) -> bool:
    """End one part of a server for certain. Raises as `RemoteProcess.stop`."""
    node = found.node
    request = {"do": "stop", "token": record.hosted(token), "timeout_s": timeout_s}
    if node.ray:
        target = node.target if node.chosen else ""
        request |= {"token": token, "hosted": request["token"], "target": target}
    patience_s = connect_timeout_s(node) + timeout_s + _END_S
    try:
        answer = await ask(node.cluster, request, patience_s)
    except HostUnreachable as error:
        raise HostUnreachable(
            f"{error.message}; its server ends by itself after {node.grace_s:g} s "
            f"without us (gone for good? remove {record.path_of(token)})",
            hint=error.hint,
        ) from error
    return bool(answer["gently"])


def spawn(
    node: Node,
    followers: Sequence[Follower],
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    token: str,
) -> ChildProcess:
    """Start `argv` on a node, and its followers on theirs. The variables that name the file which
    keeps the server closed (`FleetPaths.held`) name one there, which follows ours."""
    held = str(log.parent.parent / f"{log.stem}.held")
    closed = [name for name, value in env.items() if value == held]
    nodes = [node, *(one.node for one in followers)]
    for part, its_node in zip(record.tokens(token, len(nodes)), nodes, strict=True):
        parts = len(nodes) if part == token else 1
        record.write(part, record.Record(its_node, held, parts=parts))
    number = log.stem.rpartition("-")[2]  # of the replica
    turn = int(number) if number.isdecimal() else 0
    rest = [(list(one.argv), one.env) for one in followers]
    task = json.dumps(asdict(Task(list(argv), dict(env), closed, turn, rest)))
    tether = [sys.executable, "-m", "skyctl.launch.remote.tether"]
    try:
        return RemoteProcess(LOCAL.spawn(tether, {VARIABLE: task}, log, token))
    except SkyctlError:
        record.forget(token)
        raise


def adopt(
    identity: ProcessIdentity | None, token: str, descendants: Sequence[ProcessIdentity]
) -> ChildProcess:
    """A front runs here, a server where its record says; `stop` raises if that cannot be read."""
    process = LOCAL.adopt(identity, token, descendants)
    return RemoteProcess(process) if record.path_of(token).exists() else process


def on(node: Node, followers: Sequence[Follower]) -> Host:
    """A node as a `Host`, with the followers of what it spawns. Its GPUs, CPUs and ports come with
    the plan (`machines.py`)."""
    return replace(
        SSH,
        spawn=partial(spawn, node, followers),
        environment=lambda paths: {},  # its keeper has its own
        port_holder=lambda host, port: None,
    )


SSH = replace(LOCAL, name="ssh", adopt=adopt, on=on)
