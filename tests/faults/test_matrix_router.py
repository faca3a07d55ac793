"""The failure matrix: rows of the router."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from skyctl.core.requests import Pause, Resume
from skyctl.supervisor.fleet import report
from tests.pids import gone
from tests.processes.supervisor.supervising import bring_up, states, supervising
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_router, stub_server


async def test_a_hung_router_does_not_hold_up_control_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.supervisor.router.FRONT_TIMEOUT_S", 0.3)
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        assert supervisor.router is not None and supervisor.router.process is not None
        pid = supervisor.router.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(10):
                outcomes = await supervisor.pause(Pause(mode="keep", servers=("a",), timeout_s=2.0))
                assert outcomes[0].status == "ok"
                assert (await supervisor.resume(Resume(timeout_s=2.0)))[0].status == "ok"
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_a_router_that_hangs_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.supervisor.router.FRONT_TIMEOUT_S", 0.3)
    monkeypatch.setattr("skyctl.supervisor.front.ASK_INTERVAL_S", 0.1)
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a"), stub_server("b")], stub_router(), stop_timeout_s=0.5)
        await bring_up(supervisor, plan)
        router = supervisor.router
        assert router is not None and router.process is not None and router.process.pid
        pid = router.process.pid
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: gone(pid))
        await eventually(lambda: router.state == "ready" and len(router.workers) == 2)


async def test_a_router_that_keeps_dying_is_given_up_and_servers_go_on(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        router = supervisor.router
        assert router is not None
        for _ in range(3):
            await eventually(lambda: router.state == "ready")
            process = router.process
            assert process is not None and process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            await eventually(lambda: router.state != "ready")
        await eventually(lambda: router.state == "failed")
        found = await report(supervisor)
        assert found.health == "unavailable" and "router is failed" in found.reasons[0].message
        assert states(supervisor) == {"a": "ready", "b": "ready"}
        assert (await supervisor.pause(Pause(mode="keep", timeout_s=2.0)))[0].status == "ok"


async def test_a_router_killed_while_the_fleet_is_paused_comes_back_with_every_server(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        await supervisor.pause(Pause(mode="keep", timeout_s=2.0))
        router = supervisor.router
        assert router is not None and router.process is not None and router.process.pid
        os.kill(router.process.pid, signal.SIGKILL)
        await eventually(lambda: router.state != "ready")
        await eventually(lambda: router.state == "ready" and len(router.workers) == 2)
