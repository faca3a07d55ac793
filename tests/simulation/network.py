"""Requests and answers between simulated processes: delayed, lost, reset or refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from skyctl.http.transport import Answer, CannotConnect, ConnectionBroke, NoAnswer, Request
from tests.simulation.kernel import Kernel, Process, current
from tests.simulation.loop import Killed, VirtualLoop

_LINGERS_S = 0.5
"""How much later than its delay a request of a sender that died may arrive."""


@dataclass(slots=True)
class Reply:
    """The way back of one request. `gone`: whether its caller has hung up."""

    send: Callable[[int, bytes], None]
    gone: Callable[[], bool]

    def __call__(self, status: int, body: bytes) -> None:
        self.send(status, body)


class Host(Protocol):
    """Something that answers at a URL. `process` is None before its first start."""

    process: Process | None

    def receive(self, request: Request, caller: Process | None, reply: Reply) -> None:
        """A request arrived; call `reply(status, body)` once, at any later time."""


@dataclass
class Weather:
    """How bad the network is now: probabilities per call."""

    refused: float = 0.0
    reset_before: float = 0.0
    lost_answer: float = 0.0
    reset_after: float = 0.0
    slow: float = 0.02


class Network:
    def __init__(self, loop: VirtualLoop, kernel: Kernel, dice: Random) -> None:
        self.hosts: dict[str, Host] = {}
        self.weather = Weather()
        self.calls = 0
        self.on_arrival: Callable[[], None] = lambda: None
        self._loop = loop
        self._kernel = kernel
        self._dice = dice
        self._open: dict[int, list[asyncio.Future[Answer]]] = {}

    def serve(self, url: str, host: Host) -> None:
        self.hosts[url] = host

    def delay(self) -> float:
        """One way, in seconds."""
        dice = self._dice
        slow = dice.random() < self.weather.slow
        return dice.random() * (0.4 if slow else 0.003)

    async def call(self, request: Request, timeout_s: float) -> Answer:
        """One request of the process that runs, and its answer."""
        caller, loop, dice, weather = current(), self._loop, self._dice, self.weather
        self.calls += 1
        future: asyncio.Future[Answer] = loop.create_future()
        luck = dice.random()
        # a socket of this machine breaks or answers: what is lost on it is lost with a process
        lost = luck < weather.lost_answer and not request.url.startswith("/")
        reset_after = not lost and luck < weather.lost_answer + weather.reset_after
        luck = dice.random()
        refused = luck < weather.refused
        reset_before = not refused and luck < weather.refused + weather.reset_before

        def fail(error: Exception) -> None:
            if not future.done():
                future.set_exception(error)

        def arrive(late: bool = False) -> None:
            if caller is not None and caller.dead and not late:
                loop.call_later(dice.random() * _LINGERS_S, arrive, True, context=_NOBODY)
                return
            host = self.hosts.get(request.url)
            process = host.process if host is not None else None
            if host is None or process is None or process.dead or refused:
                fail(CannotConnect("Connection refused"))
                return
            if reset_before:
                fail(ConnectionBroke("Connection reset by peer"))
                return
            self._watch(process, future)
            self.on_arrival()

            def reply(status: int, body: bytes) -> None:
                if lost or future.done():
                    return
                back = self.delay()
                if reset_after:
                    loop.call_later(back, fail, ConnectionBroke("Connection reset by peer"))
                else:
                    loop.call_later(back, answer, Answer(status, "", {}, body))

            def gone() -> bool:
                return future.done() or (caller is not None and caller.dead)

            host.receive(request, caller, Reply(reply, gone))

        def answer(found: Answer) -> None:
            if not future.done():
                future.set_result(found)

        # as the kernel's: they go on when the caller dies, its request is on its way
        loop.call_later(self.delay(), arrive, context=_NOBODY)
        late = loop.call_later(timeout_s, fail, NoAnswer("no answer"), context=_NOBODY)
        try:
            return await future
        finally:
            late.cancel()

    def _watch(self, process: Process, future: asyncio.Future[Answer]) -> None:
        """The caller's connection breaks when the process dies."""
        waiting = self._open.get(process.pid)
        if waiting is None:
            waiting = self._open[process.pid] = []

            def broke() -> None:
                for one in waiting:
                    if not one.done():
                        self._loop.call_later(
                            self.delay(), _fail, one, ConnectionBroke("it died"), context=_NOBODY
                        )

            process.on_death.append(broke)
        if len(waiting) > 32:
            waiting[:] = [one for one in waiting if not one.done()]
        waiting.append(future)


def _fail(future: asyncio.Future[Answer], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def nobody() -> Any:
    """A context that belongs to no process."""
    from contextvars import Context

    return Context()


_NOBODY = nobody()


class SimTransport:
    """Stands in for `KeptConnections`."""

    network: Network | None

    def __init__(self, *, unix_socket: str = "", **_: Any) -> None:
        self._socket = unix_socket

    async def send(self, request: Request, *, timeout_s: float) -> Answer:
        if self._socket:
            request = request._replace(url=self._socket)
        if self.network is None:
            raise Killed  # the schedule is over
        return await self.network.call(request, timeout_s)

    async def aclose(self) -> None:
        """Nothing is open."""


def body(value: Any) -> bytes:
    return json.dumps(value).encode()
