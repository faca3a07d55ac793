"""The end of a push: servers are checked, then labelled, and the outcome says how each was left.

They must hold what was sent, and all the same; only then it gets its version. With a canary they
answer its prompts before, and the push is undone when an answer is not as expected:

    verify ─► canary: resume engine ─► prompt … ─► pause engine ─┬─ all as expected ─► publish
              (out of the router)                                └─ one is not ─► push back the
                 committed checkpoint; where that cannot be had: the servers are quarantined
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from skyctl.checkpoints.configs import ALL_KEYS
from skyctl.errors import (
    CanaryFailed,
    DeadlineExceeded,
    PushError,
    ServerError,
    ServerUnreachable,
    SkyctlError,
)
from skyctl.kill_points import reached
from skyctl.push.canary import Canary, CanaryResult, failed, judge, parse_canary, read_answer
from skyctl.push.delivery import Delivery
from skyctl.push.expected import agreed, expected_of, names_of, unexpected
from skyctl.push.freeze import abort_stragglers
from skyctl.push.layouts import numbered, settle_parameters
from skyctl.push.preflight import Prepared
from skyctl.push.request import THIS_JOB, PushRequest, PushResult, ServerPush
from skyctl.push.run import CancelGuard, Run
from skyctl.push.sites import Site, Weights, alive, each, require_paused
from skyctl.push.verify import HOW_TO_DIGEST, can_compare, comparable, weights_digest
from skyctl.states import PushStage, PushState
from skyctl.store.expected import BrokenReload
from skyctl.units import count_of

Transaction = Callable[[Run], Awaitable[PushResult]]


async def verify(run: Run, prepared: Prepared, content_digest: str) -> None:
    """Drop caches of the old weights, and compare what the servers hold with the checkpoint, with
    the digests it had before, and with each other.
    """
    timeout_s = run.fleet.update_timeout_s
    loaded = alive([site for site in prepared.sites if site.weights is Weights.NEW])

    async def digest(site: Site) -> None:
        # both must end before this does: a pause that outlives its push would freeze the server
        meanwhile = asyncio.gather(
            _refuse_thawed(site), site.vllm.reset_caches(), return_exceptions=True
        )
        try:
            if not (run.request.verify or site.copied):
                return
            found = await weights_digest(
                site.vllm,
                timeout_s=timeout_s,
                rows=() if site.copied else prepared.rows,  # every byte is compared then
                numbered=numbered(site),
                finite=run.fleet.trainer is not None,
            )
        finally:
            errors = [one for one in await meanwhile if isinstance(one, BaseException)]
            if errors:
                raise errors[0]
        site.digest, site.compared = found.digest, found.compared
        if site.expected:
            said = await settle_parameters(
                site, found.numbers, prepared.checkpoint, timeout_s=timeout_s
            )
            if said:
                run.note(said)
        if run.request.weights_digest not in (None, site.digest):
            raise ServerError(
                f"{site.name} does not hold what was announced (digest {site.digest}, "
                f"announced {run.request.weights_digest})"
            )
        if prepared.source:
            _require_comparison(site)

    await each(loaded, digest, timeout_s=timeout_s * 2, what="verify")
    names = names_of(prepared.checkpoint, content_digest) if prepared.source else ()
    _enforce(run, prepared, alive(loaded), names)
    _outvote(alive(loaded))
    announced = run.request.weights_digest
    if run.fleet.trainer is not None and not prepared.source and not announced:
        _require_change(alive(loaded))
    if run.fleet.trainer is None:  # a trainer's are compared by rows only
        run.learned.digests += agreed(loaded, names)
    reached("push.verify.done")


async def _refuse_thawed(site: Site) -> None:
    """Freeze a server again that was thawed while it was loaded; what it answered meanwhile is
    unknown.
    """
    try:
        await require_paused(site)
    except ServerError:
        await site.vllm.pause("abort", clear_cache=False)
        raise


def _require_change(sites: Sequence[Site]) -> None:
    """Fail servers that hold what they held before: they were sent nothing."""
    for site in sites:
        before = site.server.weights_digest or site.digest_before
        if site.digest and site.digest == before and not site.server.half_updated:
            site.failure = (
                "verify: the trainer sent nothing: the weights are what they were "
                f"(digest {before}); one that sends the same again announces their digest"
            )


def _require_comparison(site: Site) -> None:
    if site.compared is None:
        if not can_compare(site.target):
            return  # its checksums are compared with the others' and with those of earlier loads
        raise ServerError(
            f"{site.name} cannot be compared with the checkpoint, its workers lack skyctl's "
            f"extension; {HOW_TO_DIGEST}"
        )
    if not site.compared.tensors:
        raise ServerError(
            f"{site.name}: no tensor could be compared with the checkpoint "
            f"({site.compared.why_not or 'nothing was asked for'}); to do without: --no-verify"
        )


def _enforce(run: Run, prepared: Prepared, sites: Sequence[Site], names: Sequence[str]) -> None:
    """Fail servers whose digest is not the one that the same weights had before, or only note it if
    the request allows that.
    """
    known = (*run.learned.digests, *run.fleet.expected.digests)
    unseen = [one for one in sites if one.compared is None and not expected_of(one, known, names)]
    if names and unseen:
        servers = ", ".join(site.name for site in unseen)
        run.note(f"{servers}: nothing was compared with the checkpoint's bytes")
    for site, one in unexpected(sites, known, names):
        by_launch = one.origin == "launch"
        when = "when vLLM loaded it" if by_launch else "when it was pushed before"
        said = (
            f"its weights are not what this checkpoint came to {when} (digest {site.digest}, "
            f"expected {one.digest})"
        )
        if run.request.allow_unproven_reload:
            run.note(f"{site.name}: {said}")
            continue
        site.failure = f"verify: {said}"
        if by_launch:
            site.failure += f": vLLM {prepared.engine} does not reload this model as it loads it"
            checkpoint = prepared.checkpoint
            run.learned.broken = BrokenReload(
                checkpoint.layout_digest, prepared.engine, checkpoint.name
            )


def _outvote(sites: Sequence[Site]) -> None:
    """Fail servers whose digest differs from that of the majority in the same arrangement."""
    for group in comparable(sites, lambda site: site.digest):
        digests = [site.digest for site in group]
        most = max(set(digests), key=digests.count)
        sure = digests.count(most) * 2 > len(digests)
        for site in group:
            if not (sure and site.digest == most):
                site.failure = f"verify: its weights differ from the others' (digest {site.digest})"


async def try_canary(run: Run, sites: Sequence[Site]) -> list[CanaryResult]:
    """Run every prompt on every server that holds new weights, one prompt at a time on each.

    Servers generate only while their prompts run, and are paused again afterwards.
    """
    canary = parse_canary(run.request.canary)
    loaded = alive([site for site in sites if site.weights is Weights.NEW])
    results: dict[str, list[CanaryResult]] = {site.name: [] for site in loaded}

    async def call(site: Site) -> None:
        run.observer.server(site.name, PushState.TRYING)
        await abort_stragglers(site)
        await site.vllm.resume()
        reached("push.canary.call")
        try:
            await _ask_all(site, canary, results[site.name])
        finally:
            await site.vllm.pause("abort", clear_cache=False)

    timeout_s = len(canary.prompts) * canary.timeout_s + 5 * run.fleet.control_timeout_s
    await each(loaded, call, timeout_s=timeout_s, what="canary")
    reached("push.canary.done")
    for site in loaded:
        if site.failure and not failed(results[site.name]):
            # it did not answer, or could not be paused again: its verdict is unknown
            results[site.name].append(CanaryResult(site.name, "", False, {}, {}, site.failure))
    return [result for site in loaded for result in results[site.name]]


async def _ask_all(site: Site, canary: Canary, results: list[CanaryResult]) -> None:
    if not (models := await site.vllm.models()):
        raise ServerError(f"{site.name} names no model to ask")
    model = models[0]
    for number, prompt in enumerate(canary.prompts):
        name = canary.name_of(number)
        try:
            data = await site.vllm.complete(
                {**prompt.body(), "model": model}, chat=prompt.chat, timeout_s=canary.timeout_s
            )
            results.append(
                judge(site.name, name, prompt.expect, read_answer(data, chat=prompt.chat))
            )
        except (SkyctlError, ValueError) as error:
            why = error.message if isinstance(error, SkyctlError) else str(error)
            results.append(CanaryResult(site.name, name, False, prompt.expect.said(), {}, why))
            if isinstance(error, ServerUnreachable | DeadlineExceeded):
                return  # the remaining prompts would wait as long


async def refuse_commit(
    run: Run, sites: Sequence[Site], results: Sequence[CanaryResult], transaction: Transaction
) -> CanaryFailed:
    """Push the committed weights back, or leave the servers paused; returns the error to raise."""
    bad = failed(results)
    first = bad[0]
    where = f"prompt {first.prompt} on {first.server}" if first.prompt else first.server
    why = f"canary: {where}: {first.problem}"
    returned, problem = await _push_back(run, sites, transaction)
    for site in sites:
        if site.weights is Weights.NEW:
            site.failure = site.failure or why
    rows = [returned.get(site.name) or site.report() for site in sites]
    left = [row.server for row in rows if row.state == PushState.QUARANTINED]
    if left:
        end = f"{', '.join(left)} quarantined"
        end += f": the version before could not be pushed back ({problem})" if problem else ""
    else:
        end = f"{_version_before(run)} was pushed back"
    for row in rows:
        if row.state == PushState.QUARANTINED:
            run.observer.server(row.server, PushState.QUARANTINED, row.detail)
    asked = len({result.prompt for result in results})
    return CanaryFailed(
        f"the new weights were not accepted, {end} ({why}; {len(bad)} of {len(results)} answers, "
        f"{asked} prompts)",
        hint="skyctl recover" if left else f"see the answers: skyctl jobs show {THIS_JOB} --json",
        details={
            "servers": [row.to_json() for row in rows],
            "canary": [result.to_json() for result in results],
        },
    )


def _version_before(run: Run) -> str:
    committed = run.fleet.committed
    return (committed and committed.version) or "the checkpoint before"


async def _push_back(
    run: Run, sites: Sequence[Site], transaction: Transaction
) -> tuple[dict[str, ServerPush], str]:
    """How the push of the committed weights left each server, by name; and what failed."""
    committed = run.fleet.committed
    loaded = [site for site in sites if site.weights is Weights.NEW]
    if committed is None or committed.checkpoint is None:
        return {}, "nothing is known of it"
    run.note(f"the canary failed; {_version_before(run)} is pushed back")
    request = PushRequest(
        checkpoint=committed.checkpoint,
        transport=committed.transport,
        chunk_size=run.request.chunk_size,
        weight_version=committed.version or loaded[0].old_version or "default",
        pause_mode="abort",
        verify=run.request.verify,
        scan_nan=False,  # they were accepted when they were pushed
        allow_unproven_reload=run.request.allow_unproven_reload,
        allow_config=(ALL_KEYS,),
        expected_digest=committed.checkpoint_digest,
        expected_content=committed.content_digest,
    )
    # half updated: what they hold was never accepted, so only a whole push may free them
    servers = tuple(replace(site.server, half_updated=True, thaw=True) for site in loaded)
    again = replace(
        run,
        request=request,
        fleet=replace(run.fleet, servers=servers),
        cancel_guard=CancelGuard(),  # a cancellation of the push is one more reason to undo it
    )
    try:
        result = await transaction(again)
    except SkyctlError as error:
        rows = [ServerPush(**row) for row in error.details.get("servers", [])]
        return {row.server: row for row in rows}, error.message
    run.thawed_at = again.thawed_at
    return {row.server: row for row in result.servers}, ""


async def publish(run: Run, sites: Sequence[Site], label: str) -> None:
    """Label the servers that hold the new weights with their version; then they may serve."""

    async def call(site: Site) -> None:
        await require_paused(site)  # a process that was restarted meanwhile holds something else
        await site.vllm.set_weight_version(label)
        site.version = label
        site.weights = Weights.VERIFIED
        run.observer.server(site.name, PushState.UPDATED, label)

    loaded = alive([site for site in sites if site.weights is Weights.NEW])
    await each(loaded, call, timeout_s=run.fleet.control_timeout_s, what="publish the version")
    reached("push.published")


def cut_short(run: Run, sites: Sequence[Site], error: BaseException) -> BaseException:
    """The error to raise when a push ends midway; says which servers must not be resumed.

    An error that already says how each server was left stays as it is.
    """
    if isinstance(error, PushError) and "servers" in error.details:
        return error
    in_doubt = [site for site in sites if site.weights in (Weights.UNKNOWN, Weights.NEW)]
    for site in in_doubt:
        site.failure = site.failure or f"the push was interrupted ({error!r})"
        run.observer.server(site.name, PushState.QUARANTINED, site.failure)
    if isinstance(error, SkyctlError) or not isinstance(error, Exception):
        return error
    return PushError(
        f"the push broke off: {error!r}",
        details={"servers": [site.report().to_json() for site in sites]},
    )


def settle(run: Run, prepared: Prepared, label: str, delivery: Delivery) -> PushResult:
    """The result; raises PushError if a server is not at the new version and thawed."""
    result = result_of(run, prepared, label, delivery)
    behind = [server for server in result.servers if not server.ok]
    if run.observer.failures:
        result.notes.append(f"progress could not be recorded: {run.observer.failures[0]!r}")
    if not behind:
        return result
    for server in behind:
        if server.state == PushState.QUARANTINED:
            run.observer.server(server.server, PushState.QUARANTINED, server.detail)
    updated = [server.server for server in result.servers if server.ok]
    done = f"{', '.join(updated)} at {label}; " if updated else ""
    stay = ", ".join(f"{server.server} {server.state}" for server in behind)
    raise PushError(
        f"the push failed on {len(behind)} of {count_of(len(result.servers), 'server')}: "
        f"{done}{stay} ({behind[0].detail})",
        hint="skyctl recover",
        details={**result.to_json(), "learned": result.learned},
    )


def result_of(
    run: Run, prepared: Prepared, label: str, delivery: Delivery | None = None
) -> PushResult:
    """The result as of now; a dry run has no delivery."""
    total = prepared.checkpoint.total_bytes
    moving_s = sum(run.stages.get(name, 0.0) for name in (PushStage.UPDATE, PushStage.FINISH))
    frozen_s = 0.0 if run.froze_at is None else run.thawed_at - run.froze_at
    dry = run.request.dry_run
    return PushResult(
        version=label,
        checkpoint=prepared.source,
        checkpoint_digest=prepared.identity,
        transport=prepared.choice.name,
        total_bytes=total,
        chunks=prepared.chunks,
        seconds=run.clock() - run.began,
        gb_per_s=total / moving_s / 1e9 if moving_s else 0.0,
        freeze_window_s=frozen_s,
        stages=dict(run.stages),
        servers=[site.report() for site in prepared.sites],
        content_digest=delivery.content_digest if delivery is not None else "",
        canary=[result.to_json() for result in run.canary],
        notes=list(run.notes),
        compared=_compared(prepared),
        layout_share=sum(site.copied for site in prepared.sites) / len(prepared.sites),
        learned=run.learned.to_json(),
        plan=prepared.to_json() if dry else None,
    )


def _compared(prepared: Prepared) -> dict[str, int] | None:
    """How much of the checkpoint every verified server was seen to hold: the least of them."""
    seen = [s.compared for s in prepared.sites if s.compared and s.weights is Weights.VERIFIED]
    if not (seen and prepared.source):
        return None
    least = min(seen, key=lambda one: one.bytes)
    return {
        "tensors": least.tensors,
        "of_tensors": len(prepared.checkpoint.tensors),
        "bytes": least.bytes,
        "of_bytes": prepared.checkpoint.total_bytes,
    }
