"""`skyctl jobs`: pushes, running and finished, and what else a fleet's supervisor is changing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl import output
from skyctl.cli import complete
from skyctl.cli.fleet_calls import call_chosen_fleet, call_fleet, chosen
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.core.registry import find
from skyctl.errors import FleetDownError, NotFoundError
from skyctl.push.request import live_source
from skyctl.units import format_ago

if TYPE_CHECKING:
    from skyctl.core.following import JobChanges
    from skyctl.service import FleetService
    from skyctl.store.journal import Job

app = typer.Typer(help="Weight pushes, and other changes under way: list, follow, cancel.")

LatestArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="ID", help="Job id (default: the newest).", autocompletion=complete.jobs
    ),
]
JobArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Job id.", autocompletion=complete.jobs)
]


@app.callback(invoke_without_command=True)
def jobs(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Weight pushes, and other changes under way; without a command: list them.

    Changes are up, restart and scale (`up-3`), and of adapters (`adapters-math`).

    \b
    skyctl jobs
    skyctl jobs wait push-3
    skyctl jobs cancel push-3
    """
    if context.invoked_subcommand is not None:
        context.obj = (file, fleet)
        return

    listed_jobs = call_chosen_fleet(file, fleet, lambda running: running.jobs())
    rows = [
        [
            job.id,
            output.styled(job.state),
            job.stage,
            _percent(job),
            format_ago(job.created_at),
            live_source(ranks)
            if (ranks := job.request.get("ranks"))
            else job.request.get("checkpoint"),
        ]
        for job in listed_jobs
    ]
    output.emit(
        {"jobs": [job.to_json() for job in listed_jobs]},
        output.table(["JOB", "STATE", "STAGE", ">DONE", ">STARTED", "~CHECKPOINT"], rows)
        if rows
        else "no jobs yet",
    )


@app.command()
def show(
    context: typer.Context,
    job_id: LatestArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw its stages and servers over time.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """One job: what was asked, how far it came, how it ended, and when each stage ran.

    \b
    skyctl jobs show
    skyctl jobs show push-3
    skyctl jobs show push-3 --timeline
    """
    from skyctl.cli.bars_view import legend, timeline_view
    from skyctl.cli.job_view import job_views, request_rows
    from skyctl.core.requests import JobQuery
    from skyctl.core.results import job_error
    from skyctl.core.timeline import timeline as timeline_of

    async def newest_or_named(running: FleetService) -> JobChanges:
        return await running.job_changes(JobQuery(job_id or await _newest(running)))

    changes = call_chosen_fleet(*chosen(context, file, fleet), newest_or_named)
    job, drawn = changes.job, timeline_of(changes.events)
    data = {"job": job.to_json(), "timeline": drawn.to_json()}
    if timeline:
        output.emit(data, timeline_view(drawn, columns=output.out.width), "", legend(drawn))
        return
    error = job_error(job)
    rows: list[list[Any]] = [
        ["state", output.styled(job.state)],
        ["stage", job.stage],
        ["done", _percent(job)],
        ["started", format_ago(job.created_at)],
        *request_rows(job.request),
    ]
    if error is not None:
        rows.append(["error", error.message])
        rows.append(["hint", error.hint or None])
    output.emit(data, output.table([job.id, "~"], rows), *job_views(job))


@app.command()
def wait(
    context: typer.Context,
    job_id: JobArgument,
    file: FileOption = None,
    fleet: FleetOption = None,
    timeout: Annotated[float | None, seconds("Stop waiting after this long.")] = None,
    json: JsonOption = False,
) -> None:
    """Follow a job until it ends; ends with the job's own exit code. Ctrl-C leaves it running.

    \b
    skyctl jobs wait push-3 --timeout 600
    """
    from skyctl.cli.job_view import emit_job, follow_job, going_on

    async def follow(running: FleetService) -> Job:
        await running.job(job_id)
        return await follow_job(running, job_id, timeout_s=timeout)

    ref = find(*chosen(context, file, fleet))
    emit_job(call_fleet(ref, follow, lambda: going_on(job_id)))


@app.command()
def cancel(
    context: typer.Context,
    job_id: JobArgument,
    file: FileOption = None,
    fleet: FleetOption = None,
    timeout: Annotated[float | None, seconds("Stop waiting for its end after this long.")] = None,
    json: JsonOption = False,
) -> None:
    """Cancel a push or another change, and wait until it has ended and the fleet is free.

    Before its first byte a push is undone: the servers go on with their old weights. Later it
    completes, since half-updated servers cannot serve; a rolling push stops after the part under
    way. Of up, restart and scale, servers that are done stay so, those in between get their old
    settings back, and the next `up` goes on. A change of adapters is undone on all servers.

    \b
    skyctl jobs cancel push-3
    skyctl jobs cancel up-2
    """
    from skyctl.cli.job_view import emit_cancelled, follow_job
    from skyctl.core.requests import CancelJob
    from skyctl.store.journal import JobState

    async def end(running: FleetService) -> tuple[Job, bool, bool]:
        job = await running.job(job_id)
        if job.ended:
            return job, False, False
        await running.cancel_job(CancelJob(job_id))
        try:
            job = await follow_job(running, job_id, timeout_s=timeout)
        except (FleetDownError, NotFoundError) as error:
            if job.is_push:
                raise
            if not await _is_down(running):
                raise FleetDownError(
                    f"the supervisor ended before it had put {job_id} back",
                    hint="what runs now: skyctl status; go on with it: skyctl up",
                ) from error
            return replace(job, state=JobState.INTERRUPTED), True, True
        return job, True, not job.is_push and await _is_down(running)

    ref = find(*chosen(context, file, fleet))
    hint = f"{job_id} is being cancelled: skyctl jobs show"
    job, was_running, down = call_fleet(ref, end, lambda: hint)
    emit_cancelled(job, was_running=was_running, down=down)


async def _is_down(running: FleetService) -> bool:
    """Whether nothing runs, or is about to: with a cancelled first `up` the whole fleet goes."""
    from skyctl.core.requests import StatusQuery
    from skyctl.core.status import Health

    status = await running.status(StatusQuery(fresh=False))
    return status.health in (Health.DOWN, Health.STOPPING)


async def _newest(running: FleetService) -> str:
    listed_jobs = await running.jobs()
    if not listed_jobs:
        raise NotFoundError("there are no jobs yet", hint="push weights: skyctl sync-weights CKPT")
    return listed_jobs[0].id


def _percent(job: Job) -> str | None:
    return f"{job.done_bytes / job.total_bytes:.0%}" if job.total_bytes else None
