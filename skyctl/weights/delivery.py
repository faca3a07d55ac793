"""Carry a plan's chunks into servers: one sender process, and the four calls of vLLM's push."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from skyctl.control.dialects import rank_offsets
from skyctl.errors import ServerUnreachable
from skyctl.weights.checkpoint import Checkpoint
from skyctl.weights.plan import ChunkPlan
from skyctl.weights.request import PushFleet
from skyctl.weights.sender_client import SenderFailed, SenderProcess
from skyctl.weights.sites import Holds, Site, alive, each, open_session, scrub
from skyctl.weights.transports.base import Filled, Session, Transport

SLOTS = 2
"""One slot is filled while servers load the other."""

_STARTUP_TIMEOUT_S = 120.0  # importing torch from a cold disk takes tens of seconds
_GRACE_S = 5.0  # a server's own deadline should end before ours, so that its reason arrives


class Delivery(Protocol):
    """One attempt at bringing a checkpoint into servers.

    Each step records a server's failure in its `Site` and goes on with the others; what fails as
    a whole (the sender) is every server's failure.
    """

    can_retry: bool

    @property
    def content_digest(self) -> str:
        """Digest over every byte that was sent; "" when that is not known."""

    async def open(self, sites: Sequence[Site]) -> None:
        """Everything that can be done before a server is touched. Raises SkyctlError."""

    async def init(self, sites: Sequence[Site]) -> None: ...

    async def start(self, sites: Sequence[Site], *, scrubbing: bool = False) -> None: ...

    async def update(self, sites: Sequence[Site], on_progress: Callable[[int], None]) -> None: ...

    async def finish(self, sites: Sequence[Site], version: Callable[[], str]) -> None: ...

    async def close(self) -> None: ...


class ChunkDelivery:
    """Chunks read by a sender process and moved by a transport."""

    def __init__(
        self,
        transport: Transport,
        checkpoint: Checkpoint,
        plan: ChunkPlan,
        fleet: PushFleet,
        *,
        sender_gpu: int = -1,
    ) -> None:
        self._transport = transport
        self._checkpoint = checkpoint
        self._plan = plan
        self._fleet = fleet
        self._sender_gpu = sender_gpu
        self._sender: SenderProcess | None = None
        self._session: Session | None = None
        self._offsets: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._checksums: dict[str, int] = {}
        self.can_retry = True

    @property
    def content_digest(self) -> str:
        """Digest over names, types, shapes and the crc32 of every tensor; independent of chunks."""
        if len(self._checksums) < len(self._checkpoint.tensors):
            return ""
        content = sorted(
            (t.name, t.dtype, t.shape, self._checksums[t.name]) for t in self._checkpoint.tensors
        )
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    @property
    def slots(self) -> int:
        return min(SLOTS, len(self._plan.chunks))

    async def open(self, sites: Sequence[Site]) -> None:
        offsets, world_size = rank_offsets([site.world_size for site in sites])
        self._offsets = {site.name: offset for site, offset in zip(sites, offsets, strict=True)}
        self._numbers = {site.name: number for number, site in enumerate(sites)}
        name = secrets.token_hex(8)
        self._sender = await SenderProcess.start(
            python=self._fleet.python,
            transport=self._transport.name,
            session=name,
            checkpoint=self._checkpoint,
            plan=self._plan,
            slots=self.slots,
            options=self._transport.sender_options(
                world_size=world_size,
                server_gpus=[site.server.gpus for site in sites],
                sender_gpu=self._sender_gpu,
                rendezvous_timeout_s=self._fleet.rendezvous_timeout_s,
                update_timeout_s=self._fleet.update_timeout_s,
            ),
        )
        endpoint = await self._sender.opened(timeout_s=_STARTUP_TIMEOUT_S)
        self._session = Session(name, self._plan, world_size, endpoint)
        for chunk in range(self.slots):
            await self._sender.filled(chunk, timeout_s=self._fleet.update_timeout_s)

    async def init(self, sites: Sequence[Site]) -> None:
        sender, session = self._opened()
        timeout_s = self._fleet.rendezvous_timeout_s + _GRACE_S

        async def call(site: Site) -> None:
            info = self._transport.init_info(
                session, rank_offset=self._offsets[site.name], dialect=site.dialect
            )
            await site.vllm.init_weight_transfer(info, timeout_s=timeout_s)

        await self._all_at_once(
            sites, call, lambda: sender.join(timeout_s=timeout_s), timeout_s=timeout_s, what="init"
        )

    async def start(self, sites: Sequence[Site], *, scrubbing: bool = False) -> None:
        # a scrub is up to five calls
        timeout_s = self._fleet.control_timeout_s
        begin = scrub if scrubbing else open_session
        await each(
            alive(sites),
            lambda site: begin(site, timeout_s=timeout_s),
            timeout_s=timeout_s * 5,
            what="start",
        )

    async def update(self, sites: Sequence[Site], on_progress: Callable[[int], None]) -> None:
        sender, _ = self._opened()
        done = 0
        for chunk in self._plan.chunks:
            if not alive(sites):
                return
            try:
                filled = await sender.filled(chunk.index, timeout_s=self._fleet.update_timeout_s)
                await self._update_one(sites, filled)
                await sender.release(chunk.index)
            except SenderFailed as error:
                self._all_failed(sites, error)
                return
            for placed, checksum in zip(chunk.placed, filled.crc32, strict=False):
                self._checksums[placed.tensor.name] = checksum
            done += chunk.payload_bytes
            on_progress(done)

    async def _update_one(self, sites: Sequence[Site], filled: Filled) -> None:
        sender, session = self._opened()
        chunk = self._plan.chunks[filled.chunk]
        timeout_s = self._fleet.update_timeout_s + _GRACE_S

        async def call(site: Site) -> None:
            info = self._transport.update_info(
                session,
                chunk,
                filled,
                server=self._numbers[site.name],
                dialect=site.dialect,
            )
            site.holds = Holds.UNKNOWN
            await site.vllm.update_weights(info, timeout_s=timeout_s)

        await self._all_at_once(
            sites,
            call,
            lambda: sender.send(filled, chunk.size, timeout_s=timeout_s),
            timeout_s=timeout_s,
            what=f"chunk {chunk.index + 1} of {len(self._plan.chunks)}",
        )

    async def finish(self, sites: Sequence[Site], version: Callable[[], str]) -> None:
        timeout_s = self._fleet.update_timeout_s

        async def call(site: Site) -> None:
            # 0.32 can label weights once they are verified; before it, only here
            early = site.dialect.has_weight_version and not site.dialect.has_checksum
            label = site.dialect.finish_version(version()) if early else None
            await site.vllm.finish_weight_update(label, timeout_s=timeout_s)
            site.open = False
            site.holds = Holds.NEW

        await each(alive(sites), call, timeout_s=timeout_s, what="finish")

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender.close()

    def _opened(self) -> tuple[SenderProcess, Session]:
        if self._sender is None or self._session is None:
            raise RuntimeError("open() comes first")
        return self._sender, self._session

    async def _all_at_once(
        self,
        sites: Sequence[Site],
        call: Callable[[Site], Awaitable[None]],
        sending: Callable[[], Awaitable[None]],
        *,
        timeout_s: float,
        what: str,
    ) -> None:
        """Call every live site, and the sender's `sending` at the same time in a collective.

        In a collective one that fails would leave the others waiting for it: the sender is killed,
        which ends the collective for all of them, and all have failed.
        """
        if not self._transport.collective:
            await each(alive(sites), call, timeout_s=timeout_s, what=what)
            return
        sender, _ = self._opened()
        waiting: set[asyncio.Timeout] = set()

        async def guarded(site: Site) -> None:
            try:
                async with asyncio.timeout(None) as patience:
                    waiting.add(patience)
                    await call(site)
            except TimeoutError as error:
                raise ServerUnreachable(f"{site.name}: no answer after the group broke") from error
            finally:
                waiting.discard(patience)

        async def failing(site: Site) -> None:
            try:
                await guarded(site)
            except BaseException:
                sender.kill(f"{what}: {site.name} failed, and the group with it")
                raise

        def hurry(part: asyncio.Future[None]) -> None:
            # a server that lost its group says so soon, or not at all
            if part.cancelled() or part.exception() is not None:
                soon = asyncio.get_running_loop().time() + _GRACE_S
                for patience in waiting:
                    patience.reschedule(soon)

        part = asyncio.ensure_future(sending())
        part.add_done_callback(hurry)
        await each(alive(sites), failing, timeout_s=timeout_s, what=what)
        try:
            await part
        except SenderFailed as error:
            self._all_failed(sites, error)

    def _all_failed(self, sites: Sequence[Site], error: SenderFailed) -> None:
        # a checkpoint that changes while it is pushed will not be whole the second time either
        self.can_retry = self.can_retry and not error.changed
        for site in alive(sites):
            site.failure = error.message
