"""Pushes that are played: no byte moves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from skyctl.errors import PreflightError
from skyctl.push.request import PushRequest, PushResult, ServerPush
from skyctl.supervisor.resident import Supervisor
from tests.unit.supervisor.fleets import eventually


def pushed(request: PushRequest, names: list[str]) -> PushResult:
    version = request.weight_version or "v1"
    servers = [ServerPush(name, True, "ready", version, "digest-" + version) for name in names]
    return PushResult(version, request.checkpoint, "same", "shm", 10, 1, 0.1, 0.1, 0.1, {}, servers)


class FakePush:
    """Stands in for weights.push.push: remembers its calls, answers or fails as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.observer: Any = None  # of the last call
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(
        self, request: PushRequest, fleet: Any, *, observer: Any, **_: Any
    ) -> PushResult:
        if fleet.sibling is not None:
            raise PreflightError("these stubs have no workers whose memory could be copied")
        names = [server.name for server in fleet.servers]
        self.calls.append((request.checkpoint, names))
        self.observer = observer
        observer.stage("update")
        for name in names:
            observer.server(name, "updating")
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return pushed(request, names)


async def push_ended(supervisor: Supervisor, version: str = "v1") -> str:
    """A push of /ckpt that has ended; its job."""
    job = await supervisor.start_push(PushRequest("/ckpt", weight_version=version))
    await eventually(lambda: supervisor.push_job is None)
    return job


class FakeCheckpoint:
    identity_digest = layout_digest = "same"
    path = Path("/ckpt")
