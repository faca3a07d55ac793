"""How the ranks of a training job act as one: rank 0 gathers from each rank, decides, and answers.

    rank 1 …   exchange ─► exchange ─► …      a round: a few exchanges, numbered on every rank
    rank 0     gather, decide, answer ─► …    or fail: the round is over, for every rank

The job's own collectives only tell where ranks meet (`live/meeting.py`): a rank that has died would
stop them for minutes, and they do not tell which rank it was. Each message names its round, so that
a rank that comes late learns how its round ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from abc import ABC, abstractmethod
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from skyctl.errors import PreflightError, SkyctlError, error_named
from skyctl.live.meeting import Address, listen_everywhere, listen_locally
from skyctl.store.identity import peer
from skyctl.store.owned import own
from skyctl.units import count_of, format_seconds
from skyctl.wire.proofs import keep_alive

PATIENCE_S = 600.0
"""How long a rank waits for the others in an exchange."""
_BEAT_S = 5.0
_LENGTH = struct.Struct("<Q")
_LONGEST = 2**32

Body = dict[str, Any]
Decide = Callable[[list[Body]], Awaitable[list[Body]]]
"""Makes of the bodies of all ranks, in their order, an answer for each of them. On rank 0 only."""


class RankFailed(SkyctlError):
    """A rank has died, failed, or has not come. It names the rank."""


@dataclass(frozen=True)
class Step:
    """One exchange."""

    round: int
    """Its round, counted alike on every rank."""
    name: str
    """Its name within that."""
    subject: str
    """What the round is for, as errors name it."""
    patience_s: float = PATIENCE_S
    """How long rank 0 waits in it for others, and they for rank 0 to begin it."""
    lends: bool = False
    """Servers may read this rank's memory until rank 0 answers: cancelled, even twice, it waits."""


class _Channel:
    """The sending end of a connection between two ranks; a forked child does not keep it open."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._socket = writer.get_extra_info("socket")
        self.is_local = self._socket.family == socket.AF_UNIX
        if self.is_local:
            pid, self.uid = peer(self._socket)
            self.peer_name = f"pid {pid}"
        else:
            keep_alive(self._socket)
            self.peer_name = f"at {writer.get_extra_info('peername')[0]}"
        own(self)

    def fileno(self) -> int:
        return int(self._socket.fileno())

    def send(self, message: Body) -> None:
        """To a rank that has ended, nothing is sent; its end is noticed where it is read from."""
        data = json.dumps(message).encode()
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        self._writer.close()


class Ranks(ABC):
    """All ranks of the job, as one of them sees them: `machines` names that of each. Belongs to one
    event loop.
    """

    def __init__(self, rank: int, machines: Sequence[str]) -> None:
        self.rank = rank
        self.world_size = len(machines)
        self.machines = tuple(machines)
        self.address = Address("")
        """Where rank 0 listens, on rank 0."""
        self.when_lost: Callable[[], None] = lambda: None
        """Called on rank 0 when another rank has ended, or has closed its trainer."""

    @property
    def apart(self) -> bool:
        """Whether they are on several machines."""
        return len(set(self.machines)) > 1

    @abstractmethod
    async def exchange(self, step: Step, body: Body, decide: Decide) -> Body:
        """Give rank 0 this rank's body and return the answer to it.

        Every rank takes part in the same steps, in the same order. An exchange that raises ends the
        round on every rank.

        Raises:
            RankFailed: a rank died, failed, or did not come.
            SkyctlError: what `decide` raised on rank 0.
        """

    @abstractmethod
    def fail(self, step: Step, error: BaseException) -> None:
        """End the round of this step on every rank: beside its exchanges, this one has failed."""

    @abstractmethod
    async def close(self) -> None:
        """Leave; the other ranks' exchanges fail. A second call does nothing."""


class Hub(Ranks):
    """Rank 0's end."""

    def __init__(self, machines: Sequence[str] = ("",)) -> None:
        super().__init__(0, machines)
        self._servers: list[asyncio.Server] = []
        self._channels: dict[int, _Channel] = {}
        self._lost: dict[int, str] = {}
        self._bodies: dict[tuple[int, str, int], Body] = {}
        self._failures: dict[int, SkyctlError] = {}
        self._changed = asyncio.Event()

    async def listen(self, towards: str = "") -> None:
        """Let the other ranks in, `towards` the address of one of another machine if there are any.

        Raises:
            OSError: there is no way to that address.
        """
        if self.world_size > 1:
            self.address, server = await listen_locally(self._serve)
            self._servers.append(server)
        if self.apart:
            self.address, server = await listen_everywhere(
                self.address.name, self._serve, expected=self.world_size, towards=towards
            )
            self._servers.append(server)

    async def exchange(self, step: Step, body: Body, decide: Decide) -> Body:
        try:
            with self._beating(step):
                answers = await decide(await self._gather(step, body))
        except BaseException as error:
            lost = next(iter(self._lost.values()), "")
            if lost and isinstance(error, PreflightError):
                # what servers say of a rank that has ended does not name it
                error = RankFailed(f"{lost}: {step.subject} is given up ({error.message})")
            self.fail(step, error)
            raise error
        for rank, channel in self._channels.items():
            channel.send({"round": step.round, "step": step.name, "body": answers[rank]})
        return answers[0]

    async def close(self) -> None:
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        for channel in self._channels.values():
            channel.close()
        await asyncio.sleep(0)  # closed by the next turn of the loop, which may be its last

    async def _gather(self, step: Step, body: Body) -> list[Body]:
        clock = asyncio.get_running_loop().time
        until = clock() + step.patience_s
        keys = {rank: (step.round, step.name, rank) for rank in range(1, self.world_size)}
        while missing := [rank for rank, key in keys.items() if key not in self._bodies]:
            for rank in missing:
                if rank in self._lost:
                    raise RankFailed(f"{self._lost[rank]}: {step.subject} is given up")
            self._changed.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                raise RankFailed(_late(missing, step)) from None
        bodies = [body, *(self._bodies.pop(key) for key in keys.values())]
        self._bodies = {key: late for key, late in self._bodies.items() if key[0] >= step.round}
        for rank, given in enumerate(bodies):
            if "error" in given:
                raise _error(given["error"], f"rank {rank}: ")
        return bodies

    def fail(self, step: Step, error: BaseException) -> None:
        """The ranks that come later learn of it, too."""
        if not isinstance(error, SkyctlError):
            notes = getattr(error, "__notes__", ())
            reason = "; ".join([repr(error), *notes])
            error = RankFailed(f"rank 0 failed in {step.subject}: {reason}")
        self._failures = {step.round: error}
        self._bodies = {key: body for key, body in self._bodies.items() if key[0] > step.round}
        for channel in self._channels.values():
            channel.send({"round": step.round, "error": _described(error)})

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        channel, rank = _Channel(writer), 0
        try:
            rank = int((await _receive(reader))["rank"])
            if (channel.is_local and channel.uid != os.getuid()) or not 0 < rank < self.world_size:
                return
            self._channels.setdefault(rank, channel)
            while self._servers and self._channels[rank] is channel:
                self._take(rank, await _receive(reader))
        except (OSError, EOFError, ValueError, KeyError):
            if self._channels.get(rank) is channel:
                self._lost[rank] = (
                    f"rank {rank} ({channel.peer_name}) has ended, or closed its trainer"
                )
                self._changed.set()
                self.when_lost()
        except asyncio.CancelledError:
            pass  # the loop ends; Python 3.11 would print a traceback of each connection
        finally:
            channel.close()

    def _take(self, rank: int, message: Body) -> None:
        number = int(message["round"])
        if failure := self._failures.get(number):
            self._channels[rank].send({"round": number, "error": _described(failure)})
            return
        self._bodies[number, str(message["step"]), rank] = message["body"]
        self._changed.set()

    @contextmanager
    def _beating(self, step: Step) -> Iterator[None]:
        """Show the other ranks meanwhile that this one is in the step, too."""

        async def beat() -> None:
            while True:
                for channel in self._channels.values():
                    channel.send({"round": step.round, "step": ""})
                await asyncio.sleep(min(_BEAT_S, step.patience_s / 4))

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()


class Link(Ranks):
    """The end of another rank."""

    def __init__(
        self, rank: int, machines: Sequence[str], reader: StreamReader, writer: StreamWriter
    ) -> None:
        super().__init__(rank, machines)
        self._channel = _Channel(writer)
        self._answers: asyncio.Queue[Body | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def connect(cls, address: Address, rank: int, machines: Sequence[str]) -> Link:
        """Meet rank 0, which listens there.

        Raises:
            RankFailed: it does not.
        """
        local = machines[rank] == machines[0]
        try:
            streams = await address.connect(local=local)
        except (OSError, EOFError) as error:
            if local:
                message = f"rank {rank} does not reach rank 0: it has ended ({error})"
                raise RankFailed(message) from error
            at = f"rank 0 at {address.host}:{address.port}"
            raise RankFailed(f"rank {rank} does not reach {at}: {error!r}") from error
        link = cls(rank, machines, *streams)
        link._channel.send({"rank": rank})
        return link

    async def exchange(self, step: Step, body: Body, decide: Decide) -> Body:
        self._channel.send({"round": step.round, "step": step.name, "body": body})
        answering = asyncio.ensure_future(self._answer(step))
        try:
            return await asyncio.shield(answering)
        except asyncio.CancelledError as error:
            self.fail(step, error)
            while step.lends and not answering.done():
                with suppress(asyncio.CancelledError):  # it may be cancelled more than once
                    await asyncio.wait([answering])
            raise
        finally:
            answering.cancel()

    async def _answer(self, step: Step) -> Body:
        try:
            while True:
                async with asyncio.timeout(step.patience_s):
                    answer = await self._answers.get()
                if answer is None:
                    self._answers.put_nowait(None)
                    raise RankFailed(
                        f"rank 0 ({self._channel.peer_name}) has ended, or closed its trainer: "
                        f"{step.subject} is given up"
                    )
                if answer["round"] < step.round:
                    continue  # late, of a round that has failed here
                if answer["round"] > step.round:
                    raise RankFailed(f"rank 0 has abandoned {step.subject}")
                if "error" in answer:
                    raise _error(answer["error"])
                if answer["step"] == step.name:
                    return dict(answer["body"])
        except TimeoutError:
            error = RankFailed(_late([0], step))
            self.fail(step, error)
            raise error from None

    async def _read(self, reader: StreamReader) -> None:
        with suppress(OSError, EOFError, ValueError):
            while True:
                self._answers.put_nowait(await _receive(reader))
        self._answers.put_nowait(None)

    def fail(self, step: Step, error: BaseException) -> None:
        """Whatever the round's next exchange is, this rank fails it."""
        if not isinstance(error, SkyctlError):
            error = RankFailed(f"it was cancelled in {step.subject}")
        for name in STEPS:
            body = {"error": _described(error)}
            self._channel.send({"round": step.round, "step": name, "body": body})

    async def close(self) -> None:
        self._reading.cancel()
        self._channel.close()
        await asyncio.sleep(0)


STEPS = ("gather", "write")
"""The exchanges of a round, in their order."""


def failure_body(error: BaseException) -> Body:
    """A body that fails the exchange on every rank, by what went wrong on this one."""
    if not isinstance(error, SkyctlError):
        error = RankFailed(repr(error))
    return {"error": _described(error)}


def _described(error: SkyctlError) -> dict[str, Any]:
    return {**error.to_json(), "details": error.details}


def _error(described: dict[str, Any], before: str = "") -> SkyctlError:
    message, kind = before + described["message"], described["kind"]
    if kind == RankFailed.__name__:
        return RankFailed(message, hint=described["hint"])
    return error_named(kind, message, hint=described["hint"], details=described["details"])


def _late(ranks: Sequence[int], step: Step) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    many = len(ranks) > 1
    which = f"{count_of(len(ranks), 'rank')} ({listed}) have" if many else f"rank {listed} has"
    return f"{which} not come to {step.subject} within {format_seconds(step.patience_s)}"


async def _receive(reader: StreamReader) -> Body:
    """Raises EOFError, OSError or ValueError."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _LONGEST:
        raise ValueError("not a message of a rank")
    message: Body = json.loads(await reader.readexactly(length))
    return message
