"""The push: one transaction over all servers of a fleet.

    preflight ─► stage ─► pause ─► init ─► start ─► update … ─► finish ─► verify ─► resume
    └─ nothing touched ─┘ └─ old weights, undone ─┘ └─ half new: scrub and push once more,
                                                       else the server stays paused: quarantined

Whatever fails, each server ends verified and resumed at one version, or paused with the reason
reported. A server that was paused before stays paused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from skyctl.control.http import ControlClient
from skyctl.errors import PreflightError, PushError, SkyctlError
from skyctl.kill_points import reached
from skyctl.weights.cancellation import Abandoned, Shelter
from skyctl.weights.delivery import Delivery
from skyctl.weights.preflight import Prepared, preflight
from skyctl.weights.request import (
    CarefulObserver,
    PushFleet,
    PushObserver,
    PushRequest,
    PushResult,
    PushServer,
    ServerPush,
    SilentObserver,
)
from skyctl.weights.samples import Sample
from skyctl.weights.sender_client import SenderFailed
from skyctl.weights.sender_pool import SenderPool
from skyctl.weights.sites import Holds, Site, alive, close_session, each, responsive
from skyctl.weights.tracing import traced
from skyctl.weights.verify import weights_digest

__all__ = [
    "PushFleet",
    "PushObserver",
    "PushRequest",
    "PushResult",
    "PushServer",
    "ServerPush",
    "SilentObserver",
    "push",
]


@dataclass
class _Run:
    """One push under way: what it was asked, whom it tells, and its stopwatch."""

    request: PushRequest
    fleet: PushFleet
    client: ControlClient
    observer: CarefulObserver
    clock: Callable[[], float]
    shelter: Shelter
    senders: SenderPool
    began: float = 0.0
    froze_at: float | None = None
    thawed_at: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, and tell the observer that it begins."""
        self.observer.stage(name)
        began = self.clock()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + self.clock() - began

    def note(self, message: str) -> None:
        self.notes.append(message)
        self.observer.note(message)


async def push(
    request: PushRequest,
    fleet: PushFleet,
    *,
    client: ControlClient,
    observer: PushObserver,
    senders: SenderPool | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PushResult:
    """Bring a checkpoint into every server of a fleet.

    Cancelled before any byte was sent, it undoes the pause and raises CancelledError; later it
    completes first, because half-updated servers cannot be left, and returns the result. A second
    cancellation ends it where it is: servers stay paused.

    A caller that pushes again and again gives a pool of `senders`, which keeps what a GPU sender
    sets up; without one, each push has its own.

    Raises:
        PreflightError, NotFoundError, ServerError: nothing was touched.
        PushError: it failed after the pause; `details["servers"]` has one ServerPush mapping each.
    """
    shelter = Shelter()
    pool = senders or SenderPool()
    try:
        with traced(request, fleet, observer) as watched:
            run = _Run(request, fleet, client, CarefulObserver(watched), clock, shelter, pool)
            result = await shelter.run(_transaction(run))
            watched.finish(result)
            return result
    finally:
        if senders is None:
            await pool.close()


async def _transaction(run: _Run) -> PushResult:
    run.began = run.clock()
    with run.stage("preflight"):
        prepared = await preflight(run.request, run.fleet, client=run.client)
        reached("push.prepared")
        for note in prepared.notes:
            run.note(note)
    if run.request.dry_run:
        return _result(run, prepared, run.request.weight_version or "", "")
    sites = prepared.sites
    delivery = prepared.delivery(run.fleet, run.senders)
    try:
        with run.stage("stage"):
            await _stage(delivery, sites)
            reached("push.staged")
        run.shelter.enter()  # from here on a cancellation must not leave servers frozen
        try:
            with run.stage("pause"):
                await _pause(run, sites)
                reached("push.pause.done")
            with run.stage("init"):
                await delivery.init(sites)
                reached("push.init.done")
                _require_all(run, sites)
            with run.stage("start"):
                reached("push.start.call")
                await delivery.start(sites)
                reached("push.start.done")
                _require_all(run, sites)
        except _NotYet as stop:
            await _roll_back(run, sites)
            raise stop.reason(sites) from None
        run.shelter.commit()
        with run.stage("update"):
            await delivery.update(sites, _progress(run, prepared))
        with run.stage("finish"):
            reached("push.finish.call")
            await delivery.finish(sites, lambda: _label(run, prepared, delivery))
            reached("push.finish.done")
    except BaseException as error:
        raise _cut_short(run, sites, error) from error
    finally:
        await delivery.close()
    if delivery.can_retry and len(alive(sites)) < len(sites):
        delivery = await _push_again(run, prepared, delivery)
    label = _label(run, prepared, delivery)
    with run.stage("verify"):
        await _verify(run, sites, label, prepared.samples)
    with run.stage("resume"):
        reached("push.resume.call")
        await _resume(run, [site for site in sites if site.holds in (Holds.OLD, Holds.VERIFIED)])
        reached("push.resume.done")
    return _settle(run, prepared, label, delivery.content_digest)


def _cut_short(run: _Run, sites: Sequence[Site], error: BaseException) -> BaseException:
    """The error to raise when a push ends in the middle; says which servers must not be resumed."""
    in_doubt = [site for site in sites if site.holds in (Holds.UNKNOWN, Holds.NEW)]
    for site in in_doubt:
        site.failure = site.failure or f"the push was interrupted ({error!r})"
        run.observer.server(site.name, "quarantined", site.failure)
    if isinstance(error, SkyctlError) or not isinstance(error, Exception):
        return error
    return PushError(
        f"the push broke off: {error!r}",
        details={"servers": [site.report().to_json() for site in sites]},
    )


async def _stage(delivery: Delivery, sites: Sequence[Site]) -> None:
    """Do ahead what can be done ahead. Its failures are refusals: nothing was touched."""
    try:
        await delivery.open(sites)
    except SenderFailed as error:
        raise PreflightError(error.message, details=error.details) from error


class _NotYet(Exception):
    """A stage before the first byte failed or was abandoned: everything can be undone."""

    def __init__(self, abandoned: bool) -> None:
        self.abandoned = abandoned

    def reason(self, sites: Sequence[Site]) -> BaseException:
        if self.abandoned:
            return Abandoned()
        failed = [site for site in sites if site.failure]
        left = [site.report().to_json() for site in sites]
        in_doubt = [row["server"] for row in left if row["state"] == "quarantined"]
        after = (
            f"{', '.join(in_doubt)} stay paused: an earlier push broke off there"
            if in_doubt
            else "the servers keep their old weights"
        )
        return PushError(
            f"the push was undone, {after} ({failed[0].name}: {failed[0].failure})",
            hint="`skyctl restart` the server if it does not answer, then push again",
            details={"servers": left},
        )


def _require_all(run: _Run, sites: Sequence[Site]) -> None:
    if run.shelter.cancelled:
        raise _NotYet(abandoned=True)
    if len(alive(sites)) < len(sites):
        raise _NotYet(abandoned=False)


async def _pause(run: _Run, sites: Sequence[Site]) -> None:
    """Freeze every server that is not paused already; the freeze window begins."""
    run.froze_at = run.clock()
    running = [site for site in sites if not site.was_paused]
    for site in sites:
        # before it is done: whoever reads the journal of a push that died must know whom to thaw
        run.observer.server(site.name, "held" if site.was_paused else "pausing")
    reached("push.pause.call")
    mode = run.request.pause_mode

    async def call(site: Site) -> None:
        site.frozen = True  # before the call: when its answer is lost, it may be paused
        await site.vllm.pause(mode, clear_cache=False)

    # mode "wait" lets running requests end first
    timeout_s = run.fleet.control_timeout_s if mode != "wait" else run.fleet.update_timeout_s
    await each(running, call, timeout_s=timeout_s, what="pause")
    for site in running:
        if not site.failure:
            run.observer.server(site.name, "paused")
    _require_all(run, sites)


async def _roll_back(run: _Run, sites: Sequence[Site]) -> None:
    """Nothing was sent: close what was opened, and resume what we froze at its old weights."""
    timeout_s = run.fleet.control_timeout_s

    with run.stage("recover"):
        await each(
            [site for site in sites if site.open],
            lambda site: close_session(site, timeout_s=timeout_s),
            timeout_s=timeout_s,
            what="close",
        )
        for site in sites:
            if site.open:  # not closed: its layers are empty
                site.holds = Holds.UNKNOWN
        await _resume(run, [site for site in sites if site.holds is Holds.OLD])
        for site in sites:
            if site.holds is Holds.UNKNOWN:
                site.failure = site.failure or "an earlier push broke off and left it half updated"
                run.observer.server(site.name, "quarantined", site.failure)


def _progress(run: _Run, prepared: Prepared) -> Callable[[int], None]:
    total = prepared.checkpoint.total_bytes
    run.observer.progress(0, total)
    for site in alive(prepared.sites):
        run.observer.server(site.name, "updating")
    return lambda done: run.observer.progress(done, total)


def _label(run: _Run, prepared: Prepared, delivery: Delivery) -> str:
    """The version's label: the user's, else the checkpoint's name and a digest of its content."""
    if run.request.weight_version:
        return run.request.weight_version
    digest = delivery.content_digest or prepared.checkpoint.identity_digest
    return f"{prepared.checkpoint.name}@{digest[:8]}"


async def _push_again(run: _Run, prepared: Prepared, first: Delivery) -> Delivery:
    """Scrub the servers that failed and push to them once more, with a fresh sender.

    They stay paused meanwhile. Those that do not answer, or have several workers of which one
    failed, cannot be scrubbed: only a restart helps them.
    """
    failed = [site for site in prepared.sites if site.failure]
    delivery = prepared.delivery(run.fleet, run.senders)
    with run.stage("recover"):
        run.note(
            f"{', '.join(site.name for site in failed)}: {failed[0].failure}; "
            "scrubbing and pushing again"
        )
        candidates = await responsive(failed, timeout_s=run.fleet.control_timeout_s)
        candidates = [site for site in candidates if site.world_size == 1]
        if not candidates:
            return first
        for site in candidates:
            site.failure = ""
        try:
            await delivery.open(candidates)
            await delivery.init(candidates)
            await delivery.start(candidates, scrubbing=True)
            await delivery.update(candidates, _progress(run, prepared))
            await delivery.finish(candidates, lambda: _label(run, prepared, delivery))
        except SkyctlError as error:
            for site in alive(candidates):
                site.failure = error.message
        finally:
            await delivery.close()
    return delivery if delivery.content_digest else first


async def _verify(
    run: _Run, sites: Sequence[Site], label: str, samples: Mapping[str, Sample]
) -> None:
    """Drop caches of the old weights, compare what the servers hold, then publish the version."""
    timeout_s = run.fleet.update_timeout_s
    loaded = alive([site for site in sites if site.holds is Holds.NEW])

    async def digest(site: Site) -> None:
        await _reset_cache(site)
        if run.request.verify:
            site.digest, how = await weights_digest(site.vllm, timeout_s=timeout_s, samples=samples)
            if not site.digest:
                run.note(f"{site.name} was not verified: {how}")

    await each(loaded, digest, timeout_s=timeout_s * 2, what="verify")
    _outvote(alive(loaded))
    reached("push.verify.done")

    async def publish(site: Site) -> None:
        await site.vllm.set_weight_version(label)
        site.version = label
        site.holds = Holds.VERIFIED
        run.observer.server(site.name, "updated", label)

    await each(
        alive(loaded), publish, timeout_s=run.fleet.control_timeout_s, what="publish the version"
    )
    reached("push.published")


async def _reset_cache(site: Site) -> None:
    """vLLM keeps KV blocks of the old weights for new requests unless it is told to drop them."""
    if not await site.vllm.reset_prefix_cache():
        # frozen requests hold blocks: they go back to the queue with the tokens they have
        await site.vllm.reset_prefix_cache(reset_running=True)


def _outvote(sites: Sequence[Site]) -> None:
    """Servers whose digest differs from that of most others hold something else: they fail."""
    digests = [site.digest for site in sites if site.digest]
    if len(set(digests)) <= 1:
        return
    most = max(set(digests), key=digests.count)
    sure = digests.count(most) * 2 > len(digests)
    for site in sites:
        if site.digest and not (sure and site.digest == most):
            site.failure = f"verify: its weights differ from the others' (digest {site.digest})"


async def _resume(run: _Run, sites: Sequence[Site]) -> None:
    """Thaw what we froze; the freeze window ends. A resume that fails is tried once more."""
    timeout_s = run.fleet.control_timeout_s
    frozen = [site for site in sites if site.frozen]
    for site in sites:
        if not site.frozen:
            run.observer.server(site.name, "kept", "stays paused")

    async def call(site: Site) -> None:
        try:
            await site.vllm.resume()
        except SkyctlError:
            await site.vllm.resume()
        site.resumed = True

    await each(frozen, call, timeout_s=timeout_s * 2, what="resume")
    run.thawed_at = run.clock()
    for site in frozen:
        run.observer.server(site.name, "ready" if site.resumed else "paused", site.failure)


def _settle(run: _Run, prepared: Prepared, label: str, content_digest: str) -> PushResult:
    """The result, or a PushError when a server is not at the new version and thawed."""
    result = _result(run, prepared, label, content_digest)
    failed = [server for server in result.servers if not server.ok]
    if run.observer.failures:
        result.notes.append(f"progress could not be recorded: {run.observer.failures[0]!r}")
    if not failed:
        return result
    for server in failed:
        if server.state == "quarantined":
            run.observer.server(server.server, "quarantined", server.detail)
    updated = [server.server for server in result.servers if server.ok]
    done = f"{', '.join(updated)} at {label}; " if updated else ""
    stay = ", ".join(f"{server.server} {server.state}" for server in failed)
    raise PushError(
        f"the push failed on {len(failed)} of {len(result.servers)} servers: {done}{stay} "
        f"({failed[0].detail})",
        hint=f"skyctl restart {failed[0].server}",
        details={**result.to_json()},
    )


def _result(run: _Run, prepared: Prepared, label: str, content_digest: str) -> PushResult:
    total = prepared.checkpoint.total_bytes
    moving_s = sum(run.stages.get(name, 0.0) for name in ("update", "finish"))
    frozen_s = 0.0 if run.froze_at is None else run.thawed_at - run.froze_at
    dry = run.request.dry_run
    return PushResult(
        version=label,
        checkpoint=str(prepared.checkpoint.path),
        checkpoint_digest=prepared.checkpoint.identity_digest,
        transport=prepared.choice.name,
        total_bytes=total,
        chunks=prepared.chunks,
        seconds=run.clock() - run.began,
        gb_per_s=total / moving_s / 1e9 if moving_s else 0.0,
        freeze_window_s=frozen_s,
        stages=dict(run.stages),
        servers=[site.report() for site in prepared.sites],
        content_digest=content_digest,
        notes=list(run.notes),
        plan=prepared.to_json() if dry else None,
    )
