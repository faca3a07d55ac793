"""What bookkeeping costs: statements of a push, functions of a pause and for many servers."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import skyctl
from skyctl.core import actions, recorded_sleep, verbs
from skyctl.core.requests import Control, Pause, Resume, Sleep, Wake
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome, OutcomeStatus
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushRequest
from skyctl.service.attached import AttachedFleet
from skyctl.states import Phase
from skyctl.store import opening
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor.resident import Supervisor
from tests.faults.attached_fleet import attached_fleet
from tests.stub.app import StubServer
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.supervisor.fleets import fleet_plan, stub_server

SKYCTL = str(Path(skyctl.__file__).parent)
MANY = 512
VERBS = (Pause, Resume, Sleep, Wake)
MOST_CALLS = 400
"""Of functions for each server. In proportion to the square of these, there were thousands."""


async def test_a_push_into_two_servers_takes_few_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "ckpt", tiny_tensors())
    statements: list[str] = []
    stubs = [StubServer(), StubServer()]
    async with attached_fleet(tmp_path / "home", monkeypatch, stubs) as fleet:
        await fleet.resume()  # the first act records which server is which
        file = fleet.state._file
        assert file is not None
        file.set_trace_callback(statements.append)
        job_id = await fleet.start_push(PushRequest(str(checkpoint)))
        await fleet._pushes[job_id]
        file.set_trace_callback(None)
        job = await fleet.job(job_id)
        assert job.state == "succeeded", job.error
        assert set(job.servers) == {"far-0", "far-1"}
    # each state of a server is one, 43 in all; those that take and leave the lock are not counted,
    # and on a busy machine what a push tells at once may take three more
    counted = [one for one in statements if " locks " not in one]
    assert len(counted) <= 46, "\n".join(counted)


async def test_a_pause_of_two_servers_calls_few_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From opening the fleet to closing it. A coroutine that goes on is not called again, and a
    comprehension is no call (nor is it to Python 3.12).
    """
    frames: dict[int, FrameType] = {}  # kept, so that no two have one number
    before_a_request = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal before_a_request
        code = frame.f_code
        named = code.co_filename.startswith(SKYCTL) and not code.co_name.startswith("<")
        if event == "call" and named:
            frames.setdefault(id(frame), frame)
            if not before_a_request and code is ControlClient._send.__code__:
                before_a_request = len(frames)

    async with attached_fleet(tmp_path / "home", monkeypatch, [StubServer()] * 2) as fleet:
        await fleet.resume()
        sys.setprofile(look)
        try:
            async with AttachedFleet(fleet.ref) as again:
                outcomes = await again.pause(Pause())
        finally:
            sys.setprofile(None)
    assert [outcome.ok for outcome in outcomes] == [True, True]
    assert 0 < before_a_request <= 285
    assert len(frames) <= 550, Counter(one.f_code.co_qualname for one in frames.values())


def test_only_the_owner_reads_a_whole_file_for_corruption(tmp_path: Path) -> None:
    """It takes as long as the history is large."""
    statements: list[str] = []

    def connect(path: Path) -> sqlite3.Connection:
        connection = opening.connect(path)
        connection.set_trace_callback(statements.append)
        return connection

    for owner in (False, True):
        FleetState(tmp_path / "fleet" / "state.sqlite", connect=connect, owner=owner).close()
        assert any("quick_check" in one for one in statements) is owner


@pytest.fixture
def done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a verb succeeds, and costs nothing."""

    async def done(_: Any, targets: Sequence[ServerTarget], **__: Any) -> list[Outcome[None]]:
        return [Outcome(target.name, OutcomeStatus.OK, 0.0) for target in targets]

    async def awake(*_: Any) -> int:
        return 0

    monkeypatch.setattr(recorded_sleep, "sleep_level", awake)
    for verb in VERBS:
        monkeypatch.setattr(actions, verb.verb, done)


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Events of the interpreter: `call` of a function, `c_call` of one in C."""
    events: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: object) -> None:
        events[event] += 1

    sys.setprofile(look)
    try:
        yield events
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.usefixtures("done_at_once")
async def test_the_bookkeeping_of_a_verb_grows_with_the_servers_and_not_with_their_square(
    verb: type[Control], tmp_path: Path
) -> None:
    targets = [ServerTarget(f"a-{n}", "http://127.0.0.1:1", None) for n in range(MANY)]
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        state.update_servers({target.name: {"weight_version": "v"} for target in targets})
        with counted_calls() as events:
            outcomes = await verbs.run(verb(), targets, client=None, state=state, timeout_s=1.0)  # type: ignore[arg-type]
    assert all(outcome.ok for outcome in outcomes) and len(outcomes) == MANY
    print(verb, events)
    assert MANY < events["call"] < MOST_CALLS * MANY


@pytest.mark.usefixtures("done_at_once")
async def test_so_does_that_of_a_supervisor(tmp_path: Path) -> None:
    paths = FleetPaths(tmp_path, "stubs").prepare()
    specs = [replace(stub_server("a"), name=f"a-{n}") for n in range(MANY)]
    with FleetState(paths.database) as state:
        supervisor = Supervisor(paths, state)
        supervisor._take(replace(fleet_plan(specs[:1]), servers=tuple(specs)))
        for spec in specs:
            supervisor.new_replica(spec).phase = Phase.UP
        await supervisor.control(Resume(timeout_s=1.0))  # the first makes the files of locks
        for verb, shown in ((Pause, "paused"), (Resume, "ready")):
            with counted_calls() as events:
                outcomes = await supervisor.control(verb(timeout_s=1.0))
                await asyncio.sleep(0)  # what changed is looked at
            assert {outcome.status for outcome in outcomes} == {"ok"}
            assert {replica.state for replica in supervisor.replicas.values()} == {shown}
            assert all(replica._shown == shown for replica in supervisor.replicas.values())
            print(verb, events)
            assert MANY < events["call"] < MOST_CALLS * MANY
        await supervisor.client.aclose()
