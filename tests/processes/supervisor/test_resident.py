"""A whole supervisor in the test's loop, over stub servers in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import psutil
import pytest

from skyctl.core import arbiter
from skyctl.core.arbiter import Turn, hung_up
from skyctl.core.findings import Finding
from skyctl.core.jobs import open_push
from skyctl.core.requests import CancelJob, Down, Pause, Restart, Resume, Sleep, StatusQuery, Wake
from skyctl.core.status import BY_CANCEL, Operation, OperationKind
from skyctl.engines.vllm.router import RouterClient
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import ConflictError, HostUnreachable, NotFoundError, PushError, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.launch.local.host import port_holder
from skyctl.launch.local.process import ManagedProcess
from skyctl.push.request import PushRequest, PushResult, ServerPush
from skyctl.service.ended import operation_error
from skyctl.states import Phase
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.in_doubt import InDoubt, put_in_doubt
from skyctl.supervisor import admission, healing, replica, rollout
from skyctl.supervisor.fleet import report
from skyctl.supervisor.interface import Adopt, Begun
from skyctl.supervisor.pushes import RouterRotation
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
    command_server,
    eventually,
    fleet_plan,
    light_front,
    stub_router,
    stub_server,
)


async def test_up_starts_servers_and_then_the_router_on_them(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        assert states(supervisor) == {"a": "ready", "b": "ready"}
        assert routed(supervisor) == {"a", "b"}
        found = await report(supervisor)
        assert found.health == "healthy" and found.replicas[0].running == 0


async def test_a_paused_fleet_stays_in_its_router_whoever_is_seen_paused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = list[str]()

    async def remove(self: RouterClient, url: str) -> None:
        removed.append(url)

    probe = admission.probe_alive

    async def slow_for_b(client: ControlClient, target: ServerTarget, timeout_s: float) -> bool:
        await asyncio.sleep(0.2 if target.name == "b" else 0.0)
        return await probe(client, target, timeout_s)

    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan(
            [stub_server("a"), stub_server("b")], stub_router(), health={"interval_s": 60}
        )
        await bring_up(supervisor, plan)
        with monkeypatch.context() as patched:
            patched.setattr(RouterClient, "remove_worker", remove)
            patched.setattr(admission, "probe_alive", slow_for_b)
            await supervisor.pause(Pause(mode="keep", timeout_s=5.0))
            assert states(supervisor) == {"a": "paused", "b": "paused"}
            await supervisor.resume(Resume(timeout_s=5.0))
            assert states(supervisor) == {"a": "ready", "b": "ready"}
            for replica in supervisor.replicas.values():  # somebody else does
                await VLLMServer(supervisor.client, replica.target, timeout_s=5.0).pause("keep")
            await report(supervisor)
            assert states(supervisor) == {"a": "paused", "b": "paused"}
        assert removed == []
        assert routed(supervisor) == {"a", "b"}


async def test_down_leaves_no_process_and_no_port_and_may_be_repeated(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a")], stub_router())
        await bring_up(supervisor, plan)
        pid = pid_of(supervisor, "a")
        for _ in range(2):
            await supervisor.down(Down(0.0))
            assert not psutil.pid_exists(pid)
            assert plan.router is not None
            for port in (plan.servers[0].port, plan.router.port):
                assert port_holder("127.0.0.1", port) is None
            assert supervisor.state.processes() == []


async def test_up_again_with_the_same_plan_does_nothing(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a")], stub_router())
        await bring_up(supervisor, plan)
        pid = pid_of(supervisor, "a")
        assert supervisor.change_to(plan) == Begun(0)
        assert pid_of(supervisor, "a") == pid


async def test_of_two_ups_at_once_the_second_joins_the_first(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a")])
        first = supervisor.change_to(plan).operation
        assert supervisor.change_to(plan) == Begun(first, joined=True)
        with pytest.raises(ConflictError, match="busy: up"):
            supervisor.change_to(fleet_plan([stub_server("other")]))
        assert await ended(supervisor) == ""


async def test_a_changed_plan_touches_only_what_differs(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        a, b, c = stub_server("a"), stub_server("b"), stub_server("c")
        router = stub_router()
        await bring_up(supervisor, fleet_plan([a, b, c], router))
        pids = {name: pid_of(supervisor, name) for name in "abc"}
        changed = replace(b, env={**b.env, "CHANGED": "1"})
        await bring_up(supervisor, fleet_plan([a, changed, stub_server("d")], router))
        assert list(supervisor.replicas) == ["a", "b", "d"]
        assert pid_of(supervisor, "a") == pids["a"]
        assert pid_of(supervisor, "b") != pids["b"]
        assert not psutil.pid_exists(pids["c"])
        assert routed(supervisor) == {"a", "b", "d"}


async def test_changed_policies_apply_to_what_runs_on(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        server, router = stub_server("a"), stub_router()
        await bring_up(supervisor, fleet_plan([server], router))
        never = fleet_plan([server], router, restart={"policy": "never"})
        assert supervisor.change_to(never).operation == 0
        for kept in (supervisor.replicas["a"], supervisor.router):
            assert kept is not None and kept.process is not None
            os.kill(kept.process.pid, signal.SIGKILL)
            await eventually(lambda kept=kept: kept.phase == "dead")


async def test_a_killed_replica_is_started_again_and_routed_again(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        pid = pid_of(supervisor, "a")
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: "a" not in routed(supervisor))
        assert states(supervisor)["b"] == "ready"
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        assert pid_of(supervisor, "a") != pid
        assert any("SIGKILL" in event.message for event in supervisor.state.events())


async def test_a_replica_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        replica = supervisor.replicas["a"]
        for _ in range(3):
            await eventually(lambda: replica.state == "ready")
            os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
            await eventually(lambda: replica.state != "ready")
        await eventually(lambda: replica.phase == "failed")
        assert "restarted 2 times" in replica.reason
        # by hand it gets a fresh start
        await supervisor.restart(Restart(("a",)))
        assert await ended(supervisor) == ""
        assert replica.state == "ready" and replica.restarts == []


async def test_a_server_that_stops_answering_is_killed_and_restarted(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 0.1, "timeout_s": 0.3, "failures": 2, "startup_timeout_s": 15}
        plan = fleet_plan([stub_server("a")], health=health, stop_timeout_s=0.3)
        await bring_up(supervisor, plan)
        pid = pid_of(supervisor, "a")
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: not psutil.pid_exists(pid))
        await eventually(lambda: states(supervisor)["a"] == "ready")
        why = "stopped by skyctl after 2 missed health probes: "
        assert any(event.message.startswith(why) for event in supervisor.state.events())
        (row,) = (await report(supervisor)).replicas
        assert row.restarts == 1 and row.restart_reason.startswith(why)


async def test_servers_that_stop_answering_at_once_are_replaced_one_after_the_other(
    tmp_path: Path,
) -> None:
    """What all suffer from may pass: the second is left alone when it answers again."""
    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 0.1, "timeout_s": 0.2, "failures": 2, "startup_timeout_s": 15}
        servers = [stub_server("a"), stub_server("b")]
        plan = fleet_plan(servers, health=health, stop_timeout_s=0.3, restart={"backoff_s": 2})
        await bring_up(supervisor, plan)
        before = {name: pid_of(supervisor, name) for name in "ab"}
        for pid in before.values():
            os.kill(pid, signal.SIGSTOP)

        def waiting() -> list[str]:
            replicas = supervisor.replicas.values()
            return [replica.name for replica in replicas if "waits until" in replica.reason]

        await eventually(lambda: bool(waiting()))
        (second,) = waiting()
        os.kill(before[second], signal.SIGCONT)
        await eventually(lambda: set(states(supervisor).values()) == {"ready"})
        replaced = {name for name in "ab" if pid_of(supervisor, name) != before[name]}
        assert replaced == {"a", "b"} - {second}


async def test_a_busy_server_that_answers_late_is_not_ended(tmp_path: Path) -> None:
    """Its engine generates: its sibling, which does not answer and does nothing, is replaced."""
    hangs = {"/is_paused": {"kind": "hang", "calls": list(range(4, 1000))}}
    servers = [stub_server(name, faults=hangs) for name in "ab"]
    servers[0] = replace(servers[0], argv=(*servers[0].argv, "--token-delay-s", "0.01"))
    async with supervising(tmp_path) as supervisor, httpx.AsyncClient() as client:
        health = {"interval_s": 0.1, "timeout_s": 0.3, "failures": 2, "startup_timeout_s": 15}
        await bring_up(supervisor, fleet_plan(servers, health=health))
        busy, idle = pid_of(supervisor, "a"), pid_of(supervisor, "b")
        body = {"model": "stub-model", "prompt": "long", "max_tokens": 100_000}
        url = f"http://127.0.0.1:{servers[0].port}/v1/completions"
        request = asyncio.create_task(client.post(url, json=body, timeout=60))
        await eventually(lambda: not psutil.pid_exists(idle))
        await eventually(lambda: states(supervisor)["b"] == "ready")
        assert psutil.pid_exists(busy) and pid_of(supervisor, "a") == busy
        assert not request.done()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def test_a_server_whose_machine_comes_back_is_asked_again_before_it_counts_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["its machine is away", ""])

    async def lost(process: ManagedProcess) -> str:
        if not (answer := next(answers, "")):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGCONT)
        return answer

    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 0.1, "timeout_s": 0.3, "failures": 2, "startup_timeout_s": 15}
        await bring_up(supervisor, fleet_plan([stub_server("a")], health=health))
        pid = pid_of(supervisor, "a")
        monkeypatch.setattr(ManagedProcess, "lost", lost)
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: states(supervisor)["a"] == "unreachable")
        await eventually(lambda: states(supervisor)["a"] != "unreachable")
        assert (states(supervisor)["a"], pid_of(supervisor, "a")) == ("ready", pid)


@pytest.mark.parametrize("away", [True, False], ids=["away", "connected anew"])
async def test_a_machine_that_swallows_packets_leaves_the_router_before_the_probes_have_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    """And a server that is only slow, just as its connection is made anew, stays in it."""
    why = "its machine is away"
    lost = AsyncMock(return_value=why if away else "")
    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 0.1, "timeout_s": 0.2, "failures": 1000, "startup_timeout_s": 15}
        plan = fleet_plan([stub_server("a"), stub_server("b")], stub_router(), health=health)
        await bring_up(supervisor, plan)
        pid = pid_of(supervisor, "a")
        monkeypatch.setattr(ManagedProcess, "connection_lost", lambda process: why)
        monkeypatch.setattr(ManagedProcess, "lost", lost)
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: lost.await_count > 1)
        if away:
            await eventually(lambda: routed(supervisor) == {"b"})
        assert states(supervisor)["a"] == ("unreachable" if away else "ready")
        os.kill(pid, signal.SIGCONT)
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        assert pid_of(supervisor, "a") == pid


async def test_a_server_that_could_not_be_replaced_is_back_once_its_machine_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the recovery after a push tries, which the loss of the machine has broken."""
    why = "its machine is away"
    async with supervising(tmp_path) as supervisor:
        restart = {"backoff_s": 0.05, "backoff_max_s": 0.1}
        await bring_up(supervisor, fleet_plan([stub_server("a")], restart=restart))
        pid = pid_of(supervisor, "a")
        with monkeypatch.context() as away:
            away.setattr(ManagedProcess, "stop", AsyncMock(side_effect=HostUnreachable(why)))
            await supervisor.restart(Restart())
            assert await ended(supervisor) == f"a did not come back: {why}"
            await eventually(lambda: states(supervisor)["a"] == "unreachable")
        await eventually(lambda: states(supervisor)["a"] == "ready")
        assert pid_of(supervisor, "a") != pid and not psutil.pid_exists(pid)


async def test_a_server_that_cannot_be_ended_has_failed_and_is_ended_by_the_next_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a")])
        await bring_up(supervisor, plan)
        pid = pid_of(supervisor, "a")
        with monkeypatch.context() as stuck:
            hangs = AsyncMock(side_effect=SkyctlError("it outlived SIGKILL"))
            stuck.setattr(ManagedProcess, "stop", hangs)
            await supervisor.restart(Restart())
            assert await ended(supervisor) == "a did not come back: it outlived SIGKILL"
        assert states(supervisor) == {"a": "failed"}
        await bring_up(supervisor, plan)
        assert pid_of(supervisor, "a") != pid and not psutil.pid_exists(pid)


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
    tasks = [one._task for one in supervisor.replicas.values() if one._task is not None]
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


@pytest.mark.parametrize("given_up", ["router", "server"])
async def test_an_up_does_not_wait_for_an_api_that_lost_what_it_waits_for(given_up: str) -> None:
    server = SimpleNamespace(phase=Phase.UP)
    router = SimpleNamespace(phase=Phase.READY, renewing=False)
    router.settled, settled = asyncio.Event(), asyncio.Event()
    router.settled.set()
    fleet: Any = SimpleNamespace(
        replicas={"a": server},
        router=router if given_up == "router" else None,
        tinker=SimpleNamespace(phase=Phase.WAITING, settled=settled),
        desired=lambda: {"a": "http://a"} if server.phase is Phase.UP else {},
    )
    router.sync = AsyncMock()
    waiting = asyncio.create_task(rollout.settle_fronts(fleet))
    await asyncio.sleep(0)
    if given_up == "router":
        router.phase = Phase.FAILED
        router.wake = lambda: None
    else:
        server.phase = Phase.FAILED
    async with asyncio.timeout(10):
        await waiting


@pytest.mark.parametrize(
    ("fault", "state"),
    [({"kind": "status", "status": 500}, "unreachable"), ({"kind": "hang"}, "ready")],
)
async def test_a_status_sees_an_engine_that_died_before_the_next_probe(
    tmp_path: Path, fault: dict[str, Any], state: str
) -> None:
    """One that does not answer in time may only be busy: that is for the probes to count."""
    async with supervising(tmp_path) as supervisor:
        # the first call is that of the start
        server = stub_server("a", faults={"/is_paused": {**fault, "calls": list(range(2, 99))}})
        health = {"interval_s": 60, "startup_timeout_s": 15}
        await bring_up(supervisor, fleet_plan([server], health=health))
        found = await report(supervisor)
        assert found.replicas[0].state == state
        assert (found.health == "unavailable") == (state == "unreachable")
        if found.reasons:
            assert found.reasons[0].message.startswith("a is unreachable: ")


async def test_one_that_exits_at_start_fails_the_up_and_the_others_run_on(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        broken = command_server("b", "raise ValueError('no such model')")
        supervisor.change_to(fleet_plan([stub_server("a"), broken], stub_router()))
        error = await ended(supervisor)
        assert error.startswith("b exited with code 1") and "ValueError: no such model" in error
        assert states(supervisor) == {"a": "ready", "b": "failed"}
        assert routed(supervisor) == {"a"}
        found = await report(supervisor)
        assert found.health == "degraded" and "skyctl restart b" in found.reasons[0].hint


async def test_one_that_is_never_ready_runs_into_its_deadline(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 0.1, "timeout_s": 1, "startup_timeout_s": 0.5}
        hung = command_server("a", "import time; time.sleep(600)")
        supervisor.change_to(fleet_plan([hung], stub_router(), health=health))
        assert "not ready after 500 ms" in await ended(supervisor)
        assert supervisor.replicas["a"].process is None


async def test_undo_stops_what_the_operation_started_and_nothing_else(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        a = stub_server("a")
        await bring_up(supervisor, fleet_plan([a]))
        hung = command_server("b", "import time; time.sleep(600)")
        supervisor.change_to(fleet_plan([a, hung]))
        await eventually(
            lambda: "b" in supervisor.replicas and states(supervisor)["b"] != "stopped"
        )
        await supervisor.undo()
        assert states(supervisor) == {"a": "ready"}
        assert not supervisor.finished.is_set()


async def test_a_cancel_that_comes_after_the_end_undoes_nothing(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        a, b = stub_server("a"), stub_server("b")
        await bring_up(supervisor, fleet_plan([a]))
        await bring_up(supervisor, fleet_plan([a, b]))
        await supervisor.undo_by(BY_CANCEL)
        assert states(supervisor) == {"a": "ready", "b": "ready"}


async def test_what_could_not_be_put_back_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        number = supervisor.change_to(
            fleet_plan([command_server("a", "import time; time.sleep(600)")])
        ).operation
        await eventually(lambda: "a" in supervisor.replicas)
        with monkeypatch.context() as patch:
            patch.setattr(supervisor, "undo_by", AsyncMock(side_effect=OSError("disk is full")))
            await supervisor.cancel_job(CancelJob(f"up-{number}"))
            await eventually(
                lambda: (
                    f"up-{number} is not put back: OSError('disk is full')"
                    in [event.message for event in supervisor.state.events()]
                )
            )


async def test_an_up_that_down_ended_did_not_fail(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([command_server("a", "import time; time.sleep(600)")])
        number = supervisor.change_to(plan).operation
        await eventually(lambda: "a" in supervisor.replicas)
        await supervisor.down(Down(0.0))
        status = await supervisor.status(StatusQuery(fresh=False, operation=number))
        error = await operation_error(supervisor, status)
        assert error is not None and error.message == "up was stopped by `skyctl down`"
        assert error.hint == "start it again: skyctl up"


async def test_undo_of_a_first_up_ends_the_supervisor(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        supervisor.change_to(fleet_plan([command_server("a", "import time; time.sleep(600)")]))
        await eventually(lambda: "a" in supervisor.replicas)
        await supervisor.undo()
        assert supervisor.finished.is_set() and supervisor.replicas == {}


async def test_a_router_of_pairs_is_started_anew_for_a_server_that_joins(tmp_path: Path) -> None:
    """It takes none while it runs. What freezes or leaves needs no other router."""
    servers = [
        replace(stub_server(name), role=role)
        for name, role in (("p", "prefill"), ("d", "decode"), ("e", "decode"))
    ]
    pairs = {"auth": "control", "replicas": [{"role": "prefill"}, {"role": "decode", "count": 2}]}
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan(servers, stub_router(), **pairs))
        assert supervisor.router is not None and supervisor.router.process is not None
        router, first = supervisor.router, supervisor.router.process.pid
        assert routed(supervisor) == {"p", "d", "e"}
        for verbs, expected in ((1, {"p", "d", "e"}), (0, {"p", "e"})):
            supervisor.verbs_under_way = verbs  # a probe may see one paused before the other
            supervisor.replicas["d"].observe(paused=True)
            assert set(supervisor.desired()) == expected
            supervisor.replicas["d"].observe(paused=False)
        await supervisor.pause(Pause(mode="keep"))
        assert routed(supervisor) == {"p", "d", "e"}
        await supervisor.resume(Resume())
        supervisor.replicas["d"].update_row(quarantine="for a while")
        await rollout.sync_router(supervisor)
        assert routed(supervisor) == {"p", "e"}
        assert supervisor.router.process.pid == first
        supervisor.replicas["d"].update_row(quarantine="")
        await rollout.sync_router(supervisor)
        assert routed(supervisor) == {"p", "d", "e"}
        assert supervisor.router.process.pid != first
        assert not supervisor.router.restarts
        # half a pair serves nobody
        supervisor.replicas["p"].update_row(quarantine="for a while")
        await rollout.sync_router(supervisor)
        assert routed(supervisor) == set()
        # nor is one waited for that goes meanwhile
        supervisor.replicas["p"].update_row(quarantine="")
        syncing = asyncio.create_task(rollout.sync_router(supervisor))
        async with asyncio.timeout(10):
            while not router.renewing:  # noqa: ASYNC110 - as soon as it is
                await asyncio.sleep(0)
        supervisor.replicas["p"].update_row(quarantine="for a while")
        async with asyncio.timeout(10):
            await syncing
        assert routed(supervisor) == set()


async def test_a_router_that_dies_is_restarted_with_its_workers(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        router = supervisor.router
        assert router is not None and router.process is not None and router.process.pid is not None
        os.kill(router.process.pid, signal.SIGKILL)
        await eventually(lambda: router.state != "ready")
        await eventually(lambda: router.state == "ready" and len(router.workers) == 2)
        assert len(router.restarts) == 1


async def test_one_paused_server_leaves_the_router_and_a_paused_fleet_stays(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        await supervisor.pause(Pause(mode="keep", servers=("a",), timeout_s=5.0))
        assert states(supervisor)["a"] == "paused" and routed(supervisor) == {"b"}
        await supervisor.pause(Pause(mode="keep", timeout_s=5.0))
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        await supervisor.resume(Resume(timeout_s=5.0))
        assert states(supervisor) == {"a": "ready", "b": "ready"}
        assert routed(supervisor) == {"a", "b"}


async def test_a_paused_server_that_dies_comes_back_paused(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        await supervisor.pause(Pause(mode="keep", timeout_s=5.0))
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: supervisor.replicas["a"].phase != "up")
        await eventually(lambda: supervisor.replicas["a"].phase == "up")
        assert states(supervisor) == {"a": "paused"}


async def test_a_replica_that_is_starting_is_paused_when_it_is_ready(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        slow = stub_server("b", faults={"startup_delay_s": 1})
        supervisor.change_to(fleet_plan([stub_server("a"), slow]))
        await eventually(lambda: states(supervisor).get("a") == "ready")
        outcomes = await supervisor.pause(Pause(mode="keep", timeout_s=5.0))
        assert [o.status for o in outcomes] == ["ok", "skipped"]
        assert "will be paused" in outcomes[1].detail
        assert await ended(supervisor) == ""
        assert states(supervisor) == {"a": "paused", "b": "paused"}


async def test_an_unknown_replica_is_refused_with_the_known_names(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        with pytest.raises(NotFoundError, match="no server 'z'") as caught:
            await supervisor.restart(Restart(("z",)))
        assert "a" in caught.value.hint


async def test_a_rolling_restart_never_takes_out_two(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        pids = [pid_of(supervisor, "a"), pid_of(supervisor, "b")]
        fewest = 2

        def done() -> bool:
            nonlocal fewest
            fewest = min(fewest, sum(state == "ready" for state in states(supervisor).values()))
            return supervisor.operation is not None and supervisor.operation.ended_at is not None

        await supervisor.restart()
        await eventually(done)
        assert fewest == 1
        assert routed(supervisor) == {"a", "b"}
        assert not set(pids) & {pid_of(supervisor, "a"), pid_of(supervisor, "b")}


async def test_servers_on_one_gpu_start_one_after_the_other(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        slow = {"startup_delay_s": 0.3}
        a = replace(stub_server("a", faults=slow), gpus=(0,))
        b = replace(stub_server("b", faults=slow), gpus=(0,))
        supervisor.change_to(fleet_plan([a, b]))
        together = False

        def ready() -> bool:
            nonlocal together
            phases = [replica.phase for replica in supervisor.replicas.values()]
            together = together or phases.count("starting") > 1
            return phases == ["up", "up"]

        await eventually(ready)
        assert not together


# --- weights -----------------------------------------------------------------------------------


def pushed(request: PushRequest, names: list[str]) -> PushResult:
    version = request.weight_version or "v1"
    servers = [ServerPush(name, True, "ready", version, "digest-" + version) for name in names]
    return PushResult(version, request.checkpoint, "same", "shm", 10, 1, 0.1, 0.1, 0.1, {}, servers)


class FakePush:
    """Stands in for weights.push.push: remembers its calls, answers or fails as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(
        self, request: PushRequest, fleet: Any, *, observer: Any, **_: Any
    ) -> PushResult:
        names = [server.name for server in fleet.servers]
        self.calls.append((request.checkpoint, names))
        observer.stage("update")
        for name in names:
            observer.server(name, "updating")
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return pushed(request, names)


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch) -> FakePush:
    fake = FakePush()
    monkeypatch.setattr("skyctl.push.transaction.push", fake)
    return fake


class FakeCheckpoint:
    identity_digest = layout_digest = "same"
    path = Path("/ckpt")


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> type[FakeCheckpoint]:
    monkeypatch.setattr("skyctl.core.repeated.read_checkpoint", lambda path: FakeCheckpoint)
    return FakeCheckpoint


async def test_a_push_waits_until_its_fleet_is_taken_over_and_for_nothing_else(
    tmp_path: Path, push: FakePush
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        supervisor.operation = Operation(7, OperationKind.ADOPT, "", time.time())
        begun = asyncio.create_task(supervisor.start_push(PushRequest("/ckpt")))
        assert not (await asyncio.wait({begun}, timeout=0.2))[0]
        supervisor.taken_over = True
        assert (await begun).startswith("push-")
        await eventually(lambda: supervisor.push_job is None)
        supervisor.operation = Operation(8, OperationKind.SCALE, "", time.time())
        with pytest.raises(ConflictError, match="busy: scale"):
            await supervisor.start_push(PushRequest("/ckpt"))


async def test_a_push_whose_asker_has_hung_up_meanwhile_is_not_begun(
    tmp_path: Path, push: FakePush
) -> None:
    async def gone() -> bool:
        return True

    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        listening = hung_up.set(gone)
        with pytest.raises(ConflictError, match="has gone meanwhile"):
            await supervisor.start_push(PushRequest("/ckpt"))
        hung_up.reset(listening)
        assert not supervisor.state.journal.jobs() and not supervisor.arbiter.holders()
        assert (await supervisor.start_push(PushRequest("/ckpt"))).startswith("push-")


async def test_a_second_push_is_refused_and_told_of_the_first(
    tmp_path: Path, push: FakePush
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        push.gate.clear()
        job = await supervisor.start_push(PushRequest("/ckpt", weight_version="v1"))
        await eventually(lambda: states(supervisor)["a"] == "updating")
        with pytest.raises(ConflictError, match=job):
            await supervisor.start_push(PushRequest("/b"))
        for refused in (supervisor.recover, supervisor.restart):
            with pytest.raises(ConflictError, match=job):
                await refused()
        for verb in (Resume, Pause, Sleep, Wake):
            with pytest.raises(ConflictError, match=job):
                await supervisor.control(verb(timeout_s=5.0))
        push.gate.set()
        await eventually(lambda: supervisor.push_job is None)
        assert supervisor.state.journal.job(job).state == "succeeded"
        assert supervisor.state.weights() == FleetWeights("v1", "/ckpt", "same", "shm")
        assert states(supervisor)["a"] == "ready"
        assert supervisor.replicas["a"].row.weights_digest == "digest-v1"
        assert supervisor.state.locks.holders("turn") == []


async def test_what_a_dead_push_left_is_not_said_to_be_resumed_when_it_is_ready(
    tmp_path: Path,
) -> None:
    """Recovery leaves it paused if it was paused before that push."""
    async with supervising(tmp_path) as supervisor:
        supervisor.change_to(fleet_plan([command_server("a", "import time; time.sleep(600)")]))
        await eventually(lambda: states(supervisor).get("a") == "starting")
        supervisor.state.update_server("a", paused=True)
        supervisor.replicas["a"].reload_row()
        put_in_doubt(supervisor.state, {"a": InDoubt("a", "push-1", "update", True, False)})
        (outcome,) = await supervisor.control(Resume())
        assert outcome.detail.endswith("type: skyctl recover")
        assert supervisor.state.server("a").paused


async def test_a_fleet_that_was_taken_over_can_be_pushed_to_while_a_dead_server_starts(
    tmp_path: Path, push: FakePush
) -> None:
    async with supervising(tmp_path) as supervisor:
        never = command_server("b", "import time; time.sleep(600)")
        await supervisor.adopt(Adopt(fleet_plan([stub_server("a"), never])))
        await eventually(lambda: states(supervisor).get("a") == "ready")
        with pytest.raises(ConflictError, match="busy: adopt"):
            await supervisor.restart()
        await supervisor.start_push(PushRequest("/ckpt", weight_version="v1"))
        await eventually(lambda: supervisor.push_job is None)
        assert push.calls == [("/ckpt", ["a"])]
        assert supervisor.operation is not None and supervisor.operation.ended_at is None


async def test_a_replica_that_dies_takes_the_fleets_weights_before_it_is_routed(
    tmp_path: Path, push: FakePush, checkpoint: object
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        await supervisor.start_push(PushRequest("/ckpt", weight_version="v1"))
        await eventually(lambda: supervisor.push_job is None)
        push.gate.clear()
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: len(push.calls) == 2)
        assert push.calls[1] == ("/ckpt", ["a"])
        assert routed(supervisor) == {"b"} and states(supervisor)["a"] == "updating"
        # nor when a push froze all others: it is not frozen, and at the weights it started from
        supervisor.replicas["b"].in_push = True
        assert supervisor.desired().keys() == {"b"}
        supervisor.replicas["b"].in_push = False
        push.gate.set()
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        assert supervisor.replicas["a"].row.weight_version == "v1"


async def test_a_replica_is_quarantined_when_the_checkpoint_changed(
    tmp_path: Path, push: FakePush, checkpoint: type[FakeCheckpoint], monkeypatch: Any
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        await supervisor.start_push(PushRequest("/ckpt", weight_version="v1"))
        await eventually(lambda: supervisor.push_job is None)
        monkeypatch.setattr(checkpoint, "identity_digest", "other")
        monkeypatch.setattr(checkpoint, "layout_digest", "other")
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: states(supervisor)["a"] == "quarantined")
        assert routed(supervisor) == {"b"}
        assert "/ckpt was overwritten since" in (supervisor.replicas["a"].row.quarantine or "")
        outcomes = await supervisor.resume(Resume(timeout_s=5.0))
        assert [o.status for o in outcomes] == ["skipped", "ok"]


async def test_a_failed_push_quarantines_what_it_left_in_doubt(
    tmp_path: Path, push: FakePush
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        left = [
            ServerPush("a", True, "ready", "base"),
            ServerPush("b", False, "quarantined", None, detail="half updated"),
        ]
        push.error = PushError("b failed", details={"servers": [s.to_json() for s in left]})
        job = await supervisor.start_push(PushRequest("/ckpt", weight_version="v1"))
        await eventually(lambda: supervisor.push_job is None)
        assert supervisor.state.journal.job(job).state == "failed"
        assert states(supervisor) == {"a": "ready", "b": "quarantined"}
        assert supervisor.replicas["b"].row.quarantine == "half updated"
        await eventually(lambda: routed(supervisor) == {"a"})
        assert [record.ok for record in supervisor.state.journal.pushes()] == [False]


@pytest.mark.parametrize("reached", [False, True])
async def test_a_replica_that_dies_in_a_push_is_not_blamed_for_what_its_process_was_left_in(
    tmp_path: Path, push: FakePush, reached: bool
) -> None:
    """Unless the push may have reached the next process as well, which is ended then."""
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")]))
        push.gate.clear()
        left = [ServerPush("b", False, "quarantined", None, detail="connection lost")]
        push.error = PushError("b died", details={"servers": [s.to_json() for s in left]})
        await supervisor.start_push(PushRequest("/ckpt", weight_version="v1"))
        await eventually(lambda: len(push.calls) == 1)
        pid = pid_of(supervisor, "b")
        os.kill(pid, signal.SIGKILL)
        replica = supervisor.replicas["b"]
        await eventually(lambda: replica.process is not None and replica.process.pid != pid)
        pid = pid_of(supervisor, "b")
        if reached:
            put_in_doubt(supervisor.state, {"b": InDoubt("b", "push-1", "update", True, True)})
        push.gate.set()
        await eventually(lambda: states(supervisor) == {"a": "ready", "b": "ready"})
        assert (pid_of(supervisor, "b") != pid) is reached
        assert replica.row.quarantine is None and replica.row.weight_version is None


async def test_a_status_that_need_not_be_fresh_shows_others_pauses_with_the_next_probe(
    tmp_path: Path,
) -> None:
    plan = fleet_plan([stub_server("stubs-0")], health={"interval_s": 60, "startup_timeout_s": 15})
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, plan)
        await VLLMServer(supervisor.client, supervisor.replicas["stubs-0"].target).pause()
        assert (await report(supervisor, fresh=False)).replicas[0].state == "ready"
        found = (await report(supervisor)).replicas[0]
    assert found.state == "paused"
    assert found.state_s is not None and found.uptime_s is not None
    assert found.state_s <= found.uptime_s


async def test_a_push_that_cannot_even_begin_is_a_failed_job_and_frees_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("stubs-0")]))
        with monkeypatch.context() as broken:
            broken.delattr(admission, "push_fleet")
            job = await supervisor.start_push(PushRequest("nowhere"))
            await eventually(lambda: supervisor.push_job is None)
        found = supervisor.state.journal.job(job)
        assert found.state == "failed"
        assert found.error is not None and "never began" in found.error["message"]
        again = await supervisor.start_push(PushRequest("nowhere"))  # the lock is free
        await eventually(lambda: supervisor.push_job is None)
        assert supervisor.state.journal.job(again).ended


async def test_a_push_is_refused_while_a_verb_is_under_way_and_told_of_it(
    tmp_path: Path, push: FakePush, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb's rollback would thaw servers in the middle of the update."""
    monkeypatch.setattr(arbiter, "PATIENCE_S", 0.1)
    slow = stub_server("a", faults={"/pause": {"kind": "delay", "seconds": 1.0}})
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([slow]))
        verb = asyncio.create_task(supervisor.pause(Pause(mode="wait", timeout_s=5.0)))
        await eventually(lambda: supervisor.arbiter.holders() != [])
        with pytest.raises(ConflictError, match="busy: skyctl pause"):
            await supervisor.start_push(PushRequest("/ckpt"))
        assert (await verb)[0].status == "ok"
        await supervisor.start_push(PushRequest("/ckpt"))
        await eventually(lambda: supervisor.push_job is None)
        assert push.calls == [("/ckpt", ["a"])]


async def test_nobody_acts_beside_a_recovery(
    tmp_path: Path, push: FakePush, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, go_on = asyncio.Event(), asyncio.Event()

    async def find(_: Supervisor) -> list[Finding]:
        looking.set()
        await go_on.wait()
        return []

    monkeypatch.setattr(healing, "find", find)
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        recovery = asyncio.create_task(healing.heal_in_turn(supervisor, supervisor.pushes))
        await looking.wait()
        with pytest.raises(ConflictError, match="busy: recovery"):
            await supervisor.resume(Resume())
        with pytest.raises(ConflictError, match="busy: recovery"):
            await supervisor.start_push(PushRequest("/ckpt"))
        go_on.set()
        await recovery
        assert (await supervisor.resume(Resume()))[0].status == "ok" and push.calls == []


async def test_a_push_waits_while_the_fleet_is_put_right(
    tmp_path: Path, push: FakePush, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def find(_: Supervisor) -> list[Finding]:
        await go_on.wait()
        return []

    monkeypatch.setattr(healing, "find", find)
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        supervisor.begin_recovery()
        request = PushRequest("/committed")  # a recovery pushes, too
        supervisor.push_job = open_push(supervisor.state.journal, Turn(None), request)
        waiting = asyncio.create_task(supervisor.start_push(PushRequest("/ckpt")))
        await asyncio.sleep(0.01)
        with pytest.raises(ConflictError, match="busy: recover"):
            await supervisor.restart(Restart())
        assert not waiting.done() and push.calls == []
        supervisor.push_job = None
        go_on.set()
        await waiting
        await eventually(lambda: push.calls == [("/ckpt", ["a"])])


async def test_a_push_waits_for_the_end_of_one_that_is_over_for_whoever_asked_for_it(
    tmp_path: Path, push: FakePush, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def refresh_all(*_: object) -> dict[str, str]:
        await go_on.wait()
        return {}

    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        monkeypatch.setattr(admission, "refresh_all", refresh_all)
        first = await supervisor.start_push(PushRequest("/ckpt"))
        await eventually(lambda: supervisor.state.journal.job(first).ended)
        assert supervisor.push_job is not None
        waiting = asyncio.create_task(supervisor.start_push(PushRequest("/next")))
        await asyncio.sleep(0)
        assert not waiting.done()
        go_on.set()
        await waiting
        await eventually(lambda: [path for path, _ in push.calls] == ["/ckpt", "/next"])


async def test_a_label_that_meant_other_files_does_not_make_a_server_current(
    tmp_path: Path, push: FakePush, checkpoint: type[FakeCheckpoint]
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        await supervisor.start_push(PushRequest("/ckpt", weight_version="latest"))
        await eventually(lambda: supervisor.push_job is None)
        replica = supervisor.replicas["a"]
        assert admission.is_current(supervisor.state, replica)
        replica.update_row(checkpoint_digest="of the latest before")
        assert not admission.is_current(supervisor.state, replica)


async def test_a_server_that_waits_for_weights_takes_the_next_push(
    tmp_path: Path, push: FakePush, checkpoint: type[FakeCheckpoint], monkeypatch: Any
) -> None:
    """A directory that is overwritten at every step: who restarted between two has none to take."""
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        await supervisor.start_push(PushRequest("/ckpt", weight_version="v1"))
        await eventually(lambda: supervisor.push_job is None)
        monkeypatch.setattr(checkpoint, "identity_digest", "other")
        monkeypatch.setattr(checkpoint, "layout_digest", "other")
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: states(supervisor)["a"] == "quarantined")
        await eventually(lambda: supervisor.replicas["a"].phase == "up")
        await supervisor.start_push(PushRequest("/ckpt", weight_version="v2"))
        await eventually(lambda: states(supervisor) == {"a": "ready", "b": "ready"})
        assert push.calls[-1] == ("/ckpt", ["a", "b"])
        await eventually(lambda: routed(supervisor) == {"a", "b"})


KNOWS_ALL = {"/never": {"kind": "hang"}}  # the full stub: the light one has no labels


async def test_status_names_a_server_that_somebody_else_pushed_to(
    tmp_path: Path, push: FakePush
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a", faults=KNOWS_ALL)]))
        server = VLLMServer(supervisor.client, supervisor.replicas["a"].target)
        assert (await report(supervisor)).health == "healthy"
        await server.set_weight_version("b1")
        found = await report(supervisor)
        assert found.health == "degraded" and found.replicas[0].reported_version == "b1"
        assert (
            "b1" in found.reasons[0].message
            and "a program other than skyctl" in found.reasons[0].message
        )


async def test_an_error_as_a_push_ends_leaves_none_in_progress(
    tmp_path: Path, push: FakePush, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))

        def broken(self: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr("skyctl.supervisor.replica.Replica.reload_row", broken)
            await supervisor.start_push(PushRequest("/ckpt"))
            await eventually(lambda: supervisor.push_job is None)
        assert supervisor.arbiter.holders() == []
        await supervisor.start_push(PushRequest("/ckpt"))
        await eventually(lambda: supervisor.push_job is None)
        assert len(push.calls) == 2


async def test_a_server_with_a_canary_is_closed_until_it_rejoins(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        servers = [stub_server("a"), stub_server("b")]
        await bring_up(supervisor, fleet_plan(servers, stub_router()))
        rotation, held = RouterRotation(supervisor), supervisor.paths.hold_file("a")
        await rotation.take_out(["a"], others_serve=True, closed=True)
        supervisor.replicas["a"].reload_row()
        assert held.exists() and not supervisor.paths.hold_file("b").exists()
        await rotation.rejoin(["a"])
        assert not held.exists()


async def test_a_server_whose_machine_does_not_say_that_it_is_open_is_not_routed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = asyncio.Event()
    monkeypatch.setattr(replica, "_SETTLE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(ManagedProcess, "settled", lambda process: heard.wait())
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a"), stub_server("b")], stub_router())
        await bring_up(supervisor, plan)  # which does not wait for it
        assert states(supervisor) == {"a": "unreachable", "b": "unreachable"}
        heard.set()
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        heard.clear()
        await RouterRotation(supervisor).rejoin(["a"])
        assert routed(supervisor) == {"b"}
        heard.set()
        await eventually(lambda: routed(supervisor) == {"a", "b"})
