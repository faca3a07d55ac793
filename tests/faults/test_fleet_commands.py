"""up, status, logs, restart, scale and down as a user types them, on stubs in place of vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from skyctl.store.state import FleetState
from tests.faults.stub_fleet import StubFleet, until_said
from tests.pids import gone, kill
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path)
    fleet.write()
    yield fleet
    if (tmp_path / "home").exists():
        fleet.write()  # in case the test broke the file
        fleet.run("down", "--drain-timeout", "0")


def test_events_are_shown_since_a_time_and_followed(fleet: StubFleet) -> None:
    assert fleet.run("events").stdout == "no events yet\n"
    fleet.run("up")
    assert "there are no jobs yet" in fleet.run("jobs", "show", expect=4).stderr
    assert fleet.run("events").stdout.splitlines()[-1].endswith("fleet    up: done")
    following = fleet.start("events", "--follow", "-n", "1")
    assert following.stdout is not None and following.stdout.readline().endswith("up: done\n")
    began = time.time()
    fleet.run("pause")
    assert following.stdout.readline().endswith("fleet  pause (mode abort): 2 of 2 servers\n")
    following.send_signal(signal.SIGINT)
    assert following.wait(20) == 0
    [pause] = fleet.json("events", "--since", datetime.fromtimestamp(began).isoformat())["data"][
        "events"
    ]
    assert (pause["subject"], pause["at"] >= began) == ("fleet", True)
    every = fleet.json("events", "--since", "10m")["data"]["events"]
    assert every[-1] == pause and len(every) > 2
    refused = fleet.run("events", "--since", "yesterday", expect=2).stderr
    assert "--since: 'yesterday' is not a time" in refused


@pytest.mark.parametrize("typed", ["logs --follow", "status --watch"])
def test_what_runs_until_ctrl_c_ends_well_with_it(fleet: StubFleet, typed: str) -> None:
    fleet.run("up")
    shown = fleet.start(*typed.split())
    assert shown.stdout is not None and shown.stdout.readline()
    shown.send_signal(signal.SIGINT)
    assert shown.wait(20) == 0


def test_the_life_of_a_fleet(fleet: StubFleet) -> None:
    assert fleet.json("status")["data"]["health"] == "down"
    fleet.json("status", "--exit-code", expect=4)
    refused = fleet.json("restart", expect=4)
    assert "skyctl up" in refused["error"]["hint"]

    assert fleet.json("ls")["data"]["fleets"] == []

    up = fleet.run("up")
    assert "stubs-0: ready" in up.stderr and "is ready after" in up.stderr
    assert "healthy" in up.stdout
    again = fleet.run("up")
    assert "nothing to do" in again.stderr
    rows = fleet.replicas()
    assert {row["state"] for row in rows.values()} == {"ready"}
    assert all(row["routed"] for row in rows.values())

    [listed] = fleet.json("ls")["data"]["fleets"]
    assert (listed["name"], listed["state"], listed["servers"]) == ("stubs", "healthy", 2)
    assert listed["supervisor_pid"] == fleet.json("status")["data"]["supervisor_pid"]
    assert "healthy" in fleet.run("ls").stdout

    logs = fleet.run("logs", "-n", "5")
    assert "stubs-0    │ " in logs.stdout and "supervisor │ " in logs.stdout

    fleet.run("pause", "stubs-0")
    assert "skyctl resume stubs-0" in fleet.run("status", "--exit-code").stdout
    fleet.run("pause")
    paused = fleet.json("status", "--exit-code", expect=1)["data"]
    assert paused["health"] == "paused" and paused["reasons"][0]["hint"] == "skyctl resume"
    fleet.run("resume")
    assert fleet.json("status", "--exit-code")["data"]["health"] == "healthy"

    fleet.run("scale", "3")
    assert {name: row["pid"] for name, row in fleet.replicas().items()}.items() >= {
        (name, row["pid"]) for name, row in rows.items()
    }
    assert len(fleet.replicas()) == 3
    fleet.run("scale", "1")
    fleet.run("restart", "stubs-0")
    [(name, row)] = fleet.replicas().items()
    assert name == "stubs-0" and row["pid"] != rows["stubs-0"]["pid"] and row["routed"]
    runs = fleet.run("logs", "stubs-0", "-n", "1000").stdout.count("│ ── skyctl starts stubs-0 at ")
    assert runs == 2
    lately = fleet.run("logs", "stubs-0", "--since", "1h").stdout
    assert lately == fleet.run("logs", "stubs-0", "-n", "1000").stdout
    assert fleet.json("logs", "--until", "1h")["data"]["logs"]["stubs-0"] == []
    assert "--until: 'soon' is not a time" in fleet.run("logs", "--until", "soon", expect=2).stderr

    unknown = fleet.json("restart", "stubs-7", expect=4)
    assert "stubs-0" in unknown["error"]["hint"]
    fleet.json("logs", "stubs-7", expect=4)

    down = fleet.run("down")
    assert "stopped router, stubs-0" in down.stdout
    assert not psutil.pid_exists(row["pid"])
    assert "nothing was running" in fleet.run("down").stdout
    [listed] = fleet.json("ls")["data"]["fleets"]
    assert (listed["state"], listed["servers"]) == ("down", None)


def test_a_taken_port_is_refused_before_anything_starts(fleet: StubFleet) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        fleet.write(replicas=1, extra=f"ports: [{port}]")
        refused = fleet.json("up", expect=2)
        assert str(port) in refused["error"]["message"]
        assert f"pid {os.getpid()}" in refused["error"]["message"]
        assert fleet.json("status")["data"]["health"] == "down"
        assert not list((fleet.directory / "home").rglob("*.log"))


def test_an_up_that_down_ends_says_so(fleet: StubFleet) -> None:
    fleet.write(replicas=1, faults='{"startup_delay_s": 600}')
    up = fleet.start("up")
    deadline = time.monotonic() + 30
    while (health := fleet.json("status")["data"]["health"]) == "down":
        assert time.monotonic() < deadline
    assert health == "starting"
    fleet.run("down", "--drain-timeout", "0")
    _, said = up.communicate(timeout=60)
    assert up.returncode == 1
    assert "error: up was stopped by `skyctl down`\nhint: start it again: skyctl up\n" in said
    assert "failed" not in said


def test_a_replica_that_exits_at_start_fails_up_with_the_end_of_its_log(fleet: StubFleet) -> None:
    fleet.write(replicas=1, faults='{"exit_at_start": 3}')
    failed = fleet.run("up", expect=1)
    assert "told to exit at start" in failed.stderr
    assert "stubs-0 exited with code 3" in failed.stderr
    assert "skyctl logs stubs-0" in failed.stderr
    status = fleet.json("status", "--exit-code", expect=4)["data"]
    assert status["replicas"][0]["state"] == "failed"
    # the file is mended: up tries again, and shows nothing of the run before
    fleet.write(replicas=1, faults='{"startup_delay_s": 600}')
    late = fleet.json("up", "--timeout", "3", expect=124)
    fleet.run("wait", "--timeout", "0", expect=124)
    status = fleet.json("status")["data"]
    assert status["health"] == "starting" and "told to exit" not in json.dumps(status), late


def test_a_rollback_of_the_first_push_brings_back_what_servers_were_started_with(
    fleet: StubFleet,
) -> None:
    base = write_checkpoint(fleet.directory / "model", tiny_tensors(1))
    new = write_checkpoint(fleet.directory / "new", tiny_tensors(2))
    fleet.run("up")
    fleet.json("sync-weights", "--rollback", expect=4)
    fleet.run("sync-weights", str(new), "--weight-version", "next")
    back = fleet.json("sync-weights", "--rollback")["data"]["job"]["result"]
    assert (back["version"], back["checkpoint"]) == ("base", str(base))
    assert {row["weight_version"] for row in fleet.replicas().values()} == {"base"}
    again = fleet.json("sync-weights", "--rollback")["data"]["job"]["result"]
    assert again["version"] == "next"


def test_a_failed_up_with_rollback_leaves_nothing(fleet: StubFleet) -> None:
    fleet.write(replicas=1, faults='{"exit_at_start": 3}')
    failed = fleet.json("up", "--rollback", expect=1)
    assert "--rollback" in failed["error"]["hint"]
    assert fleet.json("status")["data"]["replicas"] == []
    assert "nothing was running" in fleet.run("down").stdout


def test_two_ups_at_once_make_one_fleet(fleet: StubFleet) -> None:
    racers = [fleet.start("up"), fleet.start("up")]
    for racer in racers:
        stdout, stderr = racer.communicate(timeout=60)
        assert racer.returncode == 0, stdout + stderr
    rows = fleet.replicas()
    assert len(rows) == 2 and {row["state"] for row in rows.values()} == {"ready"}
    assert {row["restarts"] for row in rows.values()} == {0}


def test_ctrl_c_during_up_stops_what_it_started(fleet: StubFleet) -> None:
    fleet.write(replicas=1, faults='{"startup_delay_s": 30}')
    up = fleet.start("up")
    until_said(up, "starting")
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)
    assert up.returncode == 130
    assert fleet.json("status")["data"]["replicas"] == []


def test_a_wait_that_is_too_short_ends_with_124_and_the_fleet_goes_on(fleet: StubFleet) -> None:
    fleet.write(replicas=1, faults='{"startup_delay_s": 3}')
    short = fleet.json("up", "--timeout", "0.5", expect=124)
    assert "skyctl status" in short["error"]["hint"]
    fleet.run("up")
    assert fleet.replicas()["stubs-0"]["state"] == "ready"


def test_a_fleet_whose_supervisor_was_killed_gets_another_with_the_next_command(
    fleet: StubFleet,
) -> None:
    fleet.run("up")
    fleet.run("scale", "3")
    before = fleet.json("status")["data"]
    kill(before["supervisor_pid"])
    found = fleet.json("recover", "--dry-run")["data"]["findings"]
    assert {row["found"] for row in found} == {"unsupervised"} and len(found) == 3
    fleet.run("pause", "--mode", "keep")
    after = fleet.json("status")["data"]
    assert after["supervisor_pid"] != before["supervisor_pid"]
    assert after["router"]["pid"] == before["router"]["pid"]
    assert [r["pid"] for r in after["replicas"]] == [r["pid"] for r in before["replicas"]]
    assert {r["state"] for r in after["replicas"]} == {"paused"}


def test_a_supervisor_that_cannot_be_replaced_is_missed_and_said_so(fleet: StubFleet) -> None:
    fleet.write(extra="api_key_env: STUB_KEY_THAT_IS_NOT_SET")
    fleet.environ["STUB_KEY_THAT_IS_NOT_SET"] = "key"
    fleet.run("up", "--no-router")
    kill(fleet.json("status")["data"]["supervisor_pid"])
    fleet.environ.clear()
    left = fleet.run("status")  # with --exit-code it would plan, too
    assert "unsupervised" in left.stdout and "STUB_KEY_THAT_IS_NOT_SET" in left.stdout
    refused = fleet.json("pause", expect=4)["error"]
    assert "STUB_KEY_THAT_IS_NOT_SET" in refused["message"] + refused["hint"]


def test_a_down_that_was_cut_short_is_not_undone_but_finished(fleet: StubFleet) -> None:
    fleet.run("up", "--no-router")
    before = fleet.json("status")["data"]
    kill(before["supervisor_pid"])
    with FleetState(fleet.directory / "home" / "fleets" / "stubs" / "state.sqlite") as state:
        state.set("going_down", "1")
    left = fleet.run("status", "--exit-code", expect=1)
    assert "cut short" in left.stdout and "skyctl down" in left.stdout
    done = fleet.json("recover", "--yes")["data"]["recovered"]
    assert {row["action"] for row in done} == {"down"} and all(row["ok"] for row in done)
    assert all(gone(row["pid"]) for row in before["replicas"])


def test_after_a_reboot_the_state_is_stale_and_nothing_is_signalled(fleet: StubFleet) -> None:
    fleet.run("up", "--no-router")
    before = fleet.json("status")["data"]
    kill(before["supervisor_pid"])
    database = fleet.directory / "home" / "fleets" / "stubs" / "state.sqlite"
    with FleetState(database) as state:
        rows = state.processes()
        for row in rows:
            assert row.identity is not None
            state.save_process(replace(row, identity=replace(row.identity, boot_id="before")))
    stale = fleet.run("status", "--exit-code", expect=4)
    assert "machine was restarted" in stale.stdout
    assert fleet.json("recover")["data"]["findings"][0]["found"] == "stale"
    assert not any(gone(row["pid"]) for row in before["replicas"])
    with FleetState(database) as state:
        for row in rows:
            state.save_process(row)  # so that they are found at the end


def test_status_loads_neither_torch_nor_vllm_nor_a_web_server(fleet: StubFleet) -> None:
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "skyctl", "status"],
        cwd=fleet.directory,
        env={**os.environ, "SKYCTL_HOME": str(fleet.directory / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip() for line in traced.stderr.splitlines()}
    assert "skyctl.output" in loaded
    assert loaded.isdisjoint({"torch", "vllm", "transformers", "uvicorn", "starlette"})
