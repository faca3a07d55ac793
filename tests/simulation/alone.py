"""One simulated engine by itself, in real time, behind skyctl's own client: for contract tests.

It generates as far as it would answer: a request waits until the server serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from random import Random
from typing import Any

from skyctl.http.target import ServerTarget
from skyctl.http.transport import Answer, NoAnswer, Request
from tests.simulation.disk import Checkpoints
from tests.simulation.engine import Engine, Frailty
from tests.simulation.kernel import Kernel, Process
from tests.simulation.sender import Memory

_POLL_S = 0.02


class _Heard:
    """A reply that always arrives."""

    heard, by_push = True, False

    def __init__(self, answered: asyncio.Future[Answer]) -> None:
        self._answered = answered

    def __call__(self, status: int, body: bytes) -> None:
        self._answered.set_result(Answer(status, "", {}, body))


class _RealTime:
    """As much of a simulated loop as an engine uses."""

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, call: Callable[..., Any], *args: Any, context: Context) -> Any:
        return asyncio.get_running_loop().call_at(when, call, *args, context=context)

    def call_later(
        self, delay: float, call: Callable[..., Any], *args: Any, context: Context
    ) -> Any:
        return asyncio.get_running_loop().call_later(delay, call, *args, context=context)


class Alone:
    """A Transport to one engine that runs the model at `model`."""

    def __init__(self, home: Path) -> None:
        loop: Any = _RealTime()
        self._kernel = Kernel(loop, Random(0), lambda line: None)
        self._memories: dict[int, Memory] = {}
        checkpoints = Checkpoints(home)
        self.model = checkpoints.write("model", 0)
        self.target = ServerTarget("simulated", "http://simulated")
        self.engine = Engine(
            "simulated",
            self.target.url,
            self.model,
            checkpoints.values(0),
            ranks=1,
            loop=loop,
            kernel=self._kernel,
            dice=Random(0),
            frailty=Frailty(slow=0.0),
            memories=self._memories,
            checkpoints=checkpoints,
            watch=lambda engine, what: None,
            before=lambda engine, path, caller: None,
        )
        self.engine.users = False
        self.engine.start(self._kernel.spawn("server", None))

    def offer(self, pid: int, session: str, slots: dict[int, dict[str, int]]) -> None:
        """Let the engine find this at process `pid`: tensor → crc32, in each slot."""
        self._kernel.processes[pid] = Process(self._kernel, pid, "sender", None)
        self._memories[pid] = Memory(session, slots)

    async def send(self, request: Request, *, timeout_s: float) -> Answer:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                if request.path == "/v1/completions":
                    while not self.engine.serving:  # noqa: ASYNC110 - it tells nobody
                        await asyncio.sleep(_POLL_S)
                    return Answer(200, "", {}, b"{}")
                self.engine.receive(request, None, _Heard(answered))
                return await answered
        except TimeoutError:
            raise NoAnswer("no answer") from None

    async def aclose(self) -> None:
        """Nothing is open."""
