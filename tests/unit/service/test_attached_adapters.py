"""Adapters of a fleet that skyctl did not start: what a sleep, a dead command or a server miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyctl.adapters import change
from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
from skyctl.core.requests import Recover, Sleep, StatusQuery, Wake
from skyctl.errors import PartialFailure
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.unit.adapters.files import make_adapter
from tests.unit.service.attached_stubs import attached


def asked(tmp_path: Path, version: int, new: bool | None = None) -> LoadAdapter:
    directory = make_adapter(tmp_path / f"v{version}", value=version / 10)
    return LoadAdapter(name="x", directory=str(directory), new=new)


def serve(stubs: list[StubServer]) -> list[dict[str, str]]:
    return [{name: one.name for name, one in s.adapters.served.items()} for s in stubs]


async def test_a_server_that_slept_through_a_sync_has_it_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = [StubServer(), StubServer()]
    async with attached(tmp_path, monkeypatch, *stubs) as fleet:
        await fleet.load_adapter(asked(tmp_path, 1))
        await fleet.sleep(Sleep(level=1, servers=("far-1",)))
        done = await fleet.load_adapter(asked(tmp_path, 2))
        assert [one.status.value for one in done.outcomes] == ["ok", "skipped"]
        assert serve(stubs) == [{"x": "x@2"}, {"x": "x@1"}]
        await fleet.wake(Wake())
        assert serve(stubs) == [{"x": "x@2"}] * 2
        assert (await fleet.status(StatusQuery())).adapters == ("x@2",)
        assert [one.servers for one in await fleet.adapters()] == [("far-0", "far-1")]
        await fleet.unload_adapter(UnloadAdapter(name="x"))
        assert (await fleet.status(StatusQuery())).adapters == ()


async def test_one_that_cannot_take_them_is_quarantined_and_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = [StubServer(), StubServer()]
    async with attached(tmp_path, monkeypatch, *stubs) as fleet:
        await fleet.sleep(Sleep(level=1, servers=("far-1",)))
        await fleet.load_adapter(asked(tmp_path, 1))
        stubs[1].asgi.faults["/v1/load_lora_adapter"] = Fault("status")
        outcomes = await fleet.wake(Wake())
        assert [one.status.value for one in outcomes] == ["ok", "failed"]
        assert "not given the fleet's adapters" in outcomes[1].detail
        assert fleet.state.events()[-1].message.endswith(": 1 of 2 servers")
        assert (await fleet.status(StatusQuery())).replicas[1].state == "quarantined"


async def test_recover_puts_right_what_a_killed_command_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(point: str) -> None:
        if point == "adapters.commit":
            raise Killed

    stubs = [StubServer(), StubServer()]
    async with attached(tmp_path, monkeypatch, *stubs) as fleet:
        await fleet.load_adapter(asked(tmp_path, 1))
        with monkeypatch.context() as patched:
            patched.setattr(change, "reached", kill)
            with pytest.raises(Killed):
                await fleet.load_adapter(asked(tmp_path, 2))
        assert serve(stubs) == [{"x": "x@2"}] * 2
        assert [finding.action for finding in await fleet.findings()] == ["load"] * 2
        await fleet.recover(Recover())
        assert serve(stubs) == [{"x": "x@1"}] * 2
        assert [one.servers for one in await fleet.adapters()] == [("far-0", "far-1")]


async def test_recover_gives_them_to_a_server_that_somebody_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = [StubServer(), StubServer()]
    async with attached(tmp_path, monkeypatch, *stubs) as fleet:
        await fleet.load_adapter(asked(tmp_path, 1))
        assert not any(finding.action.needed for finding in await fleet.findings())
        stubs[1].adapters.served.clear()  # on record it has what it was given
        assert [finding.action for finding in await fleet.findings()] == ["nothing", "load"]
        repairs = await fleet.recover(Recover())
        assert [(repair.action, repair.ok) for repair in repairs][1] == ("load", True)
        assert serve(stubs) == [{"x": "x@1"}] * 2


async def test_recover_says_which_server_does_not_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = [StubServer(), StubServer()]
    async with attached(tmp_path, monkeypatch, *stubs) as fleet:
        await fleet.load_adapter(asked(tmp_path, 1))
        stubs[1].adapters.served.clear()
        stubs[1].asgi.faults["/v1/load_lora_adapter"] = Fault("status")
        repairs = await fleet.recover(Recover())
        assert [repair.ok for repair in repairs] == [True, False]
        quarantine = fleet.state.server("far-1").quarantine
        assert quarantine is not None and repairs[1].detail == quarantine
        assert "its adapters are not the fleet's" in quarantine


async def test_what_an_attached_server_lacks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs: list[Any] = [StubServer(), StubServer()]
    stubs[1].adapters.plugin = False
    async with attached(tmp_path, monkeypatch, *stubs) as fleet:
        with pytest.raises(PartialFailure, match="without skyctl's plug-in"):
            await fleet.load_adapter(asked(tmp_path, 1))
        assert serve(stubs) == [{}, {}]
