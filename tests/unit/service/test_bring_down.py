"""Taking a fleet down."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skyctl.core.requests import TakenDown
from skyctl.service.bring_down import take_down
from skyctl.store.paths import fleet_paths
from skyctl.store.state import FleetState


async def test_two_tasks_of_one_event_loop_take_a_fleet_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    paths = fleet_paths("demo").prepare()
    FleetState(paths.database).close()
    downs = (take_down(paths, drain_timeout_s=0.0) for _ in range(2))
    assert await asyncio.gather(*downs) == [TakenDown((), False)] * 2
