"""Weights that a trainer sends itself, with its own engine: the trainer, and the servers it sends
to.

    push     preflight ─► pause ─► start ─► update: waits ─────────────► finish ─► verify ─► resume
    trainer                                 └► init, start, update, … ─► "sent" ┘

`push/senderless_delivery.py` has the push's side.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from skyctl.store.identity import ProcessIdentity, boot_id
from skyctl.wire.addresses import address_towards

_LOOK_S = 0.5
CANCELLED = "the push was cancelled"
"""Of an update: reported in its trainer's place."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the trainer will wait for the workers of all servers."""

    master_address: str
    master_port: int


@dataclass(frozen=True)
class SendTarget:
    """One server, for a trainer that sends by itself, as rank 0 of a group."""

    server: str
    """Its name."""
    url: str
    """Its URL."""
    version: str
    """Its engine's version."""
    backend: str
    """The weight-transfer backend it was started with."""
    rank_offset: int
    """The rank of its first worker."""
    workers: int
    """How many ranks it takes."""
    world_size: int
    """The sender and the workers of all servers."""
    init_info: dict[str, Any] | None = None
    """The body of its init call, in the dialect of its `version`; None for a backend that
    only the trainer's own engine can open."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def suggest(urls: Collection[str]) -> Rendezvous:
    """An address of this machine that servers at these URLs can reach, and a free port."""
    from skyctl.fleetfile.values import is_loopback

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    hosts = (urlsplit(url).hostname or "" for url in urls)
    far = next((host for host in hosts if not is_loopback(host)), None)
    try:
        return Rendezvous(address_towards(far or "127.0.0.1"), port)
    except OSError:
        return Rendezvous(socket.gethostname(), port)


class Trainer:
    """The sender of the weights of one update. Belongs to one event loop.

    `process` is watched where it is visible: a trainer on another machine, or in another container,
    is bounded only by `timeout_s`, the seconds in which it must have sent.
    """

    def __init__(self, at: Rendezvous, process: ProcessIdentity | None, timeout_s: float) -> None:
        self.at = at
        seen = process is not None and process.boot_id == boot_id() and process.alive()
        self.process = process if seen else None
        self.version = ""  # the label that it gave at its end
        self.passed_on = False  # the fleet itself has passed weights on to every server
        self._timeout_s = timeout_s
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[tuple[SendTarget, ...]] = loop.create_future()
        self._word: asyncio.Future[str] = loop.create_future()

    @property
    def has_spoken(self) -> bool:
        """Whether it has said that it is done: it sends nothing more."""
        return self._word.done()

    @property
    def failure(self) -> str:
        """Why it sends nothing, or sent too little; "" as long as nothing is wrong."""
        if self._word.done():
            return self._word.result()
        if self.process is not None and not self.process.alive():
            return f"the trainer (pid {self.process.pid}) died"
        return ""

    def report(self, failure: str = "", version: str = "", *, passed_on: bool = False) -> None:
        """The trainer's report: everything is sent, or why not, and the `version` that the update
        was begun without. Only the first counts.
        """
        if not self._word.done():
            self.version, self.passed_on = version, passed_on
            self._word.set_result(failure)

    async def targets(self, push: asyncio.Task[Any]) -> tuple[SendTarget, ...]:
        """The servers, once they wait for it; none if the `push` has ended instead."""
        try:
            await asyncio.wait({self._opened, push}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self.report("the trainer did not wait for the servers")
            raise
        return self._opened.result() if self._opened.done() else ()

    async def send(self, targets: tuple[SendTarget, ...]) -> str:
        """Let it send to servers that are ready for it; returns why it failed, "" when done."""
        self._opened.set_result(targets)
        clock = asyncio.get_running_loop().time
        until = clock() + self._timeout_s
        while not (self.has_spoken or self.failure):
            if (left_s := until - clock()) <= 0:
                return f"the trainer has not sent its weights within {self._timeout_s:g} s"
            await asyncio.wait({self._word}, timeout=min(left_s, _LOOK_S))
        return self.failure
