"""Take the servers of a push out of service and return them: out of the router and drained, frozen
and thawed. Undo what was done before the first byte.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from skyctl import engines
from skyctl.engines.base import Refusal
from skyctl.errors import PreflightError, PushError, ServerError, SkyctlError, StateUnwritable
from skyctl.http.fanout import OutcomeStatus
from skyctl.http.target import FreezeOrder
from skyctl.kill_points import reached
from skyctl.push.frozen import count_tokens, require_paused, take_over_freeze
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.run import Abandoned, Rotation, Run
from skyctl.push.servers import Holds, PushedServer, alive, ask_all, close_session, each, responsive
from skyctl.push.verify import weights_digest
from skyctl.states import PauseMode, PushStage, PushState
from skyctl.units import waits_for

_POLL_S = 0.25
_REPORT_S = 1.0
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

    def reason(self, servers: Sequence[PushedServer]) -> BaseException:
        if self.abandoned:
            return Abandoned()
        failed = [f"{server.name}: {server.failure}" for server in servers if server.failure]
        hint = "where a server does not answer: skyctl recover; then push again"
        if self.unwritable is not None:
            failed, hint = [self.unwritable.message], self.unwritable.hint
        rows = [server.report().to_json() for server in servers]
        in_doubt = [row["server"] for row in rows if row["state"] == PushState.QUARANTINED]
        after = (
            f"{', '.join(in_doubt)} stay paused, without whole weights"
            if in_doubt
            else "the servers keep their old weights"
        )
        return PushError(
            f"the push was undone, {after} ({failed[0]})", hint=hint, details={"servers": rows}
        )


def require_all(run: Run, servers: Sequence[PushedServer]) -> None:
    if run.cancel_guard.cancelled:
        raise NotYet(abandoned=True)
    if len(alive(servers)) < len(servers):
        raise NotYet


def refuse_impossible(request: PushRequest, fleet: PushFleet, rotation: Rotation | None) -> None:
    """Raise PreflightError for a push that needs what this fleet lacks."""
    if not request.leaves_router:
        return
    option = "--trial" if request.trial is not None else "--rolling"
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


def refuse_paused(request: PushRequest, servers: Sequence[PushedServer]) -> None:
    """Raise PreflightError if a trial would release requests that somebody froze."""
    paused = [server.name for server in servers if server.before.paused]
    if request.trial is not None and paused:
        raise PreflightError(
            f"{', '.join(paused)} cannot answer trial prompts: paused or asleep before the push",
            hint="thaw them: skyctl resume; skyctl wake; then push again; or leave --trial out",
        )


async def take_out(run: Run, servers: Sequence[PushedServer]) -> None:
    """Take servers out of the router, and wait until they have no requests, unless those are to be
    aborted. A server that is not empty within the fleet's `drain_timeout_s` fails: the push is
    undone.
    """
    assert run.rotation is not None  # see refuse_impossible
    reached("push.drain.call")
    try:
        names = [server.name for server in servers]
        await run.rotation.take_out(
            names,
            others_serve=run.request.rolling > 0,
            closed=run.request.trial is not None,  # nobody has accepted what they will hold
        )
        for server in servers:
            run.observer.server(server.name, PushState.DRAINING)
    except SkyctlError as error:
        for server in servers:
            server.failure = f"drain: {error.message}"
    require_all(run, servers)
    if run.request.pause_mode == "wait":
        patience_s = run.fleet.timeouts.drain_s
        await each(
            [
                server for server in servers if not server.before.paused
            ],  # frozen requests do not finish
            lambda server: _drained(run, server, patience_s),
            timeout_s=patience_s + run.fleet.timeouts.control_s,
            call_name="drain",
        )
    reached("push.drain.done")
    require_all(run, servers)


async def pause(run: Run, servers: Sequence[PushedServer]) -> None:
    """Freeze every server and check that it is frozen; the freeze window begins.

    A server that is already paused is paused as well: whoever froze it may thaw it between the
    check and now.
    """
    run.stopwatch.froze_at = run.stopwatch.clock()
    # recorded first: whoever reads the journal of a push that died must know which servers to thaw
    run.observer.intend(
        {
            server.name: PushState.HELD if server.before.paused else PushState.PAUSING
            for server in servers
        }
    )
    reached("push.pause.call")
    # prefill servers first: they answer once the decode servers, which still run, have fetched the
    # KV that waits for them
    awake = [server for server in servers if not server.before.asleep]
    prefill = [server for server in awake if server.before.kv_lease_s]
    if prefill:
        names = ", ".join(server.name for server in prefill)
        run.note(f"{names} paused first, so that decode servers fetch the KV that waits there")
        await _pause(run, prefill)
        require_all(run, servers)
    await _pause(run, [server for server in awake if not server.before.kv_lease_s])
    require_all(run, servers)


async def _pause(run: Run, servers: Sequence[PushedServer]) -> None:
    mode = run.request.pause_mode
    # mode "wait" lets running requests finish first
    timeout_s = run.fleet.timeouts.control_s if mode != "wait" else run.fleet.timeouts.update_s
    timeout_s += max((server.before.kv_lease_s for server in servers), default=0.0)

    async def call(server: PushedServer) -> None:
        if server.before.paused and not await server.control.is_paused():
            take_over_freeze(server)
        if not server.before.paused:
            server.did.frozen = True  # set before the call: if its answer is lost, it may be paused
        how: PauseMode = "keep" if server.before.paused else mode
        try:
            pausing = server.control.pause(how, clear_cache=False, timeout_s=timeout_s)
            await _paused(run, server, pausing)
        except ServerError as error:
            if error.refusal == Refusal.FROZEN_BY_ANOTHER:
                server.did.frozen = False
            raise
        await require_paused(server)
        server.spans.frozen_at = server.spans.clock()
        if server.before.empty:
            server.holds = Holds.UNKNOWN
        await count_tokens(server)
        if server.did.frozen:
            run.observer.server(server.name, PushState.PAUSED)

    outcomes = await each(servers, call, timeout_s=timeout_s, call_name="pause")
    for server, outcome in zip(servers, outcomes, strict=True):
        if server.before.kv_lease_s and outcome.status is OutcomeStatus.TIMEOUT:
            server.failure += (
                ": its requests keep KV that no decode server has fetched, for longer than their "
                f"lease of {server.before.kv_lease_s:g} s; end them, or check that decode servers "
                "run"
            )


async def roll_back(run: Run, servers: Sequence[PushedServer]) -> None:
    """Nothing was sent: close what was opened, and resume at their old weights the servers we
    froze.

    A server whose engine is stuck stays paused: waiting for it would keep the others frozen.
    """
    timeout_s = run.fleet.timeouts.control_s

    with run.stage(PushStage.RECOVER):
        failed = [server for server in servers if server.failure]
        answering = await responsive(failed, control_timeout_s=timeout_s)
        able = alive(servers) + answering
        await each(
            [server for server in able if server.did.open],
            close_session,
            timeout_s=timeout_s,
            call_name="close",
        )
        for server in servers:
            if server.did.open:  # not closed: its layers are empty
                server.holds = Holds.UNKNOWN
        await label_verified(run, [server for server in able if server.holds is Holds.OLD])
        await resume(run, [server for server in able if server.holds is Holds.OLD])
        for server in servers:
            if server.holds is Holds.UNKNOWN:
                if server.before.empty:
                    reason = f" ({server.failure})" if server.failure else ""
                    server.failure = f"a level-2 sleep discarded its weights: push again{reason}"
                server.failure = (
                    server.failure or "an earlier push broke off and left it half updated"
                )
                run.observer.server(server.name, PushState.QUARANTINED, server.failure)


async def label_verified(run: Run, servers: Sequence[PushedServer]) -> None:
    """Label weights that an earlier push verified but died before labelling: thawed without the
    label, the server would serve them under the previous one.
    """

    async def call(server: PushedServer) -> None:
        label, server.holds = server.given.recorded.verified_as, Holds.UNKNOWN  # until it is done
        report = await weights_digest(server.control, timeout_s=run.fleet.timeouts.update_s)
        if report.digest != server.given.recorded.weights_digest:
            raise ServerError(f"{server.name}: it does not hold {label} (digest {report.digest})")
        await server.control.set_weight_version(label)
        server.holds, server.version = Holds.OLD, label

    verified = [server for server in servers if server.given.recorded.verified_as]
    await each(verified, call, timeout_s=run.fleet.timeouts.update_s, call_name="label")


async def resume(run: Run, servers: Sequence[PushedServer]) -> None:
    """Thaw the servers we froze; the freeze window ends. A resume that fails is retried once."""
    timeout_s = run.fleet.timeouts.control_s
    frozen = [server for server in servers if server.did.frozen]
    for server in servers:
        if server.before.paused and not server.did.resumed:
            run.observer.server(server.name, PushState.KEPT, "stays paused")
        elif not server.did.frozen:
            run.observer.server(server.name, PushState.READY)

    async def call(server: PushedServer) -> None:
        try:
            await server.control.resume()
        except SkyctlError:
            await server.control.resume()
        server.did.resumed = True
        server.spans.thawed_at = server.spans.clock()
        # its freeze ends here; it becomes `ready`, and is routed to, once all are resumed
        run.observer.server(server.name, PushState.RESUMED, server.failure)

    await each(frozen, call, timeout_s=timeout_s * 2, call_name="resume")
    run.stopwatch.thawed_at = run.stopwatch.clock()
    await _release(run, servers)
    for server in frozen:
        run.observer.server(
            server.name, PushState.READY if server.did.resumed else PushState.PAUSED, server.failure
        )


async def _release(run: Run, servers: Sequence[PushedServer]) -> None:
    """Let whoever froze a server before the push thaw it again: pausing it made the freeze ours."""

    async def call(server: PushedServer) -> None:
        target = replace(server.given.target, freeze=FreezeOrder.RELEASE)
        control = engines.server(run.client, target, timeout_s=run.fleet.timeouts.control_s)
        if await control.is_paused():  # else it was started again, or thawed
            await control.pause("keep", clear_cache=False)

    others = [
        server
        for server in servers
        if server.before.paused
        and not (server.before.asleep or server.given.recorded.paused or server.did.resumed)
        and server.given.target.holder
    ]
    await ask_all(others, call, timeout_s=run.fleet.timeouts.control_s)


async def rejoin(run: Run, servers: Sequence[PushedServer]) -> None:
    """Return servers to the router, whatever became of them; those that must not be routed to are
    quarantined by now.
    """
    if run.rotation is not None and run.request.leaves_router:
        await run.rotation.rejoin([server.name for server in servers])


async def abort_stragglers(server: PushedServer) -> None:
    """Abort requests that reached a server past the router, before it generates again.

    Raises:
        ServerError: it does not answer.
    """
    if (await server.control.metrics()).in_flight:
        await server.control.pause("abort", clear_cache=False)
        if (await server.control.metrics()).in_flight:
            raise ServerError(f"{server.name}: requests arrive past the router")


async def _drained(run: Run, server: PushedServer, patience_s: float) -> None:
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


async def _paused(run: Run, server: PushedServer, pausing: Coroutine[Any, Any, None]) -> None:
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
