"""Adapters into all servers or into none, whatever servers and processes do meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.adapters import change, committed
from skyctl.adapters import change as adapters
from skyctl.adapters.fleet import AdapterFleet
from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
from skyctl.errors import (
    ConflictError,
    NotFoundError,
    PartialFailure,
    PreflightError,
    ServerError,
    SkyctlError,
    UsageError,
)
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.http.transport import Request
from skyctl.store import adapters as store
from skyctl.store.state import FleetState
from tests.stub.adapters import StubAdapters
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.inprocess import StubTransport
from tests.unit.adapters.files import lora, make_adapter

LOAD, UNLOAD, LIST = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models"


class Fleet:
    """Three stubs with adapters on disk, and what a change needs to know of them."""

    def __init__(self, tmp_path: Path, state: FleetState) -> None:
        self.tmp_path = tmp_path
        self.stubs = [StubServer() for _ in range(3)]
        transport = StubTransport(self.stubs)
        self.targets: list[ServerTarget] = list(transport.targets)
        self.absent: dict[str, str] = {}
        self.state = state
        self.quarantined: list[str] = []
        self.fleet = AdapterFleet(
            name="f",
            state=state,
            client=ControlClient(transport=transport),
            targets=lambda: ([t for t in self.targets if t.name not in self.absent], self.absent),
            directory=tmp_path / "state" / "adapters",
            timeout_s=10.0,
            reserved=["stub"],
            max_rank=8,
            max_adapters=2,
            quarantined=self.quarantined.append,
        )
        for number, value in enumerate((0.1, 0.2, 0.3), start=1):
            make_adapter(tmp_path / f"v{number}", value=value)

    async def load(
        self, name: str, version: int, new: bool | None = True, timeout_s: float | None = None
    ) -> Any:
        directory = str(self.tmp_path / f"v{version}")
        request = LoadAdapter(name=name, directory=directory, new=new, timeout_s=timeout_s)
        return await adapters.load(self.fleet, request)

    async def sync(self, name: str, version: int) -> Any:
        return await self.load(name, version, new=False)

    async def unload(self, name: str) -> Any:
        return await adapters.unload(self.fleet, UnloadAdapter(name=name))

    def serve(self) -> list[dict[str, str]]:
        """What each server serves: the versions by name."""
        return [
            {name: adapter.name for name, adapter in stub.adapters.served.items()}
            for stub in self.stubs
        ]

    def fail(self, stub: int, path: str, kind: str, calls: tuple[int, ...] = ()) -> None:
        layer = self.stubs[stub].asgi
        layer.faults[path] = Fault(kind, calls=calls)
        layer.calls.clear()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    with FleetState(tmp_path / "state" / "state.sqlite") as state:
        yield Fleet(tmp_path, state)


async def test_an_adapter_is_loaded_synced_and_unloaded_on_all_servers(fleet: Fleet) -> None:
    first = await fleet.load("x", 1)
    assert (first.adapter.served_as, first.before) == ("x@1", None)
    assert [outcome.ok for outcome in first.outcomes] == [True] * 3
    second = await fleet.sync("x", 2)
    assert (second.adapter.served_as, second.before) == ("x@2", 1)
    assert second.adapter.digest != first.adapter.digest
    assert fleet.serve() == [{"x": "x@2"}] * 3
    assert second.adapter.servers == ("stub-0", "stub-1", "stub-2")
    await fleet.unload("x")
    assert fleet.serve() == [{}] * 3
    assert store.served(fleet.state) == {}
    again = await fleet.load("x", 1, new=None)
    assert again.adapter.served_as == "x@3"  # what runs may still be one of the earlier ones


async def test_each_version_has_a_directory_of_its_own_that_outlives_the_source(
    fleet: Fleet,
) -> None:
    first = (await fleet.load("x", 1)).adapter
    make_adapter(fleet.tmp_path / "v1", value=0.9)
    second = (await fleet.sync("x", 1)).adapter
    assert first.path != second.path
    assert adapters.read_adapter(first.path).digest == first.digest
    mode = await asyncio.to_thread(lambda: Path(first.path).stat().st_mode)
    assert mode & 0o077 == 0


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda f: f.load("x", 2), ConflictError, "serves x already, version 1"),
        (lambda f: f.sync("y", 2), NotFoundError, "serves no adapter 'y'"),
        (lambda f: f.unload("y"), NotFoundError, "serves no adapter 'y'"),
        (lambda f: f.load("stub", 2), UsageError, "name of the model itself"),
        (lambda f: f.load("x@2", 2), UsageError, "cannot be the name"),
        (lambda f: f.load("", 2), UsageError, "cannot be the name"),
        (lambda f: f.load("x\n", 2), UsageError, "cannot be the name"),
        (lambda f: f.load("z", 9), NotFoundError, "does not exist"),
        (lambda f: f.load("z", 8), PreflightError, "rank 32"),
    ],
)
async def test_an_impossible_change_is_refused_before_anything_is_sent(
    fleet: Fleet, ask: Callable[[Fleet], Any], error: type[SkyctlError], words: str
) -> None:
    make_adapter(fleet.tmp_path / "v8", lora("base_model.model.up", rank=32), r=32)
    await fleet.load("x", 1)
    sent = [len(stub.bodies) for stub in fleet.stubs]
    with pytest.raises(error, match=words) as caught:
        await ask(fleet)
    assert caught.value.hint
    assert [len(stub.bodies) for stub in fleet.stubs] == sent


async def test_there_is_room_for_so_many_adapters(fleet: Fleet) -> None:
    await fleet.load("x", 1)
    await fleet.load("y", 1)
    with pytest.raises(ConflictError, match="serves 2 adapters, which is all"):
        await fleet.load("z", 1)
    assert (await fleet.sync("y", 2)).adapter.version == 2


# the first call of each server loads the version, the second gives it the name
FAILURES = [
    ("load refused", LOAD, {"kind": "status", "calls": (1,)}),
    ("load lost", LOAD, {"kind": "reset", "calls": (1,)}),
    ("load done, answer lost", LOAD, {"kind": "reset-after", "calls": (1,)}),
    ("load done, no answer", LOAD, {"kind": "hang-after", "calls": (1,)}),
    ("name refused", LOAD, {"kind": "status", "calls": (2,)}),
    ("name done, answer lost", LOAD, {"kind": "reset-after", "calls": (2,)}),
    ("name done, no answer", LOAD, {"kind": "hang-after", "calls": (2,)}),
]


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(("case", "path", "fault"), FAILURES, ids=[names[0] for names in FAILURES])
async def test_a_change_that_fails_on_one_server_is_undone_on_all(
    fleet: Fleet, case: str, path: str, fault: dict[str, Any], before: int
) -> None:
    if before:
        await fleet.load("x", 1)
    was = fleet.serve()
    fleet.fail(1, path, **fault)
    with pytest.raises(PartialFailure) as caught:
        await fleet.load("x", 2, new=None, timeout_s=0.5 if "no answer" in case else None)
    status = {row["server"]: row["status"] for row in caught.value.details["outcomes"]}
    assert status["stub-1"] in ("failed", "unreachable", "timeout")
    assert {status["stub-0"], status["stub-2"]} == {"rolled-back"}
    assert fleet.serve() == was
    assert not fleet.quarantined and not store.unfinished(fleet.state)
    assert (await fleet.load("x", 3, new=None)).adapter.version == before + 2
    assert {tuple(names.items()) for names in fleet.serve()} == {(("x", f"x@{before + 2}"),)}


async def test_an_unload_that_one_server_refuses_is_undone(fleet: Fleet) -> None:
    await fleet.load("x", 1)
    fleet.fail(2, UNLOAD, "status", (1,))
    with pytest.raises(PartialFailure):
        await fleet.unload("x")
    assert fleet.serve() == [{"x": "x@1"}] * 3
    await fleet.unload("x")
    assert fleet.serve() == [{}] * 3


async def test_a_server_where_it_cannot_be_undone_is_quarantined(fleet: Fleet) -> None:
    await fleet.load("x", 1)
    fleet.fail(1, LOAD, "status", (2,))
    fleet.stubs[1].asgi.faults[LIST] = Fault("status")
    with pytest.raises(PartialFailure, match="not undone"):
        await fleet.sync("x", 2)
    assert fleet.quarantined == ["stub-1"]
    assert "skyctl recover" in (fleet.state.server("stub-1").quarantine or "")
    assert not store.is_current(fleet.state, "stub-1")
    assert store.is_current(fleet.state, "stub-0")
    assert fleet.serve()[0] == {"x": "x@1"}


async def test_servers_without_the_plug_in_or_without_lora_are_told_apart(fleet: Fleet) -> None:
    for adapters_of, words, hint in (
        (StubAdapters("stub", plugin=False), "without skyctl's plug-in", "install skyctl"),
        (StubAdapters("stub", enabled=False), "not started to take LoRA", "`lora:`"),
    ):
        fleet.stubs[1].adapters = adapters_of
        with pytest.raises(PartialFailure, match=words) as caught:
            await fleet.load("x", 1)
        assert hint in caught.value.hint
        assert fleet.serve() == [{}] * 3


async def test_servers_that_cannot_take_part_are_skipped_and_caught_up(fleet: Fleet) -> None:
    fleet.absent = {"stub-2": "asleep"}
    done = await fleet.load("x", 1)
    assert [outcome.status.value for outcome in done.outcomes] == ["ok", "ok", "skipped"]
    assert fleet.serve()[2] == {}
    assert not store.is_current(fleet.state, "stub-2")
    [outcome] = await committed.catch_up(fleet.state, fleet.fleet.client, fleet.targets[2:], 1.0)
    assert outcome.ok
    assert fleet.serve()[2] == {"x": "x@1"}
    assert store.is_current(fleet.state, "stub-2")
    fleet.absent = dict.fromkeys(("stub-0", "stub-1", "stub-2"), "asleep")
    with pytest.raises(ConflictError, match="no server"):
        await fleet.sync("x", 2)
    assert not store.unfinished(fleet.state)


async def test_adapters_that_somebody_else_loaded_are_let_be(fleet: Fleet) -> None:
    fleet.stubs[0].adapters.load({"lora_name": "theirs", "lora_path": str(fleet.tmp_path / "v3")})
    await fleet.load("x", 1)
    fleet.fail(1, LOAD, "status", (1,))
    with pytest.raises(PartialFailure):
        await fleet.sync("x", 2)
    await fleet.unload("x")
    assert fleet.serve() == [{"theirs": "theirs"}, {}, {}]


class Killed(BaseException):
    """The process ends here."""


POINTS = ("adapters.load.call", "adapters.name.call", "adapters.commit", "adapters.undo")


@pytest.mark.parametrize("verb", ["load", "sync", "unload"])
@pytest.mark.parametrize("point", [*POINTS, "amid the names", "adapters.committed"])
async def test_a_killed_process_leaves_one_version_everywhere_after_the_next_change(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, verb: str, point: str
) -> None:
    if verb != "load":
        await fleet.load("x", 1)
    before = fleet.serve()[0]

    def kill(reached: str) -> None:
        if reached == point:
            raise Killed

    for module in (change, committed):
        monkeypatch.setattr(module, "reached", kill)
    if point == "adapters.undo":
        fleet.fail(1, UNLOAD if verb == "unload" else LOAD, "status", (1,))
    if point == "amid the names":
        send = fleet.fleet.client._transport.send
        seen: list[bytes] = []

        async def dies(request: Request, *, timeout_s: float) -> Any:
            if b"skyctl:" in (request.body or b"") or UNLOAD in request.path:
                seen.append(request.body or b"")
                if len(seen) == 2:
                    raise Killed
            return await send(request, timeout_s=timeout_s)

        monkeypatch.setattr(fleet.fleet.client._transport, "send", dies)
    asks = {"load": lambda: fleet.load("x", 2), "sync": lambda: fleet.sync("x", 2)}
    dies_here = not (verb == "unload" and point in ("adapters.load.call", "adapters.name.call"))
    if dies_here:
        with pytest.raises(Killed):
            await asks.get(verb, lambda: fleet.unload("x"))()
    monkeypatch.undo()
    await fleet.load("y", 3)
    done = point == "adapters.committed"
    after: dict[str, str] = {"load": {"x": "x@1"}, "sync": {"x": "x@2"}, "unload": {}}[verb]
    assert fleet.serve() == [{**(after if done else before), "y": "y@1"}] * 3
    assert all(store.is_current(fleet.state, target.name) for target in fleet.targets)


async def test_a_cancelled_change_is_undone(fleet: Fleet) -> None:
    await fleet.load("x", 1)
    fleet.fail(1, LOAD, "hang", (2,))
    changing = asyncio.create_task(fleet.sync("x", 2))
    await fleet.stubs[1].asgi.until(LOAD, 2)
    changing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await changing
    assert fleet.serve() == [{"x": "x@1"}] * 3


async def test_changes_wait_for_each_other(fleet: Fleet) -> None:
    await asyncio.gather(fleet.load("x", 1), fleet.load("y", 2))
    assert fleet.serve() == [{"x": "x@1", "y": "y@1"}] * 3
    lock = fleet.state.locks.take(store.LOCK, "something else")
    fleet.fleet = replace(fleet.fleet, timeout_s=0.1)
    with pytest.raises(ConflictError, match="something else"):
        await fleet.sync("x", 3)
    lock.release()


async def test_files_go_once_no_request_runs_with_them(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed, "RETIRE_AFTER_S", -1.0)
    paths = [Path((await fleet.load("x", 1)).adapter.path)]
    running = fleet.stubs[2].adapters.served["x"]
    fleet.stubs[2].adapters.running[running] += 1
    paths.append(Path((await fleet.sync("x", 2)).adapter.path))
    await committed.retire(fleet.fleet)
    assert [path.exists() for path in paths] == [True, True]
    fleet.fail(0, LIST, "status")
    fleet.stubs[2].adapters.running[running] -= 1
    await committed.retire(fleet.fleet)  # one server cannot tell
    assert [path.exists() for path in paths] == [True, True]
    fleet.stubs[0].asgi.faults.clear()
    await committed.retire(fleet.fleet)
    assert [path.exists() for path in paths] == [False, True]
    await fleet.unload("x")
    await committed.retire(fleet.fleet)
    assert [path.exists() for path in paths] == [False, False]


async def test_a_server_that_was_started_anew_amid_a_change_has_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restarts(point: str) -> None:
        if point == "adapters.commit":
            store.record_server(fleet.state, "stub-1", {})

    monkeypatch.setattr(change, "reached", restarts)
    await fleet.load("x", 1)
    current = [store.is_current(fleet.state, target.name) for target in fleet.targets]
    assert current == [True, False, True]


async def test_nothing_is_sent_that_could_not_be_put_on_record(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ServerError("the disk is full")

    monkeypatch.setattr(store, "intend_version", full)
    with pytest.raises(ServerError):
        await fleet.load("x", 1)
    assert all(not stub.asgi.calls[LOAD] for stub in fleet.stubs)


async def test_files_that_a_reboot_took_are_copied_anew_while_their_source_is_the_same(
    fleet: Fleet,
) -> None:
    await fleet.load("x", 1)
    lost = store.served(fleet.state)["x"]
    shutil.rmtree(Path(lost.path).parent)
    await adapters.restore(fleet.fleet, lost)
    version = store.served(fleet.state)["x"]
    assert adapters.read_adapter(version.path).digest == lost.digest
    assert replace(version, path=lost.path) == lost
    shutil.rmtree(Path(version.path).parent)
    make_adapter(fleet.tmp_path / "v1", value=0.9)
    with pytest.raises(PreflightError, match="is not what x@1 was made from any more"):
        await adapters.restore(fleet.fleet, lost)


@pytest.mark.parametrize("extension", [True, False])
async def test_an_adapter_of_modules_that_servers_leave_out_is_refused(
    fleet: Fleet, extension: bool
) -> None:
    fleet.stubs[1].engine.extension = extension  # without it, its settings decide
    fleet.stubs[1].engine.settings = {"lora_config": {"target_modules": ["q_proj"]}}
    with pytest.raises(
        PreflightError, match=r"stub-1: it would change nothing in .*up_proj"
    ) as caught:
        await fleet.load("x", 1)
    assert "lora-target-modules" in caught.value.hint
    assert fleet.serve() == [{}] * 3 and not store.served(fleet.state)
    fleet.stubs[1].engine.settings = {"lora_config": {"target_modules": ["up_proj", "q_proj"]}}
    assert (await fleet.load("x", 1)).adapter


async def test_a_server_that_starts_and_would_leave_modules_out_does_not_get_it(
    fleet: Fleet,
) -> None:
    await fleet.load("x", 1)
    fleet.stubs[0].adapters.served.clear()  # it was restarted
    fleet.stubs[0].engine.settings = {"lora_config": {"target_modules": ["q_proj"]}}
    targets = fleet.fleet.targets()[0]
    outcomes = await committed.catch_up(fleet.state, fleet.fleet.client, targets, 5.0)
    assert [outcome.ok for outcome in outcomes] == [False, True, True]
    assert "x@1: it would change nothing in" in outcomes[0].detail
