"""Calls that only succeed together: the members of a group wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from skyctl.errors import ServerUnreachable
from skyctl.push.servers import PushedServer, each
from skyctl.transfer.sender_client import SenderProcess


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
