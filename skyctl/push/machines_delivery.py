"""One push into servers on several machines: each has a sender of its own, beside its servers.

Every sender reads the checkpoint there; or one does, and passes it on before the freeze
(`push/collective.py`). A machine that fails takes its own servers out of the push and no others;
one that has read other bytes than the rest fails the push for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from skyctl.launch.base import Node
from skyctl.push.collective import one_reader
from skyctl.push.delivery import ChunkDelivery
from skyctl.push.servers import PushedServer, alive
from skyctl.push.way import Delivery


class MachinesDelivery(Delivery):
    """`parts` has the delivery of each machine. With `one_reader`, the first of them that has
    servers in the push reads for all.
    """

    def __init__(
        self, parts: Mapping[Node | None, ChunkDelivery], *, one_reader: bool = False
    ) -> None:
        self._parts = dict(parts)
        self._one_reader = one_reader
        self._differs = False
        first = next(iter(self._parts.values()))
        self.frees_late, self.copies = first.frees_late, first.copies

    @property
    def can_retry(self) -> bool:
        return not self._differs and all(part.can_retry for part in self._parts.values())

    @property
    def content_digest(self) -> str:
        """Of a machine that has read it all."""
        digests = (part.content_digest for part in self._parts.values())
        return next((digest for digest in digests if digest), "")

    async def open(self, servers: Sequence[PushedServer]) -> None:
        parts = [part for part, _ in self._by_machine(servers)]
        if self._one_reader and len(parts) > 1:
            for part, joining in zip(parts, one_reader(len(parts)), strict=True):
                part.one_reader = joining
        await self._together(servers, lambda part, those: part.open(those))

    async def init(self, servers: Sequence[PushedServer]) -> None:
        await self._together(servers, lambda part, those: part.init(those))

    async def start(self, servers: Sequence[PushedServer], *, scrubbing: bool = False) -> None:
        await self._together(servers, lambda part, those: part.start(those, scrubbing=scrubbing))

    async def update(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        done = {those[0].given.node: 0 for _, those in self._by_machine(servers)}

        async def update(part: ChunkDelivery, those: Sequence[PushedServer]) -> None:
            node = those[0].given.node

            def progress(done_bytes: int) -> None:
                done[node] = done_bytes
                on_progress(min(done.values()))

            await part.update(those, progress)
            if not alive(those):
                del done[node]

        await self._together(servers, update)
        read = {
            those[0].given.node: part for part, those in self._by_machine(servers) if alive(those)
        }
        self._differs = _differ(read.values())
        if self._differs:  # whose bytes are the right ones, nobody can tell
            machines = ", ".join(sorted(node.target if node else "this machine" for node in read))
            reason = f"the checkpoint's bytes are not the same on every machine ({machines})"
            for server in alive(servers):
                server.failure = reason

    async def finish(self, servers: Sequence[PushedServer], version: Callable[[], str]) -> None:
        await self._together(servers, lambda part, those: part.finish(those, version))

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self._parts.values()))

    def _by_machine(
        self, servers: Sequence[PushedServer]
    ) -> list[tuple[ChunkDelivery, list[PushedServer]]]:
        servers_of = [
            (part, [server for server in servers if server.given.node == node])
            for node, part in self._parts.items()
        ]
        return [(part, those) for part, those in servers_of if those]

    async def _together(
        self,
        servers: Sequence[PushedServer],
        work: Callable[[ChunkDelivery, list[PushedServer]], Coroutine[Any, Any, None]],
    ) -> None:
        """The same on each machine that has any of these servers. An error of one ends it on the
        others."""
        tasks = [
            asyncio.create_task(work(part, those)) for part, those in self._by_machine(servers)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _differ(parts: Iterable[ChunkDelivery]) -> bool:
    """Whether machines have read different bytes. Bytes that pass through no CPU have no digest;
    those of parameters that lie alike have equal numbers.
    """
    digests: set[str] = set()
    numbers: dict[str, dict[str, int]] = {}
    differ = False
    for part in parts:
        digests.add(part.content_digest)
        for layout, own in part.numbers.items():
            differ = differ or numbers.setdefault(layout, own) != own
    return differ or len(digests) > 1
