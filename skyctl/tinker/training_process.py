"""The worker as the API process sees it: started on demand, restarted after a death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from skyctl.tinker import worker_messages

START_TIMEOUT_S = 900.0
HUNG_AFTER_S = 60.0
_SHOWN = {"go_on": "forward_backward"}
"""What `status` calls an operation, where that is not its name."""


class WorkerDied(Exception):
    """The worker ended, or did not answer, during a request."""


class Refused(Exception):
    """The request cannot be carried out. `category` is user or server, as in the SDK."""

    def __init__(self, message: str, category: str) -> None:
        super().__init__(message)
        self.category = category


@dataclass(frozen=True)
class WorkerSettings:
    """What the worker is started with."""

    name: str
    """The base model's name in the API."""
    path: str
    """The base model's directory."""
    device: str
    """torch's name of the device."""
    dtype: str
    """torch's name of the base's dtype."""
    threads: int = 0
    """CPU threads; 0: torch's default."""
    batch_tokens: int = 4096
    """Bounds rows × longest row of one forward pass."""
    checkpointing: bool = False
    """Recompute activations for the gradient instead of keeping them."""
    timeout_s: float = 1800.0
    """Seconds after which a request is given up, and the worker ended."""


class Worker:
    """One worker process at a time. `life` counts them: a model is open in one life only."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.life = 0
        self.hello: dict[str, Any] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()
        self._failures = 0
        self._fault = ""  # why the latest start failed
        self._operation: tuple[str, float] | None = None
        self._progress: tuple[Any, float] = None, 0.0  # CPU time used, and since when

    def report(self) -> dict[str, Any]:
        """What `status` shows of it."""
        operation, began = self._operation or (None, 0.0)
        return {
            "worker_pid": self.pid,
            "device": self.settings.device,
            "operation": operation,
            "operation_s": None if operation is None else time.monotonic() - began,
            "fault": self._fault or self._hung(),
        }

    def _hung(self) -> str:
        """That it has used no CPU for so long that it cannot be at work, or "". On a GPU, waiting
        for a kernel uses CPU.
        """
        if self._process is None or self._operation is None:
            return ""
        (operation, began), pid = self._operation, self._process.pid
        try:
            used = psutil.Process(pid).cpu_times()
        except psutil.Error:  # it has just ended
            return ""
        if used != self._progress[0] or began > self._progress[1]:
            self._progress = used, time.monotonic()
        idle_s = time.monotonic() - self._progress[1]
        if idle_s < HUNG_AFTER_S:
            return ""
        return f"the training worker (pid {pid}) has done nothing for {idle_s:.0f} s of {operation}"

    async def start(self) -> None:
        """Start it before a request needs it. Whether it did is in `report`."""
        with contextlib.suppress(WorkerDied):
            await self.ensure()

    @property
    def pid(self) -> int | None:
        """The live worker's, None if there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def ensure(self) -> int:
        """Start a worker unless one lives; returns its `life`.

        Raises:
            WorkerDied: it does not start.
        """
        async with self._turn:
            if self._streams is None:
                await asyncio.sleep(min(2.0**self._failures - 1, 30.0))
                with self._noted("start"):
                    await self._start()
            return self.life

    async def call(
        self, header: dict[str, Any], body: bytes = b"", *, life: int | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Ask the worker; with `life`, only that one.

        Raises:
            WorkerDied: no answer, or another worker lives now; what it had done is unknown.
            Refused: it did not do it.
        """
        exchange = asyncio.create_task(self._exchange(header, body, life))
        exchange.add_done_callback(lambda task: task.cancelled() or task.exception())
        # a caller that leaves does not end it: the next one must not read its answer
        return await asyncio.shield(exchange)

    async def _exchange(
        self, header: dict[str, Any], body: bytes, life: int | None
    ) -> tuple[dict[str, Any], bytes]:
        async with self._turn:
            if self._streams is None or (life is not None and life != self.life):
                raise WorkerDied("another worker lives now")
            reader, writer = self._streams
            try:
                with self._noted(_SHOWN.get(header["do"], header["do"])):
                    async with asyncio.timeout(self.settings.timeout_s):
                        writer.write(worker_messages.pack(header, body))
                        await writer.drain()
                        answer, content = await worker_messages.read_async(reader)
            except (OSError, EOFError, TimeoutError) as error:
                await self.stop()
                raise WorkerDied(f"the training worker ended: {error!r}") from error
        if "error" in answer:
            raise Refused(answer["error"], answer["category"])
        return answer, content

    @contextlib.contextmanager
    def _noted(self, operation: str) -> Iterator[None]:
        self._operation = (operation, time.monotonic())
        try:
            yield
        finally:
            self._operation = None

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        settings = {**vars(self.settings), "parent": os.getpid()}
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "skyctl.tinker.worker",
                str(theirs.fileno()),
                json.dumps(settings),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        self._streams = await asyncio.open_connection(sock=ours, limit=2**20)
        began = time.monotonic()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.hello, _ = await worker_messages.read_async(self._streams[0])
        except BaseException as error:
            await self.stop()
            self._failures += 1
            if isinstance(error, OSError | EOFError | TimeoutError):
                took = time.monotonic() - began
                self._fault = (
                    f"the training worker did not start ({took:.0f} s); its output has the reason"
                )
                raise WorkerDied(self._fault) from error
            raise
        self._failures, self._fault = 0, ""
        self.life += 1

    async def stop(self) -> None:
        """End the worker."""
        process, streams, self._process, self._streams = self._process, self._streams, None, None
        if streams is not None:
            streams[1].close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
