"""The update that a trainer makes through the fleet URL, one call at a time.

    closed ── start ──► open ── update, update … ── finish ──► closed: verified, labelled, resumed
                          └─ a server failed; the trainer died, hung up or ran out of time
                               └──► closed: undone

Everything between start and finish is the fleet's own update (`push/trainer.py`). This module
begins and ends it, and passes on to every server what the trainer sends in between. Only this
process calls the servers, so it is the sender on record: once it has reported the end, nothing can
arrive any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyctl import engines
from skyctl.core.arbiter import Act, Turn
from skyctl.core.requests import CloseUpdate, OpenUpdate
from skyctl.core.results import push_result
from skyctl.engines.base import Server
from skyctl.errors import ConflictError, SkyctlError
from skyctl.push.request import PushRequest, PushResult
from skyctl.push.trainer import Rendezvous, SendTarget
from skyctl.states import TRAINER
from skyctl.store.identity import ProcessIdentity, own_identity
from skyctl.supervisor.resident import Supervisor
from skyctl.wire.worker import WorkerMethod

_LOOK_S = 0.5
_GRACE_S = 10.0  # the trainer's time is measured here; the push allows a little more

Gone = Callable[[], Awaitable[bool]]
"""Whether the client of the present call has hung up."""
Call = Callable[[Server, SendTarget], Awaitable[None]]
"""One call of a trainer, on one server."""


@dataclass
class _Open:
    """An update that servers wait for."""

    job: str
    """Its id."""
    servers: tuple[SendTarget, ...]
    """All servers that take part."""
    process: ProcessIdentity | None
    """The trainer's, if it is visible from this machine."""
    deadline: float
    """When the trainer must have sent everything, by `time.monotonic`."""
    parts: int = 0
    """How many parts of the weights every server has taken."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no call of the trainer is under way."""
    over: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Why it ended; "" once it is finished."""


class TrainerUpdate:
    """At most one open update of one fleet. Belongs to one event loop."""

    def __init__(self, fleet: Supervisor) -> None:
        self._fleet = fleet
        self._open: _Open | None = None
        self._joined: dict[str, str] = {}  # server → its process, when its workers joined a group
        self._watching: asyncio.Task[None] | None = None

    async def targets(self) -> tuple[SendTarget, ...]:
        """Every server, with its ranks in a trainer's group. Raises as `FleetService.rendezvous`"""
        return await self._fleet.rendezvous(Rendezvous("", 0))

    async def join(self, init_info: Mapping[str, Any], gone: Gone) -> None:
        """Open the transfer engine of every server: the workers of each take the ranks that follow
        those of the server before it.

        Raises:
            ConflictError: an update, or another act on the fleet, is under way.
            SkyctlError: a server refused.
        """
        if self._open is not None:
            raise ConflictError(f"{self._open.job} is under way: finish it first")
        targets, timeout_s = await self.targets(), self._timeout_s
        with await self._turn("a trainer that joins the servers", gone):
            await self._leave_own_group(targets)
            self._joined = {}
            await self._all(
                targets,
                lambda server, target: server.init_weight_transfer(_placed(init_info, target)),
                timeout_s=timeout_s,
                gone=gone,
            )
            if "rank_offset" in init_info:
                self._joined = {target.server: self._process_of(target) for target in targets}

    async def dissolve(self, gone: Gone) -> None:
        """Workers leave the trainer's group. Raises as `join`."""
        if self._open is not None:
            raise ConflictError(f"{self._open.job} is under way: finish it first")
        targets = await self.targets()
        with await self._turn("a trainer that leaves the servers", gone):
            self._joined = {}
            await self._all(
                targets,
                lambda server, target: server.extension_rpc(WorkerMethod.LEAVE_GROUP),
                timeout_s=self._timeout_s,
                gone=gone,
            )

    async def start(self, process: ProcessIdentity | None, gone: Gone) -> str:
        """Freeze the servers and open an update in each; returns its job.

        Raises:
            ConflictError: something else is under way, or servers are not in the trainer's group.
            SkyctlError: it was refused or undone; the old weights serve.
        """
        if self._open is not None:
            raise ConflictError(f"{self._open.job} is open already: finish it first")
        self._require_group()
        timeout_s = self._timeout_s
        opened = await self._fleet.open_update(
            OpenUpdate(
                PushRequest("", transport=TRAINER),
                Rendezvous("", 0),
                own_identity(),
                timeout_s + _GRACE_S,
            )
        )
        if not opened.servers:
            await self._result(opened.job)
            raise ConflictError(f"{opened.job} ended before the servers were ready")
        if await gone():
            reason = "the trainer hung up before the servers were ready"
            await self._fleet.close_update(CloseUpdate(opened.job, reason))
            raise ConflictError(reason)
        deadline = time.monotonic() + timeout_s
        update = self._open = _Open(opened.job, opened.servers, process, deadline)
        update.idle.set()
        self._watching = asyncio.create_task(self._watch(update), name=f"{opened.job} watch")
        await self._call(update, lambda server, target: server.start_weight_update(), gone)
        return opened.job

    async def update(self, update_info: Any, gone: Gone) -> None:
        """Pass a part of the weights on to every server. Raises ConflictError: no update is open,
        or this one failed and is undone.
        """
        update = self._require_open()

        def send(server: Server, target: SendTarget) -> Awaitable[None]:
            info = update_info
            if isinstance(info, list):  # one entry for each worker of the fleet
                info = info[target.rank_offset - 1 :][: target.workers]
            return server.update_weights(info)

        await self._call(update, send, gone)
        update.parts += 1

    async def finish(self, version: str) -> PushResult:
        """Verify, label and resume the servers; returns the result. `version` "" takes the job's
        id for a label.

        Raises:
            ConflictError: no update is open. PushError: it failed; says how servers were left.
        """
        update = self._require_open()
        if not update.parts:
            await self._fail(update, "the trainer sent nothing")
            raise ConflictError(f"{update.job} is undone: it brought no weights")
        self._end(update, "")
        await self._fleet.close_update(
            CloseUpdate(update.job, "", version or update.job, update.parts > 0)
        )
        return await asyncio.shield(asyncio.ensure_future(self._result(update.job)))

    async def close(self) -> None:
        """The fleet URL is closed: an update that is open can only be undone."""
        if self._open is not None:
            await self._fail(self._open, "the fleet URL was closed")

    # --- internals ------------------------------------------------------------------------------

    @property
    def _timeout_s(self) -> float:
        return self._fleet.require_plan().config.weight_transfer.update_timeout_s

    async def _turn(self, act: str, gone: Gone) -> Turn:
        """The fleet for itself, once others have ended what they do: a trainer that restarts may
        meet what it began before. Raises ConflictError.
        """
        until = time.monotonic() + self._fleet.require_plan().config.control_timeout_s
        while True:
            try:
                return await self._fleet.arbiter.turn(Act.SLEEP, act)
            except ConflictError:
                if time.monotonic() > until or await gone():
                    raise
            await asyncio.sleep(_LOOK_S)

    def _require_open(self) -> _Open:
        if self._open is None:
            raise ConflictError(
                "no weight update is open: it was not started, or has ended",
                hint="start one; how the last one ended: skyctl jobs",
            )
        if not self._open.idle.is_set():
            raise ConflictError(f"{self._open.job}: another call of it is under way")
        return self._open

    def _require_group(self) -> None:
        """Raise ConflictError if a server's workers are no longer in the group they joined."""
        lost = [
            name
            for name, process in self._joined.items()
            if name not in self._fleet.replicas or self._fleet.replicas[name].instance != process
        ]
        if self._joined and self._fleet.pushes.senders.idle is not None:
            lost = list(self._joined)  # a push by skyctl's own sender took them out
        if lost:
            raise ConflictError(
                f"{', '.join(lost)} left the trainer's group: restarted, or pushed to meanwhile",
                hint="let them join it again: initialize the transfer engine",
            )

    def _process_of(self, target: SendTarget) -> str:
        replica = self._fleet.replicas.get(target.server)
        return "" if replica is None else replica.instance

    async def _leave_own_group(self, targets: tuple[SendTarget, ...]) -> None:
        """Workers leave the group of a sender that was kept after a push, for the trainer's."""
        if self._fleet.pushes.senders.idle is None:
            return
        await self._fleet.pushes.senders.close()
        for target in targets:
            control = engines.server(self._fleet.client, self._fleet.replicas[target.server].target)
            await control.extension_rpc(WorkerMethod.LEAVE_GROUP)

    async def _call(self, update: _Open, call: Call, gone: Gone) -> None:
        """One call of an open update on every server. A failure ends the update."""
        update.idle.clear()
        timeout_s = max(1.0, update.deadline - time.monotonic())
        try:
            try:
                await self._all(
                    update.servers, call, timeout_s=timeout_s, gone=gone, over=update.over
                )
            finally:
                update.idle.set()
        except SkyctlError as error:
            await self._fail(update, error.message)
            raise ConflictError(
                f"{update.job} failed, and is undone: {error.message}",
                hint="how each server was left: skyctl status",
            ) from error

    async def _all(
        self,
        targets: tuple[SendTarget, ...],
        call: Call,
        *,
        timeout_s: float,
        gone: Gone,
        over: asyncio.Future[str] | None = None,
    ) -> None:
        """Call all servers at once. After the first failure the other calls have a control
        call's time to end: in a group, servers wait for each other, and a call that is carried out
        later would reach a server that serves again.

        Raises:
            SkyctlError: a server failed, the client hung up, or the update ended meanwhile.
        """

        async def carry_out(target: SendTarget) -> None:
            replica = self._fleet.replicas[target.server]
            control = engines.server(self._fleet.client, replica.target, timeout_s=timeout_s)
            await call(control, target)

        calls = {asyncio.create_task(carry_out(target)) for target in targets}
        waited: set[asyncio.Future[Any]] = {*calls} if over is None else {*calls, over}
        try:
            while any(not task.done() for task in calls):
                await asyncio.wait(
                    {task for task in waited if not task.done()},
                    timeout=_LOOK_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if failed := [task for task in calls if task.done() and task.exception()]:
                    failed[0].result()
                if over is not None and over.done():
                    raise ConflictError(over.result())
                if await gone():
                    raise ConflictError("the trainer hung up during a call")
            for task in calls:
                task.result()
        finally:
            late = {task for task in calls if not task.done()}
            if late:
                patience_s = self._fleet.require_plan().config.control_timeout_s
                await asyncio.wait(late, timeout=patience_s)
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _watch(self, update: _Open) -> None:
        """End the update when its trainer is gone or late, or the push has ended without it."""
        while not update.over.done():
            await asyncio.wait({update.over}, timeout=_LOOK_S)
            job = self._fleet.push_job
            if job is None or job.id != update.job:
                self._end(update, f"{update.job} has ended: the fleet is taken down")
            elif update.process is not None and not update.process.alive():
                await self._fail(update, f"the trainer (pid {update.process.pid}) died")
            elif time.monotonic() > update.deadline:
                late = f"the trainer has not sent its weights within {self._timeout_s:g} s"
                await self._fail(update, late)

    async def _fail(self, update: _Open, reason: str) -> None:
        """End the update as failed, once no call of it is under way."""
        if update.over.done():
            return
        self._end(update, reason)
        await update.idle.wait()
        with contextlib.suppress(SkyctlError):
            await self._fleet.close_update(CloseUpdate(update.job, reason))

    def _end(self, update: _Open, reason: str) -> None:
        if not update.over.done():
            update.over.set_result(reason)
        if self._open is update:
            self._open = None

    async def _result(self, job_id: str) -> PushResult:
        """The result of an update, once it has ended. Raises its error."""
        return push_result(await self._fleet.wait_job(job_id))


def _placed(init_info: Mapping[str, Any], target: SendTarget) -> dict[str, Any]:
    """The init_info of one server: its ranks begin where the server before it ends."""
    offset = init_info.get("rank_offset")
    if not isinstance(offset, int) or isinstance(offset, bool):
        return dict(init_info)
    return {**init_info, "rank_offset": offset + target.rank_offset - 1}
