"""The Python API over a fleet that skyctl starts: a real supervisor, stubs for vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skyctl import Fleet
from skyctl.api import FleetStatus
from skyctl.core.registry import supervisor_running
from skyctl.errors import FleetDownError, SkyctlError
from skyctl.store.paths import fleet_paths
from skyctl.supervisor import daemon
from tests import forking
from tests.faults.stub_fleet import StubFleet

torch = pytest.importorskip("torch")


@asynccontextmanager
async def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **file: Any) -> AsyncIterator[Fleet]:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(daemon, "start_detached", forking.detached)
    StubFleet(tmp_path).write(**file)
    fleet = Fleet.load(tmp_path / "fleet.yaml")
    try:
        async with fleet:
            await fleet.up(timeout_s=60)
            yield fleet
    finally:
        await fleet.down(drain_timeout_s=0)


async def until(fleet: Fleet, holds: Callable[[FleetStatus], bool]) -> FleetStatus:
    async with asyncio.timeout(30):
        while not holds(status := await fleet.status()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return status


def staged(tmp_path: Path) -> list[str]:
    """Weights from memory that are kept, in the state directory and in /dev/shm."""
    entries = tmp_path / "home" / "fleets" / "stubs" / "weights"
    return sorted(entry.name for entry in entries.iterdir()) if entries.is_dir() else []


async def test_a_replica_that_dies_comes_back_with_the_weights_pushed_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with up(tmp_path, monkeypatch) as fleet:
        first = await fleet.sync_weights({"w": torch.ones(3)}, weight_version="step-1")
        kept = staged(tmp_path)
        assert len(kept) == 1 and kept[0] in first.checkpoint
        await fleet.sync_weights(iter([("w", torch.zeros(3))]), weight_version="step-2")
        async with asyncio.timeout(30):  # what the last push replaced goes after its answer
            while kept[0] in staged(tmp_path):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert len(staged(tmp_path)) == 1

        victim = (await fleet.status()).replicas[0]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)

        def is_back(status: FleetStatus) -> bool:
            row = status.replicas[0]  # ready comes first, the router a moment later
            return row.restarts == 1 and row.state == "ready" and row.routed is True

        status = await until(fleet, is_back)
        assert [r.weight_version for r in status.replicas] == ["step-2", "step-2"]
    assert staged(tmp_path) == [], "down left weights behind"


async def test_up_scale_restart_and_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with up(tmp_path, monkeypatch, replicas=1) as fleet:
        seen: list[str] = []
        again = await fleet.up(on_status=lambda status: seen.append(status.health))
        assert again.health == "healthy" and seen == [], "nothing was to be done"
        urls = await fleet.urls()
        assert urls.router is not None and urls.servers.keys() == {"stubs-0"}
        assert len((await fleet.scale(2, timeout_s=60)).replicas) == 2
        restarted = await fleet.restart(["stubs-1"], timeout_s=60)
        assert [r.state for r in restarted.replicas] == ["ready", "ready"]
        taken = await fleet.down(drain_timeout_s=0)
        assert set(taken.stopped) == {"stubs-0", "stubs-1", "router"}
        assert (await fleet.status()).health == "down"
        with pytest.raises(FleetDownError):
            await fleet.pause()
        with pytest.raises(FleetDownError):
            await fleet.sync_weights({"w": torch.ones(1)})
        with pytest.raises(FleetDownError):
            await fleet.generate("ab")


async def test_a_supervisor_that_dies_in_a_block_is_replaced_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with up(tmp_path, monkeypatch, replicas=1) as fleet:
        server = (await fleet.status()).replicas[0].pid
        for _ in range(2):
            supervisor = (await fleet.status()).supervisor_pid
            assert supervisor is not None
            os.kill(supervisor, signal.SIGKILL)
            while supervisor_running(fleet_paths("stubs")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            paused, weights = await asyncio.gather(fleet.pause("keep"), fleet.model_path())
            assert paused.ok and weights is not None
            assert (await fleet.resume()).ok
        assert (await fleet.status()).replicas[0].pid == server


async def test_a_fleet_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start() -> None:
        async with up(tmp_path, monkeypatch, replicas=1, faults='{"exit_at_start": 3}'):
            raise AssertionError("it started")

    with pytest.raises(SkyctlError, match="up failed") as caught:
        await start()
    assert "skyctl logs stubs-0" in caught.value.hint
    assert "stubs-0" in caught.value.details["logs"]
