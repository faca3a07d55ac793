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
        spawned = record.glance(self.token)
        return spawned.pid if spawned else None

    def alive(self) -> bool:
        return self._tether.alive()

    def exit_text(self) -> str:
        for rank, part in enumerate(record.glances(self.token)):
            if part.ended:
                return f"its part on {part.node.target} {part.ended}" if rank else part.ended
        return f"lost its connection: the process that held it {self._tether.exit_text()}"

    def record_descendants(self) -> bool:
        changed = self._tether.record_descendants()
        self.descendants = self._tether.descendants
        return changed

    def record_segments(self) -> None:
        """They are its keeper's to know."""

    def place(self) -> ChosenPlace | None:
        spawned = record.glance(self.token)
        if not spawned or not spawned.port:
            return None
        return ChosenPlace(spawned.node, spawned.port, spawned.gpus)

    def connection_lost(self) -> str:
        return next((part.lost for part in record.glances(self.token) if part.lost), "")

    def listens_at(self, port: int) -> bool:
        spawned = record.glance(self.token)
        return spawned is not None and port in spawned.ports

    def members(self) -> list[Any]:
        """The tether's, and the server as long as its end is not certain."""
        try:
            parts = [part for _, part in record.of_parts(self.token) if part.begun]
            servers = [SimpleNamespace(pid=part.pid) for part in parts]
        except SkyctlError:  # `stop` raises it
            servers = [SimpleNamespace(pid=None)]
        return [*self._tether.members(), *servers]

    def resident_bytes(self) -> int | None:
        sizes = [part.rss for part in record.glances(self.token) if part.rss is not None]
        return sum(sizes) if sizes else None

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
                if (spawned := record.read(self.token)) is None or spawned.follows():
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
        if not all(part.begun and part.node.chosen for _, part in parts):
            await self._tether.stop(_TETHER_S)  # may be just about to begin
            parts = record.of_parts(self.token)
        begun = [(token, part) for token, part in parts if part.begun]
        stops = (_stopped(token, part, timeout_s) for token, part in begun)
        answers = await asyncio.gather(*stops, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if not failed or any(isinstance(error, HostUnreachable) for error in failed):
            await self._tether.stop(_TETHER_S)
        if failed:
            for (token, part), answer in zip(begun, answers, strict=True):
                if not isinstance(answer, BaseException):
                    with suppress(SkyctlError):  # else that machine is asked again
                        record.write(token, part, begun=False)
            raise failed[0]
        record.forget(self.token)
        return all(answers)


async def _stopped(token: str, part: record.Record, timeout_s: float) -> bool:
    """End one part of a server for certain. Raises as `RemoteProcess.stop`."""
    node = part.node
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
    closed_by = str(log.parent.parent / f"{log.stem}.held")
    closed_names = [name for name, value in env.items() if value == closed_by]
    nodes = [node, *(follower.node for follower in followers)]
    for part, its_node in zip(record.tokens(token, len(nodes)), nodes, strict=True):
        parts = len(nodes) if part == token else 1
        record.write(part, record.Record(its_node, closed_by, parts=parts))
    number = log.stem.rpartition("-")[2]  # of the replica
    turn = int(number) if number.isdecimal() else 0
    follower_tasks = [(list(follower.argv), follower.env) for follower in followers]
    task = json.dumps(asdict(Task(list(argv), dict(env), closed_names, turn, follower_tasks)))
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
