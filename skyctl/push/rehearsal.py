"""A rehearsal of a fleet's first push, beside serving: everything up to the freeze.

    servers   report what they are, and number their weights: kernels are compiled, nothing written
    sender    imports, makes its CUDA context and pins its buffers, and rests in the pool
    layout    is proven: the sender reads the checkpoint that the servers hold, and what each
              parameter must hold by their layout is compared with what it holds; weights that
              layers process are processed from what the sender shows, and the result discarded

The first push by a GPU transport then already copies into parameters, as later ones do. A rehearsal
may be cancelled at any time; the push then finds out the rest itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from skyctl.children import to_its_end
from skyctl.http.client import ControlClient
from skyctl.launch.local.devices import free_gpu_memory
from skyctl.push.check import Checked, check
from skyctl.push.delivery import ChunkDelivery
from skyctl.push.forecast import SENDER_CONTEXT
from skyctl.push.layouts import numbered, settle_parameters
from skyctl.push.machine_facts import free_for_sender
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.runtime_delivery import RuntimeDelivery
from skyctl.push.sender_way import SenderWay
from skyctl.push.servers import PushedServer
from skyctl.push.verify import weights_digest
from skyctl.push.worker_memory import numbering_bytes
from skyctl.transfer.sender_client import Opened
from skyctl.transfer.sender_pool import Lease, SenderPool

_LOG = logging.getLogger(__name__)
_SHARE_OF_FREE = 0.5
"""The share of a GPU's free memory that work nobody asked for may take."""


async def rehearse(
    request: PushRequest,
    fleet: PushFleet,
    *,
    client: ControlClient,
    senders: SenderPool,
    asking: Callable[[], AbstractContextManager[None]],
) -> tuple[PushedServer, ...]:
    """Prepare a push of what the servers hold, and stop there; `senders` holds a warm sender
    afterwards, if the transport keeps one and there is room for it. Engines are asked only within
    `asking`: not while the sender starts and reads.

    Returns:
        the servers, with `digest_before` set for those without a digest on record.

    Raises:
        SkyctlError: why something could not be done; a push may succeed all the same.
    """
    with asking():
        checked = await check(request, fleet, client=client, idle=senders.idle)
    way = checked.way
    if not isinstance(way, SenderWay) or not way.transport.resident:
        return checked.servers
    if any(server.node for server in fleet.servers):
        return checked.servers
    context = 0 if senders.idle else SENDER_CONTEXT[way.name]
    free = await asyncio.to_thread(free_gpu_memory)
    free_bytes = free_for_sender(fleet.servers, way.place.gpu, free) or 0
    room = int(free_bytes * _SHARE_OF_FREE) - context
    if room < 0:
        _LOG.warning("the first push begins cold: too little GPU memory is free for a sender")
        return checked.servers
    delivery = _rehearsed(way, senders)
    await delivery.warm(checked.servers)
    if way.layout.programs and way.layout.name != "runtime" and delivery.takes <= room:
        with asking() if way.layout.spare_bytes else nullcontext():
            try:  # to find out what each parameter must hold by its server's layout
                await delivery.open(checked.servers)
            finally:
                await to_its_end(delivery.close())
        with asking():
            await _compare(checked, fleet)
    return checked.servers


def _rehearsed(way: SenderWay, senders: SenderPool) -> _Processing | _Numbering:
    """A delivery that ends before the freeze."""
    spare_bytes = way.layout.spare_bytes
    read = functools.partial(_Processing, spare_bytes=spare_bytes) if spare_bytes else _Numbering
    return read(
        way.transport,
        way.source.files,
        way.chunks,
        way.fleet,
        senders=senders,
        sender_gpu=way.place.gpu,
        nccl_settings=way.place.nccl_settings,
        stage="gpu" if spare_bytes else "stream",
        programs=way.layout.programs,
        scan=False,
        stage_rate=way.fleet.reading.stage_rate,
    )


async def _compare(checked: Checked, fleet: PushFleet) -> None:
    """Compare what servers hold with what their layout makes of the checkpoint."""

    async def compare(server: PushedServer) -> None:
        timeout_s = fleet.timeouts.update_s
        report = await weights_digest(
            server.control, timeout_s=timeout_s, numbered=numbered(server)
        )
        await settle_parameters(server, report.numbers, checked.source.whole, timeout_s=timeout_s)

    await asyncio.gather(*map(compare, checked.servers))


class _Numbering(ChunkDelivery):
    """Reads everything through two slots; delivers nothing."""

    _exports = False
    _rehearses = True

    @property
    def takes(self) -> int:
        """Bytes on the sender's GPU, beside its context."""
        return 2 * self._plan.slot_bytes + numbering_bytes(self._distinct)

    async def _get_ready(
        self, servers: Sequence[PushedServer], lease: Lease, opened: Opened, slots: int
    ) -> None:
        for chunk in self._plan.chunks:
            filled = await self._staged(lease, chunk)
            await self._sent(chunk, filled)
        self._tell_numbers(servers)


class _Processing(RuntimeDelivery):
    """Stages everything and has servers process it; delivers nothing."""

    _keeps = False
    _rehearses = True

    @property
    def takes(self) -> int:
        """Bytes on the sender's GPU, beside its context."""
        return self._plan.total_bytes + numbering_bytes(self._distinct) + self._spare_bytes

    async def _get_ready(
        self, servers: Sequence[PushedServer], lease: Lease, opened: Opened, slots: int
    ) -> None:
        await super()._get_ready(servers, lease, opened, slots)
        for chunk in self._plan.chunks:
            await self._sent(chunk, self._filled[chunk.index])
        self._tell_numbers(servers)
