"""Whether servers stay frozen for a push, whose freeze it is, and freezing them again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from skyctl.errors import ServerError, SkyctlError, StateUnwritable
from skyctl.push.request import PushObserver
from skyctl.push.servers import Holds, PushedServer, ask_all
from skyctl.states import PushState, is_empty

_COUNT_INTERVAL_S = 0.02
_FRESH_S = 2.0
"""For so long holds what a server was seen to be. A push that was stopped (SIGSTOP) looks again: a
server may have been started meanwhile."""
_LOOKS = 3
"""How often that is repeated at most."""


class ThawSeen(ServerError):
    """Another program has thawed a server that must be frozen. It is frozen again."""


async def count_tokens(server: PushedServer) -> None:
    """Remember how many tokens a frozen server without skyctl's guard has generated. Its counter
    may still lack those of its last step: it is read until it stands still.

    Raises:
        ServerError: another program has put it to sleep, so nothing can be loaded. It sleeps on.
    """
    if server.target.holder:
        return
    count, metrics = -1, await server.control.metrics()
    while count != metrics.generation_tokens:
        count = metrics.generation_tokens
        await asyncio.sleep(_COUNT_INTERVAL_S)
        metrics = await server.control.metrics()
    server.generated = count
    if metrics.sleep_level and not server.given.recorded.sleep_level:
        server.before = replace(server.before, paused=True, asleep=True)
        server.did.frozen, server.did.slept = False, metrics.sleep_level
        raise ServerError(f"{server.name}: another program has put it to sleep")


def take_over_freeze(server: PushedServer) -> None:
    """A server is about to be paused that runs: whoever had paused it before the push, that freeze
    is over, and this one is the push's to end. Unless the fleet itself had paused it.
    """
    if not server.did.frozen and not server.given.recorded.paused:
        with suppress(StateUnwritable):  # it must not answer, on record or not
            server.intend({server.name: PushState.PAUSING})
        server.before = replace(server.before, paused=False)
        server.did.frozen = True


async def take_over_awake(server: PushedServer) -> None:
    """A server that slept before the push was woken since, or started again: it is frozen like
    those that were awake.
    """
    recorded, label = server.given.recorded, await server.control.weight_version()
    empty = is_empty(recorded.sleep_level, label, recorded.version)
    server.before = replace(server.before, asleep=False, empty=empty)
    server.did.woken, server.did.slept = False, None if empty else 0
    if empty and server.holds is Holds.OLD:
        server.holds = Holds.UNKNOWN
    take_over_freeze(server)


async def require_paused(server: PushedServer) -> None:
    """Raise ThawSeen if a server that must be frozen is not, or has not been since: it would
    answer from a half-loaded model. It is frozen again first. One that sleeps is paused as well.
    """
    for _ in range(_LOOKS):
        began = time.monotonic()
        problem = await _thaw_seen(server)
        if problem or time.monotonic() - began < _FRESH_S:
            break
    else:
        raise ServerError(
            f"{server.name} takes longer than {_FRESH_S:g} s to report that it is paused"
        )
    if problem:
        await server.control.pause("abort", clear_cache=False)
        raise ThawSeen(f"{server.name} {problem}")


async def _thaw_seen(server: PushedServer) -> str:
    """How it is seen that another program has thawed a server; "" if it has stayed frozen."""
    if not await server.control.is_paused():
        if not server.before.asleep:
            take_over_freeze(server)
        elif not (await server.control.metrics()).sleep_level:  # else it sleeps, and was resumed
            await take_over_awake(server)
        return "is not paused: another program resumed it, or it was started again"
    if server.generated is None:
        return ""
    if (await server.control.metrics()).generation_tokens == server.generated:
        return ""
    return (
        "generated tokens while it was frozen for this push: another client resumed it, "
        "and paused it again"
    )


async def freeze_again(
    servers: Sequence[PushedServer], observer: PushObserver, timeout_s: float
) -> None:
    """Freeze servers that must not be resumed, in case another program has: the push ends, and
    looks no more. Where it had to, the others may have been thawed meanwhile: all are looked at
    again, a few times at most.
    """

    async def frozen_anew(server: PushedServer) -> bool:
        try:
            await require_paused(server)
        except SkyctlError as error:
            observer.server(server.name, PushState.QUARANTINED, server.failure)
            if isinstance(error, ThawSeen):
                return True
            raise
        return False

    unsafe = [server for server in servers if server.holds in (Holds.UNKNOWN, Holds.NEW)]
    for _ in range(_LOOKS):
        outcomes = await ask_all(unsafe, frozen_anew, timeout_s=timeout_s)
        if not any(outcome.value for outcome in outcomes):
            break
