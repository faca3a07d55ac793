"""New weights on trial: they answer its prompts before users get them, or are taken back.

resume engine ─► prompt … ─► pause engine ─┬─ all as expected ─► publish
 (out of the router)                       └─ one is not ─► push back the committed checkpoint;
                                              where that cannot be had: servers are quarantined
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from skyctl.checkpoints.configs import ALL_KEYS
from skyctl.errors import (
    DeadlineExceeded,
    ServerError,
    ServerUnreachable,
    SkyctlError,
    TrialFailed,
)
from skyctl.kill_points import reached
from skyctl.push.freeze import abort_stragglers
from skyctl.push.frozen import count_tokens
from skyctl.push.request import THIS_JOB, PushRequest, PushResult, ServerPush
from skyctl.push.run import CancelGuard, Run, Verified
from skyctl.push.servers import Holds, PushedServer, alive, each
from skyctl.push.trial_file import Trial, TrialResult, failed, judge, parse_trial, read_answer
from skyctl.states import PushStage, PushState

Transaction = Callable[[Run], Awaitable[PushResult]]


async def accept(run: Run, verified: Verified, *, push_back: Transaction) -> None:
    """Try the new weights by the prompts of the request.

    Raises:
        TrialFailed: an answer is not as expected; the weights before were pushed back.
    """
    servers = verified.checked.servers
    with run.stage(PushStage.TRIAL):
        run.trial = await try_trial(run, servers)
    if failed(run.trial):
        raise await refuse_commit(run, servers, run.trial, push_back)


async def try_trial(run: Run, servers: Sequence[PushedServer]) -> list[TrialResult]:
    """Run every prompt on every server that holds new weights, one prompt at a time on each.

    Servers generate only while their prompts run, and are paused again afterwards.
    """
    trial = parse_trial(run.request.trial)
    loaded = alive([server for server in servers if server.holds is Holds.NEW])
    results: dict[str, list[TrialResult]] = {server.name: [] for server in loaded}

    async def call(server: PushedServer) -> None:
        run.observer.server(server.name, PushState.TRYING)
        await abort_stragglers(server)
        await server.control.resume()
        reached("push.trial.call")
        try:
            await _ask_all(server, trial, results[server.name])
        finally:
            await server.control.pause("abort", clear_cache=False)
            await count_tokens(server)

    timeout_s = len(trial.prompts) * trial.timeout_s + 5 * run.fleet.timeouts.control_s
    await each(loaded, call, timeout_s=timeout_s, call_name="trial")
    reached("push.trial.done")
    for server in loaded:
        if server.failure and not failed(results[server.name]):
            # it did not answer, or could not be paused again: its verdict is unknown
            results[server.name].append(TrialResult(server.name, "", False, {}, {}, server.failure))
    return [result for server in loaded for result in results[server.name]]


async def _ask_all(server: PushedServer, trial: Trial, results: list[TrialResult]) -> None:
    if not (models := await server.control.models()):
        raise ServerError(f"{server.name} names no model to ask")
    model = models[0]
    for number, prompt in enumerate(trial.prompts):
        name = trial.name_of(number)
        try:
            data = await server.control.complete(
                {**prompt.body(), "model": model}, chat=prompt.chat, timeout_s=trial.timeout_s
            )
            results.append(
                judge(server.name, name, prompt.expect, read_answer(data, chat=prompt.chat))
            )
        except (SkyctlError, ValueError) as error:
            problem = error.message if isinstance(error, SkyctlError) else str(error)
            results.append(
                TrialResult(server.name, name, False, prompt.expect.conditions(), {}, problem)
            )
            if isinstance(error, ServerUnreachable | DeadlineExceeded):
                return  # the remaining prompts would wait as long


async def refuse_commit(
    run: Run,
    servers: Sequence[PushedServer],
    results: Sequence[TrialResult],
    transaction: Transaction,
) -> TrialFailed:
    """Push the committed weights back, or leave the servers paused; returns the error to raise."""
    bad = failed(results)
    first = bad[0]
    where = f"prompt {first.prompt} on {first.server}" if first.prompt else first.server
    reason = f"trial: {where}: {first.problem}"
    returned, problem = await _push_back(run, servers, transaction)
    for server in servers:
        if server.holds is Holds.NEW:
            server.failure = server.failure or reason
    rows = [returned.get(server.name) or server.report() for server in servers]
    quarantined = [row.server for row in rows if row.state == PushState.QUARANTINED]
    if quarantined:
        end = f"{', '.join(quarantined)} quarantined"
        end += f": the version before could not be pushed back ({problem})" if problem else ""
    else:
        end = f"{_version_before(run)} was pushed back"
    for server, row in zip(servers, rows, strict=True):
        if row.state == PushState.QUARANTINED:
            run.observer.server(row.server, PushState.QUARANTINED, row.detail)
        else:
            server.holds = Holds.OLD  # again
    prompts = len({result.prompt for result in results})
    return TrialFailed(
        f"the new weights were not accepted, {end} ({reason}; {len(bad)} of {len(results)} "
        f"answers, {prompts} prompts)",
        hint="skyctl recover"
        if quarantined
        else f"see the answers: skyctl jobs show {THIS_JOB} --json",
        details={
            "servers": [row.to_json() for row in rows],
            "trial": [result.to_json() for result in results],
        },
    )


def _version_before(run: Run) -> str:
    committed = run.fleet.committed
    return (committed and committed.version) or "the checkpoint before"


async def _push_back(
    run: Run, servers: Sequence[PushedServer], transaction: Transaction
) -> tuple[dict[str, ServerPush], str]:
    """How the push of the committed weights left each server, by name; and what failed."""
    committed = run.fleet.committed
    loaded = [server for server in servers if server.holds is Holds.NEW]
    if committed is None or committed.checkpoint is None:
        return {}, "nothing is known of it"
    run.note(f"the trial failed; {_version_before(run)} is pushed back")
    request = PushRequest(
        checkpoint=committed.checkpoint,
        transport=committed.transport,
        chunk_size=run.request.chunk_size,
        weight_version=committed.version or loaded[0].before.version or "default",
        pause_mode="abort",
        draft=committed.draft,
        expected_draft=committed.draft_digest,
        verify=run.request.verify,
        scan_nan=False,  # they were accepted when they were pushed
        allow_unproven_reload=run.request.allow_unproven_reload,
        allow_config=(ALL_KEYS,),
        expected_digest=committed.checkpoint_digest,
        expected_content=committed.content_digest,
    )
    # half updated: what they hold was never accepted, so only a whole push may free them
    half_updated = []
    for server in loaded:
        recorded = replace(server.given.recorded, in_doubt=True, half_updated=True, thaw=True)
        half_updated.append(replace(server.given, recorded=recorded))
    again = replace(
        run,
        request=request,
        fleet=replace(run.fleet, servers=tuple(half_updated)),
        stopwatch=replace(run.stopwatch),  # the push has its own freeze; stages are of both
        cancel_guard=CancelGuard(),  # a cancellation of the push is one more reason to undo it
    )
    try:
        result = await transaction(again)
    except SkyctlError as error:
        rows = [ServerPush(**row) for row in error.details.get("servers", [])]
        return {row.server: row for row in rows}, error.message
    run.stopwatch.thawed_at = again.stopwatch.thawed_at
    return {row.server: row for row in result.servers}, ""
