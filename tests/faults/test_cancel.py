"""`jobs cancel` at each stage of a push, by the real command: the fleet is free after it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.shell_commands import attached
from tests.faults.stub_fleet import StubFleet, busy, until_said, versions
from tests.pids import kill
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path)
    write_checkpoint(tmp_path / "next", tiny_tensors(2))
    yield fleet
    fleet.run("down", "--drain-timeout", "0")


@pytest.mark.parametrize(
    ("stage", "slow"),
    [("preflight", "/collective_rpc"), ("pause", "/pause"), ("update", "/collective_rpc")],
)
def test_a_cancelled_push_is_undone_before_its_first_byte_and_completes_later(
    fleet: StubFleet, stage: str, slow: str
) -> None:
    delay = f'{{"{slow}": {{"kind": "delay", "seconds": 1.5}}}}'
    fleet.write(faults=delay, extra="weight_transfer: {transport: disk}")
    write_checkpoint(fleet.directory / "model")
    fleet.run("up")
    before = versions(fleet)
    push = fleet.start("sync-weights", "next", "--weight-version", "v1")
    until_said(push, stage)
    twice = fleet.start("jobs", "cancel", "push-1")
    printed = fleet.run("jobs", "cancel", "push-1").stdout
    after = versions(fleet)
    printed += twice.communicate(timeout=30)[0]
    assert twice.returncode == 0
    fleet.run("pause")  # nothing has the fleet any more
    fleet.run("resume")
    push.communicate(timeout=30)
    if stage == "update":
        assert "push-1 was too far to be undone: succeeded" in printed
        assert push.returncode == 0 and versions(fleet) == after == {"v1"}
    else:
        assert "push-1 is cancelled; the servers keep their old weights" in printed
        assert push.returncode == 1 and versions(fleet) == after == before
    again = fleet.json("jobs", "cancel", "push-1")["data"]["job"]
    assert again["state"] == ("succeeded" if stage == "update" else "interrupted")
    assert "push-1 has ended before" in fleet.run("jobs", "cancel", "push-1").stdout
    fleet.run("sync-weights", "next", "--weight-version", "v2")
    assert versions(fleet) == {"v2"}


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        ("sync-weights next --mode wait", "pause: waits for 1 request on stubs-0"),
        ("sync-weights next --rolling 1", "drain: waits for 1 request on stubs-0"),
        ("restart stubs-0", "waits for 1 request"),
    ],
)
def test_what_waits_for_a_request_names_it_and_is_cancelled_at_once(
    fleet: StubFleet, words: str, stage: str
) -> None:
    fleet.write(extra="args: {token-delay-s: 0.1}\nweight_transfer: {transport: disk}")
    file = fleet.directory / "fleet.yaml"
    file.write_text(file.read_text().replace("drain_timeout_s: 1", "drain_timeout_s: 60"))
    write_checkpoint(fleet.directory / "model")
    fleet.run("up")
    before = fleet.replicas()
    request = busy(fleet)
    change = fleet.start(*words.split())
    until_said(change, stage)
    [job] = [job for job in fleet.json("jobs")["data"]["jobs"] if job["state"] == "running"]
    if job["kind"] == "restart":
        assert "restart-2 0 of 1 server restarted" in fleet.run("status").stdout
    assert f"{job['id']} is cancelled; " in fleet.run("jobs", "cancel", job["id"]).stdout
    assert request.poll() is None  # what it waited for still runs
    _, notes = change.communicate(timeout=30)
    assert change.returncode == 1, notes
    assert {name: row["pid"] for name, row in fleet.replicas().items()} == {
        name: row["pid"] for name, row in before.items()
    }
    assert versions(fleet) == {None}
    request.kill()
    request.communicate()


def test_a_pause_that_waits_for_a_request_names_it(fleet: StubFleet) -> None:
    fleet.write(extra="args: {token-delay-s: 0.1}")
    fleet.run("up")
    request = busy(fleet)
    pause = fleet.start("pause", "--mode", "wait")
    until_said(pause, "pause: waits for 1 request on stubs-0")
    request.kill()
    stdout, notes = pause.communicate(timeout=30)
    assert pause.returncode == 0 and "paused 2 of 2 servers" in stdout, notes
    request.communicate()


async def test_so_does_one_of_attached_servers(tmp_path: Path) -> None:
    async with attached(tmp_path) as fleet:
        engine = fleet.stubs[1].engine
        engine.requests = 2
        with fleet.started("pause", "far-1", "--mode", "wait") as pause:
            await asyncio.to_thread(until_said, pause, "pause: waits for 2 requests on far-1")
            engine.requests = 0
            async with engine.changed:
                engine.changed.notify_all()
            assert await asyncio.to_thread(pause.wait, 30) == 0
        assert fleet.frozen == [False, True]


def test_a_cancelled_first_up_leaves_nothing(fleet: StubFleet) -> None:
    fleet.write(faults='{"startup_delay_s": 15}')
    up = fleet.start("up")
    until_stage(fleet, "up-1", "starting")
    printed = fleet.run("jobs", "cancel", "up-1").stdout
    assert "up-1 is cancelled; nothing of it is left" in printed
    up.communicate(timeout=30)
    assert fleet.json("status")["data"]["health"] == "down"


def test_a_change_whose_supervisor_dies_is_not_called_put_back(fleet: StubFleet) -> None:
    slow = '{"startup_delay_s": 3}'
    fleet.write(faults=slow)
    fleet.run("up")
    fleet.write(faults=slow, extra="args: {max-model-len: 2048}")
    up = fleet.start("up")
    until_stage(fleet, "up-2", "0 of 2 servers restarted")
    cancel = fleet.start("jobs", "cancel", "up-2")
    until_stage(fleet, "up-2", "starting")  # it is being put back
    kill(fleet.json("status")["data"]["supervisor_pid"])
    printed, notes = cancel.communicate(timeout=60)
    assert cancel.returncode == 4 and not printed
    assert "the supervisor ended before it had put up-2 back" in notes
    up.communicate(timeout=60)


def until_stage(fleet: StubFleet, job: str, stage: str) -> None:
    """Wait until this change is in this stage; it must get there."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        answer = fleet.run("jobs", "--json", expect=None).stdout
        rows = (json.loads(answer).get("data") or {}).get("jobs", ())
        if (job, stage) in [(row["id"], row["stage"]) for row in rows]:
            return
    raise AssertionError(f"{job} never was in stage {stage!r}")


async def test_a_push_that_another_process_runs_is_cancelled_there(tmp_path: Path) -> None:
    async with attached(tmp_path) as fleet:
        fleet.hang("/start_weight_update")
        with fleet.started("sync-weights", "v1"):
            await fleet.stubs[1].asgi.until("/start_weight_update")
            code, envelope = await fleet.skyctl("jobs", "cancel", "push-1")
            assert code == 1 and "runs in another process" in envelope["error"]["message"]
            assert "Ctrl-C" in envelope["error"]["hint"] and fleet.frozen == [True, True]
        fleet.mend()
        assert (await fleet.skyctl("recover", "--yes"))[0] == 0
