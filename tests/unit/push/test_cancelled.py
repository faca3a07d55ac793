"""A push that is cancelled is undone, or ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.core import jobs
from skyctl.core.arbiter import Turn
from skyctl.push.request import PushRequest, RecordedState
from skyctl.push.run import CancelGuard
from skyctl.store.in_doubt import in_doubt
from skyctl.store.state import FleetState
from tests.stub.faults import Fault
from tests.unit.push.fleets import Recorder, Stubs, check_invariant, push_new


async def test_cancelled_before_bytes_it_is_undone(stubs: Stubs) -> None:
    observer = Recorder()
    task = asyncio.ensure_future(push_new(stubs, observer))
    observer.on_stage = lambda name: task.cancel() if name == "start" else None  # type: ignore[func-returns-value]
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [engine.digest for engine in stubs.engines] == ["base", "base"]
    assert not any(engine.paused or engine.update_open for engine in stubs.engines)


async def test_cancelled_it_resumes_no_server_that_does_not_have_its_pause(stubs: Stubs) -> None:
    """A pause that arrives after the resume would freeze it for ever. That a dead push has frozen
    the server does not show that the pause arrived."""
    given, _ = stubs.fleet.servers
    stubs.fleet = replace(stubs.fleet, servers=(replace(given, recorded=RecordedState(thaw=True)),))
    frozen, observer = stubs.servers[0], Recorder()
    await frozen.engine.pause("keep")
    frozen.engine.log.clear()
    frozen.asgi.faults["/pause"] = Fault("delay", seconds=0.2)
    task = asyncio.ensure_future(push_new(stubs, observer))
    observer.on_stage = lambda name: task.cancel() if name == "pause" else None  # type: ignore[func-returns-value]
    with pytest.raises(asyncio.CancelledError):
        await task
    assert frozen.engine.log == ["pause keep", "resume"]


async def test_cancelled_after_bytes_it_completes(stubs: Stubs) -> None:
    observer = Recorder()
    task = asyncio.ensure_future(push_new(stubs, observer))

    def cancel(done: int) -> None:
        if done and not task.cancelling():
            task.cancel()

    observer.on_progress = cancel
    result = await task
    assert all(server.ok for server in result.servers)
    check_invariant(stubs)


async def test_cancelled_as_it_ends_it_has_succeeded() -> None:
    async def transaction() -> str:
        task.cancel()
        return "the result"

    task = asyncio.ensure_future(CancelGuard().run(transaction()))
    assert await task == "the result"


async def test_cancelled_twice_it_stops_and_leaves_the_servers_paused(stubs: Stubs) -> None:
    observer = Recorder()
    task = asyncio.ensure_future(push_new(stubs, observer))
    loop = asyncio.get_running_loop()

    def cancel(done: int) -> None:
        if done and not task.cancelling():
            task.cancel()
            loop.call_soon(task.cancel)

    observer.on_progress = cancel
    stubs.servers[0].asgi.faults["/update_weights"] = Fault("hang", calls=(2,))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(engine.paused for engine in stubs.engines)
    assert {(name, state) for name, state, _ in observer.servers[-2:]} == {
        ("demo-0", "quarantined"),
        ("demo-1", "quarantined"),
    }


async def test_cancelled_twice_once_servers_have_the_new_weights_it_has_pushed_them(
    stubs: Stubs, tmp_path: Path
) -> None:
    """A server that restarts would get those before, beside the others."""
    request = PushRequest(str(stubs.new), weight_version="v2")
    seen: list[str] = []

    def cancel(name: str, state: str, detail: str) -> None:
        seen.append(state)
        if state in ("updating", "resumed") and seen.count(state) == len(stubs.servers):
            task.cancel()

    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        job = jobs.open_push(state.journal, Turn(None), request)
        async with stubs.client() as client:
            push = jobs.run_push(
                job,
                request,
                stubs.fleet,
                client=client,
                state=state,
                on_server=cancel,
                kept=tmp_path / "kept",
            )
            task = asyncio.ensure_future(push)
            with pytest.raises(asyncio.CancelledError):
                await task
        assert state.journal.job(job.id).state == "interrupted"
        assert {engine.weight_version for engine in stubs.engines} == {"v2"}
        assert {row.weight_version for row in state.servers()} == {"v2"}
        assert state.weights().version == "v2"
        assert in_doubt(state) == {}
