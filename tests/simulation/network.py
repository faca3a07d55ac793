"""Requests and answers between simulated processes: delayed, lost, reset or refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from skyctl.http.transport import Answer, CannotConnect, ConnectionBroke, NoAnswer, Request
from tests.simulation.kernel import Process, current
from tests.simulation.loop import Killed, VirtualLoop

PUSHING: ContextVar[bool] = ContextVar("pushing", default=False)
"""Whether what runs is part of a push, and not another task of a supervisor that pushes."""
_LINGERS_S = 0.9
"""How long after it was sent a request of a sender that died may arrive."""


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
    def __init__(self, loop: VirtualLoop, dice: Random) -> None:
        self.hosts: dict[str, Host] = {}
        self.weather = Weather()
        self.on_arrival: Callable[[], None] = lambda: None
        self.loop = loop
        self.dice = dice
        self._open: dict[int, list[Reply]] = {}

    def serve(self, url: str, host: Host) -> None:
        self.hosts[url] = host

    def delay(self) -> float:
        """One way, in seconds."""
        dice = self.dice
        slow = dice.random() < self.weather.slow
        return dice.random() * (0.4 if slow else 0.003)

    async def call(self, request: Request, timeout_s: float) -> Answer:
        """One request of the process that runs, and its answer."""
        caller, loop = current(), self.loop
        reply = Reply(self, request, caller, loop.create_future())
        # as the kernel's: they go on when the caller dies, its request is on its way
        reply.delay_s = self.delay()
        loop.call_later(reply.delay_s, reply.arrive, context=_NOBODY)
        if caller is not None and caller.doomed.get("request") == request.path.partition("?")[0]:
            caller.doomed["passes"] -= 1
            if caller.doomed["passes"] < 0:
                caller.kernel.die(f"is killed when it has sent {request.path}")
        late = loop.call_later(timeout_s, reply.expire, context=_NOBODY)
        try:
            return await reply.future
        finally:
            late.cancel()

    def watch(self, process: Process, reply: Reply) -> None:
        """The caller's connection breaks when the process dies."""
        waiting = self._open.get(process.pid)
        if waiting is None:
            waiting = self._open[process.pid] = []

            def broke() -> None:
                for one in waiting:
                    if not one.future.done():
                        error = ConnectionBroke("it died")
                        self.loop.call_later(self.delay(), one.fail, error, context=_NOBODY)

            process.on_death.append(broke)
        if len(waiting) > 32:
            waiting[:] = [one for one in waiting if not one.future.done()]
        waiting.append(reply)


class Reply:
    """One request on its way, and the way back of its answer. Its luck is decided when it leaves.

    No closures: each would be a cycle, thousands of which are to be collected.
    """

    __slots__ = (
        "by_push",
        "caller",
        "delay_s",
        "future",
        "lost",
        "network",
        "refused",
        "request",
        "reset_after",
        "reset_before",
    )

    def __init__(
        self,
        network: Network,
        request: Request,
        caller: Process | None,
        future: asyncio.Future[Answer],
    ) -> None:
        self.network, self.request, self.caller, self.future = network, request, caller, future
        self.delay_s, self.by_push = 0.0, PUSHING.get()
        weather, dice = network.weather, network.dice
        luck = dice.random()
        # a socket of this machine breaks or answers: what is lost on it is lost with a process
        self.lost = luck < weather.lost_answer and not request.url.startswith("/")
        self.reset_after = not self.lost and luck < weather.lost_answer + weather.reset_after
        luck = dice.random()
        self.refused = luck < weather.refused
        self.reset_before = not self.refused and luck < weather.refused + weather.reset_before

    def arrive(self, late: bool = False) -> None:
        network, caller = self.network, self.caller
        if caller is not None and caller.dead and not late:
            after_s = network.dice.random() * (_LINGERS_S - self.delay_s)
            network.loop.call_later(after_s, self.arrive, True, context=_NOBODY)
            return
        host = network.hosts.get(self.request.url)
        process = host.process if host is not None else None
        if host is None or process is None or process.dead or self.refused:
            self.fail(CannotConnect("Connection refused"))
            return
        if self.reset_before:
            self.fail(ConnectionBroke("Connection reset by peer"))
            return
        network.watch(process, self)
        network.on_arrival()
        host.receive(self.request, caller, self)

    def __call__(self, status: int, body: bytes) -> None:
        """The host answers."""
        if self.lost or self.future.done():
            return
        loop, back = self.network.loop, self.network.delay()
        if self.reset_after:
            loop.call_later(back, self.fail, ConnectionBroke("Connection reset by peer"))
        else:
            loop.call_later(back, self._succeed, Answer(status, "", {}, body))

    @property
    def heard(self) -> bool:
        """Whether an answer now reaches its caller."""
        return not (self.lost or self.reset_after or self.gone())

    def gone(self) -> bool:
        """Whether its caller has hung up."""
        return self.future.done() or (self.caller is not None and self.caller.dead)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        self.fail(NoAnswer("no answer"))

    def _succeed(self, answer: Answer) -> None:
        if not self.future.done():
            self.future.set_result(answer)


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
