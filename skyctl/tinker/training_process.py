"""The worker as the API process sees it: a rank for each device, started on demand, restarted after
the death of any.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from skyctl.launch.base import Node
from skyctl.tinker import worker_messages
from skyctl.tinker.connection import beat, connect

START_TIMEOUT_S = 900.0
HUNG_AFTER_S = 60.0
ALONE_S = 5.0
"""Seconds that a rank waits for one that has failed: by then all have failed, if all do."""
_TOGETHER = ("forward_backward", "go_on", "optim_step", "save", "prompt_logprobs")
"""Operations in which ranks may wait for each other."""
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
    devices: Sequence[str]
    """torch's names of the devices; a rank on each."""
    dtype: str
    """torch's name of the base's dtype."""
    threads: int = 0
    """CPU threads of a rank; 0: torch's default, divided among the ranks."""
    batch_tokens: int = 4096
    """Bounds rows × longest row of one forward pass."""
    checkpointing: bool = False
    """Recompute activations for the gradient instead of keeping them."""
    shard_base: bool | None = None
    """Whether several ranks divide the base; None: where it takes too much of a GPU."""
    timeout_s: float = 1800.0
    """Seconds after which a request is given up, and the worker ended."""
    node: Node | None = None
    """The machine of all ranks; None for this one."""
    seen: str = ""
    """A file that this machine must see as the API's does; "" for none."""


@dataclass(frozen=True)
class _Rank:
    """One process of the worker, or the connection to another machine's."""

    process: asyncio.subprocess.Process
    """It has a handle on nothing but its socket."""
    reader: asyncio.StreamReader
    """Its answers."""
    writer: asyncio.StreamWriter
    """What it is asked."""

    async def ask(self, message: bytes) -> tuple[dict[str, Any], bytes]:
        """Its answer. Raises OSError, EOFError: it ended."""
        self.writer.write(message)
        await self.writer.drain()
        return await worker_messages.read_async(self.reader)


class Worker:
    """One worker at a time, as a process for each rank: they get the same messages, and end
    together. `life` counts them: a model is open in one life only.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.life = 0
        self.hello: dict[str, Any] = {}
        self._ranks: list[_Rank] = []
        self._turn = asyncio.Lock()
        self._failures = 0
        self._fault = ""  # why the latest start failed
        self._operation: tuple[str, float] | None = None
        self._progress: tuple[Any, float] = None, 0.0  # CPU time used, and since when
        self._watchers: set[asyncio.Task[None]] = set()

    def report(self) -> dict[str, Any]:
        """What `status` shows of it."""
        operation, began = self._operation or (None, 0.0)
        return {
            "ranks": self._shown_ranks(),
            "operation": operation,
            "operation_s": None if operation is None else time.monotonic() - began,
            "fault": self._fault or self._hung(),
        }

    def _shown_ranks(self) -> list[dict[str, Any]]:
        if (node := self.settings.node) is not None:
            ranks = self.hello.get("ranks", []) if self.alive else []
            return [{**rank, "device": f"{rank['device']} of {node.target}"} for rank in ranks]
        return [
            {"pid": rank.process.pid, "device": device}
            for rank, device in zip(self._ranks, self.settings.devices, strict=False)
            if rank.process.returncode is None
        ]

    def _hung(self) -> str:
        """That no rank has used CPU for so long that none can be at work, or "". On a GPU, waiting
        for a kernel uses CPU; a rank that waits for another uses none.
        """
        if not self._ranks or self._operation is None or self.settings.node is not None:
            return ""
        operation, began = self._operation
        pids = [rank.process.pid for rank in self._ranks]
        try:
            used = [psutil.Process(pid).cpu_times() for pid in pids]
        except psutil.Error:  # it has just ended
            return ""
        if used != self._progress[0] or began > self._progress[1]:
            self._progress = used, time.monotonic()
        idle_s = time.monotonic() - self._progress[1]
        if idle_s < HUNG_AFTER_S:
            return ""
        worker = f"the training worker (pid {', '.join(map(str, pids))})"
        return f"{worker} has done nothing for {idle_s:.0f} s of {operation}"

    async def start(self) -> None:
        """Start it before a request needs it. Whether it did is in `report`."""
        with contextlib.suppress(WorkerDied):
            await self.ensure()

    @property
    def alive(self) -> bool:
        """Whether every rank is."""
        codes = [rank.process.returncode for rank in self._ranks]
        return bool(codes) and codes == [None] * len(codes)

    async def ensure(self) -> int:
        """Start a worker unless one lives; returns its `life`.

        Raises:
            WorkerDied: it does not start.
        """
        async with self._turn:
            if not self._ranks:
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
            if not self._ranks or (life is not None and life != self.life):
                raise WorkerDied("another worker lives now")
            message = worker_messages.pack(header, body)
            try:
                with self._noted(_SHOWN.get(header["do"], header["do"])):
                    answers = await self._ask(self._ranks, message, header["do"] in _TOGETHER)
            except (OSError, EOFError, TimeoutError) as error:
                await self.stop()
                raise WorkerDied(f"the training worker ended: {error!r}") from error
        for answer, _ in answers:
            if "error" in answer:
                raise Refused(answer["error"], answer["category"])
        return answers[0]

    async def _ask(
        self, ranks: Sequence[_Rank], message: bytes, together: bool
    ) -> list[tuple[dict[str, Any], bytes]]:
        """The ranks' answers. If one fails, those that wait for it `together` do so in vain.

        Raises:
            OSError, EOFError, TimeoutError: one has ended, or does not answer.
        """
        failed = ""

        async def ask(number: int) -> tuple[dict[str, Any], bytes]:
            nonlocal failed
            answer = await ranks[number].ask(message)
            if together and not failed and answer[0].get("category") == "server":
                device = self.settings.devices[number]
                failed = f"rank {number} ({device}) failed by itself: {answer[0]['error']}"
                soon = asyncio.get_running_loop().time() + ALONE_S
                limit.reschedule(min(soon, limit.when() or soon))
            if "ends" in answer[0]:
                raise EOFError(failed)
            return answer

        try:
            async with asyncio.timeout(self.settings.timeout_s) as limit:
                return await asyncio.gather(*map(ask, range(len(ranks))))
        except TimeoutError as error:
            raise TimeoutError(failed or f"no answer in {self.settings.timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            raise EOFError(failed or repr(error)) from error

    @contextlib.contextmanager
    def _noted(self, operation: str) -> Iterator[None]:
        self._operation = (operation, time.monotonic())
        try:
            yield
        finally:
            self._operation = None

    async def _start(self) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                node = self.settings.node
                await (self._spawn() if node is None else self._connect(node))
                reads = [worker_messages.read_async(rank.reader) for rank in self._ranks]
                (hello, _), *_ = await asyncio.gather(*reads)
            if "error" in hello:
                raise EOFError(hello["error"])
            self.hello = hello
        except BaseException as error:
            await self.stop()
            self._failures += 1
            if isinstance(error, OSError | EOFError | TimeoutError):
                took = f"{time.monotonic() - began:.0f} s"
                self._fault = (
                    f"the training worker did not start ({took}); its output has the reason"
                )
                if self.settings.node is not None and str(error):
                    self._fault += f": {error}"
                raise WorkerDied(self._fault) from error
            raise
        self._failures, self._fault = 0, ""
        self.life += 1

    async def _spawn(self) -> None:
        """Start a process for each rank. They meet in a file without a name: none is left."""
        meeting = os.memfd_create("ranks")
        common = {**vars(self.settings), "parent": os.getpid(), "meeting": meeting}
        try:
            for number in range(len(self.settings.devices)):
                ours, theirs = socket.socketpair()
                with theirs:
                    process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-m",
                        "skyctl.tinker.worker",
                        str(theirs.fileno()),
                        json.dumps({**common, "rank": number}),
                        pass_fds=[theirs.fileno(), meeting],
                        stdin=subprocess.DEVNULL,
                    )
                streams = await asyncio.open_connection(sock=ours, limit=2**20)
                self._ranks.append(_Rank(process, *streams))
        finally:
            os.close(meeting)
        self._watch(_end_together(list(self._ranks)))

    async def _connect(self, node: Node) -> None:
        """Have another machine start them; here they are one."""
        settings = {**vars(self.settings), "devices": list(self.settings.devices), "node": None}
        client = await connect(node, settings, self.settings.seen)
        assert client.stdin is not None and client.stdout is not None
        self._ranks.append(_Rank(client, client.stdout, client.stdin))
        self._watch(beat(client, node.grace_s))
        self._watch(_end_together(list(self._ranks)))

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        watcher = asyncio.create_task(work)
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def stop(self) -> None:
        """End the worker."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.writer.close()
            with contextlib.suppress(ProcessLookupError):
                rank.process.kill()
        for rank in ranks:
            await asyncio.shield(rank.process.wait())


async def _end_together(ranks: Sequence[_Rank]) -> None:
    """Once one has ended, end the others, also while nobody asks them."""
    waits = [asyncio.create_task(rank.process.wait()) for rank in ranks]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            rank.process.kill()
    await asyncio.wait(waits)
