"""Carry a plan's chunks into servers in the layout of their parameters.

Chunks and sender are those of `push/delivery.py`; servers copy what they receive into the running
parameters instead of passing it to vLLM's loader. There is no update session to open or close: a
server in which this breaks off midway is scrubbed and pushed to again by vLLM's loader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from skyctl.errors import PreflightError
from skyctl.kill_points import reached
from skyctl.push.delivery import ChunkDelivery
from skyctl.push.servers import Holds, PushedServer, alive, all_or_none, ask_all, each
from skyctl.push.way import Delivery
from skyctl.push.worker_memory import workers_on_fullest
from skyctl.transfer.plan import Chunk
from skyctl.transfer.reader import Filled
from skyctl.transfer.sender_client import Opened
from skyctl.transfer.sender_pool import Lease
from skyctl.wire.worker import WorkerMethod

_CLOSE_TIMEOUT_S = 5.0


class CannotCopy(PreflightError):
    """A server cannot get ready to copy, for lack of memory for instance. Nothing was touched."""


class RuntimeDelivery(ChunkDelivery):
    """Chunks copied into parameters, by servers whose processes have seen the layout proven.

    Where the sender's slots are on the servers' GPUs, servers map them while they are filled, and
    copy in one call when they are frozen; what exceeds the slots follows as it is read. Otherwise
    all chunks are broadcast from the sender's GPU.

    With `spare_bytes` (what each worker takes for it), weights that layers process are processed as
    their chunks are staged, while the servers serve.
    """

    frees_late = True  # freeing a model's size takes a tenth of the freeze
    copies = True
    _shows = True

    _keeps = True
    """Whether processed weights are kept, to be copied."""

    def __init__(self, *arguments: Any, spare_bytes: int = 0, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._spare_bytes = spare_bytes
        self._filled: dict[int, Filled] = {}
        self._mapping: dict[
            str, PushedServer
        ] = {}  # servers that may have mapped the sender's memory
        self._slots: Mapping[str, Any] | None = None  # what servers map; None: broadcast

    @property
    def _at_once(self) -> bool:
        return self._slots is None

    async def _get_ready(
        self, servers: Sequence[PushedServer], lease: Lease, opened: Opened, slots: int
    ) -> None:
        """Have servers map the slots while they are filled: mapping takes longer than copying out
        of them.
        """
        self._slots = opened.shown
        if self._slots is not None:
            slots = len(self._slots["offsets"])
        elif not opened.staged_whole:
            raise CannotCopy("the checkpoint does not fit on the sender's GPU as a whole")
        telling = asyncio.create_task(self._ask(servers, WorkerMethod.LAYOUT_OPEN, self._opening))
        try:
            if self._spare_bytes:
                await telling
            await self._read_ahead(lease, slots)
            await telling
        finally:
            telling.cancel()
            await asyncio.wait([telling])

    def _opening(self, server: PushedServer) -> dict[str, Any]:
        self._mapping[server.name] = server
        programs = [program.to_wire() for program in self._programs[server.name]]
        if self._slots is None:
            return {"programs": programs, "buffer_bytes": self._plan.slot_bytes}
        payload = self._slots["handles"][self._numbers[server.name]]
        return {"programs": programs, "payload": payload, "offsets": self._slots["offsets"]}

    def _processing(self, chunk: int, server: PushedServer) -> dict[str, Any]:
        return {"chunk": chunk, "keep": self._keeps}

    async def _ask(
        self,
        servers: Sequence[PushedServer],
        method: str,
        arguments: Callable[[PushedServer], dict[str, Any]],
    ) -> None:
        """Have all servers get ready, or none. Raises CannotCopy."""
        reason = await all_or_none(
            servers,
            lambda server: server.control.ask_workers(method, arguments(server)),
            timeout_s=self._fleet.timeouts.control_s,
            call_name="layout",
        )
        if reason:
            raise CannotCopy(reason, hint="push with --layout checkpoint")

    async def _read_ahead(self, lease: Lease, chunks: int) -> None:
        """Read as many chunks as there are slots: servers copy faster than files are read."""
        for chunk in self._plan.chunks[:chunks]:
            filled = await self._staged(lease, chunk)
            if self._slots is not None:
                self._filled[chunk.index] = filled
            if self._spare_bytes:  # chunk by chunk: between them, engines go on with their requests
                mapping = list(self._mapping.values())
                await self._ask(
                    mapping, WorkerMethod.LAYOUT_PROCESS, partial(self._processing, chunk.index)
                )
        self._read_ahead_until = asyncio.get_running_loop().time()

    async def init(self, servers: Sequence[PushedServer]) -> None:
        if self._slots is None:
            await super().init(servers)

    async def start(self, servers: Sequence[PushedServer], *, scrubbing: bool = False) -> None:
        """There is no session to open. Without its sender nothing can be copied: this can still be
        undone.
        """
        failure = self._opened()[0].sender.failure
        if failure is not None:
            self._all_failed(servers, failure)
        await Delivery.start(self, servers)

    async def update(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        for server in servers:
            server.proof.copied = True
        await super().update(servers, on_progress)

    async def _update_by_chunk(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        """Load what is staged in one call, then chunk after chunk as the slots are refilled."""
        sender = self._opened()[0].sender
        chunks, done = self._plan.chunks, 0
        ready = list(chunks[: len(self._filled)])
        while ready and alive(servers):
            following = ready[-1].index + 1
            indices = [chunk.index for chunk in ready]
            arguments = {"chunks": indices, "last": following == len(chunks)}
            await each(
                alive(servers),
                partial(self._rpc, method=WorkerMethod.LAYOUT_LOAD, arguments=arguments),
                timeout_s=self._fleet.timeouts.update_s,
                call_name="update",
            )
            for chunk in ready:
                done += await self._sent(chunk, self._filled.pop(chunk.index))
            on_progress(done)
            ready = list(chunks[following : following + 1])
            for chunk in ready:
                self._filled[chunk.index] = await sender.filled(
                    chunk.index, timeout_s=self._fleet.timeouts.update_s
                )

    async def _call_load(self, server: PushedServer, chunk: Chunk, filled: Filled) -> None:
        sizes = [chunk.size for chunk in self._plan.chunks]
        await self._rpc(server, WorkerMethod.LAYOUT_RECEIVE, {"sizes": sizes})

    async def _rpc(self, server: PushedServer, method: str, arguments: Mapping[str, Any]) -> None:
        server.holds = Holds.UNKNOWN
        reached("push.update.call")
        with server.spans.loading():
            await server.control.collective_rpc(
                method, kwargs=arguments, timeout_s=self._fleet.timeouts.update_s
            )
        reached("push.update.sent")

    async def finish(self, servers: Sequence[PushedServer], version: Callable[[], str]) -> None:
        """There is nothing to close: the calls that copied have ended."""
        await Delivery.finish(self, servers, version)

    async def close(self) -> None:
        """Also release servers that were told what to copy and have not copied it all."""
        mapping, self._mapping = self._mapping, {}
        incomplete = [server for server in mapping.values() if server.holds < Holds.NEW]
        timeout_s = _CLOSE_TIMEOUT_S
        await ask_all(
            incomplete,
            lambda server: server.control.collective_rpc(
                WorkerMethod.LAYOUT_CLOSE, timeout_s=timeout_s
            ),
            timeout_s=timeout_s,
        )
        if self._spare_bytes:
            await ask_all(
                list(mapping.values()),
                lambda server: server.control.extension_rpc(
                    WorkerMethod.FREE_CACHED, timeout_s=timeout_s
                ),
                timeout_s=timeout_s,
            )
        await super().close()

    def _worker_bytes(self, servers: Sequence[PushedServer]) -> int:
        """Chunks are copied straight out of the sender's memory: they take none in the workers."""
        return self._spare_bytes * workers_on_fullest([server.given.gpus for server in servers])

    def _filling(self, servers: Sequence[PushedServer]) -> str:
        return "" if self._spare_bytes else super()._filling(servers)  # freed after the push
