"""Weights of another server of the fleet, which a server that has just started copies worker by
worker, each tensor as it lies: both run the same engine with the same arguments.

    open    the sibling's workers get two buffers ready; those of the server map them
    update  frozen: the sibling fills one buffer while the server copies the other

The sibling serves meanwhile. Its digest on record decides whether what arrived is what it has.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.engines.base import Server
from skyctl.errors import PreflightError, ServerError, SkyctlError
from skyctl.kill_points import reached
from skyctl.push.request import PushFleet, Sibling
from skyctl.push.servers import Holds, PushedServer, alive, each
from skyctl.push.way import Delivery, Plan, Question
from skyctl.states import SIBLING
from skyctl.transfer.sender_pool import SenderPool
from skyctl.wire.worker import WorkerMethod

BUFFER_BYTES = 128 << 20
"""What a worker on CPU takes of the directory at most."""
_CLOSE_TIMEOUT_S = 10.0


def sibling_way(sibling: Sibling, question: Question) -> SiblingWay:
    """Raises PreflightError: the server has more than a sibling can give it."""
    [fact] = question.facts
    if fact.process.drafts:
        raise PreflightError("it drafts tokens by weights of its own")
    return SiblingWay(sibling, question.fleet)


@dataclass(frozen=True)
class SiblingWay:
    """The workers of one server copy what those of another have."""

    sibling: Sibling
    """It has the weights."""
    fleet: PushFleet
    """The server that gets them, and the bounds to keep."""

    name = SIBLING
    reads_every_byte = True
    layout_only_by_loader = False

    @property
    def reason(self) -> str:
        return f"the server copies them from {self.sibling.name}, worker by worker"

    async def plan(
        self, question: Question, servers: Sequence[PushedServer]
    ) -> tuple[SiblingWay, Plan]:
        return self, Plan()

    def delivery(self, senders: SenderPool, *, by_loader: bool = False) -> Delivery:
        return SiblingDelivery(self.sibling, self.fleet)


class SiblingDelivery(Delivery):
    """One attempt. A second goes through a file (`supervisor/weights.py`)."""

    def __init__(self, sibling: Sibling, fleet: PushFleet) -> None:
        self._sibling = sibling.control
        self._directory = sibling.directory
        self._fleet = fleet
        self._timeout_s = fleet.timeouts.update_s
        self._key = secrets.token_hex(8)
        self._chunks = 0
        self._opened: Sequence[PushedServer] | None = None

    async def open(self, servers: Sequence[PushedServer]) -> None:
        self._opened = ()
        try:
            offers = await self._share()
            self._opened = servers
            for server in servers:
                await server.control.ask_workers(
                    WorkerMethod.WEIGHTS_OPEN,
                    {"key": self._key, "offers": offers, "pid": os.getpid()},
                    timeout_s=self._timeout_s,
                )
        except ServerError as error:
            raise PreflightError(error.message, hint=error.hint) from error

    async def _share(self) -> list[dict[str, Any]]:
        offers = await self._sibling.ask_workers(
            WorkerMethod.WEIGHTS_SHARE,
            {"key": self._key, "directory": self._directory, "pid": os.getpid()},
            timeout_s=self._timeout_s,
        )
        if reason := next((offer["reason"] for offer in offers if offer["reason"]), ""):
            raise PreflightError(f"{self._sibling.target.name}: {reason}")
        self._chunks = max(-(-o["total_bytes"] // o["buffer_bytes"]) for o in offers)
        return offers

    async def update(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        timeout_s = self._timeout_s * 2
        await each(alive(servers), self._copy, timeout_s=timeout_s, call_name="update")

    async def _copy(self, server: PushedServer) -> None:
        """Copy chunk after chunk; the sibling fills the next one meanwhile."""
        server.proof.copied = True
        await self._fill(0)
        for chunk in range(self._chunks):
            last = chunk + 1 == self._chunks
            server.holds = Holds.UNKNOWN
            reached("push.update.call")
            copying = self._load(server, {"key": self._key, "chunk": chunk, "last": last})
            filling = [] if last else [self._fill(chunk + 1)]
            # both end before an error is raised: the buffers are released after it
            ended = await asyncio.gather(copying, *filling, return_exceptions=True)
            if error := next((e for e in ended if isinstance(e, BaseException)), None):
                raise error
            reached("push.update.sent")

    async def _load(self, server: PushedServer, arguments: dict[str, Any]) -> None:
        with server.spans.loading():
            await server.control.ask_workers(
                WorkerMethod.WEIGHTS_COPY, arguments, timeout_s=self._timeout_s
            )

    async def _fill(self, chunk: int) -> None:
        arguments = {"key": self._key, "chunk": chunk}
        await self._sibling.ask_workers(
            WorkerMethod.WEIGHTS_FILL, arguments, timeout_s=self._timeout_s
        )

    async def close(self) -> None:
        """Unmap the sibling's buffers, then free them. Those that a server may still map are kept
        for the next copy.
        """
        opened, self._opened = self._opened, None
        if opened is None:
            return
        unmapped = [await _closed(server.control, free=True) for server in opened]
        await _closed(self._sibling, free=all(unmapped))


async def _closed(control: Server, *, free: bool) -> bool:
    """End a copy in a server's workers; returns whether it has."""
    try:
        await control.ask_workers(
            WorkerMethod.WEIGHTS_CLOSE, {"free": free}, timeout_s=_CLOSE_TIMEOUT_S
        )
    except SkyctlError:
        return False
    return True
