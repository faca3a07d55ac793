"""A changed fleet file by the real command: `plan` and `up --dry-run` show what `up` then does.
`SKYCTL_TEST_CHANGES=200` tries so many random changes.
"""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.stub_fleet import ROOT, StubFleet, until_said


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path)
    yield fleet
    fleet.run("down")


def pids(fleet: StubFleet) -> dict[str, int]:
    status = fleet.json("status")["data"]
    found = {row["name"]: row["pid"] for row in status["replicas"]}
    return found | ({"router": status["router"]["pid"]} if status["router"] else {})


def test_up_does_what_the_plan_shows_over_random_changes(fleet: StubFleet) -> None:
    dice = random.Random(11)
    fleet.write(replicas=2)
    fleet.run("up")
    before = pids(fleet)
    for _ in range(int(os.environ.get("SKYCTL_TEST_CHANGES", "10"))):
        faults = dice.choice(["{}", "{ }"])
        length = dice.choice(["", "args: {max-model-len: 2048}\n"])
        router = dice.choice(["", "router: {policy: random}\n", "router: {enabled: false}\n"])
        fleet.write(dice.randint(1, 4), faults, length + router)
        changes = fleet.json("plan")["data"]["changes"]
        fleet.run("up", "--yes")
        after = pids(fleet)
        did = dict.fromkeys(before.keys() - after.keys(), "stop")
        did |= dict.fromkeys(after.keys() - before.keys(), "start")
        did |= {
            name: "keep" if before[name] == after[name] else "restart"
            for name in before.keys() & after.keys()
        }
        assert did == {change["name"]: change["kind"] for change in changes}
        before = after


def test_status_and_plan_show_what_is_not_applied(fleet: StubFleet) -> None:
    fleet.write(replicas=1)
    fleet.run("up")
    file = fleet.directory / "fleet.yaml"
    file.write_text(file.read_text() + "# a remark\n")
    assert fleet.json("status")["data"]["unapplied"] is False
    fleet.write(replicas=2, extra="args: {max-model-len: 2048}\nenv: {A_TOKEN: hunter2}")
    fleet_file = file.read_text().replace("env: {STUB_FAULTS: '{}'}\n", "")
    file.write_text(fleet_file)
    assert "has changes that are not applied  → skyctl plan" in fleet.run("status").stdout
    lines = fleet.run("plan").stdout.splitlines()
    shown = lines[lines.index("fleet stubs would change:") :]
    assert "  ~ restart stubs-0" in shown and "  + start   stubs-1" in shown
    assert "        --max-model-len  not set → 2048" in shown
    assert "        A_TOKEN          not set → ***" in shown
    assert "hunter2" not in "".join(lines)
    before = pids(fleet)
    assert fleet.run("up", "--dry-run").stdout.splitlines()[:3] == shown[:3]
    assert pids(fleet) == before
    fleet.run("up")
    assert fleet.run("up", "--dry-run").stdout == "fleet stubs is up to date, nothing to do\n"
    assert fleet.json("status")["data"]["unapplied"] is False


def test_a_file_that_is_not_applied_stays_so_when_another_supervisor_takes_over(
    fleet: StubFleet,
) -> None:
    fleet.write(replicas=1)
    fleet.run("up")
    fleet.write(replicas=1, extra="args: {max-model-len: 2048}")
    status = fleet.json("status")["data"]
    os.kill(status["supervisor_pid"], signal.SIGKILL)
    assert fleet.json("status")["data"]["unapplied"] is True
    os.kill(pids(fleet)["stubs-0"], signal.SIGKILL)
    while fleet.replicas()["stubs-0"]["restarts"] == 0:
        pass
    fleet.run("wait")
    assert "--max-model-len  not set → 2048" in fleet.run("plan").stdout


@pytest.mark.parametrize(("answer", "changed"), [("n", False), ("y", True)])
def test_on_a_terminal_up_asks_before_it_restarts(
    fleet: StubFleet, answer: str, changed: bool
) -> None:
    fleet.write(replicas=1)
    fleet.run("up")
    fleet.write(replicas=1, extra="args: {max-model-len: 2048}")
    before = pids(fleet)
    user, terminal = pty.openpty()
    environ = {**os.environ, "SKYCTL_HOME": str(fleet.directory / "home"), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "skyctl", "up"],
        cwd=fleet.directory,
        env={**environ, "PYTHONPATH": str(ROOT)},
        stdin=terminal,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    os.close(terminal)
    screen = b""
    while b"do this?" not in screen:
        screen += os.read(user, 4096)
    assert b"--max-model-len  \x1b[31mnot set" in screen
    os.write(user, answer.encode() + b"\n")
    try:
        while os.read(user, 4096):
            pass
    except OSError:  # it has ended
        pass
    os.close(user)
    assert process.wait(60) == (0 if changed else 130)
    assert (pids(fleet) != before) is changed


def length(fleet: StubFleet) -> set[str | None]:
    """What the servers run with, by what a file without it would change."""
    text = (fleet.directory / "fleet.yaml").read_text()
    fleet.write(replicas=2)
    changes = fleet.json("plan")["data"]["changes"]
    (fleet.directory / "fleet.yaml").write_text(text)
    servers = [change for change in changes if change["name"] != "router"]
    return {next((d["before"] for d in s["differences"]), None) for s in servers}


def test_undo_returns_to_the_file_before_and_a_second_one_comes_back(fleet: StubFleet) -> None:
    fleet.write(replicas=2)
    fleet.run("up")
    none = fleet.json("rollout", "undo", expect=4)["error"]
    assert "no earlier file" in none["message"] and none["hint"].endswith("skyctl up")
    fleet.write(replicas=2, extra="args: {max-model-len: 2048}")
    fleet.run("up")
    assert length(fleet) == {"2048"}
    assert "2048 → not set" in fleet.run("rollout", "undo", "--dry-run").stdout
    assert length(fleet) == {"2048"}
    fleet.run("rollout", "undo")
    assert length(fleet) == {None}
    assert fleet.json("status")["data"]["unapplied"] is True
    fleet.run("rollout", "undo")
    assert length(fleet) == {"2048"}
    assert fleet.json("status")["data"]["unapplied"] is False


def test_undo_of_a_fleet_without_its_files_router_starts_none(fleet: StubFleet) -> None:
    fleet.write(replicas=2)
    fleet.run("up", "--no-router")
    assert "no earlier file" in fleet.json("rollout", "undo", expect=4)["error"]["message"]
    fleet.run("scale", "3")
    shown = fleet.json("rollout", "undo", "--dry-run")["data"]["changes"]
    assert [change["name"] for change in shown if change["kind"] != "keep"] == ["stubs-2"]
    fleet.write(replicas=2, extra="args: {max-model-len: 2048}")
    fleet.run("up", "--no-router")
    shown = fleet.json("rollout", "undo", "--dry-run")["data"]["changes"]
    assert {change["name"]: change["kind"] for change in shown} == dict.fromkeys(
        ("stubs-0", "stubs-1"), "restart"
    )
    assert fleet.json("status")["data"]["unapplied"] is False
    fleet.write(replicas=2, extra="args: {max-model-len: 4096}")
    assert fleet.json("status")["data"]["unapplied"] is True
    fleet.run("rollout", "undo")
    assert fleet.json("status")["data"]["router"] is None
    assert length(fleet) == {None}


def test_undo_after_a_change_that_was_left_half_done_returns_to_what_was_applied(
    fleet: StubFleet,
) -> None:
    fleet.write(replicas=2)
    fleet.run("up")
    fleet.write(replicas=2, faults='{"exit_at_start": true}')
    fleet.run("up", "--no-undo", expect=1)
    assert fleet.replicas()["stubs-0"]["state"] == "failed"
    untouched = fleet.replicas()["stubs-1"]["pid"]
    fleet.run("rollout", "undo")
    rows = fleet.replicas()
    assert {row["state"] for row in rows.values()} == {"ready"}
    assert rows["stubs-1"]["pid"] == untouched


def test_a_roll_that_was_interrupted_is_continued_by_up(fleet: StubFleet) -> None:
    fleet.write(replicas=2)
    fleet.run("up")
    before = pids(fleet)
    fleet.write(replicas=2, faults='{"startup_delay_s": 1.5}')
    process = fleet.start("up")
    until_said(process, "stubs-1: st")
    process.send_signal(signal.SIGINT)
    _, notes = process.communicate(timeout=60)
    assert process.returncode == 130 and "go on with it: skyctl up" in notes
    between = pids(fleet)
    assert between["stubs-0"] != before["stubs-0"]
    shown = {c["name"]: c["kind"] for c in fleet.json("plan")["data"]["changes"]}
    assert shown == {"stubs-0": "keep", "stubs-1": "restart", "router": "keep"}
    fleet.run("up")
    after = pids(fleet)
    assert after["stubs-0"] == between["stubs-0"] and after["stubs-1"] != between["stubs-1"]
