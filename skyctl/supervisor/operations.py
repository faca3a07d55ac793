"""What a supervisor does besides pushes: operations on its processes, one at a time, and changes of
adapters. As jobs (`up-3`, `adapters-math`) they are followed and cancelled; they are not on record.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

from skyctl.adapters.fleet import AdapterChange
from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
from skyctl.core.following import CHANGES_WAIT_S, JobChanges
from skyctl.core.requests import CancelJob, JobQuery
from skyctl.core.status import (
    BY_CANCEL,
    BY_DOWN,
    ENDED_BY_OTHERS,
    Operation,
    OperationKind,
    ended_by_others,
)
from skyctl.errors import ConflictError, DeadlineExceeded, ExitCode, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.states import FleetEvent, Phase
from skyctl.store.journal import EventKind, Job, JobEvent, JobState
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor import adapters, rolling, rollout
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.pushes import Pushes
from skyctl.supervisor.scaling import Scaling
from skyctl.units import count_of

_ADAPTERS = "adapters"
_POLL_S = 0.1
_REMEMBERED = 20


class OperatedFleet(RunningFleet, ABC):
    """A fleet that is changed by operations; subclasses say what each does."""

    pushes: Pushes
    scaler: Scaling

    def __init__(
        self, paths: FleetPaths, state: FleetState, client: ControlClient | None = None
    ) -> None:
        super().__init__(paths, state, client)
        self._numbers = itertools.count(1)
        self._ended_operations: deque[Operation] = deque(maxlen=_REMEMBERED)
        self._operation_task: asyncio.Task[None] | None = None
        self._stopped_by = ""
        self.begun_by: str | None = None  # the request that began the last operation
        self._cancelling: asyncio.Task[None] | None = None
        self._adapter_tasks: dict[asyncio.Task[AdapterChange], Job] = {}
        self._ended_adapter_jobs: deque[Job] = deque(maxlen=_REMEMBERED)

    @abstractmethod
    async def undo_by(self, reason: str) -> None:
        """Stop the operation under way and put back what it has begun; what it has completed stays.
        The whole fleet goes down if nothing is left.
        """

    # --- as jobs --------------------------------------------------------------------------------

    async def jobs(self) -> tuple[Job, ...]:
        """Those under way, then pushes."""
        under_way = [job for job in self._own_jobs() if not job.ended]
        return (*under_way, *await super().jobs())

    async def job_changes(self, request: JobQuery) -> JobChanges:
        """Of an operation or a change of adapters, too, while this supervisor remembers it."""
        until = time.monotonic() + min(request.wait_s, CHANGES_WAIT_S)
        while job := self._own_job(request.job):
            done = self.progress[0] if self.progress and job.kind != _ADAPTERS else 0
            sequence = 1 + done
            events = [JobEvent(sequence, time.time(), EventKind.STAGE, {"stage": job.stage})]
            events = [event for event in events if event.sequence > request.after]
            if job.ended or events or time.monotonic() >= until:
                return JobChanges(job, () if job.ended else tuple(events), job.ended)
            await asyncio.sleep(_POLL_S)
        return await super().job_changes(request)

    async def cancel_job(self, request: CancelJob) -> None:
        push, job = self.push_job, self._own_job(request.job)
        if push and push.id == request.job and not self.state.journal.job(push.id).ended:
            await self.pushes.cancel(push)
        elif job is None:
            await super().cancel_job(request)
        elif job.ended:
            return
        elif job.kind == _ADAPTERS:
            await asyncio.sleep(0)  # a task that never ran would undo nothing
            for task, other in self._adapter_tasks.items():
                if other.id == job.id and not task.cancelling():
                    task.cancel()
        else:
            self._cancel_operation(job)

    def _cancel_operation(self, job: Job) -> None:
        if not OperationKind(job.kind).undoable:
            raise ConflictError(
                f"{job.id} cannot be cancelled: what it does is not undone",
                hint=f"follow it: skyctl jobs wait {job.id}",
            )
        if self._cancelling is None or self._cancelling.done():
            self._cancelling = asyncio.create_task(self._undo_cancelled(job), name="cancel")

    async def _undo_cancelled(self, job: Job) -> None:
        try:
            await self.undo_by(BY_CANCEL)
        except Exception as failure:  # the command only follows the job
            message = f"{job.id} is not put back: {failure!r}"
            self.state.add_event("fleet", message, FleetEvent.OPERATION_FAILED, operation=job.kind)

    def _own_job(self, job_id: str) -> Job | None:
        """One under way, else the last that ended."""
        jobs = [job for job in self._own_jobs() if job.id == job_id]
        return next((job for job in jobs if not job.ended), jobs[-1] if jobs else None)

    def _own_jobs(self) -> Iterator[Job]:
        yield from (_as_job(operation, "") for operation in self._ended_operations)
        yield from self._ended_adapter_jobs
        if operation := self.under_way:
            done, total = self.progress or (0, 0)
            stage = f"{done} of {count_of(total, 'server')} restarted" if total else "starting"
            yield _as_job(operation, stage)
        yield from self._adapter_tasks.values()

    # --- adapters -------------------------------------------------------------------------------

    async def change_adapter(self, request: LoadAdapter | UnloadAdapter) -> AdapterChange:
        task = asyncio.create_task(adapters.change_all(self, request))
        verb = "load" if isinstance(request, LoadAdapter) else "unload"
        job = _job(_ADAPTERS, request.name, verb, {"adapter": request.name}, time.time())
        self._adapter_tasks[task] = job
        state, error = JobState.FAILED, None
        try:
            change = await task
            state = JobState.SUCCEEDED
            return change
        except asyncio.CancelledError:
            state = JobState.INTERRUPTED
            if task.cancelling() and not _cancelled():
                raise SkyctlError(
                    f"{verb} {request.name} was {BY_CANCEL}",
                    hint="every server serves what it did before: skyctl adapters",
                ) from None
            raise
        except SkyctlError as failure:
            error = _error(failure)
            raise
        finally:
            del self._adapter_tasks[task]
            job = replace(job, state=state, finished_at=time.time(), error=error)
            self._ended_adapter_jobs.append(job)

    # --- operations -----------------------------------------------------------------------------

    def _begin(self, kind: OperationKind, detail: str, work: Coroutine[Any, Any, None]) -> int:
        self.started_by_operation, self.failed_logs = [], {}
        self.progress, self.before, self.replaced = None, None, {}
        self.router_before = None
        self._stopped_by, self.begun_by = "", None
        self.operation = Operation(next(self._numbers), kind, detail, time.time())
        self._operation_task = asyncio.create_task(self._run_operation(work), name=kind)
        return self.operation.id

    async def _run_operation(self, work: Coroutine[Any, Any, None]) -> None:
        assert self.operation is not None  # set by _begin
        operation, error = self.operation, ""
        try:
            await self._until_stopped(work)
            error = self._stopped_by
        except asyncio.CancelledError:
            error = self._stopped_by
            raise
        except SkyctlError as failure:
            error = failure.message
        except Exception as failure:
            error = f"{failure!r} (see: skyctl logs supervisor)"
            raise
        finally:
            self.operation = replace(
                operation, ended_at=time.time(), error=error, logs=self.failed_logs
            )
            self._ended_operations.append(self.operation)
            kind = FleetEvent.OPERATION_FAILED if error else FleetEvent.OPERATION_DONE
            message = f"{operation.kind}: {error or 'done'}"
            self.state.add_event("fleet", message, kind, operation=operation.kind)
            self.changed()

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work. If it is to be undone, it is over once that is done, too."""
        try:
            await self.pushes.warming.stop()
            await self.scaler.stop()
            await work
        except asyncio.CancelledError:
            if self._stopped_by == BY_DOWN:
                raise
            await self.put_back()

    async def _stop_operation(self, by: str) -> bool:
        """End the operation under way; returns whether there was one. A second command that undoes
        it waits for the first.
        """
        task = self._operation_task
        if task is None or task.done():
            return False
        await asyncio.sleep(0)  # a task that never ran would end nothing
        if by == BY_DOWN or not task.cancelling():
            self._stopped_by = by
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True

    async def put_back(self) -> None:
        """Remove what an operation has started and not completed, and bring back what it replaces
        just then.
        """
        self.progress = None
        if self.operation is not None and self.operation.kind is not OperationKind.RESTART:
            for name in [n for n in self.started_by_operation if n in self.replicas]:
                await rollout.remove(self, self.replicas[name])
            for front in (self.router, self.tinker):
                if front is not None and front.name in self.started_by_operation:
                    await rollout.remove_front(self, front)
        await rolling.put_back(self)
        for replica in self.replicas.values():
            if replica.phase is Phase.STOPPING:  # its end was cut short, and it had served nobody
                replica.start()
        await rolling.put_router_back(self)
        if self.before is not None:  # its fronts may have been about to be replaced
            rollout.start_router(self, self.before)
            rollout.start_tinker(self, self.before)
            await rollout.settle_fronts(self)
        self.take_in_force()

    @abstractmethod
    def take_in_force(self) -> None:
        """After a change that was not completed: what runs is the plan, and not the new one."""

    def _ended(self, number: int | None) -> Operation | None:
        """The operation of this number, if it has ended."""
        ended = (operation for operation in self._ended_operations if operation.id == number)
        return next(ended, None)

    async def _until_ended(self, number: int, deadline: float | None) -> None:
        """Wait for an operation. Raises SkyctlError if another command ended it,
        DeadlineExceeded if it goes on.
        """
        task = self._operation_task
        if task is not None and self.operation is not None and self.operation.id == number:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            await asyncio.wait({task}, timeout=left_s)
            if not task.done():
                raise DeadlineExceeded(
                    f"{self.operation.kind} has not ended in time; it goes on",
                    hint="follow it: skyctl status --watch; or end it: skyctl down",
                )
        ended = self._ended(number)
        if ended is not None and ended.error in ENDED_BY_OTHERS:
            raise ended_by_others(ended.kind, ended.error)


def _cancelled() -> bool:
    """Whether this very task is cancelled, and not one that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _as_job(operation: Operation, stage: str) -> Job:
    request = {"changes": operation.detail or None}
    job = _job(operation.kind, str(operation.id), stage, request, operation.began_at)
    if operation.ended_at is None:
        return job
    state, error = JobState.SUCCEEDED, None
    if operation.error in ENDED_BY_OTHERS:
        state = JobState.INTERRUPTED
    elif operation.error:
        state, error = JobState.FAILED, _error(SkyctlError(operation.error))
    return replace(job, state=state, finished_at=operation.ended_at, error=error)


def _job(kind: str, suffix: str, stage: str, request: dict[str, Any], began_at: float) -> Job:
    return Job(f"{kind}-{suffix}", kind, JobState.RUNNING, stage, 0, 0, request, {}, began_at)


def _error(error: SkyctlError) -> dict[str, Any]:
    return {**error.to_json(), "exit_code": int(ExitCode.FAILED), "details": error.details}
