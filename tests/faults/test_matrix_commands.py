"""up, down, status and sync-weights as typed, with what can go wrong around them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from skyctl.core.requests import StatusQuery
from skyctl.errors import SkyctlError
from skyctl.store.paths import FleetPaths
from skyctl.store.schema import SCHEMA_VERSION
from skyctl.store.state import FleetState
from skyctl.supervisor.client import listening
from skyctl.supervisor.interface import SupervisorClient
from tests.faults.stub_fleet import ROOT, StubFleet, busy, until_said
from tests.pids import kill
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

BOUND_S = 60.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StubFleet]:
    """A fleet of two stubs; whatever still runs at the end is taken down."""
    fleet = StubFleet(tmp_path)
    fleet.write()
    yield fleet
    if (tmp_path / "home").exists():
        fleet.write()
        fleet.run("down", "--drain-timeout", "0")
    assert of_this_fleet(fleet) == []


def of_this_fleet(fleet: StubFleet) -> list[psutil.Process]:
    """Every process that was started with this fleet's state directory, however it lives now."""
    home = str(fleet.directory / "home")
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SKYCTL_HOME") == home and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


def state_file(fleet: StubFleet) -> Path:
    return fleet.directory / "home" / "fleets" / "stubs" / "state.sqlite"


def remember_a_push(fleet: StubFleet) -> None:
    """A state file with a line of history, as after a fleet that was up and is down."""
    FleetPaths(fleet.directory / "home", "stubs").prepare()
    with FleetState(state_file(fleet)) as state:
        state.journal.record_push(
            "push-1", ok=True, version="step-1", checkpoint="c", checkpoint_digest=None, result={}
        )


def one_line_error(stderr: str) -> str:
    assert "Traceback" not in stderr
    [line] = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


# --- up: ports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["port", "metrics_port"])
def test_a_taken_port_of_the_router_is_refused_and_its_holder_named(
    fleet: StubFleet, key: str
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        fleet.write(extra=f"router: {{{key}: {port}}}")
        message = one_line_error(fleet.run("up", expect=2).stderr)
    assert f"port {port} is taken by pid {os.getpid()}" in message
    assert not list((fleet.directory / "home").rglob("*.log"))


# --- up: interrupted -----------------------------------------------------------------------------


def test_a_killed_up_goes_on_and_the_next_joins_it(fleet: StubFleet) -> None:
    fleet.write(faults='{"startup_delay_s": 2}')
    first = fleet.start("up")
    until_said(first, "starting")
    first.kill()
    first.communicate()
    fleet.run("up")
    rows = fleet.replicas()
    assert {row["state"] for row in rows.values()} == {"ready"}
    assert {row["restarts"] for row in rows.values()} == {0}


def test_a_supervisor_killed_in_the_middle_of_an_up_leaves_one_process_per_server(
    fleet: StubFleet,
) -> None:
    fleet.write(faults='{"startup_delay_s": 2}')
    up = fleet.start("up")
    until_said(up, "starting")
    pid = fleet.json("status")["data"]["supervisor_pid"]
    kill(pid)
    _, stderr = up.communicate(timeout=60)
    assert up.returncode != 0 and "Traceback" not in stderr
    fleet.run("up")
    rows = fleet.replicas()
    assert {row["state"] for row in rows.values()} == {"ready"}
    servers = [p for p in of_this_fleet(fleet) if "tests.stub.server" in " ".join(p.cmdline())]
    assert sorted(p.pid for p in servers) == sorted(row["pid"] for row in rows.values())


def test_a_second_ctrl_c_leaves_at_once_and_what_is_left_can_be_stopped(fleet: StubFleet) -> None:
    fleet.write(replicas=1, faults='{"startup_delay_s": 30}')
    up = fleet.start("up")
    until_said(up, "starting")
    up.send_signal(signal.SIGINT)
    until_said(up, "Ctrl-C again")
    up.send_signal(signal.SIGINT)
    _, stderr = up.communicate(timeout=30)
    assert up.returncode == 130 and "Traceback" not in stderr, stderr
    fleet.run("down", "--drain-timeout", "0")
    assert fleet.json("status")["data"]["health"] == "down"


# --- up: a full disk -----------------------------------------------------------------------------


def files_of_at_most(size: int) -> None:
    """In a child before its exec: no file may grow beyond `size` bytes (an error, no signal)."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def run_limited(fleet: StubFleet, size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "skyctl", *arguments],
        cwd=fleet.directory,
        env={
            **os.environ,
            "SKYCTL_HOME": str(fleet.directory / "home"),
            "PYTHONPATH": str(ROOT),
        },
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: files_of_at_most(size),
    )


def test_a_disk_that_takes_no_more_stops_an_up_before_anything_is_spawned(
    fleet: StubFleet,
) -> None:
    remember_a_push(fleet)
    done = run_limited(fleet, 100, "up")
    assert done.returncode == 1, done.stderr
    one_line_error(done.stderr)
    assert of_this_fleet(fleet) == []
    assert "step-1" in fleet.run("weights", "history").stdout, "the old state is intact"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_full_file_system_stops_an_up_before_anything_is_spawned(fleet: StubFleet) -> None:
    """A file system of 64 KiB of our own, in a user namespace, filled to the last byte."""
    home = fleet.directory / "home"
    home.mkdir()
    script = (
        f"mount -t tmpfs -o size=64k tmpfs {home} || exit 77; "
        f"mkdir -p {home}/fleets; head -c 1000000 /dev/zero > {home}/fill 2>/dev/null; "
        f"{sys.executable} -m skyctl up; code=$?; "
        f"find {home} -name '*.log' | wc -l; exit $code"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=fleet.directory,
        env={**os.environ, "SKYCTL_HOME": str(home), "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.returncode == 1, done.stderr
    one_line_error(done.stderr)
    assert done.stdout.strip() == "0"
    assert of_this_fleet(fleet) == []


# --- the state file ------------------------------------------------------------------------------


def test_a_state_file_of_another_skyctl_is_refused_by_every_command_and_left_alone(
    fleet: StubFleet,
) -> None:
    remember_a_push(fleet)
    with sqlite3.connect(state_file(fleet)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    for command in (["up"], ["status"], ["down"], ["weights", "history"]):
        message = one_line_error(fleet.run(*command, expect=1).stderr)
        assert "written by another skyctl" in message, command
    with sqlite3.connect(state_file(fleet)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION + 1,)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def test_a_state_file_lost_with_its_supervisor_is_rebuilt_from_live_processes(
    fleet: StubFleet,
) -> None:
    """Nobody else remembers the servers then: they are found, and no orphan stays."""
    fleet.run("up", "--no-router")
    status = fleet.json("status")["data"]
    kill(status["supervisor_pid"])
    file = state_file(fleet)
    for suffix in ("-wal", "-shm"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)
    file.write_bytes(b"this is no database" * 1000)
    fleet.run("status")
    assert [p for p in file.parent.iterdir() if ".corrupt-" in p.name]
    fleet.run("down", "--drain-timeout", "0")
    assert of_this_fleet(fleet) == []


# --- recover --------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["the one it found", "its own"])
def test_a_supervisor_that_dies_while_recover_follows_it_is_replaced_and_no_server_ended(
    fleet: StubFleet, who: str
) -> None:
    fleet.write(faults='{"startup_delay_s": 3}')
    fleet.run("up")
    status = fleet.json("status")["data"]
    before = {name: row["pid"] for name, row in fleet.replicas().items()}
    supervisor, router = status["supervisor_pid"], status["router"]["pid"]
    # either way stubs-1 gets a new process, which takes some seconds
    if who == "its own":
        kill(before["stubs-1"])
        kill(supervisor)
    else:
        with FleetState(state_file(fleet)) as state:
            state.update_server("stubs-1", quarantine="something to recover")
    recovering = fleet.start("recover", "--yes", "--json")
    victim = followed(fleet, supervisor if who == "its own" else None)
    kill(victim)
    stdout, stderr = recovering.communicate(timeout=60)
    assert recovering.returncode == 0, stdout + stderr
    status = fleet.json("status")["data"]
    assert status["health"] == "healthy", status
    assert status["supervisor_pid"] != victim and status["router"]["pid"] == router
    assert fleet.replicas()["stubs-0"]["pid"] == before["stubs-0"]


def followed(fleet: StubFleet, dead: int | None) -> int:
    """The supervisor, not the `dead` one, once an operation of its own is under way."""
    paths = FleetPaths(fleet.directory / "home", "stubs")

    async def is_busy() -> bool:
        async with SupervisorClient.on_this_machine(paths) as client:
            operation = (await client.status(StatusQuery(fresh=False))).operation
        return operation is not None and operation.ended_at is None

    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, SkyctlError):
            pid = listening(paths)
            if pid != dead and asyncio.run(is_busy()):
                return pid
        time.sleep(0.02)
    raise AssertionError("nothing was seen under way")


# --- a server that starts again -------------------------------------------------------------------


def test_a_server_that_starts_again_never_answers_with_the_weights_it_was_started_from(
    fleet: StubFleet,
) -> None:
    """Asked directly: the router sends nobody there."""
    slow = '{"/pause": {"kind": "delay", "seconds": 1}}'  # the first thing its admission does
    fleet.write(faults=slow, extra="weight_transfer: {transport: disk}")
    write_checkpoint(fleet.directory / "model")
    write_checkpoint(fleet.directory / "next", tiny_tensors(2))
    fleet.run("up", "--no-router")
    url = fleet.replicas()["stubs-0"]["url"]
    key = (state_file(fleet).parent / "api.key").read_text().strip()
    client = httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=20.0)
    model = fleet.json("urls")["data"]["model"]
    body = {"model": model, "prompt": "ab", "max_tokens": 6}

    def answer() -> str:
        return str(client.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"])

    with client:
        before = answer()
        fleet.run("sync-weights", "next")
        after = answer()
        assert after != before
        kill(fleet.replicas()["stubs-0"]["pid"])
        refused = 0
        answered = False
        while not answered:
            with contextlib.suppress(httpx.TransportError):
                response = client.post(f"{url}/v1/completions", json=body)
                assert response.status_code in (200, 503), response.text
                refused += response.status_code == 503
                answered = response.status_code == 200
        assert response.json()["choices"][0]["text"] == after
        assert refused > 0


# --- versions that differ ------------------------------------------------------------------------


def test_mixed_versions_of_vllm_are_reported_and_a_push_is_refused(fleet: StubFleet) -> None:
    write_checkpoint(fleet.directory / "model")
    groups = "[{count: 1}, {name: old, count: 1, args: {vllm-version: 0.31.0}}]"
    fleet.write(replicas=groups, extra="weight_transfer: {transport: disk}")  # type: ignore[arg-type]
    write_checkpoint(fleet.directory / "model")
    write_checkpoint(fleet.directory / "next", tiny_tensors(2))
    fleet.run("up", "--no-router")
    message = one_line_error(fleet.run("sync-weights", "next", expect=1).stderr)
    assert "different versions of vLLM" in message and "0.31.0" in message
    assert {row["state"] for row in fleet.replicas().values()} == {"ready"}
    doctor = fleet.run("doctor", expect=1)
    assert "0.31.0" in doctor.stdout


# --- down ----------------------------------------------------------------------------------------


def test_ctrl_c_in_a_drain_leaves_a_fleet_that_the_next_down_stops_at_once(
    fleet: StubFleet,
) -> None:
    fleet.write(extra="args: {token-delay-s: 0.2}")
    # the default's 30 s to drain
    text = (fleet.directory / "fleet.yaml").read_text()
    (fleet.directory / "fleet.yaml").write_text(text.replace("drain_timeout_s: 1", ""))
    fleet.run("up", "--no-router")
    asking = busy(fleet)
    down = fleet.start("down")
    until_said(down, "draining for at most 30 s")
    while (fleet.json("status")["data"]["operation"] or {}).get("kind") != "down":
        pass
    down.send_signal(signal.SIGINT)
    _, stderr = down.communicate(timeout=30)
    assert down.returncode == 130 and "Traceback" not in stderr, stderr
    fleet.run("down", "--drain-timeout", "0")
    assert fleet.json("status")["data"]["health"] == "down"
    asking.kill()
    asking.communicate()
    assert of_this_fleet(fleet) == []


@pytest.mark.parametrize("command", ["up", "recover"])
def test_a_command_that_looked_just_before_a_down_began_waits_for_its_end(
    fleet: StubFleet, command: str
) -> None:
    fleet.write(extra="args: {token-delay-s: 0.2}")
    fleet.run("up", "--no-router")
    asking = busy(fleet)
    down = fleet.start("down", "--drain-timeout", "3")
    while (fleet.json("status")["data"]["operation"] or {}).get("kind") != "down":
        pass
    with FleetState(state_file(fleet)) as state:
        state.set("going_down", "")  # as it was when the command looked
        state.update_server("stubs-1", quarantine="something to recover")
    if command == "up":
        fleet.run("up", "--no-router")
        assert fleet.json("status")["data"]["health"] == "healthy"
    else:
        fleet.run("recover", "--yes")
        assert fleet.json("status")["data"]["health"] == "down"
    assert down.wait(timeout=30) == 0
    asking.kill()
    asking.communicate()
    down.communicate()


def test_two_downs_at_once_both_say_that_it_is_down(fleet: StubFleet) -> None:
    fleet.run("up")
    racers = [fleet.start("down", "--drain-timeout", "0") for _ in range(2)]
    for racer in racers:
        stdout, stderr = racer.communicate(timeout=60)
        assert racer.returncode == 0, stdout + stderr
    assert of_this_fleet(fleet) == []


def test_a_killed_down_is_finished_by_the_supervisor(fleet: StubFleet) -> None:
    fleet.run("up")
    pid = fleet.json("status")["data"]["supervisor_pid"]
    down = fleet.start("down")
    until_said(down, "stopping fleet")
    supervisor = psutil.Process(pid)
    down.kill()
    down.communicate()
    # killed before it was asked, the fleet runs on as it was; after, it goes down by itself
    psutil.wait_procs([supervisor], timeout=3)
    fleet.run("down", "--drain-timeout", "0")
    assert of_this_fleet(fleet) == []


def test_an_up_during_a_down_waits_for_its_end_and_starts_the_fleet_anew(
    fleet: StubFleet,
) -> None:
    fleet.write(extra="args: {token-delay-s: 0.2}")
    fleet.run("up", "--no-router")
    before = fleet.replicas()["stubs-0"]["pid"]
    asking = busy(fleet)
    down = fleet.start("down", "--drain-timeout", "2")
    while (fleet.json("status")["data"]["operation"] or {}).get("kind") != "down":
        pass
    fleet.run("up", "--no-router")
    assert down.wait(30) == 0
    asking.kill()
    asking.communicate()
    row = fleet.replicas()["stubs-0"]
    assert row["state"] == "ready" and row["pid"] != before


# --- sync-weights --------------------------------------------------------------------------------


def test_ctrl_c_leaves_a_push_to_the_supervisor_and_a_second_push_is_told_of_it(
    fleet: StubFleet,
) -> None:
    faults = '{"/collective_rpc": {"kind": "delay", "seconds": 1.5}}'
    fleet.write(faults=faults, extra="weight_transfer: {transport: disk}")
    write_checkpoint(fleet.directory / "model")
    write_checkpoint(fleet.directory / "next", tiny_tensors(2))
    fleet.run("up", "--no-router")
    push = fleet.start("sync-weights", "next")
    until_said(push, "pause")
    refused = fleet.json("sync-weights", "next", expect=1)["error"]
    assert refused["kind"] == "ConflictError" and "push-1" in refused["message"]
    push.send_signal(signal.SIGINT)
    _, stderr = push.communicate(timeout=30)
    assert push.returncode == 130 and "skyctl jobs wait push-1" in stderr
    fleet.run("jobs", "wait", "push-1")
    rows = fleet.replicas()
    assert {row["state"] for row in rows.values()} == {"ready"}
    assert len({row["weight_version"] for row in rows.values()} - {None}) == 1
