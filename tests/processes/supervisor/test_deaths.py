"""Servers that die, hang or are out of reach while their supervisor watches."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import psutil
import pytest

from skyctl.core.requests import Restart
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.launch.local.process import ManagedProcess
from skyctl.supervisor.fleet import report
from tests.processes.supervisor.supervising import (
    bring_up,
    ended,
    pid_of,
    routed,
    states,
    supervising,
)
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_router, stub_server


async def test_a_killed_replica_is_started_again_and_routed_again(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        pid = pid_of(supervisor, "a")
        with supervisor.paths.log("a").open("a") as log:
            log.write("ImportError: no such kernel: another is used\n")
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: "a" not in routed(supervisor))
        assert states(supervisor)["b"] == "ready"
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        assert pid_of(supervisor, "a") != pid
        (death,) = [e.message for e in supervisor.state.events() if "SIGKILL" in e.message]
        assert "ImportError" not in death


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


async def test_a_server_that_could_not_be_removed_is_routed_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        servers, router = [stub_server("a"), stub_server("b")], stub_router()
        await bring_up(supervisor, fleet_plan(servers, router))
        with monkeypatch.context() as away:
            gone = AsyncMock(side_effect=HostUnreachable("its machine is away"))
            away.setattr(ManagedProcess, "stop", gone)
            supervisor.change_to(fleet_plan(servers[:1], router))
            assert await ended(supervisor) == "its machine is away"
        await bring_up(supervisor, fleet_plan(servers, router))
        await eventually(lambda: routed(supervisor) == {"a", "b"})


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
