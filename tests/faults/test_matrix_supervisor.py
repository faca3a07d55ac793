"""Servers, router and replicas that fail under a supervisor; stubs in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import NoneType

import httpx
import psutil
import pytest

from skyctl.core.plan import ServerSpec
from skyctl.core.requests import Down, Pause, Restart, Resume, Sleep, Wake
from skyctl.core.status import FleetStatus
from skyctl.core.verb_table import Verb
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import DeadlineExceeded
from skyctl.launch.local.host import free_port
from skyctl.push.request import PushRequest
from skyctl.store.identity import identify
from skyctl.store.paths import FleetPaths
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState
from skyctl.supervisor.fleet import report
from skyctl.supervisor.interface import SupervisorClient
from skyctl.supervisor.resident import Supervisor
from tests.pids import gone
from tests.processes.supervisor.supervising import (
    bring_up,
    ended,
    full_server,
    pid_of,
    pushable,
    routed,
    set_faults,
    states,
    stub_state,
    supervising,
)
from tests.stub.app import StubServer
from tests.stub.running import running
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.supervisor.fleets import (
    ROOT,
    command_server,
    eventually,
    fleet_plan,
    stub_router,
    stub_server,
)

# An API server whose engine core is in a session of its own, as nothing but a record ties it.
_WITH_CORE = """
import subprocess, sys
core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                        start_new_session=True)
print("core", core.pid, flush=True)
from tests.stub.server import main
main(sys.argv[1:])
"""


def with_core(name: str) -> ServerSpec:
    port = free_port("127.0.0.1")
    argv = (sys.executable, "-c", _WITH_CORE, "--port", str(port))
    return ServerSpec(name, argv, {"PYTHONPATH": str(ROOT)}, "127.0.0.1", port)


# --- up ------------------------------------------------------------------------------------------


async def test_a_foreign_server_on_our_port_is_never_taken_for_ours(tmp_path: Path) -> None:
    """The port was free when it was planned; ours cannot bind it, and the other answers."""
    seen: set[str] = set()
    async with running([StubServer()]) as targets, supervising(tmp_path) as supervisor:
        port = int(targets[0].url.rpartition(":")[2])
        slow = stub_server("a", port=port, faults={"startup_delay_s": 1.5})
        supervisor.change_to(fleet_plan([slow, stub_server("b")], stub_router()))
        watch = asyncio.create_task(watching(supervisor, "a", seen))
        error = await ended(supervisor)
        watch.cancel()
        assert error.startswith("a exited with code ")
        assert states(supervisor) == {"a": "failed", "b": "ready"}
        assert "ready" not in seen and "updating" not in seen
        assert routed(supervisor) == {"b"}


async def watching(supervisor: Supervisor, name: str, seen: set[str]) -> None:
    while True:
        if name in supervisor.replicas:
            seen.add(supervisor.replicas[name].state)
        await asyncio.sleep(0.01)


async def test_an_answer_of_a_server_that_hangs_is_not_waited_for_beyond_its_deadline(
    tmp_path: Path,
) -> None:
    """Ready is asked under a deadline of its own, so that a hung start ends with the other one."""
    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 0.1, "timeout_s": 0.3, "startup_timeout_s": 1.5}
        hung = stub_server("a", faults={"*": {"kind": "hang"}})
        supervisor.change_to(fleet_plan([hung], health=health, stop_timeout_s=1))
        assert "not ready after 1.5 s" in await ended(supervisor)


async def test_a_replica_that_fails_to_start_in_a_scale_leaves_the_others_alone(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        servers, router = [stub_server("a"), stub_server("b")], stub_router()
        await bring_up(supervisor, fleet_plan(servers, router))
        pids = {name: pid_of(supervisor, name) for name in ("a", "b")}
        broken = command_server("c", "raise ValueError('out of memory')")
        supervisor.change_to(fleet_plan([*servers, broken], router), "scale")
        assert "out of memory" in await ended(supervisor)
        assert {name: pid_of(supervisor, name) for name in ("a", "b")} == pids
        assert routed(supervisor) == {"a", "b"} and states(supervisor)["c"] == "failed"


async def test_a_rolling_restart_stops_at_the_first_that_does_not_come_back(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 0.1, "timeout_s": 1, "startup_timeout_s": 4}
        servers = [stub_server("a"), stub_server("b"), stub_server("c")]
        await bring_up(supervisor, fleet_plan(servers, stub_router(), health=health))
        pids = {name: pid_of(supervisor, name) for name in ("b", "c")}
        # its next process cannot be started
        plan = supervisor.require_plan()
        broken = command_server("a", "raise SystemExit(9)")
        object.__setattr__(plan, "servers", (broken, *plan.servers[1:]))
        await supervisor.restart()
        assert "a did not come back" in await ended(supervisor)
        assert {name: pid_of(supervisor, name) for name in ("b", "c")} == pids
        assert routed(supervisor) == {"b", "c"}


# --- down ----------------------------------------------------------------------------------------


async def test_an_engine_core_that_outlives_its_api_server_is_stopped_before_the_next_starts(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([with_core("a")]))
        replica = supervisor.replicas["a"]
        process = replica.process
        assert process is not None
        await eventually(lambda: len(process.descendants) == 1)
        [core] = process.descendants
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: replica.process is not None and replica.process is not process)
        assert gone(core.pid)
        await eventually(lambda: states(supervisor)["a"] == "ready")
        second = replica.process
        assert second is not None
        await eventually(lambda: len(second.descendants) == 1)
        [core] = second.descendants
        await supervisor.down(Down(0.0))
        assert gone(core.pid)


async def test_a_stopped_server_ends_with_kill_after_its_stop_deadline(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 60, "timeout_s": 1, "startup_timeout_s": 15}
        plan = fleet_plan([stub_server("a")], health=health, stop_timeout_s=0.5)
        await bring_up(supervisor, plan)
        pid = pid_of(supervisor, "a")
        os.kill(pid, signal.SIGSTOP)
        await supervisor.down(Down(0.5))
        assert gone(pid)


async def test_a_restart_that_meets_a_server_being_stopped_waits_until_it_is_gone(
    tmp_path: Path,
) -> None:
    """Both found out that it hangs: its health probes, and whoever asked for the restart."""
    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 0.1, "timeout_s": 0.2, "failures": 1, "startup_timeout_s": 15}
        plan = fleet_plan([stub_server("a")], health=health, stop_timeout_s=2)
        await bring_up(supervisor, plan)
        pid = pid_of(supervisor, "a")
        os.kill(pid, signal.SIGSTOP)  # TERM does nothing until it goes on
        await eventually(lambda: states(supervisor) == {"a": "restarting"})
        await supervisor.restart(Restart(("a",)))
        await ended(supervisor)
        assert states(supervisor) == {"a": "ready"} and pid_of(supervisor, "a") != pid
        assert gone(pid)


async def test_a_request_that_never_ends_holds_a_down_no_longer_than_the_drain_deadline(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        slow = full_server("a", "--token-delay-s", "5")
        await bring_up(supervisor, fleet_plan([slow]))
        pid = pid_of(supervisor, "a")
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"model": "stub-model", "prompt": "x", "max_tokens": 1000}
            asking = asyncio.create_task(client.post(f"{slow.url}/v1/completions", json=body))
            metrics = VLLMServer(supervisor.client, supervisor.replicas["a"].target)
            while (await metrics.metrics()).in_flight == 0:
                assert not asking.done()
            await supervisor.down(Down(0.3))
            assert gone(pid)
            with pytest.raises(httpx.HTTPError):
                await asking
        events = [event.message for event in supervisor.state.events()]
        assert any("still has requests after 0.3 s" in message for message in events)


async def test_a_down_in_the_middle_of_a_push_leaves_no_sender_and_no_server(
    tmp_path: Path,
) -> None:
    base = write_checkpoint(tmp_path / "base")
    new = write_checkpoint(tmp_path / "new", tiny_tensors(50))
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([pushable("a", base)]))
        pid = pid_of(supervisor, "a")
        await set_faults(supervisor, "a", {"/update_weights": {"kind": "hang"}})
        job = await supervisor.start_push(PushRequest(str(new)))
        await eventually(lambda: states(supervisor)["a"] == "updating")
        async with asyncio.timeout(30):
            await supervisor.down(Down(0.0))
        assert gone(pid)
        assert supervisor.state.journal.job(job).ended
        assert supervisor.state.locks.holders("turn") == []
        children = psutil.Process().children(recursive=True)
        assert not [c for c in children if any("weights.sender" in word for word in c.cmdline())]


async def test_two_downs_at_once_are_one(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        pids = [pid_of(supervisor, name) for name in ("a", "b")]
        await asyncio.gather(*(supervisor.down(Down(0.2)) for _ in range(2)))
        assert all(gone(pid) for pid in pids) and supervisor.state.processes() == []


async def test_a_supervisor_that_does_not_answer_is_given_up_at_the_deadline(
    tmp_path: Path,
) -> None:
    paths = FleetPaths(tmp_path, "stubs").prepare()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with (
        await asyncio.start_unix_server(silent, paths.socket),
        SupervisorClient.on_this_machine(paths) as client,
    ):
        with pytest.raises(DeadlineExceeded, match=r"did not answer in 0\.2 s"):
            await client._ask(Verb("status", NoneType, lambda request: 0.2), None, FleetStatus)


# --- verbs through the supervisor ----------------------------------------------------------------


async def test_a_partial_pause_puts_every_server_back_into_the_router(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([full_server("a"), full_server("b")], stub_router()))
        await set_faults(supervisor, "b", {"/pause": {"kind": "status"}})
        outcomes = await supervisor.pause(Pause(mode="keep", timeout_s=2.0))
        assert [o.status for o in outcomes] == ["rolled-back", "failed"]
        assert states(supervisor) == {"a": "ready", "b": "ready"}
        assert routed(supervisor) == {"a", "b"}


async def test_a_server_that_could_not_be_woken_is_not_routed(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([full_server("a"), full_server("b")], stub_router()))
        await supervisor.sleep(Sleep(level=1, timeout_s=2.0))
        oom = {"kind": "status", "text": "CUDA out of memory"}
        await set_faults(supervisor, "b", {"/wake_up": oom})
        outcomes = await supervisor.wake(Wake(timeout_s=2.0))
        assert [o.status for o in outcomes] == ["ok", "failed"]
        assert states(supervisor) == {"a": "ready", "b": "asleep"}
        assert routed(supervisor) == {"a"}
        # staged once more, then a restart: what an operator types
        assert (await supervisor.wake(Wake(tags=("weights",), servers=("b",), timeout_s=2.0)))[
            0
        ].status == "failed"


async def test_a_sleeping_server_is_out_of_the_router_and_back_when_it_is_awake(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([full_server("a"), full_server("b")], stub_router()))
        await supervisor.sleep(Sleep(level=1, servers=("a",), timeout_s=2.0))
        assert routed(supervisor) == {"b"}
        await supervisor.wake(Wake(servers=("a",), timeout_s=2.0))
        assert routed(supervisor) == {"a", "b"}


async def test_a_sleeping_server_that_dies_comes_back_asleep(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([full_server("a")]))
        await supervisor.sleep(Sleep(level=1, timeout_s=2.0))
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: supervisor.replicas["a"].phase != "up")
        await eventually(lambda: supervisor.replicas["a"].phase == "up")
        assert states(supervisor) == {"a": "asleep"}
        assert (await stub_state(supervisor, "a"))["asleep"]


async def test_a_verb_while_a_push_runs_is_refused_with_the_jobs_name(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    new = write_checkpoint(tmp_path / "new", tiny_tensors(50))
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([pushable("a", base)]))
        await set_faults(supervisor, "a", {"/update_weights": {"kind": "hang"}})
        job = await supervisor.start_push(PushRequest(str(new)))
        for verb in (Pause, Resume, Sleep, Wake):
            with pytest.raises(Exception, match=job):
                await supervisor.control(verb(timeout_s=1.0))


# --- status --------------------------------------------------------------------------------------


async def test_a_hung_server_costs_a_status_no_more_than_its_own_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.supervisor.fleet.STATUS_TIMEOUT_S", 0.3)
    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 60, "timeout_s": 1, "startup_timeout_s": 15}
        await bring_up(supervisor, fleet_plan([full_server("a"), full_server("b")], health=health))
        await set_faults(supervisor, "b", {"*": {"kind": "hang"}})
        async with asyncio.timeout(5):
            found = await report(supervisor)
        assert [r.name for r in found.replicas] == ["a", "b"]
        assert found.replicas[0].running is not None and found.replicas[1].running is None


async def test_a_half_dead_server_is_restarted_though_its_api_answers(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([full_server("a"), full_server("b")], stub_router()))
        pid = pid_of(supervisor, "a")
        await set_faults(supervisor, "a", {"/is_paused": {"kind": "status"}})
        await eventually(lambda: gone(pid))
        assert "a" not in routed(supervisor)
        await eventually(lambda: routed(supervisor) == {"a", "b"})


# --- router --------------------------------------------------------------------------------------


# --- replica -------------------------------------------------------------------------------------


# --- reboot --------------------------------------------------------------------------------------


async def test_after_a_reboot_nothing_is_signalled_and_up_starts_anew(tmp_path: Path) -> None:
    """Pids recorded before the reboot now belong to others, descendants too."""
    bystander = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        identity = identify(bystander.pid)
        assert identity is not None
        before = replace(identity, boot_id="another boot")
        paths = FleetPaths(tmp_path, "stubs").prepare()
        server = full_server("a")
        with FleetState(paths.database) as state:
            state.save_process(
                ProcessRow("a", "server", "running", "t", before, "h", server.host, server.port,
                           descendants=(before,))
            )  # fmt: skip
        async with supervising(tmp_path) as supervisor:
            await bring_up(supervisor, fleet_plan([server]))
            assert states(supervisor) == {"a": "ready"}
            assert pid_of(supervisor, "a") != bystander.pid
        assert bystander.returncode is None
    finally:
        bystander.kill()
        await bystander.wait()
