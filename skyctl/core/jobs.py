"""Weight pushes as jobs: one at a time, journaled as they go, followed from any process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.checkpoints.checkpoint import locate
from skyctl.checkpoints.staging import in_use, without_links
from skyctl.core.arbiter import Turn
from skyctl.core.expectations import informed
from skyctl.errors import SkyctlError, StateUnwritable
from skyctl.http.client import ControlClient
from skyctl.kill_points import reached
from skyctl.push.request import (
    THIS_JOB,
    PushFleet,
    PushObserver,
    PushRequest,
    PushResult,
    live_source,
)
from skyctl.states import FleetEvent, PushStage, PushState
from skyctl.store.adapters import served
from skyctl.store.fleet_weights import CanaryStage, FleetWeights
from skyctl.store.in_doubt import (
    clear_doubt,
    in_doubt,
    left_behind,
    open_sender,
    put_in_doubt,
    record_cut_short,
    released_by,
    verified,
)
from skyctl.store.journal import DRY_RUN, PUSH, EventKind, Job, JobEvent, JobState, Journal
from skyctl.store.state import FleetState
from skyctl.transfer.sender_pool import SenderPool
from skyctl.units import format_seconds

if TYPE_CHECKING:
    from skyctl.push.run import Rotation

_PROGRESS_S = 0.15


class JournalObserver(PushObserver):
    """Writes everything to the journal; `on_server` receives server states.

    Intents and facts are on record when a call returns. The rest is written with the next of these,
    or at the end of this turn of the event loop: updates of one moment make one statement.

    Raises StateUnwritable for an intent that cannot be put on record.
    """

    def __init__(
        self,
        journal: Journal,
        job_id: str,
        on_server: Callable[[str, str, str], None] = lambda name, state, detail: None,
    ) -> None:
        self._journal = journal
        self._job_id = job_id
        self._on_server = on_server
        self._wrote_progress = 0.0
        self._pending: list[JobEvent] = []
        self._failure: Exception | None = None

    def stage(self, name: str) -> None:
        self._add(JobEvent.stage(name), intent=PushStage(name).must_be_recorded_first)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if not done_bytes:
            return  # the state in which a job begins
        if done_bytes >= total_bytes or now - self._wrote_progress >= _PROGRESS_S:
            self._wrote_progress = now
            self.close()
            self._journal.progress(self._job_id, done_bytes, total_bytes)

    def server(self, name: str, state: str, detail: str = "", requests: int = 0) -> None:
        intent = PushState(state).must_be_recorded_first
        self._add(JobEvent.server(name, state, detail, requests), intent=intent)
        self._on_server(name, state, detail)

    def intend(self, states: Mapping[str, str]) -> None:
        self._add(*(JobEvent.server(*row) for row in states.items()), intent=True)
        for name, state in states.items():
            self._on_server(name, state, "")

    def note(self, message: str) -> None:
        self._add(JobEvent.note(message))

    def fact(self, kind: str, data: Mapping[str, Any]) -> None:
        self._add(JobEvent.now(EventKind(kind), **data))
        self.close()

    def close(self) -> None:
        """Write pending updates."""
        pending, self._pending = self._pending, []
        if pending:
            self._journal.add_events(self._job_id, *pending)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _add(self, *events: JobEvent, intent: bool = False) -> None:
        before, self._pending = self._pending, []
        if intent:
            try:
                self._journal.add_events(self._job_id, *before, *events, durable=True)
            except StateUnwritable:  # the rest may do without the file
                self._journal.add_events(self._job_id, *before)
                raise
            return
        if not before:
            asyncio.get_running_loop().call_soon(self._close_later)
        self._pending = [*before, *events]

    def _close_later(self) -> None:
        try:
            self.close()
        except Exception as error:
            self._failure = error  # raised by the next `close`


def resolved(request: PushRequest) -> PushRequest:
    """The request for the directory that its checkpoint means now: a link or a branch of a hub
    repository may mean another one later, when a replica restarts or recovery pushes again.
    """
    if request.draft and (draft := locate(request.draft)) is not None:
        request = replace(request, draft=without_links(str(draft)))
    located = locate(request.checkpoint) if request.checkpoint else None
    if located is None:  # the push says what is wrong
        return request
    directory = without_links(str(located))
    written = request.checkpoint if directory != request.checkpoint else request.written
    return replace(request, checkpoint=directory, written=written)


def open_push(journal: Journal, turn: Turn, request: PushRequest) -> Job:
    """Open a push job, which has the fleet's turn from now on.

    Raises:
        StateUnwritable: its intent cannot be put on record.
    """
    job = journal.begin(DRY_RUN if request.dry_run else PUSH, request.to_json())
    turn.rename(job.id)
    return job


async def run_push(
    job: Job,
    request: PushRequest,
    fleet: PushFleet,
    *,
    client: ControlClient,
    state: FleetState,
    senders: SenderPool | None = None,
    rotation: Rotation | None = None,
    on_server: Callable[[str, str, str], None] = lambda name, state, detail: None,
    on_part: Callable[[], None] = lambda: None,
    guardian: AbstractAsyncContextManager[None] | None = None,
    kept: Path,
) -> None:
    """Run an opened push to its end, and record how it left each server.

    Never raises for a failed push: the journal says how it ended. `guardian` watches over it.
    `on_part` is called when another part of a rolling push is on record. The fleet's own copies of
    checkpoints are in `kept`.
    """
    from skyctl.core.keeping import keeping
    from skyctl.push.rolling import push_rolling
    from skyctl.push.transaction import push

    observer = JournalObserver(state.journal, job.id, on_server)
    if fleet.trainer is not None:
        open_sender(state, job.id, fleet.trainer.process)

    def part_over(result: PushResult) -> None:
        _record_servers(state, result)
        reached("push.part.done")
        on_part()

    reached("push.begun")
    async with AsyncExitStack() as watch:
        if guardian is not None and not request.dry_run:
            await watch.enter_async_context(guardian)
            reached("push.guarded")
        with _recorded(state, job.id, request) as record, contextlib.closing(observer):
            watch.enter_context(in_use(request.checkpoint))
            if request.written:
                observer.note(f"{request.written} is {request.checkpoint}")
            if request.ranks:
                observer.note(f"the weights are {live_source(request.ranks)}")
            if request.keep and request.checkpoint and not request.dry_run:
                observer.stage("keep")
            own = await watch.enter_async_context(keeping(request, kept, state))
            roll = functools.partial(push_rolling, on_part=part_over)
            result = await (roll if request.rolling else push)(
                own.request,
                informed(fleet, state),
                client=client,
                observer=observer,
                senders=senders,
                rotation=rotation,
            )
            if adapters := served(state):
                stay = ", ".join(adapter.served_as for adapter in adapters.values())
                result.notes.append(f"adapters stay: {stay}")
                observer.note(result.notes[-1])
            observer.close()
            reached("push.record")
            own.record(result)
            record(result)


@contextmanager
def _recorded(
    state: FleetState, job_id: str, request: PushRequest
) -> Iterator[Callable[[PushResult], None]]:
    """End the job as the block ends. Yields the function that records a successful push."""

    def succeeded(result: PushResult) -> None:
        with state.transaction():
            if not request.dry_run:
                record_result(state, job_id, request, result)
            reached("push.recorded")
            state.journal.end(job_id, JobState.SUCCEEDED, result=result.to_json())
        reached("push.ended")

    try:
        yield succeeded
    except asyncio.CancelledError:
        record_cut_short(state, state.journal.job(job_id))
        stopped = SkyctlError("the push was stopped")
        state.journal.end(job_id, JobState.INTERRUPTED, error=_error_json(stopped))
        raise
    except Exception as error:
        failure = (
            error if isinstance(error, SkyctlError) else SkyctlError(f"push failed: {error!r}")
        )
        failure.hint = failure.hint.replace(f"show {THIS_JOB}", f"show {job_id}")
        if not request.dry_run:
            record_failure(state, job_id, request, failure)
        state.journal.end(job_id, JobState.FAILED, error=_error_json(failure))


def _doubt_left(state: FleetState, job_id: str) -> None:
    """Record as in doubt the servers that a push that fails has touched and not released.

    Its verified digests are ignored: it could not release these servers itself.
    """
    events = [
        event for event in state.journal.events(job_id) if event.kind is not EventKind.VERIFIED
    ]
    put_in_doubt(state, left_behind(state.journal.job(job_id), events))


def abandon(state: FleetState, job_id: str, error: Exception | asyncio.CancelledError) -> None:
    """Close a job that an internal error, or a cancellation, kept from beginning."""
    if state.journal.job(job_id).ended:
        return
    if isinstance(error, asyncio.CancelledError):
        shown, ended = SkyctlError("the push was stopped before it began"), JobState.INTERRUPTED
    else:
        shown = SkyctlError(f"the push never began: {error!r}", hint="skyctl logs supervisor")
        ended = JobState.FAILED
    state.journal.end(job_id, ended, error=_error_json(shown))


def record_result(state: FleetState, job_id: str, request: PushRequest, result: PushResult) -> None:
    """Record a push that succeeded: every server and the fleet are at its version, or only the
    servers of a canary.
    """
    with state.transaction():
        _record_servers(state, result)
        weights, canary = FleetWeights.pushed(result.to_json()), state.canary()
        if request.servers:
            if canary is not None and canary.stage is CanaryStage.STARTING:
                state.set_canary(canary.serving(weights))
                state.add_event("fleet", f"{job_id}: canary {result.version}")
            return
        state.set_weights(weights)
        frozen = format_seconds(result.freeze_window_s)
        message = f"{job_id}: weights {result.version}, frozen for {frozen}"
        about = {"job": job_id, "version": result.version, "checkpoint": result.checkpoint}
        state.add_event("fleet", message, FleetEvent.PUSH_SUCCEEDED, **about)
        state.journal.record_push(
            job_id,
            ok=True,
            version=result.version,
            checkpoint=result.checkpoint,
            checkpoint_digest=result.checkpoint_digest,
            result=result.to_json(),
        )


def _record_servers(state: FleetState, result: PushResult) -> None:
    """Record that these servers are at the push's version, and the fleet perhaps not yet."""
    with state.transaction():
        state.expected.learn(result.learned)
        clear_doubt(state, *(server.server for server in result.servers))
        levels = {row.name: row.sleep_level for row in state.servers()}
        changes: dict[str, dict[str, Any]] = {}
        for server in result.servers:
            changes[server.server] = {
                "weight_version": server.version or result.version,
                "checkpoint": result.checkpoint or None,
                "checkpoint_digest": result.checkpoint_digest,
                "weights_digest": server.weights_digest or None,
                "quarantine": None,
                # weights that a level-2 sleep discarded exist again
                "sleep_level": min(levels.get(server.server, 0), 1),
            }
            if server.sleep_level is not None:
                after = {"sleep_level": server.sleep_level, "weights_awake": False}
                changes[server.server] |= after
        state.update_servers(changes)


def record_failure(
    state: FleetState, job_id: str, request: PushRequest, error: SkyctlError
) -> None:
    """Record a push that failed: quarantine servers left in doubt, keep those left at a version."""
    message = f"{job_id} failed: {error.message}"
    state.add_event("fleet", message, FleetEvent.PUSH_FAILED, job=job_id)
    rows, events = error.details.get("servers", []), state.journal.events(job_id)
    whole = {name for update in verified(events) for name in update["servers"]}
    # the rest is as this push left it, or an earlier one
    doubted = in_doubt(state).keys() & released_by(events)
    # also those that failed afterwards: a sleeping one that did not wake, one that did not sleep
    holding = {
        row["server"]
        for row in rows
        if row.get("ok") or (row["server"] in whole and PushState(row["state"]).serves_or_sleeps)
    }
    for server in rows:
        changes: dict[str, Any] = {}
        if server["state"] == PushState.QUARANTINED:
            changes["quarantine"] = server.get("detail") or error.message
        version = server.get("version")
        holds = version and server["server"] in holding
        # otherwise it holds what it held, perhaps under the same label
        new = holds or version != state.server(server["server"]).weight_version
        if version and version == error.details.get("version") and new:
            changes["weight_version"] = version
            changes["weights_digest"] = server.get("weights_digest") or None
            changes["checkpoint"] = request.checkpoint or None
            changes["checkpoint_digest"] = error.details.get("checkpoint_digest")
        if holds and server["server"] in doubted:
            # a server in doubt is cleared only once it is verified
            changes["quarantine"] = None
            clear_doubt(state, server["server"])
        if server.get("sleep_level") is not None:
            changes |= {"sleep_level": server["sleep_level"], "weights_awake": False}
        if server.get("weights_awake"):
            changes["weights_awake"] = True
        if changes:
            state.update_server(server["server"], **changes)
    state.expected.learn(error.details.pop("learned", None))
    if not request.servers:
        _publish_in_part(state, error.details, holding)
    _doubt_left(state, job_id)
    state.journal.record_push(
        job_id,
        ok=False,
        version=request.weight_version,
        checkpoint=request.checkpoint,
        checkpoint_digest=None,
        result={"error": error.message, **error.details},
    )


def _publish_in_part(
    state: FleetState, result: Mapping[str, Any], holding: Collection[str]
) -> None:
    """If some servers hold the new weights, and serve or sleep, make them the fleet's: those that
    failed join after a restart.

    Otherwise a restarted server would come back at the old weights beside them.
    """
    version = result.get("version")  # none if the push was undone
    rows = result.get("servers", ()) if version else ()
    if any(row["server"] in holding and row.get("version") == version for row in rows):
        state.set_weights(FleetWeights.pushed(result))


def _error_json(error: SkyctlError) -> dict[str, Any]:
    return {**error.to_json(), "exit_code": int(error.exit_code), "details": error.details}
