"""Whose weights the servers hold: the fleet's own, or those of one model trained as a whole.

To sample from a model that was trained as a whole, its checkpoint is pushed under a label that
names it, after requests that use other weights are done. The fleet's journal shows what servers
hold: the last push that succeeded, as long as no other has begun.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from skyctl.checkpoints.staging import is_staged
from skyctl.children import to_its_end
from skyctl.core.results import job_error
from skyctl.core.tinker import LABEL_PREFIX
from skyctl.errors import (
    ConflictError,
    DeadlineExceeded,
    FleetDownError,
    SkyctlError,
)
from skyctl.push.request import PushRequest
from skyctl.store.journal import LATEST, JobState
from skyctl.tinker import files

if TYPE_CHECKING:
    from skyctl.core.service import FleetService
    from skyctl.store.journal import Job

T = TypeVar("T")
_BUSY_S, _BUSY_TIMEOUT_S = 1.0, 600.0
_LEAVE_TIMEOUT_S = 60.0
_MIXED = "?"
_PUSH = "push"


def label_of(directory: str) -> str:
    """The name under which servers know a checkpoint: unique to it, wherever its storage is, so
    that no answer or cached prefix of another version is mistaken for it.
    """
    return f"{LABEL_PREFIX}{Path(directory).name}"


class ServedWeights:
    """The weights of one running fleet. `model` is what it was started with; `directory` is the
    API's own. Unless `offered`, servers are brought back to the fleet's weights, and stay there.
    """

    def __init__(self, fleet: FleetService, model: str, directory: Path, *, offered: bool) -> None:
        self._fleet = fleet
        self._model = model
        self._own = directory / "own-weights.json"
        self._offered = offered
        self._turns = OneAtATime()
        self._bringing = asyncio.Lock()
        self._began = time.time()
        self._back = False

    async def answer(self, directory: str | None, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask` while the servers hold the weights of this checkpoint; None: the
        fleet's own, or what others pushed. It is repeated if another push came before its answer.

        Raises:
            SkyctlError: they cannot be brought there.
        """
        if not self._offered:
            if directory is not None:
                raise SkyctlError("whole models are not offered here (`tinker: full_parameters`)")
            if not self._back:
                async with self._turns.using(None):
                    await self._bring(None)
                self._back = True
            return await ask()
        async with self._turns.using(directory):
            while True:
                last = await self._bring(directory)
                answer = await ask()
                if [job.id for job in (await self._jobs())[:1]] == last:
                    return answer

    @asynccontextmanager
    async def leaving(self, directory: str) -> AsyncIterator[None]:
        """Inside, servers do not hold this checkpoint's weights, and no call brings them.

        Raises:
            SkyctlError: they cannot be brought back.
        """
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT_S) as limit, self._turns.using(None):
                current = await self._current_label(await self._ended_jobs())
                if current in (label_of(directory), _MIXED):
                    await self._bring(None)
                limit.reschedule(None)
                yield
        except TimeoutError as error:
            raise ConflictError(
                "servers answer from these weights", hint="try again when they are done"
            ) from error

    async def _bring(self, directory: str | None) -> list[str]:
        """Push what servers lack; returns the id of the last job, if there was any."""
        async with self._bringing:
            # the next caller must not find it half done
            return await to_its_end(self._push_until_served(directory))

    async def _push_until_served(self, directory: str | None) -> list[str]:
        label = None if directory is None else label_of(directory)
        while True:
            jobs = await self._ended_jobs()
            current = await self._current_label(jobs)
            if current == label:
                return [job.id for job in jobs[:1]]
            if directory is not None and current is None:
                await self._remember_own()
            await self._push(directory, label)

    async def _push(self, directory: str | None, label: str | None) -> None:
        if directory is None:
            checkpoint = self._remembered()
        else:
            checkpoint = directory
            await asyncio.to_thread(self._check, Path(directory))
        request = PushRequest(checkpoint=checkpoint, weight_version=label)
        start = partial(self._fleet.start_push, request)
        name = await patiently(start, ConflictError, FleetDownError)
        try:
            job = await self._fleet.wait_job(name)
        except FleetDownError:
            return  # its outcome is in the journal once it was recovered
        if (error := job_error(job)) is not None:
            raise error

    def _check(self, directory: Path) -> None:
        """Compare a checkpoint with its digests, unless this process has just written it."""
        try:
            if (directory / files.META).stat().st_mtime < self._began:
                files.check(directory, files.read_meta(directory), optimizer=False)
        except (OSError, files.DamagedCheckpoint) as error:
            raise SkyctlError(f"a checkpoint is damaged: {error}") from error

    async def _remember_own(self) -> None:
        """Record what to push back, before other weights take its place."""
        state = await patiently(self._fleet.weights, FleetDownError, DeadlineExceeded)
        paths = [row.checkpoint for row in state.servers if row.weight_version]
        # a push out of memory is kept there only as long as servers have it
        if any(not path or is_staged(path) for path in paths):
            raise SkyctlError(
                "servers have weights that are in no file: nothing could bring them back",
                hint="push a checkpoint: skyctl sync-weights CKPT",
            )
        path = await patiently(self._fleet.model_path, FleetDownError, DeadlineExceeded)
        await asyncio.to_thread(self._write_own, path or self._model)

    def _write_own(self, checkpoint: str) -> None:
        beside = self._own.with_name(f".{self._own.name}.partial")
        with beside.open("w") as file:
            json.dump({"checkpoint": checkpoint}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._own)

    def _remembered(self) -> str:
        try:
            return str(json.loads(self._own.read_text())["checkpoint"])
        except FileNotFoundError:
            return self._model

    async def _jobs(self) -> tuple[Job, ...]:
        """The latest pushes, newest first."""
        jobs = await patiently(self._fleet.jobs, FleetDownError, DeadlineExceeded)
        return tuple(job for job in jobs if job.is_push)

    async def _ended_jobs(self) -> tuple[Job, ...]:
        """The latest jobs, once none is under way."""
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            jobs = await self._jobs()
            if all(job.ended for job in jobs):
                return jobs
            if time.monotonic() > deadline:
                raise ConflictError("a push has been under way for too long", hint="skyctl jobs")
            await asyncio.sleep(_BUSY_S)

    async def _current_label(self, jobs: tuple[Job, ...]) -> str | None:
        """The label of trained weights that servers hold, None for others, `_MIXED` if a push that
        failed, or that recovery finished, may have left either.
        """
        failed: list[bool] = []
        for job in jobs:
            if job.kind != _PUSH:
                continue
            version = job.request.get("weight_version") or ""
            ours = version.startswith(LABEL_PREFIX)
            if job.state is JobState.SUCCEEDED:
                unsure = bool(failed) if ours else any(failed)
                if unsure:
                    return _MIXED
                return version if ours and await self._is_current(version) else None
            failed.append(ours)
        if any(failed):
            return _MIXED
        if len(jobs) < LATEST:
            return None
        # the last push that succeeded is no longer listed
        state = await patiently(self._fleet.weights, FleetDownError, DeadlineExceeded)
        versions = {row.weight_version or "" for row in state.servers}
        trained = {version for version in versions if version.startswith(LABEL_PREFIX)}
        return (_MIXED if failed or len(versions) > 1 else trained.pop()) if trained else None

    async def _is_current(self, label: str) -> bool:
        """Whether the fleet's weights have this label: what is pushed ends with `skyctl down`, and
        its job stays on record.
        """
        path = await patiently(self._fleet.model_path, FleetDownError, DeadlineExceeded)
        return path is not None and label_of(path) == label


class OneAtATime:
    """One value at a time, shared by all that want it; others in order of arrival."""

    def __init__(self) -> None:
        self._value: str | None = None
        self._users = 0
        self._waiting: deque[tuple[str | None, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def using(self, value: str | None) -> AsyncIterator[None]:
        """Inside, no other value is in use."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (value, turn)
        self._waiting.append(entry)
        if not self._users or (len(self._waiting) == 1 and value == self._value):
            self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not turn.cancelled():
                self._release()
            raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        self._users -= 1
        if not self._users:
            self._admit()

    def _admit(self) -> None:
        """Admit the longest waiter, and all that want the same value."""
        waiting = [entry for entry in self._waiting if not entry[1].done()]
        self._waiting.clear()
        for value, turn in waiting:
            if not self._users:
                self._value = value
            if value == self._value:
                self._users += 1
                turn.set_result(None)
            else:
                self._waiting.append((value, turn))


async def patiently(ask: Callable[[], Awaitable[T]], *passing: type[SkyctlError]) -> T:
    """Ask again while the result is one of these errors, which pass: the fleet is free again (after
    a push, a recovery), or the next supervisor has taken it over.
    """
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            return await ask()
        except passing:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_BUSY_S)
