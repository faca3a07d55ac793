"""What a supervisor takes over from one that died."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from skyctl.core.requests import Down, Sleep, Wake
from skyctl.engines.vllm.router import RouterClient
from skyctl.errors import ConflictError, ServerError, SkyctlError
from skyctl.launch.local.host import port_holder
from skyctl.launch.local.process import ManagedProcess
from skyctl.states import Phase, PushStage
from skyctl.store.in_doubt import InDoubt, put_in_doubt, touch
from skyctl.supervisor import admission, healing, replica, rollout
from skyctl.supervisor.interface import Adopt
from skyctl.supervisor.resident import Supervisor
from tests.processes.supervisor.supervising import (
    bring_up,
    ended,
    pid_of,
    routed,
    states,
    supervising,
)
from tests.unit.supervisor.fleets import (
    eventually,
    fleet_plan,
    light_front,
    stub_router,
    stub_server,
)


async def test_an_adopted_server_that_closed_its_port_is_not_waited_for_as_one_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does whose engine died: it closes its port, and waits for a request for ever."""
    monkeypatch.setattr(replica, "_ADOPTED_TIMEOUT_S", 0.2)
    async with supervising(tmp_path) as supervisor, httpx.AsyncClient() as client:
        server = stub_server("a", faults={"/tokenize": {"kind": "hang"}})
        plan = fleet_plan([server], stop_timeout_s=0.3)
        await bring_up(supervisor, plan)
        before, pid = supervisor.replicas["a"], pid_of(supervisor, "a")
        assert before._task is not None
        before._task.cancel()  # its supervisor is gone
        url = f"{server.url}/tokenize"
        waiting = asyncio.create_task(client.post(url, json={}, timeout=60))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
        await eventually(lambda: port_holder(server.host, server.port) is None)
        os.kill(pid, signal.SIGSTOP)  # before the stub gives its request up

        later = Supervisor(supervisor.paths, supervisor.state, supervisor.client)
        await later.adopt(Adopt(plan))
        assert await ended(later) == ""
        assert states(later) == {"a": "ready"} and pid_of(later, "a") != pid
        messages = [event.message for event in later.state.events()]
        assert "it closed its port and did not end" in messages
        waiting.cancel()
        await later.down(Down(0.0))


async def test_a_takeover_adopts_the_rest_where_one_process_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another supervisor would start servers beside those that live, and nobody would end these."""
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a"), stub_server("b")])
        await bring_up(supervisor, plan)
        pid = pid_of(supervisor, "b")
        await abandon(supervisor)
        stopped = refuse_to_stop(monkeypatch, supervisor, "a", SkyctlError("it outlived SIGKILL"))
        later = Supervisor(supervisor.paths, supervisor.state, supervisor.client)
        await later.adopt(Adopt(plan))
        assert await ended(later) == "a it outlived SIGKILL"
        assert states(later) == {"a": "failed", "b": "ready"} and pid_of(later, "b") == pid
        stopped.set()
        await bring_up(later, plan)
        assert states(later) == {"a": "ready", "b": "ready"} and pid_of(later, "b") == pid
        await later.down(Down(0.0))


async def test_a_takeover_adopts_what_lives_before_a_silent_machine_has_been_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a"), stub_server("b")])
        await bring_up(supervisor, plan)
        await abandon(supervisor)
        stopped = refuse_to_stop(monkeypatch, supervisor, "a")
        later = Supervisor(supervisor.paths, supervisor.state, supervisor.client)
        await later.adopt(Adopt(plan))
        await eventually(lambda: states(later).get("b") == "ready")
        assert not stopped.is_set()
        stopped.set()
        assert await ended(later) == ""
        await later.down(Down(0.0))


@asynccontextmanager
async def adopting_a_sleeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, level: int, device: str
) -> AsyncIterator[tuple[Supervisor, asyncio.Event]]:
    """A supervisor that adopts server `a`, which sleeps: it answers no probe before the event."""
    probe, answers = replica.probe_ready, asyncio.Event()

    async def late(*arguments: Any) -> bool | None:
        await answers.wait()
        return await probe(*arguments)

    async with supervising(tmp_path) as supervisor:
        server = stub_server("a", faults={"/tokenize": {"kind": "hang"}})  # one that can sleep
        plan = replace(fleet_plan([server]), device=device)
        await bring_up(supervisor, plan)
        [outcome] = await supervisor.sleep(Sleep(level=level))
        assert outcome.ok
        await abandon(supervisor)
        later = Supervisor(supervisor.paths, supervisor.state, supervisor.client)
        monkeypatch.setattr(replica, "probe_ready", late)
        await later.adopt(Adopt(plan))
        await eventually(lambda: states(later) == {"a": "starting"})
        yield later, answers
        await later.down(Down(0.0))


async def sleeps(supervisor: Supervisor) -> bool:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{supervisor.replicas['a'].target.url}/is_sleeping")
    return bool(answer.json()["is_sleeping"])


async def test_what_is_to_wake_while_it_is_adopted_does_so_before_it_is_routed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopting = adopting_a_sleeper(tmp_path, monkeypatch, level=1, device="cpu")
    async with adopting as (supervisor, answers):
        [outcome] = await supervisor.wake(Wake())
        assert outcome.detail == "starting; will be awake when it is ready"
        answers.set()
        assert await ended(supervisor) == ""
        assert (states(supervisor), await sleeps(supervisor)) == ({"a": "ready"}, False)


async def test_what_is_to_wake_at_the_end_of_its_admission_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopting = adopting_a_sleeper(tmp_path, monkeypatch, level=1, device="cpu")
    async with adopting as (supervisor, answers):
        server, confirmations = supervisor.replicas["a"], list[bool]()

        async def wait_confirmed() -> bool:
            if not confirmations:
                await supervisor.wake(Wake())
            confirmations.append(True)
            return True

        monkeypatch.setattr(server, "wait_confirmed", wait_confirmed)
        answers.set()
        assert await ended(supervisor) == ""
        await eventually(lambda: server.phase is Phase.UP)
        assert (states(supervisor), await sleeps(supervisor)) == ({"a": "ready"}, False)


async def test_what_has_discarded_its_weights_is_not_woken_while_it_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopting = adopting_a_sleeper(tmp_path, monkeypatch, level=2, device="cuda")
    async with adopting as (supervisor, answers):
        with pytest.raises(ConflictError, match="a level-2 sleep discarded the weights"):
            await supervisor.wake(Wake())
        answers.set()
        assert await ended(supervisor) == ""
        assert (states(supervisor), await sleeps(supervisor)) == ({"a": "asleep"}, True)


async def test_the_weights_of_what_sleeps_are_not_read_as_it_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be unmapped. Their digest is not on record where it could not be had in time."""
    adopting = adopting_a_sleeper(tmp_path, monkeypatch, level=1, device="cuda")
    async with adopting as (supervisor, answers):
        read = AsyncMock(side_effect=ServerError("its engine has died"))
        monkeypatch.setattr(admission, "weights_digest", read)
        supervisor.replicas["a"].update_row(weights_digest=None)
        answers.set()
        assert await ended(supervisor) == ""
        assert states(supervisor) == {"a": "asleep"}
        read.assert_not_awaited()
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)  # what it starts from is compared
        await eventually(lambda: read.await_count > 0)


@pytest.mark.parametrize("admitted", [True, False])
async def test_a_takeover_lets_requests_of_an_admission_arrive_before_it_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admitted: bool
) -> None:
    """It had no turn, whose next holder would wait for them."""
    monkeypatch.setattr(healing, "LATE_S", 0.0625)
    adopted_by_then, sleep = list[list[str]](), asyncio.sleep

    async def watched(delay: float) -> None:
        if delay == healing.LATE_S:
            adopted_by_then.append(list(later.replicas))
        await sleep(delay)

    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a")])
        await bring_up(supervisor, plan)
        await abandon(supervisor)
        if admitted:
            touch(supervisor.state, "a")
        else:
            whole = InDoubt("a", "push-1", PushStage.PAUSE, half_updated=False, thaw=True)
            put_in_doubt(supervisor.state, {"a": whole})
        later = Supervisor(supervisor.paths, supervisor.state, supervisor.client)
        monkeypatch.setattr(asyncio, "sleep", watched)
        await later.adopt(Adopt(plan))
        await ended(later)
        assert adopted_by_then == [[]] * admitted and list(later.replicas) == ["a"]
        await later.down(Down(0.0))


async def test_servers_that_a_takeover_has_not_asked_yet_stay_in_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, may_ask, probe = list[str](), asyncio.Event(), replica.probe_ready

    async def remove(self: RouterClient, url: str) -> None:
        removed.append(url)

    async def probe_late(*arguments: Any) -> bool | None:
        await may_ask.wait()
        return await probe(*arguments)

    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a"), stub_server("b")], stub_router())
        await bring_up(supervisor, plan)
        await abandon(supervisor)
        monkeypatch.setattr(RouterClient, "remove_worker", remove)
        monkeypatch.setattr(replica, "probe_ready", probe_late)
        later = Supervisor(supervisor.paths, supervisor.state, supervisor.client)
        await later.adopt(Adopt(plan))
        await eventually(lambda: later.router is not None and later.router.phase is Phase.READY)
        await rollout.sync_router(later)
        assert later.desired() == {} and routed(later) == {"a", "b"}
        may_ask.set()
        assert await ended(later) == ""
        assert removed == [] and routed(later) == {"a", "b"}
        await later.down(Down(0.0))


async def abandon(supervisor: Supervisor) -> None:
    """As if it had been killed."""
    kept = [*supervisor.replicas.values(), *filter(None, [supervisor.router])]
    tasks = [one._task for one in kept if one._task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def refuse_to_stop(
    monkeypatch: pytest.MonkeyPatch,
    supervisor: Supervisor,
    name: str,
    error: SkyctlError | None = None,
) -> asyncio.Event:
    """Until this event a server, which has died, raises `error` when it is stopped; without one,
    stopping it takes that long."""
    process, may, stop = supervisor.replicas[name].process, asyncio.Event(), ManagedProcess.stop
    assert process is not None and process.pid is not None
    os.kill(process.pid, signal.SIGKILL)

    async def stop_later(self: ManagedProcess, timeout_s: float) -> bool:
        if self.token == process.token and not may.is_set():
            if error is not None:
                raise error
            await may.wait()
        return await stop(self, timeout_s)

    def members_still(self: ManagedProcess) -> list[Any]:
        there = self.token == process.token and not may.is_set()
        return [*members(self), *([SimpleNamespace(pid=None)] if there else ())]

    members = ManagedProcess.members
    monkeypatch.setattr(ManagedProcess, "stop", stop_later)
    monkeypatch.setattr(ManagedProcess, "members", members_still)
    return may


async def test_restarts_are_counted_on_by_the_next_supervisor(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        a, b = stub_server("a"), stub_server("b")
        await bring_up(supervisor, fleet_plan([a, b]))
        pid = pid_of(supervisor, "a")
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: states(supervisor)["a"] == "restarting")
        await eventually(lambda: states(supervisor)["a"] == "ready")
        # what another supervisor of this fleet would begin with
        later = Supervisor(supervisor.paths, supervisor.state, supervisor.client)
        later._take(fleet_plan([a, b]))
        counted = {spec.name: later.new_replica(spec) for spec in (a, b)}
        assert [len(counted[name].restarts) for name in "ab"] == [1, 0]
        assert "SIGKILL" in counted["a"].restart_reason
        assert abs(counted["a"].restarts[0] - supervisor.replicas["a"].restarts[0]) < 1.0
        await supervisor.down(Down(0.0))
        assert later.new_replica(a).restarts == []


async def test_a_takeover_adopts_no_api_that_has_another_endpoint_or_protocol(
    tmp_path: Path,
) -> None:
    api = light_front()
    plan = replace(fleet_plan([stub_server("a")]), tinker=api)
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, plan)
        first = supervisor.state.process("tinker")
        assert first is not None and first.alive()
        for changed in (plan, replace(plan, tinker=replace(api, argv=(*api.argv, "--other")))):
            # what another supervisor of this fleet would begin with
            later = Supervisor(supervisor.paths, supervisor.state, supervisor.client)
            later._take(changed)
            found = healing._keeper(later, changed, first)
            assert (found is None) == (changed is not plan)


async def test_an_api_starts_once_the_servers_are_those_of_the_plan(tmp_path: Path) -> None:
    servers = [stub_server("a"), stub_server("b")]
    plan = replace(fleet_plan(servers, stub_router()), tinker=light_front())
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, plan)
        moved = replace(plan, servers=(stub_server("a"), stub_server("b")), tinker=light_front())
        await bring_up(supervisor, moved)
        started = {row.name: row.started_at for row in supervisor.state.processes()}
        assert max(started["a"], started["b"]) < started["tinker"]


async def test_a_router_that_was_adopted_is_not_said_to_have_its_old_settings_again(
    tmp_path: Path,
) -> None:
    """What it ran with is not known: its next process has the settings of the new plan."""
    async with supervising(tmp_path) as supervisor:
        server, router = stub_server("a"), stub_router()
        await bring_up(supervisor, fleet_plan([server], router))
        await abandon(supervisor)
        later = Supervisor(supervisor.paths, supervisor.state, supervisor.client)
        wrong = replace(router, argv=(sys.executable, "-c", "import sys; sys.exit('no such flag')"))
        later.change_to(fleet_plan([server], wrong))
        error = await ended(later)
        assert error.startswith("router exited with code 1") and "settings" not in error
        await later.down(Down(0.0))
