"""A fleet that hands its GPUs over, when something comes in between."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import AsyncMock

import pytest

from skyctl.core.requests import Down, Outcomes, Sleep, Wake
from skyctl.core.status import GroupStatus
from skyctl.errors import ConflictError, SkyctlError, StateUnwritable
from skyctl.service.ended import operation_error
from skyctl.states import Phase
from skyctl.store.sleep_groups import SleepGroup
from skyctl.store.state import FleetState
from skyctl.supervisor import rollout
from skyctl.supervisor.replica import Replica
from skyctl.supervisor.resident import Supervisor
from tests.processes.supervisor.supervising import bring_up, supervising
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_server

HAND_OVER = Sleep(hands_to="judge", sleep_group="pair", timeout_s=5.0)
FULL = {"/nowhere": {"kind": "status"}}  # the stub that sleeps


@asynccontextmanager
async def awake(tmp_path: Path) -> AsyncIterator[tuple[Supervisor, SleepGroup]]:
    """The fleet of a group that is awake, with one server."""
    async with supervising(tmp_path) as supervisor:
        group = SleepGroup(supervisor.paths.root, "pair")
        group.give(supervisor.paths.name)
        await bring_up(supervisor, fleet_plan([stub_server("a", faults=FULL)], sleep_group="pair"))
        yield supervisor, group


async def _asleep_but_not_on_record(supervisor: Supervisor, request: Sleep | Wake) -> Outcomes:
    outcomes = await control(supervisor, request)
    if isinstance(request, Sleep):
        _full()
    return outcomes


def _full(*_: object) -> NoReturn:
    raise StateUnwritable("no space left on device")


control = Supervisor._control_in_turn


@pytest.mark.parametrize(
    ("of", "what", "fails"),
    [
        (Supervisor, "_control_in_turn", _asleep_but_not_on_record),
        (FleetState, "durable", _full),
        (SleepGroup, "give", _full),
    ],
)
async def test_a_full_disk_leaves_it_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: type, what: str, fails: Any
) -> None:
    async with awake(tmp_path) as (supervisor, group):
        monkeypatch.setattr(of, what, fails)
        with pytest.raises(StateUnwritable):
            await supervisor.sleep(HAND_OVER)
        assert supervisor.replicas["a"].state == "ready"
        assert group.awake() == supervisor.paths.name


async def test_one_that_loses_the_gpus_before_it_starts_is_not_called_ready(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        SleepGroup(supervisor.paths.root, "pair").give("judge")
        await bring_up(supervisor, fleet_plan([stub_server("a")], sleep_group="pair"))
        error = await operation_error(supervisor, await supervisor.status())
        assert (
            str(error) == "fleet stubs has started, and sleeps: judge is awake in sleep_group pair"
        )


async def test_a_fleet_hands_over_its_own_group_alone(tmp_path: Path) -> None:
    async with awake(tmp_path) as (supervisor, group):
        with pytest.raises(ConflictError, match="fleet stubs is not in sleep_group old"):
            await supervisor.sleep(replace(HAND_OVER, sleep_group="old"))
        assert supervisor.replicas["a"].state == "ready"
        assert group.awake() == supervisor.paths.name


async def test_one_that_is_taken_down_meanwhile_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with awake(tmp_path) as (supervisor, group):
        control = supervisor._control_in_turn

        async def and_down(request: Sleep | Wake) -> Outcomes:
            outcomes = await control(request)
            await supervisor.down(Down(0.0))
            return outcomes

        monkeypatch.setattr(supervisor, "_control_in_turn", and_down)
        with pytest.raises(ConflictError, match="fleet stubs is going down"):
            await supervisor.sleep(HAND_OVER)
        assert group.awake() == supervisor.paths.name


async def test_nothing_starts_while_it_is_not_known_which_fleet_may_be_awake(
    tmp_path: Path,
) -> None:
    async with awake(tmp_path) as (supervisor, group):
        replica = supervisor.replicas["a"]
        group._file.unlink()
        group._file.mkdir()
        assert replica.process is not None
        os.kill(replica.process.pid, signal.SIGKILL)
        await eventually(lambda: replica.phase is Phase.ASLEEP)
        assert "may be awake is not known" in replica.reason
        with pytest.raises(ConflictError, match="may be awake is not known"):
            await supervisor.restart()
        assert (await supervisor.status()).sleep_group == GroupStatus("pair", None)
        group._file.rmdir()
        group.give(supervisor.paths.name)
        await eventually(lambda: replica.state == "ready")


async def test_one_that_dies_while_requests_end_waits_until_its_fleet_may_be_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with awake(tmp_path) as (supervisor, group):
        replica = supervisor.replicas["a"]

        async def and_a_death(*_: object) -> None:
            assert replica.process is not None
            os.kill(replica.process.pid, signal.SIGKILL)
            await eventually(lambda: replica.phase is Phase.ASLEEP)

        monkeypatch.setattr(rollout, "drain_all", and_a_death)
        await supervisor.sleep(HAND_OVER)
        assert (group.awake(), replica.process, replica.row.sleep_level) == ("judge", None, 1)
        with pytest.raises(ConflictError, match="judge is awake in sleep_group pair"):
            await supervisor.wake(Wake())
        group.give(supervisor.paths.name)
        [outcome] = await supervisor.wake(Wake())
        assert outcome.detail.endswith("will be awake when it is ready")
        await eventually(lambda: replica.state == "ready")


async def test_one_that_is_still_being_ended_keeps_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with awake(tmp_path) as (supervisor, group):
        replica = supervisor.replicas["a"]

        async def and_a_slow_death(*_: object) -> None:
            monkeypatch.setattr(Replica, "_end_for_certain", AsyncMock(side_effect=endless.wait))
            assert replica.process is not None
            os.kill(replica.process.pid, signal.SIGKILL)
            await eventually(lambda: replica.phase is Phase.RESTARTING)

        endless = asyncio.Event()
        monkeypatch.setattr(rollout, "drain_all", and_a_slow_death)
        with pytest.raises(SkyctlError, match=r"stays awake, a server does not sleep: a: not run"):
            await supervisor.sleep(HAND_OVER)
        with pytest.raises(ConflictError, match="a of fleet stubs is restarting"):
            await supervisor.sleep(HAND_OVER)
        assert group.awake() == supervisor.paths.name


async def test_what_still_starts_is_waited_for(tmp_path: Path) -> None:
    async with awake(tmp_path) as (supervisor, group):
        replica = supervisor.replicas["a"]
        await replica.stop()
        replica.start()
        await asyncio.sleep(0)
        with pytest.raises(ConflictError, match="a of fleet stubs is starting"):
            await supervisor.sleep(HAND_OVER)
        assert group.awake() == supervisor.paths.name
