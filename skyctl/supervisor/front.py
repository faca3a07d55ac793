"""Fronts, the processes that clients talk to: the router and the Tinker API. A front starts once
there is a server to serve, and is probed regularly.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from skyctl.core.plan import FrontSpec
from skyctl.core.status import TrainerRank
from skyctl.errors import SkyctlError
from skyctl.http.target import ServerTarget
from skyctl.launch.base import ChildProcess
from skyctl.states import Phase, ReplicaState
from skyctl.supervisor.kept import Context, KeptRunning
from skyctl.units import format_seconds

READY_TIMEOUT_S = 60.0
FRONT_TIMEOUT_S = 10.0
ASK_INTERVAL_S = 5.0
_TRAINING = ("models", "operation", "operation_s")


@dataclass(kw_only=True)
class FrontContext(Context):
    """What fronts are given of their fleet."""

    desired: Callable[[], Mapping[str, str]]
    """What a front serves, URLs by name: it does not start while that is empty."""
    undecided: Callable[[], Set[str]]
    """URLs that a router keeps if it has them, and does not take."""
    role: Callable[[str], str]
    """Of a server by its name."""
    entries: Callable[[], Mapping[str, int]]
    """Which servers a router lists more than once, and how often."""


class Front(KeptRunning):
    """One front process.

    Call `wake()` whenever `desired()` may have changed.
    """

    _context: FrontContext

    def __init__(self, spec: FrontSpec, context: FrontContext) -> None:
        super().__init__(self.role, spec, context)
        self.spec = spec
        self._desired = context.desired
        self._woken = asyncio.Event()
        self._heard = False  # it has answered since this was last cleared

    @abstractmethod
    async def _first_answer(self) -> None:
        """Raises SkyctlError until it answers."""

    @abstractmethod
    async def _tend(self) -> None:
        """Probe it, and bring what it knows up to date; sets `_heard` once it answers. Raises
        SkyctlError.
        """

    def _command(self) -> tuple[str, ...]:
        """The command line of its next process."""
        return self.spec.argv

    def _variables(self) -> Mapping[str, str]:
        """What is added to the environment of its next process."""
        return self.spec.env

    @property
    def state(self) -> ReplicaState:
        """What `status` shows."""
        return self.phase.state

    def wake(self) -> None:
        """Look at `desired()` again."""
        self._woken.set()

    async def _one_life(self, adopted: ChildProcess | None) -> str:
        self._to(Phase.WAITING)
        while not adopted and not self._desired():
            self._woken.clear()
            await self._woken.wait()
        self._to(Phase.STARTING)
        started = (
            self._adopt(adopted) if adopted else self._spawn(self._command(), self._variables())
        )
        self.process = started
        if reason := await self._until_ready(started):
            return reason
        self._to(Phase.READY)
        return await self._until_silent(started)

    async def _until_ready(self, process: ChildProcess) -> str:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not process.exited.is_set():
            with contextlib.suppress(SkyctlError):
                await self._first_answer()
                return ""
            if time.monotonic() > deadline:
                return f"not ready after {format_seconds(READY_TIMEOUT_S)}"
            await asyncio.sleep(0.2)
        return self._death(process)

    async def _until_silent(self, process: ChildProcess) -> str:
        exited, unheard = asyncio.create_task(process.exited.wait()), 0
        try:
            while not process.exited.is_set():
                self._woken.clear()
                self._heard = False
                try:
                    await self._tend()
                    self._note("")
                except SkyctlError as error:
                    self._note(error.message)
                unheard = 0 if self._heard else unheard + 1
                if unheard >= self.config.health.failures:
                    return f"does not answer: {self.reason}"
                woken = asyncio.create_task(self._woken.wait())
                await asyncio.wait(
                    {exited, woken}, timeout=ASK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
                woken.cancel()
        finally:
            exited.cancel()
        return self._death(process)

    def _note(self, reason: str) -> None:
        if reason != self.reason:
            self.reason = reason
            self._context.changed()


class TinkerChild(Front):
    """The Tinker API's process (`skyctl/tinker/`), with the training process below it."""

    role = "tinker"

    def __init__(self, spec: FrontSpec, context: FrontContext) -> None:
        super().__init__(spec, context)
        self._worker: Mapping[str, Any] = {}  # what the API reports of its training process

    @property
    def training(self) -> dict[str, Any]:
        """What `status` shows of the training process; nothing while the API is not ready."""
        worker = self._worker if self.state is ReplicaState.READY else {}
        ranks = tuple(TrainerRank(**rank) for rank in worker.get("ranks", ()))
        return {"ranks": ranks, **{name: worker.get(name) for name in _TRAINING}}

    async def _first_answer(self) -> None:
        target = ServerTarget(self.name, self.spec.url)
        answer = await self._context.client.call(
            target, "GET", "/api/v1/healthz", timeout_s=FRONT_TIMEOUT_S
        )
        self._worker = answer.get("worker") or {} if isinstance(answer, dict) else {}

    async def _tend(self) -> None:
        await self._first_answer()
        self._heard = True
        if fault := self._worker.get("fault"):
            raise SkyctlError(fault)
