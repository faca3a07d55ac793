"""Attached fleets of stubs in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skyctl.core.registry import FleetRef
from skyctl.fleetfile.schema import FleetConfig
from skyctl.http.client import ControlClient
from skyctl.push.request import PushRequest, PushResult, ServerPush
from skyctl.service.attached import AttachedFleet
from skyctl.store.in_doubt import InDoubt, put_in_doubt
from skyctl.store.paths import fleet_paths
from tests.stub.app import StubServer
from tests.stub.inprocess import StubTransport
from tests.stub.state import Scheduler
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint


@asynccontextmanager
async def attached(tmp_path: Path, monkeypatch: Any, *stubs: StubServer) -> AsyncIterator[Any]:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    transport = StubTransport(stubs)
    config = FleetConfig.model_validate(
        {"name": "far", "servers": [target.url for target in transport.targets]}
    )
    ref = FleetRef("far", fleet_paths("far"), config, tmp_path, None)
    async with AttachedFleet(ref, client=ControlClient(transport=transport)) as fleet:
        yield fleet


def push_nothing(monkeypatch: pytest.MonkeyPatch, gate: asyncio.Event | None = None) -> None:
    """Let pushes move nothing, and end once the gate is set, where there is one."""

    async def push(request: PushRequest, fleet: Any, *, observer: Any, **_: Any) -> PushResult:
        observer.stage("update")
        observer.progress(10, 10)
        if gate is not None:
            await gate.wait()
        servers = [ServerPush(s.name, True, "ready", "v7", "digest") for s in fleet.servers]
        return PushResult("v7", "/c", "d", "shm", 10, 1, 0.1, 0.1, 0.1, {}, servers)

    monkeypatch.setattr("skyctl.push.transaction.push", push)


class Servers:
    """Stub servers, at `http://stub-N` and in any other spelling that `other` gives."""

    def __init__(self, count: int, directory: Path) -> None:
        model = str(write_checkpoint(directory / "model", tiny_tensors(1)))
        self.stubs = [StubServer() for _ in range(count)]
        for stub in self.stubs:
            stub.engine.model = model
        self.transport = StubTransport(self.stubs)
        self.urls = [target.url for target in self.transport.targets]
        self._directory = directory

    def other(self, place: int, host: str) -> str:
        """Another URL of a server."""
        self.transport._apps[host] = self.stubs[place].asgi
        return f"http://{host}"

    @asynccontextmanager
    async def fleet(self, servers: Any) -> AsyncIterator[AttachedFleet]:
        config = FleetConfig.model_validate({"name": "far", "servers": servers})
        ref = FleetRef("far", fleet_paths("far"), config, self._directory, None)
        async with AttachedFleet(ref, client=ControlClient(transport=self.transport)) as fleet:
            yield fleet

    @property
    def served(self) -> list[str]:
        return [weights for stub in self.stubs for weights in stub.engine.served]


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    return Servers(3, tmp_path)


async def break_off(servers: Servers, fleet: AttachedFleet, place: int, name: str) -> None:
    """Leave a server as a push leaves it that dies half-way."""
    await fleet.resume()  # as each act does, it records which server is which
    engine = servers.stubs[place].engine
    engine.scheduler, engine.half_loaded, engine.broke_off = Scheduler.PAUSED_ALL, True, True
    record = InDoubt(name, "push-1", "update", half_updated=True, thaw=True)
    put_in_doubt(fleet.state, {name: record})
