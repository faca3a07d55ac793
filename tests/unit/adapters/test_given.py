"""Adapters that servers have out of a process's memory, and the file that they write of them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.adapters import change, committed, given
from skyctl.adapters.fleet import AdapterChange, AdapterFleet
from skyctl.adapters.peft import UNWRITTEN, WEIGHTS, read_adapter
from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
from skyctl.checkpoints.staging import staged
from skyctl.errors import PartialFailure, PreflightError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.service.attached_recovery import _bring_to_adapters
from skyctl.store import adapters as store
from skyctl.store.state import FleetState
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.inprocess import StubTransport
from tests.unit.adapters.files import leave_in_memory, make_adapter

RPC = "/collective_rpc"


class Fleet:
    """Two stubs, and a trainer that has adapters in memory: a file stands for it."""

    def __init__(self, tmp_path: Path, state: FleetState) -> None:
        self.tmp_path = tmp_path
        self.stubs = [StubServer() for _ in range(2)]
        transport = StubTransport(self.stubs)
        self.targets: list[ServerTarget] = list(transport.targets)
        self.state = state
        self.fleet = AdapterFleet(
            name="f",
            state=state,
            client=ControlClient(transport=transport),
            targets=lambda: (self.targets, {}),
            directory=tmp_path / "state" / "adapters",
            timeout_s=10.0,
            in_memory=False,
        )

    async def sync(self, value: float, *, in_file: bool = False) -> AdapterChange:
        """Send an adapter whose numbers all have this value. `in_file`: a CPU had it."""
        trainer = make_adapter(self.tmp_path / f"{value}", value=value)
        with staged(self.fleet.directory, needed_bytes=None, in_memory=False) as directory:
            sent = leave_in_memory(trainer, directory, [int(value * 10)] * 2)
            if in_file:
                (directory / UNWRITTEN).unlink()
                shutil.copyfile(trainer / WEIGHTS, directory / WEIGHTS)
                sent = replace(sent, export=())
            request = LoadAdapter(name="x", directory=str(directory), new=None, sent=sent)
            return await change.load(self.fleet, request)

    def served(self) -> list[dict[str, str]]:
        """The digest of what each server reads for each name."""
        return [
            {name: loaded.digest for name, loaded in stub.adapters.served.items()}
            for stub in self.stubs
        ]

    def path(self) -> Path:
        return Path(store.served(self.state)["x"].path)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    with FleetState(tmp_path / "state" / "state.sqlite") as state:
        yield Fleet(tmp_path, state)


async def test_servers_have_it_before_a_file_does_and_then_write_the_file(fleet: Fleet) -> None:
    result = await fleet.sync(0.5)
    assert result.adapter is not None and result.adapter.served_as == "x@1"
    first, second = fleet.served()
    assert first == second and list(first) == ["x"]
    assert not (fleet.path() / WEIGHTS).exists()
    assert await given.keep(fleet.fleet) == ()
    assert (fleet.path() / WEIGHTS).read_bytes() == (fleet.tmp_path / "0.5" / WEIGHTS).read_bytes()
    assert read_adapter(str(fleet.path())).rank == 4
    assert [stub.adapters.given for stub in fleet.stubs] == [{}, {}]  # the file has it
    assert (await fleet.sync(0.6)).adapter.digest != result.adapter.digest  # type: ignore[union-attr]


async def test_a_server_that_restarts_gets_what_its_sibling_writes(fleet: Fleet) -> None:
    await fleet.sync(0.5)
    before, fleet.stubs[0].adapters = fleet.served()[1], type(fleet.stubs[0].adapters)("stub")
    store.record_server(fleet.state, "stub-0", {})
    await given.keep(fleet.fleet)
    async with change.changing(fleet.fleet):
        [outcome] = await committed.catch_up(
            fleet.state, fleet.fleet.client, fleet.targets[:1], fleet.fleet.timeout_s
        )
    assert outcome.ok and fleet.served() == [before, before]


async def test_what_no_server_has_any_more_is_said_to_be_lost(fleet: Fleet) -> None:
    await fleet.sync(0.5)
    for stub in fleet.stubs:
        stub.adapters = type(stub.adapters)("stub")
    [note] = await given.keep(fleet.fleet)
    assert "(no server holds it): sync it again" in note
    outcomes = await committed.catch_up(
        fleet.state, fleet.fleet.client, fleet.targets, fleet.fleet.timeout_s
    )
    assert ["sync it again" in outcome.detail for outcome in outcomes] == [True, True]


async def test_a_server_that_cannot_take_it_refuses_it_for_all(fleet: Fleet) -> None:
    await fleet.sync(0.5)
    before = fleet.served()
    fleet.stubs[1].adapters.cannot_take = "it sees no such GPU"
    with pytest.raises(PreflightError, match=r"stub-1 cannot copy .*: it sees no such GPU"):
        await fleet.sync(0.6)
    assert fleet.served() == before and store.served(fleet.state)["x"].version == 1
    fleet.stubs[1].engine.extension = False
    with pytest.raises(PreflightError, match=given.CANNOT_TAKE):
        await fleet.sync(0.7)


async def test_a_server_that_copied_something_else_fails_it_for_all(fleet: Fleet) -> None:
    await fleet.sync(0.5)
    before = fleet.served()
    text = "Worker failed with error 'up_proj.lora_A.weight is not what was sent'"
    fleet.stubs[1].asgi.faults[RPC] = Fault("status", text=text, calls=(2,))  # after adapter_fit
    fleet.stubs[1].asgi.calls.clear()
    with pytest.raises(PartialFailure) as caught:
        await fleet.sync(0.6)
    assert "is not what was sent" in str(caught.value.details)
    assert fleet.served() == before and not store.unfinished(fleet.state)


class Died(BaseException):
    """Of a process that is killed."""


async def test_what_servers_were_given_goes_with_a_process_that_dies_before_they_load_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.sync(0.5)
    before, first = fleet.served(), str(fleet.path())

    async def give_and_die(*arguments: Any) -> None:
        await given.give(*arguments)
        raise Died

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(change, "give", give_and_die)
        await fleet.sync(0.6)
    assert [len(stub.adapters.given) for stub in fleet.stubs] == [2, 2]
    assert store.unfinished(fleet.state) == {"x": 2}  # on record before servers had anything
    fleet.stubs[0].adapters = type(fleet.stubs[0].adapters)("stub")  # it is restarted as well
    async with change.changing(fleet.fleet):  # whoever takes the lock next
        pass
    assert (Path(first) / WEIGHTS).exists() and fleet.served() == before
    assert [stub.adapters.given for stub in fleet.stubs] == [{}, {}]
    assert not store.unfinished(fleet.state) and await given.keep(fleet.fleet) == ()


async def test_recovery_writes_what_only_servers_hold_for_one_that_was_restarted(
    fleet: Fleet,
) -> None:
    await fleet.sync(0.5)  # and its process dies before it has had it written
    before = fleet.served()
    fleet.stubs[0].adapters = type(fleet.stubs[0].adapters)("stub")
    paths = SimpleNamespace(adapters=fleet.fleet.directory)
    ref: Any = SimpleNamespace(
        name="f", paths=paths, config=SimpleNamespace(control_timeout_s=10.0)
    )
    await _bring_to_adapters(ref, fleet.targets, fleet.fleet.client, fleet.state)
    assert fleet.served() == before and (fleet.path() / WEIGHTS).exists()
    assert [row.quarantine for row in fleet.state.servers()] == [None] * len(fleet.state.servers())


async def test_what_some_servers_were_given_goes_with_the_refusal_of_another(fleet: Fleet) -> None:
    await fleet.sync(0.5)
    await given.keep(fleet.fleet)
    fleet.stubs[1].adapters.cannot_take = "it sees no such GPU"
    with pytest.raises(PreflightError, match="sees no such GPU"):
        await fleet.sync(0.6)
    assert [stub.adapters.given for stub in fleet.stubs] == [{}, {}]
    assert not store.unfinished(fleet.state) and await given.keep(fleet.fleet) == ()


LOAD = "/v1/load_lora_adapter"


@pytest.mark.parametrize("call", [1, 2])  # to load the version, to name it
@pytest.mark.parametrize("in_file", [True, False])
async def test_what_requests_may_run_with_stays_when_its_change_is_undone(
    fleet: Fleet, call: int, in_file: bool
) -> None:
    await fleet.sync(0.5)
    await given.keep(fleet.fleet)
    before = fleet.served()
    fleet.stubs[1].asgi.faults[LOAD] = Fault("status", calls=(call,))
    fleet.stubs[1].asgi.calls.clear()
    with pytest.raises(PartialFailure):
        await fleet.sync(0.6, in_file=in_file)
    was_served = call == 2
    only_there = was_served and not in_file
    assert fleet.served() == before
    assert [len(stub.adapters.given) for stub in fleet.stubs] == [only_there] * 2
    await committed.retire(fleet.fleet)
    assert len(store.kept_paths(fleet.state)) == 1 + was_served
    assert await given.keep(fleet.fleet) == ()
    assert [stub.adapters.given for stub in fleet.stubs] == [{}, {}]


async def test_a_refusal_stays_what_it_is_where_it_cannot_be_undone(fleet: Fleet) -> None:
    await fleet.sync(0.5)
    fleet.stubs[1].adapters.cannot_take = "it sees no such GPU"
    fleet.stubs[1].asgi.faults["/v1/models"] = Fault("status")
    with pytest.raises(PreflightError, match=given.CANNOT_TAKE) as caught:
        await fleet.sync(0.6)
    assert [row["status"] for row in caught.value.details["undone"]] == ["ok", "failed"]


async def test_a_version_that_was_replaced_stays_with_servers_until_it_is_written(
    fleet: Fleet,
) -> None:
    await fleet.sync(0.5)
    first = str(fleet.path())
    await fleet.sync(0.6)
    assert [first in stub.adapters.given for stub in fleet.stubs] == [True, True]
    await given.keep(fleet.fleet)
    assert (Path(first) / WEIGHTS).exists()
    await change.unload(fleet.fleet, UnloadAdapter(name="x"))


async def test_servers_that_hang_hold_up_the_writing_of_all_versions_for_a_single_timeout(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.sync(0.5)
    await fleet.sync(0.6)
    monkeypatch.setattr(given, "_WRITE_TIMEOUT_S", 0.2)
    for stub in fleet.stubs:
        stub.asgi.faults[RPC] = Fault("hang")
        stub.asgi.calls.clear()
    notes = await given.keep(fleet.fleet)  # a call by itself waits for 10 s
    assert ["not written in" in note for note in notes] == [True, True]
    assert sum(stub.asgi.calls[RPC] for stub in fleet.stubs) == 1
