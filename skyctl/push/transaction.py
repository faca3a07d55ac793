"""The push: one transaction over all servers of a fleet, or one after another over parts of it.

    phase       establishes   stages (PushStage)              if it fails
    check       Checked       preflight                       nothing was touched
    staged      Staged        stage                           nothing was touched
    freeze      Frozen        drain wake pause init start     undone: the old weights serve again
    deliver     Delivered     update finish recover           the server stays paused: quarantined
    verify      Verified      verify                          the server stays paused: quarantined
    accept                    trial                           the old weights are pushed back
    publish                   resume                          it has the new weights, and is paused

With a trial, servers leave the router and are drained before they are paused, answer its prompts
once they are verified, and rejoin at the end.

Whatever fails, each server ends verified and resumed at one version, or paused with the reason
reported. A server that was paused before stays paused.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from skyctl.errors import PreflightError, SkyctlError, StateUnwritable
from skyctl.http.client import ControlClient
from skyctl.kill_points import reached
from skyctl.push import sleeping
from skyctl.push.check import Checked, check
from skyctl.push.commit import publish, verify
from skyctl.push.freeze import (
    NotYet,
    pause,
    refuse_impossible,
    refuse_paused,
    rejoin,
    require_all,
    roll_back,
    take_out,
)
from skyctl.push.frozen import freeze_again
from skyctl.push.request import CarefulObserver, PushFleet, PushObserver, PushRequest, PushResult
from skyctl.push.run import (
    CancelGuard,
    Delivered,
    Frozen,
    Rotation,
    Run,
    Staged,
    Stopwatch,
    cut_short,
    result_of,
)
from skyctl.push.runtime_delivery import CannotCopy
from skyctl.push.servers import alive, responsive
from skyctl.push.tracing import traced
from skyctl.push.verify import launch_digests
from skyctl.push.way import Delivery
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
            careful = CarefulObserver(observer, *([spans] if spans is not None else []))
            watch = Stopwatch(clock)
            run = Run(request, fleet, client, careful, watch, cancel_guard, pool, rotation)
            result = await cancel_guard.run(carry_out(run))
            if spans is not None:
                spans.finish(result)
            return result
    finally:
        if senders is None:
            await pool.close()


async def carry_out(run: Run) -> PushResult:
    """All phases of one push."""
    run.stopwatch.began = run.stopwatch.clock()
    checked = await _check(run)
    if run.request.dry_run:
        return result_of(run, checked, run.request.weight_version or "")
    try:
        async with staged(run, checked) as staging:
            frozen = await freeze(run, staging)
            delivered = await deliver(run, frozen)
            verified = await verify(run, delivered)
            if run.request.trial is not None:
                from skyctl.push.trial import accept

                await accept(run, verified, push_back=carry_out)
            return await publish(run, verified)
    except BaseException as error:
        failure = cut_short(run, checked.servers, error)
        await freeze_again(checked.servers, run.observer, run.fleet.timeouts.control_s)
        raise failure from error
    finally:
        await rejoin(
            run, checked.servers
        )  # those that must not be routed to are quarantined by now


async def _check(run: Run) -> Checked:
    """Refuse what cannot be done, and put on record what is pushed into which weights."""
    with run.stage(PushStage.CHECK):
        sleeping.refuse_impossible(run.request)
        refuse_impossible(run.request, run.fleet, run.rotation)
        checked = await check(run.request, run.fleet, client=run.client, idle=run.senders.idle)
        reached("push.prepared")
        for note in checked.notes:
            run.note(note)
        refuse_paused(run.request, checked.servers)
        source = checked.source
        run.observer.fact(
            "prepared",
            {
                "checkpoint": source.path,
                "checkpoint_digest": source.identity,
                **checked.draft_record,
            },
        )
        run.learned.digests += launch_digests(checked.servers)
        for server in checked.servers:
            server.intend = run.observer.intend
            if server.proof.digest_before:
                run.observer.server(server.name, PushState.WEIGHED, server.proof.digest_before)
    return checked


@asynccontextmanager
async def staged(run: Run, checked: Checked) -> AsyncIterator[Staged]:
    """Do ahead of the freeze whatever can be; what was taken for it is released with the block."""
    delivery = checked.way.delivery(run.senders)
    try:
        with run.stage(PushStage.STAGE):
            delivery = await _open(run, checked, delivery)
            reached("push.staged")
        yield Staged(checked, delivery)
    finally:
        await delivery.close()


async def _open(run: Run, checked: Checked, delivery: Delivery) -> Delivery:
    """Open a delivery. Its failures are refusals: nothing was touched.

    Returns the delivery to go on with: vLLM's loader, if a server cannot get ready to copy, or the
    sender cannot stage what servers would copy.
    """
    try:
        try:
            await delivery.open(checked.servers)
            return delivery
        except (CannotCopy, SenderFailed) as why:
            copies = isinstance(why, CannotCopy) or (delivery.copies and not why.final)
            if not copies or run.request.layout == "runtime":
                raise
            run.note(f"by vLLM's loader, not in the runtime's layout: {why.message}")
        await delivery.close()
        second = checked.way.delivery(run.senders, by_loader=True)
        try:
            await second.open(checked.servers)
        except BaseException:
            await second.close()
            raise
        return second
    except SenderFailed as error:
        raise PreflightError(error.message, hint=error.hint, details=error.details) from error


async def freeze(run: Run, staging: Staged) -> Frozen:
    """Freeze the servers and open an update in each; what fails here is undone on all of them."""
    servers, delivery = staging.checked.servers, staging.delivery
    run.cancel_guard.enter()  # from here on a cancellation must not leave servers frozen
    try:
        if run.request.leaves_router:
            with run.stage(PushStage.DRAIN):
                await take_out(run, servers)
        if run.request.colocated or sleeping.sleepers(servers):
            with run.stage(PushStage.WAKE):
                await sleeping.wake_weights(run, servers)
        with run.stage(PushStage.PAUSE):
            await pause(run, servers)
            reached("push.pause.done")
        with run.stage(PushStage.INIT):
            await delivery.init(servers)
            reached("push.init.done")
            require_all(run, servers)
        with run.stage(PushStage.START):
            reached("push.start.call")
            await delivery.start(servers)
            reached("push.start.done")
            require_all(run, servers)
        run.observer.stage(PushStage.UPDATE)  # on record before the first byte, or nothing is sent
    except (NotYet, StateUnwritable) as stop:
        await roll_back(run, servers)
        await sleeping.sleep_again(run, servers)
        raise (stop if isinstance(stop, NotYet) else NotYet(stop)).reason(servers) from None
    return Frozen(staging.checked, delivery)


async def deliver(run: Run, frozen: Frozen) -> Delivered:
    """Bring the weights into the servers; those that failed get a second attempt."""
    checked, delivery = frozen.checked, frozen.delivery
    servers = checked.servers
    with run.stage(PushStage.UPDATE, announced=True):
        await delivery.update(servers, _progress(run, checked))
    with run.stage(PushStage.FINISH):
        reached("push.finish.call")
        await delivery.finish(servers, lambda: label_of(run, checked, delivery))
        reached("push.finish.done")
    failed = len(alive(servers)) < len(servers)
    if failed or run.request.trial is not None or not delivery.frees_late:
        await delivery.close()
    if failed and delivery.can_retry:
        delivery = await _push_again(run, checked, delivery)
    if checked.draft is not None:
        with run.stage(PushStage.FINISH, announced=True):
            await checked.draft.load(servers, timeout_s=run.fleet.timeouts.update_s)
    return Delivered(checked, delivery, label_of(run, checked, delivery))


def label_of(run: Run, checked: Checked, delivery: Delivery) -> str:
    """The version's label: the user's, else the trainer's, else the checkpoint's name and a digest
    of its content.
    """
    trainer = run.fleet.trainer
    given = run.request.weight_version or (trainer.version if trainer is not None else "")
    if given:
        return given
    digest = delivery.content_digest or checked.source.identity
    return f"{checked.source.name}@{digest[:8]}"


def _progress(run: Run, checked: Checked) -> Callable[[int], None]:
    total = checked.source.whole.bytes
    run.observer.progress(0, total)
    for server in alive(checked.servers):
        run.observer.server(server.name, PushState.UPDATING)
    return lambda done: run.observer.progress(done, total)


async def _push_again(run: Run, checked: Checked, first: Delivery) -> Delivery:
    """Scrub the servers that failed and push to them once more, with a new sender.

    They stay paused meanwhile. Servers that do not answer, or of whose several workers one failed,
    cannot be scrubbed: only a restart helps them. A server that is not paused was restarted.
    """
    failed = [server for server in checked.servers if server.failure]
    delivery = checked.way.delivery(run.senders, by_loader=True)
    with run.stage(PushStage.RECOVER):
        run.note(
            f"{', '.join(server.name for server in failed)}: {failed[0].failure}; "
            "scrubbing and pushing again"
        )
        candidates = await responsive(
            failed, control_timeout_s=run.fleet.timeouts.control_s, paused=True
        )
        candidates = [server for server in candidates if server.before.world_size == 1]
        if not candidates:
            return first
        for server in candidates:
            server.failure, server.proof.copied = "", False
        try:
            await delivery.open(candidates)
            await delivery.init(candidates)
            await delivery.start(candidates, scrubbing=True)
            await delivery.update(candidates, _progress(run, checked))
            for server in alive(candidates) if _differ(first, delivery) else ():
                server.failure = "its machine has read other bytes than the first attempt"
            await delivery.finish(candidates, lambda: label_of(run, checked, delivery))
        except SkyctlError as error:
            for server in alive(candidates):
                server.failure = error.message
        finally:
            await delivery.close()
    return delivery if delivery.content_digest and not _differ(first, delivery) else first


def _differ(first: Delivery, second: Delivery) -> bool:
    """Whether they have read different bytes, as another machine may that reads alone."""
    digests = {first.content_digest, second.content_digest} - {""}
    return len(digests) > 1
