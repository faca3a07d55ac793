"""The operations layer on stubs behind real sockets, in the test's own process."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skyctl.core.registry import FleetRef
from skyctl.fleetfile.schema import FleetConfig
from skyctl.service.attached import AttachedFleet
from skyctl.store.paths import fleet_paths
from tests.stub.app import StubServer
from tests.stub.running import running

NAME = "far"


def free_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def attached_fleet(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    stubs: Sequence[StubServer | None],
    **settings: Any,
) -> AsyncIterator[AttachedFleet]:
    """Servers `far-0`, `far-1`, … over `stubs`; None is a server that is dead. `settings` are keys
    of the fleet file."""
    monkeypatch.setenv("SKYCTL_HOME", str(home))
    async with running([stub for stub in stubs if stub is not None]) as targets:
        alive = iter(targets)
        urls = [
            next(alive).url if stub is not None else f"http://127.0.0.1:{free_port()}"
            for stub in stubs
        ]
        config = FleetConfig.model_validate({"name": NAME, "servers": urls, **settings})
        async with AttachedFleet(FleetRef(NAME, fleet_paths(NAME), config, home, None)) as fleet:
            yield fleet
