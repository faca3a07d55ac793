"""Keep users' requests away from the servers of a push: out of the router, and drained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from skyctl.errors import PreflightError, ServerError, SkyctlError
from skyctl.kill_points import reached
from skyctl.push.freeze import require_all
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.run import Rotation, Run
from skyctl.push.sites import Site, each

_DRAIN_POLL_S = 0.25
# a request that the router has already assigned may arrive after the server left it
_EMPTY_POLLS = 2


def refuse_impossible(request: PushRequest, fleet: PushFleet, rotation: Rotation | None) -> None:
    """Raise PreflightError for a push that needs what this fleet lacks."""
    if not request.leaves_router:
        return
    option = "--canary" if request.canary is not None else "--rolling"
    if request.pause_mode == "keep":
        raise PreflightError(
            f"{option} cannot keep running requests frozen in servers that are taken out of the "
            "router and drained",
            hint=f"{option} with --mode wait (let them end) or --mode abort",
        )
    if any(server.target.role for server in fleet.servers):
        raise PreflightError(
            f"{option} would have decode servers go on from what prefill servers computed with "
            "other weights: the router pairs any two of them",
            hint="push to all of them at once: leave the option out",
        )
    if rotation is None:
        raise PreflightError(
            f"{option} needs a router that skyctl runs: without it nothing keeps users' requests "
            "from servers whose weights nobody has accepted yet",
            hint="start the fleet with `skyctl up` and its router, or leave the option out",
        )


def refuse_paused(request: PushRequest, sites: Sequence[Site]) -> None:
    """Raise PreflightError if a canary would release requests that somebody froze."""
    paused = [site.name for site in sites if site.was_paused]
    if request.canary is not None and paused:
        raise PreflightError(
            f"{', '.join(paused)} cannot answer canary prompts: paused or asleep before the push",
            hint="skyctl resume (or skyctl wake), then push again; or leave --canary out",
        )


async def leave(run: Run, sites: Sequence[Site]) -> None:
    """Take servers out of the router, and wait until they have no requests, unless those are to be
    aborted. A server that is not empty within the fleet's `drain_timeout_s` fails: the push is
    undone.
    """
    assert run.rotation is not None  # see refuse_impossible
    reached("push.drain.call")
    try:
        names = [site.name for site in sites]
        await run.rotation.leave(
            names,
            others_serve=run.request.rolling > 0,
            closed=run.request.canary is not None,  # nobody has accepted what they will hold
        )
        for site in sites:
            run.observer.server(site.name, "draining")
    except SkyctlError as error:
        for site in sites:
            site.failure = f"drain: {error.message}"
    require_all(run, sites)
    if run.request.pause_mode == "wait":
        patience_s = run.fleet.drain_timeout_s
        await each(
            [site for site in sites if not site.was_paused],  # frozen requests do not finish
            lambda site: _drained(site, patience_s),
            timeout_s=patience_s + run.fleet.control_timeout_s,
            what="drain",
        )
    reached("push.drain.done")
    require_all(run, sites)


async def _drained(site: Site, patience_s: float) -> None:
    empty, deadline = 0, time.monotonic() + patience_s
    while empty < _EMPTY_POLLS:
        left = (await site.vllm.metrics()).in_flight
        empty = 0 if left else empty + 1
        if left and time.monotonic() > deadline:
            raise ServerError(
                f"{left:g} requests have not ended after {patience_s:g} s (drain_timeout_s)"
            )
        if empty < _EMPTY_POLLS:
            await asyncio.sleep(_DRAIN_POLL_S)


async def rejoin(run: Run, sites: Sequence[Site]) -> None:
    """Return servers to the router, whatever became of them; those that must not be routed to are
    quarantined by now.
    """
    if run.rotation is not None and run.request.leaves_router:
        await run.rotation.rejoin([site.name for site in sites])


async def abort_stragglers(site: Site) -> None:
    """Abort requests that reached a server past the router, before it generates again.

    Raises:
        ServerError: it does not answer.
    """
    if (await site.vllm.metrics()).in_flight:
        await site.vllm.pause("abort", clear_cache=False)
        if (await site.vllm.metrics()).in_flight:
            raise ServerError(f"{site.name}: requests arrive past the router")
