"""Groups whose members wait for each other: of a sender and its servers, whose calls only succeed
together, and of the senders of several machines, of which one reads for all.

The group of senders (`transfer/gpu/relay.py`) is at work before the freeze only: a machine that
dies in it fails a push that has touched nothing, and from then on each machine fails alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from skyctl.errors import PreflightError, ServerUnreachable
from skyctl.push.servers import PushedServer, each
from skyctl.transfer.sender_client import Opened, SenderFailed, SenderProcess
from skyctl.transfer.sender_pool import Lease


async def in_one_group(
    sender: SenderProcess,
    servers: Sequence[PushedServer],
    call: Callable[[PushedServer], Awaitable[None]],
    sending: Callable[[], Awaitable[None]],
    *,
    timeout_s: float,
    grace_s: float,
    call_name: str,
) -> None:
    """Call every server while `sending` runs.

    A member that fails would leave the others waiting for it: the sender is killed, which ends the
    group for all. They are given `grace_s` more then.

    Raises:
        SenderFailed: `sending` did not succeed.
    """
    waiting: set[asyncio.Timeout] = set()

    async def guarded(server: PushedServer) -> None:
        try:
            async with asyncio.timeout(None) as patience:
                waiting.add(patience)
                await call(server)
        except BaseException as error:
            broken = part.exception() if part.done() and not part.cancelled() else None
            sender.kill(f"{call_name}: {server.name} failed, and the group with it")
            if not isinstance(error, TimeoutError):
                raise
            reason = f" ({broken})" if broken is not None else ""
            raise ServerUnreachable(
                f"{server.name}: no answer after the group broke{reason}"
            ) from error
        finally:
            waiting.discard(patience)

    def shorten(part: asyncio.Future[None]) -> None:
        # a server that lost its group reports it soon, or not at all
        if part.cancelled() or part.exception() is not None:
            soon = asyncio.get_running_loop().time() + grace_s
            for patience in waiting:
                patience.reschedule(soon)

    part = asyncio.ensure_future(sending())
    part.add_done_callback(shorten)
    await each(servers, guarded, timeout_s=timeout_s, call_name=call_name)
    await part


_HINT = "set weight_transfer.readers to all: the sender on each machine then reads the checkpoint"


@dataclass
class _Group:
    """What the senders of one push know of each other."""

    world_size: int
    """How many senders it has."""
    leases: list[Lease] = field(default_factory=list)
    """Those that have come so far."""
    all_there: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all have come."""
    name: str = ""
    """Names the group; that of the last push if it still stands."""
    stands: bool = False
    """All were in one group in the last push: none has to be formed."""
    unique_id: asyncio.Future[str] = field(default_factory=asyncio.Future)
    """NCCL's id of the group, from the sender of rank 0."""

    def add(self, lease: Lease) -> None:
        self.leases.append(lease)
        if len(self.leases) == self.world_size:
            names = {member.relay for member in self.leases}
            self.stands = len(names) == 1 and "" not in names
            self.name = names.pop() if self.stands else secrets.token_hex(8)
            self.all_there.set()


@dataclass
class OneReader:
    """One sender's part in it; that of rank 0 reads."""

    rank: int
    _group: _Group

    async def join(self, lease: Lease, opened: Opened, *, timeout_s: float) -> None:
        """Form the group, or go on with that of the last push if it has the same members.

        Raises:
            PreflightError: the checkpoint does not fit on the sender's GPUs as a whole.
            SenderFailed: it could not be formed.
        """
        if not opened.staged_whole:
            raise PreflightError(
                "weight_transfer.readers: one: the checkpoint does not fit as a whole on the "
                "sender's GPUs",
                hint=_HINT,
            )
        group, sender = self._group, lease.sender
        group.add(lease)
        await group.all_there.wait()
        try:
            if group.stands:
                await sender.relay(self.rank, 0)
            elif self.rank == 0:
                await sender.relay(0, group.world_size)
                group.unique_id.set_result(await sender.relaying(timeout_s=timeout_s))
            else:
                await sender.relay(self.rank, group.world_size, await group.unique_id)
            await sender.relayed(timeout_s=timeout_s)
        except SenderFailed as error:
            error.hint = error.hint or _HINT
            raise
        lease.relay = group.name


def one_reader(world_size: int) -> list[OneReader]:
    """The parts of that many senders, the reader's first."""
    group = _Group(world_size)
    return [OneReader(rank, group) for rank in range(world_size)]
