"""Carry a plan's chunks into servers in the layout that their parameters have.

Chunks and sender are those of `push/delivery.py`; servers copy what they get into the running
parameters instead of giving it to vLLM's loader. There is no update session to open or to close:
what breaks off half-way is scrubbed and pushed again by vLLM's loader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyctl.errors import PreflightError
from skyctl.http.fanout import fan_out
from skyctl.http.target import ServerTarget
from skyctl.kill_points import reached
from skyctl.push.delivery import ChunkDelivery
from skyctl.push.sites import Holds, Site, alive, each
from skyctl.transfer.plan import Chunk
from skyctl.transfer.sender_pool import Lease
from skyctl.transfer.transports.base import Filled

OPEN_METHOD = "skyctl_layout_open"
LOAD_METHOD = "skyctl_layout_load"
RECEIVE_METHOD = "skyctl_layout_receive"
CLOSE_METHOD = "skyctl_layout_close"

_CLOSE_TIMEOUT_S = 5.0


class CannotCopy(PreflightError):
    """A server cannot get ready to copy: it lacks memory for buffers, say. Nothing was touched."""


class RuntimeDelivery(ChunkDelivery):
    """Chunks copied into parameters, by servers whose processes have seen the layout proven."""

    frees_late = True  # freeing a model's size takes a tenth of the freeze

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._filled: dict[int, Filled] = {}
        self._shown: dict[str, Site] = {}  # servers that may have mapped the sender's memory
        self._whole = False

    async def open(self, sites: Sequence[Site]) -> None:
        """Also shows each server what it will copy: mapping the sender's memory takes longer than
        copying out of it, and is done before servers are frozen."""
        await super().open(sites)
        if not self._whole:
            raise CannotCopy("the checkpoint does not fit on the sender's GPU as a whole")
        timeout_s = self._fleet.control_timeout_s
        collective = self._transport.collective

        async def show(site: Site) -> None:
            self._shown[site.name] = site
            await site.vllm.ask_workers(
                OPEN_METHOD,
                {
                    "programs": [program.to_wire() for program in self._programs[site.name]],
                    "payloads": self._payloads(site),
                    "buffer_bytes": self._plan.slot_bytes if collective else 0,
                },
                timeout_s=timeout_s,
            )

        await each(sites, show, timeout_s=timeout_s, what="layout")
        if failed := [site for site in sites if site.failure]:
            reason = f"{failed[0].name}: {failed[0].failure}"
            for site in sites:
                site.failure = ""  # nothing has happened to it
            raise CannotCopy(reason, hint="push with --layout checkpoint")

    async def _read_ahead(self, lease: Lease, chunks: int) -> None:
        """All of it: servers copy faster than files are read."""
        self._whole = chunks == len(self._plan.chunks)
        for chunk in self._plan.chunks if self._whole else ():
            filled = await lease.sender.filled(chunk.index, timeout_s=self._fleet.update_timeout_s)
            if not self._transport.collective:
                self._filled[chunk.index] = filled
        self._read_ahead_until = asyncio.get_running_loop().time()

    def _payloads(self, site: Site) -> dict[str, str]:
        """IPC handles of all chunks, as the carrier made them for this server."""
        number = self._numbers[site.name]
        return {
            str(chunk): filled.extra["handles"][number] for chunk, filled in self._filled.items()
        }

    async def start(self, sites: Sequence[Site], *, scrubbing: bool = False) -> None:
        """Nothing to open."""

    async def update(self, sites: Sequence[Site], on_progress: Callable[[int], None]) -> None:
        for site in sites:
            site.copied = True
        await super().update(sites, on_progress)

    async def _update_by_chunk(
        self, sites: Sequence[Site], on_progress: Callable[[int], None]
    ) -> None:
        """All chunks in one call."""
        chunks = [chunk.index for chunk in self._plan.chunks]

        async def load(site: Site) -> None:
            await self._rpc(site, LOAD_METHOD, {"chunks": chunks})

        timeout_s = self._fleet.update_timeout_s
        await each(alive(sites), load, timeout_s=timeout_s, what="update")
        done = 0
        for chunk in self._plan.chunks:
            done += await self._sent(chunk, self._filled[chunk.index])
            on_progress(done)

    async def _call_load(self, site: Site, chunk: Chunk, filled: Filled) -> None:
        sizes = [chunk.size for chunk in self._plan.chunks]
        await self._rpc(site, RECEIVE_METHOD, {"sizes": sizes})

    async def _rpc(self, site: Site, method: str, arguments: Mapping[str, Any]) -> None:
        site.holds = Holds.UNKNOWN
        reached("push.update.call")
        with site.spans.loading():
            await site.vllm.collective_rpc(
                method, kwargs=arguments, timeout_s=self._fleet.update_timeout_s
            )
        reached("push.update.sent")

    async def finish(self, sites: Sequence[Site], version: Callable[[], str]) -> None:
        """Nothing to close: the calls that copied have ended."""
        for site in alive(sites):
            site.holds = Holds.NEW

    async def close(self) -> None:
        """Also has servers let go that were shown what to copy and have not copied it all."""
        shown, self._shown = self._shown, {}
        left = [site for site in shown.values() if site.holds < Holds.NEW]

        async def let_go(target: ServerTarget) -> None:
            await shown[target.name].vllm.collective_rpc(CLOSE_METHOD, timeout_s=_CLOSE_TIMEOUT_S)

        await fan_out([site.target for site in left], let_go, timeout_s=_CLOSE_TIMEOUT_S)
        await super().close()

    def _worker_bytes(self, sites: Sequence[Site]) -> int:
        return 0  # chunks are copied out of the sender's memory, not beside it
