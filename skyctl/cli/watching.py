"""`skyctl sync-weights --watch`: pushes the checkpoints of a training run as they are finished."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl import output
from skyctl.cli.fleet_calls import run_following
from skyctl.cli.job_view import follow_job, going_on, summary
from skyctl.core.recorded import down_error
from skyctl.core.registry import FleetRef
from skyctl.core.results import job_error
from skyctl.core.status import Health
from skyctl.core.watching import Watched
from skyctl.errors import ConflictError, FleetDownError, SkyctlError, UsageError
from skyctl.service import connect
from skyctl.store.paths import expanded

if TYPE_CHECKING:
    from skyctl.checkpoints.checkpoint import Checkpoint
    from skyctl.core.registry import RemoteRef
    from skyctl.push.request import PushRequest
    from skyctl.service import FleetService

_SCAN_S = 1.0
"""Seconds between two scans."""


def watch(ref: FleetRef | RemoteRef, directory: Path, request: PushRequest) -> None:
    """Push each finished checkpoint below the directory until Ctrl-C.

    Raises:
        UsageError: the directory is not here, or the fleet is on another machine.
        FleetDownError: the fleet does not run.
        KeyboardInterrupt: a push is in progress.
    """
    if not isinstance(ref, FleetRef):
        raise UsageError(f"--watch works on the fleet's own machine, and not on {ref.name}")
    directory = expanded(str(directory)).absolute()
    if not directory.is_dir():
        raise UsageError(
            f"--watch {directory} is not a directory", hint="give the output directory of the run"
        )
    jobs: list[str] = []

    def on_interrupt() -> str:
        return going_on(jobs[-1]) if jobs and not ref.attached else ""

    try:
        run_following(_Watch(ref, Watched(directory), request, jobs).run(), on_interrupt)
    except KeyboardInterrupt:  # the usual way out
        if jobs:
            raise


class _Watch:
    """One watch. `jobs` has the push in progress."""

    def __init__(
        self, ref: FleetRef, watched: Watched, request: PushRequest, jobs: list[str]
    ) -> None:
        self._ref = ref
        self._watched = watched
        self._request = request
        self._jobs = jobs
        self._reported = ""

    async def run(self) -> None:
        async with connect(self._ref) as running:
            if (await running.status()).health == Health.DOWN:
                raise down_error(self._ref.name)
        output.note(f"watching {self._watched.directory}; Ctrl-C ends it")
        while True:
            try:
                # a connection for each scan: supervisors come and go
                async with connect(self._ref) as running:
                    pushed = await self._push_next(running)
                self._reported = ""
            except (ConflictError, FleetDownError) as error:  # nothing was touched
                pushed = False
                if error.message != self._reported:
                    output.print_warning(f"{error.message}; trying again")
                self._reported = error.message
            if not pushed:
                await asyncio.sleep(_SCAN_S)

    async def _push_next(self, running: FleetService) -> bool:
        """Whether a checkpoint was pushed, or refused."""
        pushes = (await running.weights()).pushes
        kept = [version.kept for version in await running.kept_versions()]
        checkpoint = await asyncio.to_thread(self._watched.next, pushes, kept)
        if checkpoint is None:
            return False
        try:
            await self._push(running, checkpoint)
        except (ConflictError, FleetDownError):
            raise
        except SkyctlError as error:
            self._watched.refuse(checkpoint)
            error.message = f"{checkpoint.path.name} is skipped: {error.message}"
            output.emit_line({"checkpoint": str(checkpoint.path)} | error.details, "", error)
        return True

    async def _push(self, running: FleetService, checkpoint: Checkpoint) -> None:
        output.note(f"pushing {checkpoint.path}")
        request = replace(self._request, checkpoint=str(checkpoint.path))
        self._jobs.append(await running.start_push(request))
        job = await follow_job(running, self._jobs[-1], timeout_s=None)
        self._jobs.clear()
        if (error := job_error(job)) is not None:
            error.details = {"job": job.to_json()}
            raise error
        assert job.result is not None  # it succeeded
        output.emit_line({"job": job.to_json()}, f"{job.id}  {summary(job.result)}")
