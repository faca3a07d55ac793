"""Carry a plan's chunks into servers: one sender process, and the four calls of vLLM's weight
transfer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.kill_points import reached
from skyctl.launch.base import Node
from skyctl.push.collective import OneReader, in_one_group
from skyctl.push.forecast import slots_of
from skyctl.push.frozen import require_paused
from skyctl.push.request import PushFleet
from skyctl.push.servers import Holds, PushedServer, alive, each, open_session, scrub
from skyctl.push.source import check_unchanged, content_digest
from skyctl.push.way import Delivery
from skyctl.push.worker_memory import NCCL_GROUP_BYTES, bytes_beside, numbering_bytes
from skyctl.transfer.plan import Chunk, ChunkPlan
from skyctl.transfer.reader import Filled
from skyctl.transfer.sender_client import Opened, SenderFailed
from skyctl.transfer.sender_pool import Lease, SenderPool, enough_is_read
from skyctl.transfer.transports.base import HOST, Session, Transport, rank_offsets
from skyctl.wire.layouts import Program
from skyctl.wire.worker import WorkerMethod

OUTSTANDING = 3
"""Updates under way at once if their order is free: while a server loads one chunk, the call for
the next has already arrived.
"""

_STARTUP_TIMEOUT_S = 120.0  # importing torch from a cold disk takes tens of seconds
_GRACE_S = 5.0  # a server's own deadline should expire before ours, so that its reason arrives


def group_of(servers: Sequence[PushedServer]) -> str:
    """Identifies a collective of exactly these processes; "" when it is unknown whether they are
    still the same.
    """
    processes = [[server.name, server.given.instance] for server in servers]
    return json.dumps(processes) if all(instance for _, instance in processes) else ""


class ChunkDelivery(Delivery):
    """Chunks read by a sender process and moved by a transport.

    The sender is on the machine of the first server; one with a GPU of its own, on the machine that
    has it (`sender_node`). Where servers are on several, the transport is a collective; others have
    a delivery for each machine (`push/machines_delivery.py`).
    """

    can_retry = True
    _shows = False
    """Whether servers copy out of the sender's slots by themselves."""
    _exports = True
    """Whether servers are told where the slots are."""
    _rehearses = False
    """Whether nothing is delivered, and the sender is kept whatever happens."""

    def __init__(
        self,
        transport: Transport,
        checkpoint: Checkpoint,
        plan: ChunkPlan,
        fleet: PushFleet,
        *,
        senders: SenderPool,
        sender_gpu: int = -1,
        sender_node: Node | None = None,
        nccl_settings: Mapping[str, str] | None = None,
        stage: str = "auto",
        programs: Mapping[str, Sequence[Program]] | None = None,
        scan: bool = True,
        stage_rate: int | None = None,
    ) -> None:
        self._transport = transport
        self._stage_rate = stage_rate
        self._scan = scan
        self._senders = senders
        self._checkpoint = checkpoint
        self._plan = plan
        self._fleet = fleet
        self._sender_gpu = sender_gpu
        self._sender_node = sender_node
        self._nccl_settings = nccl_settings
        self._stage = stage
        self._programs = dict(programs or {})
        self._distinct = list(
            dict.fromkeys(program for ranks in self._programs.values() for program in ranks)
        )
        self._parameters: list[dict[str, int]] = [{} for _ in self._distinct]
        self._lease: Lease | None = None
        self._delivered = False
        self._read_ahead_until = 0.0
        self._joined_before = False
        self._outstanding = 1
        self._session: Session | None = None
        self._offsets: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._checksums: dict[str, int] = {}
        self.one_reader: OneReader | None = None

    @property
    def _at_once(self) -> bool:
        """Whether all chunks travel within one call."""
        return self._transport.one_update

    @property
    def content_digest(self) -> str:
        """Digest over names, types, shapes and the crc32 of every tensor; independent of chunks."""
        return content_digest(self._checkpoint.tensors, self._checksums)

    @property
    def numbers(self) -> dict[str, dict[str, int]]:
        """What the sender made of the parameters of each layout, by its digest."""
        layouts = (program.layout for program in self._distinct)
        return dict(zip(layouts, self._parameters, strict=True))

    async def warm(self, servers: Sequence[PushedServer]) -> None:
        """Have the pool hold a sender that has started as far as it can without a checkpoint, if
        the transport keeps senders. Raises SenderFailed.
        """
        if not self._transport.resident:
            return
        sender = await self._senders.warm(
            self._fleet.python,
            self._transport.name,
            self._options(servers),
            secrets.token_hex(8),
            nccl_settings=self._nccl_settings,
        )
        await sender.warmed(timeout_s=_STARTUP_TIMEOUT_S)

    async def open(self, servers: Sequence[PushedServer]) -> None:
        offsets, world_size = rank_offsets([server.before.world_size for server in servers])
        self._offsets = {
            server.name: offset for server, offset in zip(servers, offsets, strict=True)
        }
        self._numbers = {server.name: number for number, server in enumerate(servers)}
        self._senders = self._senders.on(self._node_of_sender(servers))
        opened = None
        while opened is None:
            lease = self._lease = await self._senders.take(
                self._fleet.python,
                self._transport.name,
                self._options(servers),
                secrets.token_hex(8),
                group=group_of(servers) if self._transport.collective else None,
                nccl_settings=self._nccl_settings,
            )
            opened = await self._opened_by(lease, servers)
        if self._node_of_sender(servers) is not None:
            # until it opened them, it could not tell these files from others of the same header
            await asyncio.to_thread(check_unchanged, self._checkpoint)
        self._session = Session(lease.session, self._plan, world_size, opened.endpoint)
        if opened.staged_whole and not self._transport.ordered:
            self._outstanding = OUTSTANDING
        if self.one_reader is not None:
            # all is read before the freeze: no machine may wait for another in it
            lease.lead_s = lease.load_s_per_byte = 0.0
            await self.one_reader.join(lease, opened, timeout_s=self._fleet.timeouts.rendezvous_s)
        chunks = len(self._plan.chunks)
        slots = chunks if opened.staged_whole else slots_of(self._stage, chunks)
        await self._get_ready(servers, lease, opened, slots)
        if self._stage_rate is not None:
            await lease.sender.lift_pace()

    def _node_of_sender(self, servers: Sequence[PushedServer]) -> Node | None:
        return self._sender_node if self._sender_gpu >= 0 else servers[0].given.node

    def _options(self, servers: Sequence[PushedServer]) -> dict[str, Any]:
        """Options that the sender's carrier is opened with."""
        node = self._node_of_sender(servers)
        return self._transport.sender_options(
            world_size=rank_offsets([server.before.world_size for server in servers])[1],
            server_gpus=[server.given.gpus for server in servers],
            sender_gpu=self._sender_gpu,
            rendezvous_timeout_s=self._fleet.timeouts.rendezvous_s,
            update_timeout_s=self._fleet.timeouts.update_s,
            address=node.address if node is not None else HOST,
            across=any(server.given.node is not None for server in servers),
        )

    async def _opened_by(self, lease: Lease, servers: Sequence[PushedServer]) -> Opened | None:
        """Open the push in a sender and return its report; None if a pooled sender turned out to be
        unusable, so that another is needed.
        """
        if any(server.did.frozen or server.holds is Holds.UNKNOWN for server in servers):
            self._stage_rate = None  # no server generates beside it
        try:
            await lease.sender.open(
                transport=self._transport.name,
                session=lease.session,
                checkpoint=self._checkpoint,
                plan=self._plan,
                slots=slots_of(self._stage, len(self._plan.chunks)),
                ring_only=self._stage == "stream",
                reserve_bytes=self._reserve_bytes(servers, lease),
                scan=self._scan,
                carrier=self._options(servers) if lease.fresh else None,
                programs=self._distinct,
                shown=self._shows,
                exports=self._exports,
                bytes_per_s=self._stage_rate,
                relay_rank=self.one_reader.rank if self.one_reader is not None else None,
            )
            return await lease.sender.opened(timeout_s=_STARTUP_TIMEOUT_S)
        except SenderFailed as error:
            # what does not fit, or is wrong on disk, would fail with another sender, too
            if lease.fresh or error.final or error.details.get("kind") == "MemoryError":
                raise
            await self._senders.release(lease, keep=False)
            return None

    def _reserve_bytes(self, servers: Sequence[PushedServer], lease: Lease) -> int:
        """Bytes that will be taken beside the sender's slots on their GPUs.

        Servers take nothing if the last push of this sender filled them in the same way: they kept
        that memory. The sender freed its own.
        """
        numbering = numbering_bytes(self._distinct)
        if self.one_reader is not None and not lease.relay:
            numbering += NCCL_GROUP_BYTES
        if not self._transport.shares_gpus:
            return numbering
        filling = self._filling(servers)
        kept = bool(filling) and lease.filled == filling
        return (0 if kept else self._worker_bytes(servers)) + numbering

    def _worker_bytes(self, servers: Sequence[PushedServer]) -> int:
        gpus = [server.given.gpus for server in servers]
        return bytes_beside(self._transport.name, self._plan, gpus)

    def _filling(self, servers: Sequence[PushedServer]) -> str:
        group = group_of(servers)
        return json.dumps([group, self._plan.slot_bytes]) if group else ""

    async def _get_ready(
        self, servers: Sequence[PushedServer], lease: Lease, opened: Opened, slots: int
    ) -> None:
        """The rest of `open`, while the sender reads into its slots."""
        await self._read_ahead(lease, slots)

    async def _read_ahead(self, lease: Lease, chunks: int) -> None:
        """Wait until this many chunks are in their slots, or enough that servers will not wait."""
        clock = asyncio.get_running_loop().time
        began, done = clock(), 0
        lead_s = lease.lead_s + lease.load_s_per_byte * self._plan.total_bytes
        for chunk in self._plan.chunks[:chunks]:
            await self._staged(lease, chunk)
            done += chunk.payload_bytes
            if enough_is_read(
                done_bytes=done,
                total_bytes=self._plan.total_bytes,
                read_s=clock() - began,
                lead_s=lead_s,
            ):
                break
        self._read_ahead_until = clock()

    async def _staged(self, lease: Lease, chunk: Chunk) -> Filled:
        """Wait for a chunk that is read before the freeze."""
        paced_s = chunk.size / self._stage_rate if self._stage_rate else 0.0
        timeout_s = self._fleet.timeouts.update_s + paced_s
        return await lease.sender.filled(chunk.index, timeout_s=timeout_s)

    async def init(self, servers: Sequence[PushedServer]) -> None:
        lease, session = self._opened()
        timeout_s = self._fleet.timeouts.rendezvous_s + _GRACE_S
        group = group_of(servers)
        if group and lease.group == group:
            self._joined_before = True
            return  # the group of the last push still stands: it has exactly the same processes
        if self._transport.collective and lease.sender.failure is not None:
            # servers would wait for it, some longer than we do
            self._all_failed(servers, lease.sender.failure)
            return

        lease.joined = self._transport.collective

        async def call(server: PushedServer) -> None:
            if self._transport.leaves_group:
                await server.control.extension_rpc(WorkerMethod.LEAVE_GROUP, timeout_s=timeout_s)
            info = self._transport.init_info(
                session, rank_offset=self._offsets[server.name], dialect=server.dialect
            )
            await server.control.init_weight_transfer(info, timeout_s=timeout_s)

        await self._all_at_once(
            servers,
            call,
            lambda: lease.sender.join(timeout_s=timeout_s),
            timeout_s=timeout_s,
            call_name="init",
        )
        lease.group = group

    async def start(self, servers: Sequence[PushedServer], *, scrubbing: bool = False) -> None:
        failure = self._opened()[0].sender.failure
        if failure is not None and not scrubbing:
            self._all_failed(servers, failure)  # nothing has been sent: it can still be undone

        async def begin(server: PushedServer) -> None:
            # the others may have taken long: it may have restarted since it was seen frozen
            await require_paused(server)
            half_updated = scrubbing or server.holds is Holds.UNKNOWN
            await (scrub if half_updated else open_session)(server)

        # a scrub is up to five calls
        timeout_s = self._fleet.timeouts.control_s * 5
        await each(alive(servers), begin, timeout_s=timeout_s, call_name="start")

    async def update(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        lease = self._opened()[0]
        clock = asyncio.get_running_loop().time
        if self._joined_before or not self._transport.collective:  # forming a group takes seconds
            lease.lead_s = clock() - self._read_ahead_until
        try:
            if self._at_once:
                began = clock()
                await self._update_at_once(servers, on_progress)
                if alive(servers):
                    lease.loaded(self._plan.total_bytes, clock() - began)
            else:
                await self._update_by_chunk(servers, on_progress)
        except SenderFailed as error:
            self._all_failed(servers, error)
        self._tell_numbers(alive(servers))
        self._delivered = bool(alive(servers))
        lease.filled = self._filling(servers)

    async def _update_by_chunk(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        sender = self._opened()[0].sender
        timeout_s = self._fleet.timeouts.update_s + _GRACE_S
        done = 0
        turns = asyncio.Semaphore(self._outstanding)

        async def update(chunk: Chunk) -> None:
            nonlocal done
            try:
                filled = await sender.filled(chunk.index, timeout_s=self._fleet.timeouts.update_s)
                await self._all_at_once(
                    servers,
                    lambda server: self._call_load(server, chunk, filled),
                    lambda: sender.send(filled, chunk.size, timeout_s=timeout_s),
                    timeout_s=timeout_s,
                    call_name=f"chunk {chunk.index + 1} of {len(self._plan.chunks)}",
                )
                done += await self._sent(chunk, filled)
                on_progress(done)
                reached("push.update.done")
            finally:
                turns.release()

        updates: list[asyncio.Task[None]] = []
        try:
            for chunk in self._plan.chunks:
                await turns.acquire()
                if not alive(servers):
                    break
                updates.append(asyncio.create_task(update(chunk)))
            if updates:  # none when no server got this far
                await asyncio.wait(updates)
        finally:
            for task in updates:
                task.cancel()
        for task in updates:
            task.result()  # re-raises what the task raised

    async def _update_at_once(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        """One update call on each server, during which the sender sends chunk after chunk."""
        sender = self._opened()[0].sender
        plan = self._plan
        whole = Chunk(0, tuple(p for chunk in plan.chunks for p in chunk.placed), plan.total_bytes)

        async def send_all() -> None:
            done = 0
            for chunk in plan.chunks:
                filled = await sender.filled(chunk.index, timeout_s=self._fleet.timeouts.update_s)
                await sender.send(filled, chunk.size, timeout_s=self._fleet.timeouts.update_s)
                done += await self._sent(chunk, filled)
                on_progress(done)

        await self._all_at_once(
            servers,
            lambda server: self._call_load(server, whole, Filled(0, 0, ())),
            send_all,
            timeout_s=self._fleet.timeouts.update_s + _GRACE_S,
            call_name="update",
        )

    async def _sent(self, chunk: Chunk, filled: Filled) -> int:
        """Release the slot of a chunk that was sent; returns the chunk's bytes."""
        await self._opened()[0].sender.release(chunk.index)
        for placed, checksum in zip(chunk.placed, filled.crc32, strict=False):
            self._checksums[placed.tensor.name] = checksum
        for numbers, more in zip(self._parameters, filled.extra.get("numbers", ()), strict=False):
            numbers.update(more)
        return chunk.payload_bytes

    def _tell_numbers(self, servers: Sequence[PushedServer]) -> None:
        """Record the numbers each worker must report, for `push/layouts.py` to compare."""
        by_program = dict(zip(self._distinct, self._parameters, strict=True))
        for server in servers:
            if programs := self._programs.get(server.name):
                server.proof.expected = [(program, by_program[program]) for program in programs]

    async def _call_load(self, server: PushedServer, chunk: Chunk, filled: Filled) -> None:
        """Have one server load one chunk (all of them, in a single update)."""
        session = self._opened()[1]
        info = self._transport.update_info(
            session, chunk, filled, server=self._numbers[server.name], dialect=server.dialect
        )
        server.holds = Holds.UNKNOWN
        reached("push.update.call")
        with server.spans.loading():
            await server.control.update_weights(
                info, timeout_s=self._fleet.timeouts.update_s + _GRACE_S
            )
        reached("push.update.sent")

    async def finish(self, servers: Sequence[PushedServer], version: Callable[[], str]) -> None:
        timeout_s = self._fleet.timeouts.update_s

        async def call(server: PushedServer) -> None:
            # other dialects label weights once they are verified
            label = version() if server.dialect.labels_at_finish else None
            await server.control.finish_weight_update(label, timeout_s=timeout_s)
            server.did.open = False
            if self._transport.leaves_group and not server.dialect.keeps_streams:
                await server.control.extension_rpc(WorkerMethod.FREE_CACHED, timeout_s=timeout_s)
            server.holds = Holds.NEW

        await each(alive(servers), call, timeout_s=timeout_s, call_name="finish")

    async def close(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            keep = self._transport.resident and (self._delivered or self._rehearses)
            await self._senders.release(lease, keep=keep)

    def _opened(self) -> tuple[Lease, Session]:
        if self._lease is None or self._session is None:
            raise RuntimeError("open() comes first")
        return self._lease, self._session

    async def _all_at_once(
        self,
        servers: Sequence[PushedServer],
        call: Callable[[PushedServer], Awaitable[None]],
        sending: Callable[[], Awaitable[None]],
        *,
        timeout_s: float,
        call_name: str,
    ) -> None:
        """Call every live server and, in a collective, have the sender send at the same time."""
        if not self._transport.collective:
            await each(alive(servers), call, timeout_s=timeout_s, call_name=call_name)
            return
        try:
            await in_one_group(
                self._opened()[0].sender,
                alive(servers),
                call,
                sending,
                timeout_s=timeout_s,
                grace_s=_GRACE_S,
                call_name=call_name,
            )
        except SenderFailed as error:
            self._all_failed(servers, error)

    def _all_failed(self, servers: Sequence[PushedServer], error: SenderFailed) -> None:
        self.can_retry = self.can_retry and not error.final
        for server in alive(servers):
            server.failure = error.message
