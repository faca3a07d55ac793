"""A server on another machine, as a process of this one: `python -m skyctl.launch.remote.tether`.

To the supervisor it is the server: recorded, adopted and ended like any child. It writes what the
server writes to its own output, carries the file that keeps the server closed, and ends when the
server has ended for certain. While the other machine cannot be asked it asks again, and says so in
the server's record (`record.py`).

A server on several machines has one tether, with a connection and a record for each of its parts.
They have one fate: when one has ended the tether ends, and what restarts or stops the server
ends the others (`RemoteProcess.stop`). vLLM's own parts do not notice one another's death: the
leader answers its probes until it is asked for tokens, and then hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyctl.errors import SkyctlError
from skyctl.launch.base import ADDRESS_AT_SPAWN, PORT_AT_SPAWN
from skyctl.launch.remote import record
from skyctl.launch.remote.session import Session
from skyctl.store.processes import SPAWN_VARIABLE

VARIABLE = "SKYCTL_TETHER"
"""A `Task` as JSON: what it starts, with its secrets. Readable by this user only, as theirs is."""
RETRY_S = 2.0
SILENCE_S = 15.0
_PLACE_S = 60.0
_PLACED_S = 120.0
_SPEAK_S = 1.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class Task:
    """What a tether has started on another machine."""

    argv: Sequence[str]
    """The command."""
    env: Mapping[str, str]
    """Variables that are added to the other machine's."""
    closed_variables: Sequence[str]
    """Those of them that name the file which keeps the server closed."""
    turn: int = 0
    """Spreads servers that start together."""
    followers: Sequence[tuple[Sequence[str], Mapping[str, str]]] = ()
    """argv and env of each of its other parts, in the order of their records."""

    def parts(self) -> list[Task]:
        """What is started on each machine."""
        return [self, *(Task(argv, env, ()) for argv, env in self.followers)]

    def at(self, spawned: record.Record) -> Task:
        """The same on the node, and with the port and GPUs, that were chosen for it."""
        if not spawned.port:
            return self
        chosen = {ADDRESS_AT_SPAWN: spawned.node.address, PORT_AT_SPAWN: str(spawned.port)}
        env = {name: chosen.get(value, value) for name, value in self.env.items()}
        if spawned.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spawned.gpus))
        return replace(self, argv=[chosen.get(word, word) for word in self.argv], env=env)


class _Tether:
    def __init__(self, token: str, task: Task) -> None:
        spawned = record.read(token)
        if spawned is None:
            raise SkyctlError(f"there is no record of spawn {token}")
        self._token, self._task, self._record = token, task, spawned
        self._closed_by = Path(spawned.closed_by)
        self._at = 0
        self._heard = False  # the server is there

    async def run(self) -> None:
        """Until the server has ended, or could not be started."""
        while not self._record.ended:
            try:
                async with Session(self._record.node) as session:
                    if not self._record.node.chosen:
                        await self._choose(session)
                    if not self._record.begun:  # on record first, or not at all
                        self._record = record.write(self._token, self._record, begun=True)
                    await self._follow(session)
            except SkyctlError as error:
                if not self._heard:
                    failure = f"could not be started: {error.message}"
                    if not self._note(ended=failure):
                        _print(f"SkyctlError: {failure}\n")  # the log is searched for such lines
                    return
                self._note(lost=error.message)
                await asyncio.sleep(RETRY_S)

    async def _choose(self, session: Session) -> None:
        """Have a node chosen, which is reserved from then on, and go on to it."""
        self._record = record.write(self._token, self._record, begun=True)  # on record first
        node = self._record.node
        request = {"do": "place", "token": self._token, "turn": self._task.turn}
        await session.send({**request, "patience_s": _PLACE_S})
        place = await session.receive(_PLACED_S)
        self._record = record.write(
            self._token,
            self._record,
            node=replace(node, target=place["target"], address=place["address"]),
            port=place["port"],
            gpus=tuple(place["gpus"]),
        )
        await session.go_on(self._record.node)

    async def _follow(self, session: Session) -> None:
        node, task = self._record.node, self._task.at(self._record)
        await session.send(
            {
                "do": "keep",
                "token": record.hosted(self._token),
                "fresh": not self._heard,
                "argv": task.argv,
                "env": task.env,
                "closed": self._closed_by.exists(),
                "closed_variables": task.closed_variables,
                "grace_s": node.grace_s,
                "at": self._at,
            }
        )
        speaking = asyncio.create_task(self._speak(session))
        try:
            while not self._record.ended:
                message = await session.receive(SILENCE_S)
                if "log" in message:
                    _print(message["log"])
                    self._at = message["at"]
                elif "ended" in message:
                    self._note(ended=message["ended"])
                else:
                    self._heard = True
                    beat = self._record.beat + 1
                    self._note(**{**message, "ports": tuple(message["ports"])}, beat=beat, lost="")
        finally:
            speaking.cancel()

    async def _speak(self, session: Session) -> None:
        """Send heartbeats, and whether the server is to be closed, at once."""
        sent, sent_at = None, float("-inf")
        while True:
            closed = self._closed_by.exists()
            if closed != sent or time.monotonic() - sent_at > _SPEAK_S:
                sent, sent_at = closed, time.monotonic()
                await session.send({"closed": closed})
            await asyncio.sleep(_LOOK_S)

    def _note(self, **changes: object) -> bool:
        """Whether it could be put on record. What is not counts as lost, such as on a full disk."""
        try:
            self._record = record.write(self._token, self._record, **changes)
            return True
        except SkyctlError:
            with contextlib.suppress(KeyError):
                self._record = replace(self._record, ended=str(changes["ended"]))
            return False


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk
        os.write(sys.stdout.fileno(), text.encode(errors="surrogateescape"))


async def _run(token: str, task: Task) -> None:
    """Until one part of the server has ended, or could not be started."""
    parts = task.parts()
    tethers = [
        _Tether(part_token, part)
        for part_token, part in zip(record.tokens(token, len(parts)), parts, strict=True)
    ]
    running = [asyncio.create_task(tether.run()) for tether in tethers]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for tether in done:
            tether.result()
    finally:
        for tether in running:
            tether.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def main() -> None:
    """Be the tether that the environment asks for."""
    task = Task(**json.loads(os.environ.pop(VARIABLE)))
    asyncio.run(_run(os.environ[SPAWN_VARIABLE], task))


if __name__ == "__main__":
    main()
