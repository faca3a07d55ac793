"""Stub servers on real sockets inside the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import uvicorn

from skyctl.http.listener import listen_at
from skyctl.http.target import ServerTarget
from tests.stub.app import StubServer


class _QuietUvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the test process keeps its own handlers


@contextlib.asynccontextmanager
async def running(stubs: Sequence[StubServer]) -> AsyncIterator[list[ServerTarget]]:
    """Serve every stub on a free loopback port; yields targets `stub-0`, `stub-1`, …"""
    servers, tasks, targets = [], [], []
    for index, stub in enumerate(stubs):
        listener = listen_at("127.0.0.1", 0, backlog=128)
        config = uvicorn.Config(stub.asgi, log_level="critical", lifespan="off")
        servers.append(_QuietUvicorn(config))
        tasks.append(asyncio.create_task(servers[-1].serve(sockets=[listener])))
        targets.append(
            ServerTarget(f"stub-{index}", f"http://127.0.0.1:{listener.getsockname()[1]}")
        )
    try:
        yield targets
    finally:
        for server in servers:
            server.should_exit = server.force_exit = True
        await asyncio.gather(*tasks)
