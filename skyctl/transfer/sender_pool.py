"""Senders that outlive a push: a CUDA context, a pinned ring and a group are costly to set up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyctl.launch.base import Node
from skyctl.transfer.sender_client import SenderFailed, SenderProcess

_FREE_TIMEOUT_S = 10.0
_OF_UPDATE = 0.75


@dataclass
class Lease:
    """A sender on loan to one push."""

    sender: SenderProcess
    """The process."""
    key: str
    """Identifies the carrier's options: a sender is lent only to a push with the same."""
    session: str
    """The name of the carrier's session."""
    fresh: bool = True
    """Whether it has not been given its carrier yet."""
    group: str = ""
    """Identifies the servers that have `joined` it, "" while none have or they are unknown."""
    joined: bool = False
    """Whether the group is complete."""
    filled: str = ""
    """Identifies the servers that its last push filled, and the chunk size; "" before one."""
    lead_s: float = 0.0
    """Seconds from reading to the first update in its last push, 0 before one."""
    load_s_per_byte: float = 0.0
    """The least time that servers took per byte of an update which all chunks streamed into, 0
    before one."""
    relay: str = ""
    """The group that it has formed with senders of other machines, "" before one."""

    def loaded(self, total_bytes: int, seconds: float) -> None:
        """Learn from such an update.

        Slightly less than the least time counts: servers may have waited for the reader,
        and each push begins with no more lead than the servers need.
        """
        new = seconds * _OF_UPDATE / total_bytes
        self.load_s_per_byte = min(new, self.load_s_per_byte or new)


class SenderPool:
    """At most one idle sender on a machine, `node` (None: this one). One pool belongs to one event
    loop; `close` ends its senders.
    """

    def __init__(self, node: Node | None = None) -> None:
        self._node = node
        self._idle: Lease | None = None
        self._elsewhere: dict[Node, SenderPool] = {}

    def on(self, node: Node | None) -> SenderPool:
        """The pool of that machine, which `close` ends as well."""
        if node == self._node:
            return self
        assert node is not None
        return self._elsewhere.setdefault(node, SenderPool(node))

    @property
    def idle(self) -> Lease | None:
        """The sender that waits for the next push, if it is alive."""
        return self._idle if self._idle is not None and self._idle.sender.healthy else None

    async def take(
        self,
        python: str,
        transport: str,
        options: Mapping[str, Any],
        session: str,
        *,
        group: str | None = None,
        nccl_settings: Mapping[str, str] | None = None,
    ) -> Lease:
        """The idle sender if it has exactly this carrier, else a new one under `session`.

        `group` identifies the servers that must be in its group, "" if unknown; None if groups do
        not matter. A sender forms one group in its life: it cannot leave one whose members have
        died. `nccl_settings` are its NCCL variables, None for those of this process.
        """
        key = _key(python, transport, options, nccl_settings)
        idle, self._idle = self._idle, None
        if idle is not None:
            same = bool(group) and idle.group == group
            of_this_group = group is None or not idle.joined or same
            if idle.key == key and idle.sender.healthy and of_this_group:
                return idle
            await idle.sender.close()
        return Lease(await self._spawn(python, nccl_settings), key, session)

    async def warm(
        self,
        python: str,
        transport: str,
        options: Mapping[str, Any],
        session: str,
        *,
        nccl_settings: Mapping[str, str] | None = None,
    ) -> SenderProcess:
        """The sender that waits for the next push by this carrier, a new one if there is none. A
        push that comes before it is warm takes it as it is.
        """
        key = _key(python, transport, options, nccl_settings)
        if self.idle is None or self.idle.key != key:
            await self.close()
            sender = await self._spawn(python, nccl_settings)
            self._idle = Lease(sender, key, session, fresh=False)
            await sender.warm(transport=transport, session=session, carrier=options)
        assert self._idle is not None
        return self._idle.sender

    async def release(self, lease: Lease, *, keep: bool) -> None:
        """End a loan. Only a sender whose push succeeded is kept."""
        if keep and lease.sender.healthy:
            try:
                await lease.sender.free_slots(timeout_s=_FREE_TIMEOUT_S)
            except SenderFailed:
                keep = False
        if not (keep and lease.sender.healthy) or self._idle is not None:
            await lease.sender.close()
            return
        lease.fresh = False
        self._idle = lease

    async def close(self) -> None:
        """End every idle sender."""
        idle, self._idle = self._idle, None
        elsewhere, self._elsewhere = self._elsewhere, {}
        closing = [pool.close() for pool in elsewhere.values()]
        if idle is not None:
            closing.append(idle.sender.close())
        await asyncio.gather(*closing)

    async def _spawn(self, python: str, nccl_settings: Mapping[str, str] | None) -> SenderProcess:
        return await SenderProcess.spawn(python, nccl_settings, node=self._node)


def _key(*carrier: Any) -> str:
    """Identifies a carrier: senders with equal keys are interchangeable."""
    return json.dumps(carrier, sort_keys=True, default=dict)


def enough_is_read(*, done_bytes: int, total_bytes: int, read_s: float, lead_s: float) -> bool:
    """Whether the rest will have been read by the time servers are ready for it.

    `read_s` is how long reading `done_bytes` took. `lead_s` is the time from here until servers
    want the last chunk, as measured in the last push; 0 without one. If the sender streams into one
    update, from a GPU of its own, that is until the end of that update. If servers read from the
    GPU that is being filled, it is until the first update: reading on into the updates was tried
    there and lost more than it gained, because the readers keep the servers' processors and memory
    busy, and what is saved before the freeze is lost again within it.
    """
    if done_bytes >= total_bytes:
        return True
    return bool(done_bytes) and (total_bytes - done_bytes) * read_s / done_bytes <= lead_s
