"""The push: one transaction over all servers of a fleet, or one after another over parts of it.

    preflight ─► stage ─► pause ─► init ─► start ─► update … ─► finish ─► verify ─► resume
    └─ nothing touched ─┘ └─ old weights, undone ─┘ └─ half new: scrub and push once more,
                                                       else the server stays paused: quarantined

With a canary, servers leave the router and are drained before `pause` (`drain`), answer its prompts
after `verify` (`canary`), and rejoin at the end. When an answer is not as expected the committed
weights are pushed back.

Whatever fails, each server ends verified and resumed at one version, or paused with the reason
reported. A server that was paused before stays paused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from skyctl.errors import PreflightError, PushError, SkyctlError, StateUnwritable
from skyctl.http.client import ControlClient
from skyctl.kill_points import reached
from skyctl.push import sleeping
from skyctl.push.canary import failed
from skyctl.push.commit import (
    cut_short,
    publish,
    refuse_commit,
    result_of,
    settle,
    try_canary,
    verify,
)
from skyctl.push.delivery import Delivery
from skyctl.push.expected import launch_digests
from skyctl.push.freeze import (
    NotYet,
    leave,
    pause,
    refuse_impossible,
    refuse_paused,
    rejoin,
    require_all,
    resume,
    roll_back,
)
from skyctl.push.preflight import Prepared, preflight
from skyctl.push.request import (
    CarefulObserver,
    PushFleet,
    PushObserver,
    PushRequest,
    PushResult,
    PushServer,
)
from skyctl.push.run import CancelGuard, Rotation, Run, label_of
from skyctl.push.runtime_delivery import CannotCopy
from skyctl.push.sites import Site, Weights, alive, responsive
from skyctl.push.tracing import traced
from skyctl.states import PushStage, PushState
from skyctl.transfer.sender_client import SenderFailed
from skyctl.transfer.sender_pool import SenderPool


async def push(
    request: PushRequest,
    fleet: PushFleet,
    *,
    client: ControlClient,
    observer: PushObserver,
    senders: SenderPool | None = None,
    rotation: Rotation | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PushResult:
    """Bring a checkpoint into every server of a fleet.

    Cancelled before any byte was sent, it undoes the pause and raises CancelledError; later it
    completes first, because half-updated servers cannot be left, and returns the result. A second
    cancellation ends it where it is: servers stay paused.

    A caller that pushes repeatedly passes a pool of `senders`, which keeps what a GPU sender sets
    up; without one, each push has its own. Pushes that take servers out of the router need
    `rotation`.

    Raises:
        PreflightError, NotFoundError, ServerError: nothing was touched.
        PushError: it failed after the pause; `details["servers"]` has one ServerPush mapping each.
    """
    cancel_guard = CancelGuard()
    pool = senders or SenderPool()
    try:
        with traced(request, fleet) as spans:
            told = CarefulObserver(observer, *([spans] if spans is not None else []))
            run = Run(request, fleet, client, told, clock, cancel_guard, pool, rotation)
            result = await cancel_guard.run(_transaction(run))
            if spans is not None:
                spans.finish(result)
            return result
    finally:
        if senders is None:
            await pool.close()


async def _transaction(run: Run) -> PushResult:
    run.began = run.clock()
    with run.stage(PushStage.CHECK):
        sleeping.refuse_impossible(run.request)
        refuse_impossible(run.request, run.fleet, run.rotation)
        prepared = await preflight(run.request, run.fleet, client=run.client, idle=run.senders.idle)
        reached("push.prepared")
        for note in prepared.notes:
            run.note(note)
        refuse_paused(run.request, prepared.sites)
        run.observer.fact(
            "prepared", {"checkpoint": prepared.source, "checkpoint_digest": prepared.identity}
        )
        run.learned.digests += launch_digests(prepared.sites)
        for site in prepared.sites:
            if site.digest_before:
                run.observer.server(site.name, PushState.WEIGHED, site.digest_before)
    if run.request.dry_run:
        return result_of(run, prepared, run.request.weight_version or "")
    try:
        return await _carry_out(run, prepared)
    except BaseException as error:
        raise cut_short(run, prepared.sites, error) from error
    finally:
        await rejoin(run, prepared.sites)  # those that must not be routed to are quarantined by now


async def _carry_out(run: Run, prepared: Prepared) -> PushResult:
    sites = prepared.sites
    delivery = prepared.delivery(run.fleet, run.senders)
    try:
        with run.stage(PushStage.STAGE):
            delivery = await _stage(run, prepared, delivery)
            reached("push.staged")
        run.cancel_guard.enter()  # from here on a cancellation must not leave servers frozen
        await _until_started(run, delivery, sites)
        with run.stage(PushStage.UPDATE, announced=True):
            await delivery.update(sites, _progress(run, prepared))
        with run.stage(PushStage.FINISH):
            reached("push.finish.call")
            await delivery.finish(sites, lambda: label_of(run, prepared, delivery))
            reached("push.finish.done")
    except BaseException:
        await delivery.close()
        raise
    try:
        return await _commit(run, prepared, delivery)
    finally:
        await delivery.close()


async def _commit(run: Run, prepared: Prepared, delivery: Delivery) -> PushResult:
    """Verify what was delivered, and resume; servers that failed get a second attempt first."""
    sites = prepared.sites
    if len(alive(sites)) < len(sites) or run.request.canary is not None or not delivery.frees_late:
        await delivery.close()
    if delivery.can_retry and len(alive(sites)) < len(sites):
        delivery = await _push_again(run, prepared, delivery)
    label = label_of(run, prepared, delivery)
    with run.stage(PushStage.VERIFY):
        await verify(run, prepared, delivery.content_digest)
    if run.request.canary is not None:
        with run.stage(PushStage.CANARY):
            run.canary = await try_canary(run, sites)
        if failed(run.canary):
            raise await refuse_commit(run, sites, run.canary, _transaction)
    with run.stage(PushStage.RESUME):
        _tell_verified(run, prepared, label, delivery.content_digest)
        await publish(run, sites, label)
        reached("push.resume.call")
        await sleeping.wake_all(run, sites)
        await resume(
            run, [site for site in sites if site.weights in (Weights.OLD, Weights.VERIFIED)]
        )
        await sleeping.sleep_after(run, sites)
        reached("push.resume.done")
    return settle(run, prepared, label, delivery)


async def _until_started(run: Run, delivery: Delivery, sites: Sequence[Site]) -> None:
    """Freeze the servers and open an update in each; what fails here is undone on all of them."""
    try:
        if run.request.leaves_router:
            with run.stage(PushStage.DRAIN):
                await leave(run, sites)
        if run.request.colocated:
            with run.stage(PushStage.WAKE):
                await sleeping.wake_weights(run, sites)
        with run.stage(PushStage.PAUSE):
            await pause(run, sites)
            reached("push.pause.done")
        with run.stage(PushStage.INIT):
            await delivery.init(sites)
            reached("push.init.done")
            require_all(run, sites)
        with run.stage(PushStage.START):
            reached("push.start.call")
            await delivery.start(sites)
            reached("push.start.done")
            require_all(run, sites)
        run.observer.stage(PushStage.UPDATE)  # on record before the first byte, or nothing is sent
    except (NotYet, StateUnwritable) as stop:
        await roll_back(run, sites)
        await sleeping.sleep_again(run, sites)
        raise (stop if isinstance(stop, NotYet) else NotYet(stop)).reason(sites) from None


def _tell_verified(run: Run, prepared: Prepared, label: str, content_digest: str) -> None:
    """From here on, whoever finds this push dead commits it: only the thaw is left."""
    loaded = alive([site for site in prepared.sites if site.weights is Weights.NEW])
    run.observer.fact(
        "verified",
        {
            "version": label,
            "checkpoint": prepared.source,
            "checkpoint_digest": prepared.identity,
            "content_digest": content_digest,
            "transport": prepared.choice.name,
            "whole": not run.request.rolling,
            "servers": {site.name: site.digest for site in loaded},
        },
    )


async def _stage(run: Run, prepared: Prepared, delivery: Delivery) -> Delivery:
    """Do ahead of the freeze whatever can be. Its failures are refusals: nothing was touched.

    Returns the delivery to go on with: vLLM's loader, if a server cannot get ready to copy, or the
    sender cannot stage what servers would copy.
    """
    try:
        try:
            await delivery.open(prepared.sites)
            return delivery
        except (CannotCopy, SenderFailed) as why:
            copies = isinstance(why, CannotCopy) or (delivery.copies and not why.final)
            if not copies or run.request.layout == "runtime":
                raise
            run.note(f"by vLLM's loader, not in the runtime's layout: {why.message}")
        await delivery.close()
        second = prepared.delivery(run.fleet, run.senders, by_loader=True)
        try:
            await second.open(prepared.sites)
        except BaseException:
            await second.close()
            raise
        return second
    except SenderFailed as error:
        raise PreflightError(error.message, hint=error.hint, details=error.details) from error


def _progress(run: Run, prepared: Prepared) -> Callable[[int], None]:
    total = prepared.plan.total_bytes
    run.observer.progress(0, total)
    for site in alive(prepared.sites):
        run.observer.server(site.name, PushState.UPDATING)
    return lambda done: run.observer.progress(done, total)


async def _push_again(run: Run, prepared: Prepared, first: Delivery) -> Delivery:
    """Scrub the servers that failed and push to them once more, with a new sender.

    They stay paused meanwhile. Servers that do not answer, or of whose several workers one failed,
    cannot be scrubbed: only a restart helps them. A server that is not paused was restarted.
    """
    failed = [site for site in prepared.sites if site.failure]
    delivery = prepared.delivery(run.fleet, run.senders, by_loader=True)
    with run.stage(PushStage.RECOVER):
        run.note(
            f"{', '.join(site.name for site in failed)}: {failed[0].failure}; "
            "scrubbing and pushing again"
        )
        candidates = await responsive(
            failed, control_timeout_s=run.fleet.control_timeout_s, paused=True
        )
        candidates = [site for site in candidates if site.world_size == 1]
        if not candidates:
            return first
        for site in candidates:
            site.failure, site.copied = "", False
        try:
            await delivery.open(candidates)
            await delivery.init(candidates)
            await delivery.start(candidates, scrubbing=True)
            await delivery.update(candidates, _progress(run, prepared))
            for site in alive(candidates) if _differ(first, delivery) else ():
                site.failure = "its machine has read other bytes than the first attempt"
            await delivery.finish(candidates, lambda: label_of(run, prepared, delivery))
        except SkyctlError as error:
            for site in alive(candidates):
                site.failure = error.message
        finally:
            await delivery.close()
    return delivery if delivery.content_digest and not _differ(first, delivery) else first


def _differ(first: Delivery, second: Delivery) -> bool:
    """Whether they have read different bytes, as another machine may that reads alone."""
    digests = {first.content_digest, second.content_digest} - {""}
    return len(digests) > 1


async def push_rolling(
    request: PushRequest,
    fleet: PushFleet,
    *,
    client: ControlClient,
    observer: PushObserver,
    rotation: Rotation | None,
    senders: SenderPool | None = None,
    on_part: Callable[[PushResult], None] = lambda result: None,
) -> PushResult:
    """Bring a checkpoint into `request.rolling` servers at a time; returns the sum of all parts.

        check all ─► [leave, drain, push, verify, canary, rejoin] ─► [ … ] ─► the fleet's version
                      └─ fails: this part is undone, the roll stops; those before it stay new

    Requests are served throughout, by two versions: that is inherent. The fleet keeps its old
    version until the last server has the new one.

    `on_part` is called with each part that succeeded. A cancellation stops the roll after the part
    that is under way, or before it if it has sent nothing yet.

    Raises:
        As `push`. `details["servers"]` of a PushError has all servers, those of parts not begun at
        the version that they have.
    """
    began = time.perf_counter()
    _refuse_roll(request, fleet)
    checked = await push(
        replace(request, dry_run=True),
        fleet,
        client=client,
        observer=observer if request.dry_run else PushObserver(),
        rotation=rotation,
    )
    if request.dry_run:
        return checked
    # every part gets what was checked
    asked = replace(request, expected_digest=checked.checkpoint_digest)
    expected = fleet.expected
    parts: list[PushResult] = []
    for first in range(0, len(fleet.servers), request.rolling):
        servers = fleet.servers[first : first + request.rolling]
        try:
            result = await push(
                asked,
                replace(fleet, servers=servers, expected=expected),
                client=client,
                observer=observer,
                senders=senders,
                rotation=rotation,
            )
        except SkyctlError as error:
            raise _roll_stopped(error, parts, servers, checked) from error
        parts.append(result)
        on_part(result)
        expected = expected.with_learned((result.learned or {}).get("digests", ()))
        asked = replace(asked, weight_version=result.version)
        task = asyncio.current_task()
        if (
            task is not None
            and task.cancelling()
            and len(parts) * request.rolling < len(fleet.servers)
        ):
            raise asyncio.CancelledError
    return _sum_of_parts(parts, time.perf_counter() - began)


def _refuse_roll(request: PushRequest, fleet: PushFleet) -> None:
    servers = len(fleet.servers)
    if request.rolling < 0:
        raise PreflightError(f"--rolling {request.rolling}: a part has at least one server")
    if request.rolling >= servers:
        raise PreflightError(
            f"--rolling {request.rolling} would take all {servers} servers out of the router at "
            "once",
            hint=f"--rolling {servers - 1} or less"
            if servers > 1
            else "leave --rolling out: there is no other server to serve meanwhile",
        )


def _roll_stopped(
    error: SkyctlError,
    parts: Sequence[PushResult],
    servers: Sequence[PushServer],
    checked: PushResult,
) -> SkyctlError:
    """The error of the failed part, with all servers and a hint for them."""
    told: dict[str, dict[str, Any]] = {row.server: row.to_json() for row in checked.servers}
    for part in parts:
        told |= {row.server: row.to_json() for row in part.servers}
    told |= {row["server"]: row for row in error.details.get("servers", [])}
    error.details = {**error.details, "servers": list(told.values())}
    if not parts:
        return error
    # a part's version is not the fleet's: only all parts are
    error.details.pop("version", None)
    version = parts[0].version
    new = [row.server for part in parts for row in part.servers]
    names = ", ".join(server.name for server in servers)
    kind = type(error) if isinstance(error, PushError) else PushError
    return kind(
        f"the roll stopped at {names}: {', '.join(new)} at {version}, the others as they were "
        f"({error.message})",
        hint="go on: the same command again; or back to the version before: skyctl recover",
        details=error.details,
    )


def _sum_of_parts(parts: Sequence[PushResult], seconds: float) -> PushResult:
    """All parts as one result. Its freeze window is the longest part's: the fleet has none."""
    last = parts[-1]
    stages: dict[str, float] = {}
    for part in parts:
        for name, taken_s in part.stages.items():
            stages[name] = stages.get(name, 0.0) + taken_s
    return replace(
        last,
        seconds=seconds,
        gb_per_s=sum(part.gb_per_s for part in parts) / len(parts),
        freeze_window_s=max(part.freeze_window_s for part in parts),
        stages=stages,
        servers=[row for part in parts for row in part.servers],
        canary=[row for part in parts for row in part.canary],
        notes=list(dict.fromkeys(note for part in parts for note in part.notes)),
        compared=min(
            (part.compared for part in parts if part.compared),
            key=lambda compared: compared["bytes"],
            default=None,
        ),
    )
