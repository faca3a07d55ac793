"""Runs the fleet file's commands on events (`on_event:`), one after the other, beside the work."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from skyctl.children import child_environment, started
from skyctl.states import FleetEvent
from skyctl.store.state import Event

if TYPE_CHECKING:
    from skyctl.supervisor.fleet import RunningFleet

COMMAND_TIMEOUT_S = 30.0
_MOST_WAITING = 100
_LOG_BYTES = 2000
_LOG = logging.getLogger(__name__)


class EventCommands:
    """What events wait for their commands. A command that fails is an event itself."""

    def __init__(self, running: RunningFleet, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self._running = running
        self._timeout_s = timeout_s
        self._waiting = asyncio.Queue[tuple[FleetEvent, dict[str, Any]]](_MOST_WAITING)

    def enqueue(self, kind: FleetEvent, event: Event, details: Mapping[str, Any]) -> None:
        """Have the command of this event run, if the plan in force has one. Returns at once."""
        plan = self._running.plan
        if plan is None or not plan.config.on_event.command(kind):
            return
        data = {
            "fleet": plan.config.name,
            "event": kind.value,
            "at": event.at,
            "subject": event.subject,
            "message": event.message,
            **details,
        }
        try:
            self._waiting.put_nowait((kind, data))
        except asyncio.QueueFull:
            self._report(kind, f"skipped: {_MOST_WAITING} others wait")

    async def run(self) -> None:
        """Run commands until cancelled, which ends the one that runs."""
        while True:
            kind, data = await self._waiting.get()
            try:
                if problem := await self._run(kind, data):
                    self._report(kind, problem)
            except Exception:  # such as a disk that is full: the next command runs
                _LOG.exception("on_event")

    async def _run(self, kind: FleetEvent, data: Mapping[str, Any]) -> str:
        """How the command failed; "" if it did not, or is not in the plan any more."""
        plan = self._running.plan
        if plan is None or not (command := plan.config.on_event.command(kind)):
            return ""
        try:
            process = await started(
                asyncio.create_subprocess_shell(
                    command,
                    cwd=plan.base_dir,
                    env=child_environment({}),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                ),
                session=True,
            )
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        try:
            async with asyncio.timeout(self._timeout_s):
                printed, _ = await process.communicate(json.dumps(data).encode() + b"\n")
        except TimeoutError:
            return f"ended after {self._timeout_s:g} s"
        finally:
            with suppress(ProcessLookupError):  # with all that it started
                os.killpg(process.pid, signal.SIGKILL)
        if not process.returncode:
            return ""
        *_, line = printed[-_LOG_BYTES:].decode(errors="replace").strip().splitlines() or [""]
        return f"exit code {process.returncode}" + (f": {line}" if line else "")

    def _report(self, kind: FleetEvent, problem: str) -> None:
        self._running.state.add_event("on_event", f"the command of {kind}: {problem}")
