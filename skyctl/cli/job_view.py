"""Renders a job, running or finished. Shared by sync-weights and jobs."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from skyctl import output
from skyctl.core.requests import StatusQuery
from skyctl.core.results import job_error
from skyctl.errors import SkyctlError
from skyctl.output import LiveView
from skyctl.push.request import PushRequest, live_source
from skyctl.units import count_of, format_bytes, format_rate, format_seconds, waits_for

if TYPE_CHECKING:
    from skyctl.core.requests import Control, Outcomes
    from skyctl.service import FleetService
    from skyctl.store.journal import Job, JobEvent

_REPORT_S = 1.0
_REPORTED = ("quarantined", "failed")
_STAY = "servers that were done keep their new settings; go on with it: skyctl up"
_CANCELLED = {
    "adapters": "every server serves what it did before",
    "up": _STAY,
    "scale": _STAY,
    "restart": "servers that were not reached were not restarted",
}


class JobView:
    """What has happened in a job so far, as a bar that is redrawn or as plain lines."""

    def __init__(self, stage: str = "queued") -> None:
        self._stage = stage
        self._began = time.time()
        self._waits: dict[str, int] = {}  # how many requests the stage waits for, by server
        self._done = self._total = 0
        self._warned: set[tuple[str, str, str]] = set()

    def render(self) -> RenderableType:
        size = f"{format_bytes(self._done)} of {format_bytes(self._total)}" if self._total else ""
        stage = self._stage
        if self._waits:
            spent_s = max(0.0, time.time() - self._began)
            waits = ", ".join(
                f"{waits_for(count)} on {name}" for name, count in self._waits.items()
            )
            stage = f"{stage} {spent_s:.0f} s, {waits}"
        return output.progress_line(self._done, self._total or 1, f"{stage}  {size}".rstrip())

    def show(self, event: JobEvent, live: LiveView) -> None:
        """Record one event of the job, and draw it where `live` does."""
        data = event.data
        if event.kind == "stage":
            self._stage, self._began, self._waits = data["stage"], event.at, {}
            if not live.drawing:
                output.note(self._stage)
        elif event.kind == "progress":
            self._done, self._total = data["done_bytes"], data["total_bytes"]
        elif event.kind == "note":
            output.note(data["message"])
        elif event.kind == "server" and data["state"] in _REPORTED:
            report = (data["server"], data["state"], data["detail"])
            if report not in self._warned:  # later stages report the server again
                self._warned.add(report)
                output.warn(f"{report[0]} {report[1]}: {report[2]}")
        elif event.kind == "server":
            self.show_wait(data["server"], data.get("requests", 0), live)
        live.refresh()

    def show_wait(self, server: str, requests: int, live: LiveView) -> None:
        """Show what a server is waited for; a line only when that begins."""
        if requests:
            if not live.drawing and server not in self._waits:
                output.note(f"{self._stage}: {waits_for(requests)} on {server}")
            self._waits[server] = requests
        else:
            self._waits.pop(server, None)


async def follow_job(running: FleetService, job_id: str, *, timeout_s: float | None) -> Job:
    """Show a job until it ends."""
    view = JobView()
    with output.live(view.render, transient=True) as live:
        return await running.wait_job(job_id, lambda event: view.show(event, live), timeout_s)


async def follow_control(running: FleetService, request: Control) -> Outcomes:
    """The outcomes of a verb; until they come, how many requests each of its servers has."""
    view = JobView(request.verb)
    calling = asyncio.create_task(running.control(request))
    try:
        with output.live(view.render, transient=True) as live:
            while not (await asyncio.wait({calling}, timeout=_REPORT_S))[0]:
                with suppress(SkyctlError):  # the verb itself reports what does not answer
                    status = await running.status(StatusQuery(fresh=False))
                    for replica in status.replicas:
                        if not request.servers or replica.name in request.servers:
                            view.show_wait(replica.name, replica.running or 0, live)
                live.refresh()
        return calling.result()
    finally:
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)


def emit_job(job: Job) -> None:
    """Print how a job ended, and end the process with its exit code."""
    output.emit({"job": job.to_json()}, *job_views(job), error=job_error(job))


def going_on(job_id: str, *, undoable: bool = True) -> str:
    """What to type after Ctrl-C, which leaves a job to the supervisor."""
    hint = f"{job_id} goes on: skyctl jobs wait {job_id}"
    return f"{hint}; or undo it: skyctl jobs cancel {job_id}" if undoable else hint


def emit_cancelled(job: Job, *, was_running: bool, down: bool) -> None:
    """Print how a job ended that was to be cancelled; an error only if it failed meanwhile. `down`:
    it took the whole fleet with it.
    """
    views: list[RenderableType] = []
    if not was_running:
        views.append(f"{job.id} has ended before: {job.state}")
    elif job.state == "interrupted":
        views.append(f"{job.id} is cancelled; {_state_after(job, down=down)}")
    else:
        views += [*job_views(job), f"{job.id} was too far to be undone: {job.state}"]
    failed = was_running and job.state == "failed"
    output.emit({"job": job.to_json()}, *views, error=job_error(job) if failed else None)


def _state_after(job: Job, *, down: bool) -> str:
    """What a cancelled job leaves."""
    if down:
        return "nothing of it is left"
    if not job.is_push:
        return _CANCELLED[job.kind]
    if job.request.get("dry_run"):
        return "nothing was touched"
    rolling = job.request.get("rolling")
    return (
        "parts that were done keep the new weights"
        if rolling
        else "the servers keep their old weights"
    )


def request_rows(request: dict[str, Any]) -> list[list[Any]]:
    """What was asked of a job beyond the defaults, a row each."""
    return [
        [name.replace("_", " "), ", ".join(value) if isinstance(value, list) else value]
        for name, value in request.items()
        if value not in (None, "", [], getattr(PushRequest, name, None))
    ]


def job_views(job: Job) -> list[RenderableType]:
    """A summary line and a table of servers of an ended job; only the table when it failed."""
    details = job.result or (job.error or {}).get("details") or {}
    views: list[Any] = []
    if job.result and job.result.get("plan"):
        return plan_views(job.result["plan"])
    if details.get("servers"):
        views.append(
            output.table(
                ["SERVER", "STATE", "VERSION", "WEIGHTS", "~DETAIL"],
                [
                    [
                        row["server"],
                        output.styled(row["state"]),
                        row["version"],
                        row["weights_digest"][:12] or None,
                        row["detail"],
                    ]
                    for row in details["servers"]
                ],
            )
        )
    if not job.is_push and job.state == "succeeded":
        views.append(f"{job.id} is done")
    if details.get("trial"):
        views += ["", trial_view(details["trial"])]
    if result := job.result:
        views += [summary(result), _compared(result)]
    return views


def summary(result: dict[str, Any]) -> str:
    """One line about a push that succeeded."""
    chunks = f" in {count_of(result['chunks'], 'chunk')}" if result["chunks"] else ""
    source = f"{live_source(result['ranks'])}, " if result.get("ranks") else ""
    return (
        f"{result['version']}: {source}{format_bytes(result['total_bytes'])}{chunks} by "
        f"{result['transport']}, {format_rate(result['gb_per_s'])}; frozen for "
        f"{format_seconds(result['freeze_window_s'])} of {format_seconds(result['seconds'])}"
    )


def _compared(result: dict[str, Any]) -> str:
    """How much of the checkpoint was looked for in the servers."""
    compared = result.get("compared")
    if compared is None and all(server["weights_digest"] for server in result["servers"]):
        return "verified: the servers' checksums agree; their weights cannot be read otherwise"
    if compared is None:
        return "not verified: nothing was compared with the checkpoint"
    return (
        f"verified: rows of {compared['tensors']} of {compared['of_tensors']} tensors "
        f"({format_bytes(compared['bytes'])} of {format_bytes(compared['of_bytes'])}) are the "
        "checkpoint's"
    )


def trial_view(rows: list[dict[str, Any]]) -> RenderableType:
    """What each server answered to each prompt."""
    return output.table(
        ["SERVER", "~TRIAL", "RESULT", "~ANSWER", "~"],
        [
            [
                row["server"],
                row["prompt"],
                output.styled("ok" if row["ok"] else "failed"),
                repr(row["got"].get("text", "")),
                row["problem"],
            ]
            for row in rows
        ],
    )


def plan_views(plan: dict[str, Any]) -> list[RenderableType]:
    """What a dry run found."""
    rows = [
        ["checkpoint", plan["checkpoint"]],
        ["size", f"{format_bytes(plan['total_bytes'])}, {plan['tensors']} tensors"],
        ["transport", f"{plan['transport']} ({plan['reason']})"],
    ]
    if plan["chunks"]:
        largest = format_bytes(plan["largest_chunk"])
        rows.append(["chunks", f"{plan['chunks']}, the largest {largest}"])
        rows.append(["memory", f"{format_bytes(plan['memory_bytes'])} on this machine at most"])
    largest_tensor = format_bytes(plan["largest_tensor_bytes"])
    rows.append(["largest tensor", f"{plan['largest_tensor']}, {largest_tensor}"])
    servers = output.table(
        ["SERVER", "STATE", "VLLM", "BACKEND", ">WORKERS", "VERSION"],
        [
            [
                server["server"],
                output.styled(server["state"]),
                server["vllm"],
                server["backend"],
                server["workers"],
                server["weight_version"],
            ]
            for server in plan["servers"]
        ],
    )
    return [
        output.table(["PLAN", "~"], rows),
        "",
        *_forecast_views(plan),
        servers,
        "",
        "nothing was touched (--dry-run)",
    ]


def _forecast_views(plan: dict[str, Any]) -> list[RenderableType]:
    """What each way of staging would take."""
    if not plan["forecasts"]:
        return []
    rows = [
        [
            forecast["stage"] + (" *" if forecast["chosen"] else ""),
            forecast["slots"],
            format_bytes(forecast["sender_gpu_bytes"]) if forecast["sender_gpu_bytes"] else None,
            format_bytes(forecast["worker_gpu_bytes"]) if forecast["worker_gpu_bytes"] else None,
            format_bytes(forecast["host_bytes"]),
            forecast["problem"]
            or (format_seconds(forecast["freeze_s"]) if forecast["freeze_s"] else "not known"),
        ]
        for forecast in plan["forecasts"]
    ]
    columns = ["STAGE", ">SLOTS", ">SENDER GPU", ">WORKER GPU", ">HOST MEMORY", "FREEZE"]
    return [output.table(columns, rows), *plan["assumptions"], ""]
