"""Stub servers on loopback addresses without sockets, and a push's observer that remembers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyctl.errors import PushError, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import (
    PushFleet,
    PushObserver,
    PushRequest,
    PushResult,
    PushServer,
    Reading,
    Timeouts,
)
from skyctl.push.transaction import push
from tests.stub.app import StubServer
from tests.stub.sglang import SGLangStub
from tests.stub.state import StubEngine
from tests.stub.through_httpx import ThroughHttpx
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

STAGES = ["preflight", "stage", "pause", "init", "start", "update", "finish", "verify", "resume"]
"""Of a push that neither fails nor is asked for more, in order."""
BEFORE_FREEZE = 4
"""Calls of /collective_rpc to each server before a push freezes it: what it was started with, its
problems, whether the checkpoint fits, and its digest."""


class LoopbackTransport(httpx.AsyncBaseTransport):
    """Routes `http://127.0.0.1:<9000 + n>` to stub number n."""

    def __init__(self, stubs: Sequence[StubServer | SGLangStub]) -> None:
        self._apps = [httpx.ASGITransport(stub.asgi) for stub in stubs]  # type: ignore[arg-type]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._apps[(request.url.port or 0) - 9000].handle_async_request(request)


def content(updates: list[dict[str, Any]]) -> str:
    """What the stub's weights come to: the tensors received, whatever chunks they came in."""
    received: dict[str, int] = {}
    for update in updates:
        received.update(zip(update["names"], update["crc32"], strict=True))
    return f"content {hash(tuple(sorted(received.items())))}"


class Stubs:
    """A fleet of stubs that run the checkpoint `base`; `new` is one to push."""

    def __init__(self, directory: Path, count: int = 2) -> None:
        self.base = write_checkpoint(directory / "base")
        self.new = write_checkpoint(directory / "new", tiny_tensors(50), shards=2)
        self.servers = [
            StubServer(StubEngine(model=str(self.base), weigh=content)) for _ in range(count)
        ]
        for server in self.servers:
            server.engine.digest = "base"
        self.fleet = PushFleet(
            "demo",
            tuple(
                PushServer(ServerTarget(f"demo-{i}", f"http://127.0.0.1:{9000 + i}"), "skyctl")
                for i in range(count)
            ),
            model_path=str(self.base),
            timeouts=Timeouts(control_s=5.0, update_s=5.0),
            reading=Reading(chunk_size=600),
        )

    def record(self, **state: Any) -> None:
        """Put this on record of each of its servers."""
        servers = [
            replace(server, recorded=replace(server.recorded, **state))
            for server in self.fleet.servers
        ]
        self.fleet = replace(self.fleet, servers=tuple(servers))

    def limit(self, **timeouts: float) -> None:
        """Change the deadlines of its pushes."""
        self.fleet = replace(self.fleet, timeouts=replace(self.fleet.timeouts, **timeouts))

    @property
    def engines(self) -> list[StubEngine]:
        return [server.engine for server in self.servers]

    def client(self) -> ControlClient:
        return ControlClient(transport=ThroughHttpx(LoopbackTransport(self.servers)))

    def fail_update(self, number: int, *, calls: Sequence[int]) -> None:
        """Make a worker of server `number` raise on these calls of /update_weights, from 1."""
        self.engines[number].fail_updates(calls)


class Recorder(PushObserver):
    """An observer that keeps what it is told; `on_stage` and `on_progress` may act."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.servers: list[tuple[str, str, str]] = []
        self.notes: list[str] = []
        self.done: list[int] = []
        self.on_stage: Callable[[str], None] = lambda name: None
        self.on_progress: Callable[[int], None] = lambda done: None

    def stage(self, name: str) -> None:
        self.stages.append(name)
        self.on_stage(name)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.done.append(done_bytes)
        self.on_progress(done_bytes)

    def server(self, name: str, state: str, detail: str = "", requests: int = 0) -> None:
        self.servers.append((name, state, detail))

    def intend(self, states: Mapping[str, str]) -> None:
        self.servers += [(name, state, "") for name, state in states.items()]

    def fact(self, kind: str, data: Mapping[str, Any]) -> None: ...

    def note(self, message: str) -> None:
        self.notes.append(message)


def written_anew(checkpoint: Path, at: str) -> Recorder:
    """At this stage whoever reads the files of the checkpoint sees that they changed."""
    observer = Recorder()

    def touch(stage: str) -> None:
        if stage == at:
            for shard in checkpoint.glob("*.safetensors"):
                os.utime(shard, ns=(1, 1))

    observer.on_stage = touch
    return observer


class Rotation:
    """A router of which it is known who is in it; `problem` keeps everybody in."""

    def __init__(self, stubs: Stubs) -> None:
        self.routed = {server.name for server in stubs.fleet.servers}
        self.problem = ""
        self.log: list[str] = []
        self.closed = False

    async def take_out(
        self, names: Collection[str], *, others_serve: bool, closed: bool = False
    ) -> None:
        self.closed = closed
        self.log.append(f"leave {' '.join(sorted(names))}")
        if self.problem:
            raise SkyctlError(self.problem)
        self.routed -= set(names)
        assert self.routed or not others_serve

    async def rejoin(self, names: Collection[str]) -> None:
        self.log.append(f"rejoin {' '.join(sorted(names))}")
        self.routed |= set(names)


async def pushed(
    stubs: Stubs,
    observer: PushObserver | None = None,
    rotation: Rotation | None = None,
    **changes: Any,
) -> PushResult:
    """Push the new checkpoint into all stubs, or what `changes` of its request say."""
    request = PushRequest(**{"checkpoint": str(stubs.new), **changes})
    observer = observer or Recorder()
    async with stubs.client() as client:
        return await push(request, stubs.fleet, client=client, observer=observer, rotation=rotation)


async def push_new(stubs: Stubs, observer: Recorder | None = None, **changes: Any) -> PushResult:
    request = PushRequest(**{"checkpoint": str(stubs.new), **changes})
    async with stubs.client() as client:
        return await push(request, stubs.fleet, client=client, observer=observer or Recorder())


async def failing_push(stubs: Stubs, **changes: Any) -> PushError:
    with pytest.raises(PushError) as caught:
        await push_new(stubs, **changes)
    return caught.value


def states(error: PushError) -> list[str]:
    return [server["state"] for server in error.details["servers"]]


def check_invariant(stubs: Stubs) -> None:
    """No server runs with anything but the old or the completely loaded new weights."""
    for engine in stubs.engines:
        if not engine.paused:
            assert engine.digest == "base" or engine.digest.startswith("content")
            assert not engine.half_loaded
            assert not engine.update_open
