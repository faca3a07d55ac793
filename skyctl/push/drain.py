"""Wait for the requests of a server that leaves service: report how many there are, and stop
waiting once the push is to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from skyctl.errors import ServerError, SkyctlError
from skyctl.push.run import Run
from skyctl.push.servers import PushedServer
from skyctl.states import PushState
from skyctl.units import waits_for

_POLL_S = 0.25
_REPORT_S = 1.0
# a request that the router has already assigned may arrive after the server left it
_EMPTY_POLLS = 2


async def drained(run: Run, server: PushedServer, patience_s: float) -> None:
    """Return once the server has no requests. Raises ServerError: it has after `patience_s`, or the
    push is to end.
    """
    empty, shown, deadline = 0, 0, time.monotonic() + patience_s
    report_at = time.monotonic() + _REPORT_S
    while empty < _EMPTY_POLLS:
        in_flight = (await server.control.metrics()).in_flight
        empty = 0 if in_flight else empty + 1
        if in_flight and time.monotonic() > deadline:
            raise ServerError(
                f"{in_flight:g} requests have not ended after {patience_s:g} s (drain_timeout_s)"
            )
        if run.cancel_guard.cancelled:
            raise ServerError("the push is cancelled")
        if in_flight != shown and time.monotonic() >= report_at:
            shown, report_at = in_flight, time.monotonic() + _REPORT_S
            run.observer.server(server.name, PushState.DRAINING, waits_for(in_flight), in_flight)
        if empty < _EMPTY_POLLS:
            await asyncio.sleep(_POLL_S)


async def paused(run: Run, server: PushedServer, pausing: Coroutine[Any, Any, None]) -> None:
    """Await the answer to a pause, and report which requests it waits for.

    Raises:
        ServerError: the push is to end meanwhile, and the server is paused.
    """
    answer = asyncio.create_task(pausing)
    given_up = asyncio.create_task(_given_up(run, server))
    reporting = asyncio.create_task(_report_requests(run, server))
    # of a server that was frozen already, only the answer shows that it has this pause: one that
    # arrived after the resume would freeze it for ever
    was_frozen = server.before.paused or server.given.recorded.thaw
    ends = {answer} if was_frozen else {answer, given_up}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ServerError("the push is cancelled")
        await answer
    finally:
        for task in (answer, given_up, reporting):
            task.cancel()
        await asyncio.gather(answer, given_up, reporting, return_exceptions=True)


async def _given_up(run: Run, server: PushedServer) -> None:
    """Return once the push is to end and the server has the pause: a resume then comes after it."""
    await run.cancel_guard.requested.wait()
    while True:
        with suppress(SkyctlError):
            if await server.control.is_paused():
                return
        await asyncio.sleep(_POLL_S)


async def _report_requests(run: Run, server: PushedServer) -> None:
    """Report how many requests a server that is being paused still has, whenever that changes."""
    shown = 0
    while True:
        await asyncio.sleep(_REPORT_S)
        with suppress(SkyctlError):
            in_flight = (await server.control.metrics()).in_flight
            if in_flight != shown:
                shown = in_flight
                state = PushState.HELD if server.before.paused else PushState.PAUSING
                run.observer.server(server.name, state, waits_for(in_flight), in_flight)
