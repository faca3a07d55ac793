"""A change of the number of replicas, when something else acts on the fleet in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from skyctl.core.plan import FleetPlan
from skyctl.core.requests import Scale
from skyctl.launch.local.process import ManagedProcess
from skyctl.supervisor import resident, rollout
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.replica import Replica
from skyctl.supervisor.resident import Supervisor
from skyctl.supervisor.scaling import Scaling
from skyctl.supervisor.sleepers import Sleeper
from tests.processes.supervisor.supervising import bring_up, ended, routed, supervising
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_router, stub_server

LEAVING = "c"


@asynccontextmanager
async def one_too_many(tmp_path: Path) -> AsyncIterator[Supervisor]:
    """A fleet of three servers, of which the last has begun to leave."""
    async with supervising(tmp_path) as supervisor:
        servers = [stub_server("a"), stub_server("b"), stub_server(LEAVING)]
        scale = {"min": 1, "max": 2, "up_after_s": 0.06, "sleep_s": 0}
        await bring_up(supervisor, fleet_plan(servers, stub_router(), replicas=2, scale=scale))
        await supervisor.scaler.step()
        assert routed(supervisor) == {"a", "b"}
        yield supervisor


async def route_again(supervisor: Supervisor) -> None:
    """As the end of a push does."""
    supervisor.held_out.discard(LEAVING)
    await rollout.sync_router(supervisor)


async def test_one_that_a_push_routes_again_leaves_the_router_before_it_is_closed(
    tmp_path: Path,
) -> None:
    async with one_too_many(tmp_path) as supervisor:
        await supervisor.scaler.step()
        await route_again(supervisor)
        assert routed(supervisor) == {"a", "b", LEAVING}
        await supervisor.scaler.step()
        assert routed(supervisor) == {"a", "b"} and LEAVING in supervisor.replicas
        for _ in range(2):
            await supervisor.scaler.step()
        assert list(supervisor.replicas) == ["a", "b"]


@pytest.mark.parametrize("closed", [False, True])
async def test_one_that_a_push_routes_again_while_it_is_asked_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    has_requests = Scaling._has_requests

    async def and_a_push(scaler: Scaling, replica: Replica) -> bool:
        if supervisor.paths.hold_file(LEAVING).exists() is closed:
            await route_again(supervisor)
        return await has_requests(scaler, replica)

    async with one_too_many(tmp_path) as supervisor:
        if not closed:
            await supervisor.scaler.step()
        monkeypatch.setattr(Scaling, "_has_requests", and_a_push)
        await supervisor.scaler.step()
        if closed:
            await supervisor.scaler.step()
        assert LEAVING in routed(supervisor)
        assert not supervisor.paths.hold_file(LEAVING).exists()


async def test_one_that_an_operation_keeps_is_open_again_before_it_is_routed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked_forever(scaler: Scaling, replica: Replica) -> bool:
        if hold.exists():
            await asyncio.Event().wait()
        return False

    monkeypatch.setattr(Scaling, "_has_requests", asked_forever)
    async with one_too_many(tmp_path) as supervisor:
        hold = supervisor.paths.hold_file(LEAVING)
        running = asyncio.create_task(supervisor.scaler.run())
        await eventually(hold.exists)
        running.cancel()
        await supervisor.scaler.stop()
        assert not hold.exists()
        assert routed(supervisor) == {"a", "b", LEAVING}


async def test_no_sleeper_is_ended_beside_an_operation(tmp_path: Path) -> None:
    async with one_too_many(tmp_path) as supervisor:
        process = Mock(stop=AsyncMock())
        supervisor.sleepers._sleepers["d"] = Sleeper(stub_server("d"), process, since=0.0)
        supervisor.change_to(replace(supervisor.require_plan(), router=stub_router()))
        await supervisor.scaler.step()
        process.stop.assert_not_called()
        assert await ended(supervisor) == ""
        await supervisor.scaler.step()
        process.stop.assert_awaited_once()


async def test_one_that_leaves_serves_again_when_another_dies(tmp_path: Path) -> None:
    async with one_too_many(tmp_path) as supervisor:
        dying = supervisor.replicas["a"]
        await dying.stop()
        await supervisor.scaler.step()
        assert routed(supervisor) == {"b", LEAVING}
        for _ in range(3):
            await supervisor.scaler.step()
        assert list(supervisor.replicas) == ["a", "b", LEAVING]


async def test_the_removal_of_one_that_was_added_in_vain_goes_on_after_an_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        scale = {"min": 1, "max": 3, "sleep_s": 0}
        servers = [stub_server("a"), stub_server("b")]
        await bring_up(supervisor, fleet_plan(servers, stub_router(), scale=scale))
        supervisor.replicas["b"].update_row(quarantine="it has no weights")
        supervisor.scaler._added.add("b")
        with monkeypatch.context() as slow:
            slow.setattr(ManagedProcess, "stop", lambda process, timeout_s: asyncio.sleep(600))
            running = asyncio.create_task(supervisor.scaler.step())
            supervisor.scaler._step = running
            await eventually(lambda: supervisor.replicas["b"].phase == "stopping")
            await supervisor.scaler.stop()
        await supervisor.scaler.step()
        assert list(supervisor.replicas) == ["a"]


async def test_scale_keeps_settings_that_were_applied_while_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        a, b, loop = stub_server("a"), stub_server("b"), asyncio.get_running_loop()
        await bring_up(supervisor, fleet_plan([a]))
        later = [fleet_plan([a], drain_timeout_s=2)]

        async def apply(plan: FleetPlan) -> None:
            supervisor.change_to(plan)

        def while_another_is_applied(running: RunningFleet, replicas: int) -> FleetPlan:
            plan = replace(running.require_plan(), servers=(a, b))
            if later:
                asyncio.run_coroutine_threadsafe(apply(later.pop()), loop).result()
            return plan

        monkeypatch.setattr(resident, "resized", while_another_is_applied)
        await supervisor.scale(Scale(2))
        assert await ended(supervisor) == ""
        assert list(supervisor.replicas) == ["a", "b"]
        assert supervisor.require_plan().config.drain_timeout_s == 2
