"""Take the servers of a push out of service and return them: out of the router and drained, frozen
and thawed. Undo what was done before the first byte.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from skyctl.errors import PreflightError, PushError, ServerError, SkyctlError, StateUnwritable
from skyctl.http.fanout import OutcomeStatus
from skyctl.kill_points import reached
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.run import Abandoned, Rotation, Run
from skyctl.push.sites import Site, Weights, alive, close_session, each, require_paused, responsive
from skyctl.push.verify import weights_digest
from skyctl.states import PushStage, PushState

_DRAIN_POLL_S = 0.25
# a request that the router has already assigned may arrive after the server left it
_EMPTY_POLLS = 2


class NotYet(Exception):
    """A stage before the first byte failed, was abandoned, or could not be put on record
    (`unwritable`): everything can be undone.
    """

    def __init__(
        self, unwritable: StateUnwritable | None = None, *, abandoned: bool = False
    ) -> None:
        self.abandoned = abandoned
        self.unwritable = unwritable

    def reason(self, sites: Sequence[Site]) -> BaseException:
        if self.abandoned:
            return Abandoned()
        failed = [f"{site.name}: {site.failure}" for site in sites if site.failure]
        hint = "where a server does not answer: skyctl recover; then push again"
        if self.unwritable is not None:
            failed, hint = [self.unwritable.message], self.unwritable.hint
        left = [site.report().to_json() for site in sites]
        in_doubt = [row["server"] for row in left if row["state"] == PushState.QUARANTINED]
        after = (
            f"{', '.join(in_doubt)} stay paused: an earlier push broke off there"
            if in_doubt
            else "the servers keep their old weights"
        )
        return PushError(
            f"the push was undone, {after} ({failed[0]})", hint=hint, details={"servers": left}
        )


def require_all(run: Run, sites: Sequence[Site]) -> None:
    if run.cancel_guard.cancelled:
        raise NotYet(abandoned=True)
    if len(alive(sites)) < len(sites):
        raise NotYet


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
            hint=f"leave {option} out",
        )


def refuse_paused(request: PushRequest, sites: Sequence[Site]) -> None:
    """Raise PreflightError if a canary would release requests that somebody froze."""
    paused = [site.name for site in sites if site.was_paused]
    if request.canary is not None and paused:
        raise PreflightError(
            f"{', '.join(paused)} cannot answer canary prompts: paused or asleep before the push",
            hint="thaw them: skyctl resume; skyctl wake; then push again; or leave --canary out",
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
            run.observer.server(site.name, PushState.DRAINING)
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


async def pause(run: Run, sites: Sequence[Site]) -> None:
    """Freeze every server and check that it is frozen; the freeze window begins.

    A server that is already paused is paused as well: whoever froze it may thaw it between the
    check and now.
    """
    run.froze_at = run.clock()
    # recorded first: whoever reads the journal of a push that died must know which servers to thaw
    run.observer.intend(
        {site.name: PushState.HELD if site.was_paused else PushState.PAUSING for site in sites}
    )
    reached("push.pause.call")
    # prefill servers first: they answer once the decode servers, which still run, have fetched the
    # KV that waits for them
    awake = [site for site in sites if not site.asleep]
    prefill = [site for site in awake if site.kv_lease_s]
    if prefill:
        names = ", ".join(site.name for site in prefill)
        run.note(f"{names} paused first, so that decode servers fetch the KV that waits there")
        await _pause(run, prefill)
        require_all(run, sites)
    await _pause(run, [site for site in awake if not site.kv_lease_s])
    require_all(run, sites)


async def _pause(run: Run, sites: Sequence[Site]) -> None:
    mode = run.request.pause_mode
    # mode "wait" lets running requests finish first
    timeout_s = run.fleet.control_timeout_s if mode != "wait" else run.fleet.update_timeout_s
    timeout_s += max((site.kv_lease_s for site in sites), default=0.0)

    async def call(site: Site) -> None:
        if not site.was_paused:
            site.frozen = True  # set before the call: if its answer is lost, it may be paused
        await site.vllm.pause(
            "keep" if site.was_paused else mode, clear_cache=False, timeout_s=timeout_s
        )
        await require_paused(site)
        site.spans.frozen_at = site.spans.clock()
        if site.frozen:
            run.observer.server(site.name, PushState.PAUSED)

    outcomes = await each(sites, call, timeout_s=timeout_s, what="pause")
    for site, outcome in zip(sites, outcomes, strict=True):
        if site.kv_lease_s and outcome.status is OutcomeStatus.TIMEOUT:
            site.failure += (
                ": its requests keep KV that no decode server has fetched, for longer than their "
                f"lease of {site.kv_lease_s:g} s; end them, or look whether decode servers run"
            )


async def roll_back(run: Run, sites: Sequence[Site]) -> None:
    """Nothing was sent: close what was opened, and resume at their old weights the servers we
    froze.

    A server whose engine is stuck stays paused: waiting for it would keep the others frozen.
    """
    timeout_s = run.fleet.control_timeout_s

    with run.stage(PushStage.RECOVER):
        failed = [site for site in sites if site.failure]
        answering = await responsive(failed, control_timeout_s=timeout_s)
        able = alive(sites) + answering
        await each(
            [site for site in able if site.open], close_session, timeout_s=timeout_s, what="close"
        )
        for site in sites:
            if site.open:  # not closed: its layers are empty
                site.weights = Weights.UNKNOWN
        await _label_verified(run, [site for site in able if site.weights is Weights.OLD])
        await resume(run, [site for site in able if site.weights is Weights.OLD])
        for site in sites:
            if site.weights is Weights.UNKNOWN:
                site.failure = site.failure or "an earlier push broke off and left it half updated"
                run.observer.server(site.name, PushState.QUARANTINED, site.failure)


async def _label_verified(run: Run, sites: Sequence[Site]) -> None:
    """Label weights that an earlier push verified but died before labelling: thawed without the
    label, the server would serve them under the previous one.
    """

    async def call(site: Site) -> None:
        label, site.weights = site.server.verified_as, Weights.UNKNOWN  # until it is done
        found = await weights_digest(site.vllm, timeout_s=run.fleet.update_timeout_s)
        if found.digest != site.server.weights_digest:
            raise ServerError(f"{site.name}: it does not hold {label} (digest {found.digest})")
        await site.vllm.set_weight_version(label)
        site.weights, site.old_version = Weights.OLD, label

    verified = [site for site in sites if site.server.verified_as]
    await each(verified, call, timeout_s=run.fleet.update_timeout_s, what="label")


async def resume(run: Run, sites: Sequence[Site]) -> None:
    """Thaw the servers we froze; the freeze window ends. A resume that fails is retried once."""
    timeout_s = run.fleet.control_timeout_s
    frozen = [site for site in sites if site.frozen]
    for site in sites:
        if site.was_paused:
            run.observer.server(site.name, PushState.KEPT, "stays paused")
        elif not site.frozen:
            run.observer.server(site.name, PushState.READY)

    async def call(site: Site) -> None:
        try:
            await site.vllm.resume()
        except SkyctlError:
            await site.vllm.resume()
        site.resumed = True
        site.spans.thawed_at = site.spans.clock()
        # its freeze ends here; it becomes `ready`, and is routed to, once all are resumed
        run.observer.server(site.name, PushState.RESUMED, site.failure)

    await each(frozen, call, timeout_s=timeout_s * 2, what="resume")
    run.thawed_at = run.clock()
    for site in frozen:
        run.observer.server(
            site.name, PushState.READY if site.resumed else PushState.PAUSED, site.failure
        )


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
