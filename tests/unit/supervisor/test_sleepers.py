"""Servers that sleep outside the fleet, and are ended there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from unittest.mock import Mock

from skyctl.http.client import ControlClient
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState
from skyctl.supervisor.sleepers import Sleeper, Sleepers
from tests.unit.supervisor.fleets import stub_server


async def test_one_that_is_being_ended_is_not_woken_and_its_successor_stays_on_record(
    tmp_path: Path,
) -> None:
    spec, stopping, gone = stub_server("a"), asyncio.Event(), asyncio.Event()

    async def stop(timeout_s: float) -> None:
        stopping.set()
        await gone.wait()

    process, replica = Mock(stop=stop), Mock(planned=spec)
    replica.name = "a"
    async with ControlClient() as client:
        with FleetState(tmp_path / "state.sqlite") as state:
            sleepers = Sleepers(state, client)
            sleepers._sleepers["a"] = Sleeper(spec, process, time.monotonic() - 10)
            ending = asyncio.create_task(sleepers.end_old(sleep_s=5, stop_timeout_s=1))
            await stopping.wait()
            assert sleepers.asleep == ()
            sleepers.start(replica)
            replica.start_after.assert_called_once_with(process)
            successor = ProcessRow("a", "server", "running", "t", None, "h", "127.0.0.1", 8000)
            state.save_process(successor)
            gone.set()
            await ending
            assert state.process("a") == successor
