"""A trainer sends the weights itself, and somebody dies: the fleet ends committed or undone."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import skyctl
from skyctl.kill_points import VARIABLE
from skyctl.push.trainer import SendTarget
from skyctl.store.paths import FleetPaths
from tests.faults.killing import checks
from tests.faults.trainer_fleet import BOUND_S, Supervised, train
from tests.pages import block
from tests.stub.app import StubServer
from tests.stub.running import running
from tests.stub.state import StubEngine
from tests.stub.trainer import send_to
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

BASE, SENT, NEXT = "default", "step-1", "step-2"
COMMITTED = ("push.published", "push.record")
POINTS = ("push.begun", "push.prepared", "push.pause.call", "push.start.done", "push.update.call",
          "push.update.done", "push.finish.done", "push.verify.done", *COMMITTED)  # fmt: skip


def seen(stub: StubServer) -> dict[str, Any]:
    engine = stub.engine
    keys = ("served", "paused", "update_open", "half_loaded", "digest", "weight_version")
    return {key: getattr(engine, key) for key in keys}


@pytest.mark.parametrize("point", [*POINTS, "between two servers"])
async def test_a_trainer_that_is_the_pusher_may_die_anywhere(tmp_path: Path, point: str) -> None:
    """Its guardian puts the servers right, and the next update goes well."""
    model, home = str(write_checkpoint(tmp_path / "base")), tmp_path / "home"
    stubs = [StubServer(StubEngine(model=model, transfer_backend="sparse_nccl")) for _ in range(2)]
    before = stubs[0].engine.digest
    async with running(stubs) as targets:
        urls = ", ".join(target.url for target in targets)
        (tmp_path / "fleet.yaml").write_text(
            f"name: far\nservers: [{urls}]\ncontrol_timeout_s: 5\n"
            "weight_transfer: {update_timeout_s: 10}\n"
        )
        options = ("--dies-after", "1") if point not in POINTS else ()
        kill_at = point if point in POINTS else ""
        code, said = await train(tmp_path, home, SENT, 1, *options, kill_at=kill_at)
        assert code == -signal.SIGKILL, said
        if point == "push.begun":  # before there is a guardian; and nothing was touched
            assert all(stub.engine.log == [] for stub in stubs)
        assert await asyncio.to_thread(checks.nothing_left_soon, home, BOUND_S) == []
        states = [seen(stub) for stub in stubs]
        sent = {before: BASE}
        if point in COMMITTED:
            sent = {states[0]["digest"]: SENT}
            assert states[0]["digest"] != before
        assert checks.at_one_version(states, sent) == []
        assert checks.served_only(states, {before, *sent}) == []
        code, said = await train(tmp_path, home, NEXT, 2)
        assert code == 0, said
        states = [seen(stub) for stub in stubs]
        assert checks.at_one_version(states, {states[0]["digest"]: NEXT}) == []
        database = FleetPaths(home, "far").database
        assert checks.state_is_whole(database, NEXT) == []


@pytest.fixture
def supervised(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Supervised]:
    """Its first supervisor dies at the test's `point`, if it has one."""
    fleet = Supervised(tmp_path)
    fleet.write(extra="auth: none\nweight_transfer: {backend: sparse_nccl, update_timeout_s: 20}")
    write_checkpoint(tmp_path / "model", tiny_tensors(1))
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    fleet.environ = {VARIABLE: parameters["point"]} if "point" in parameters else {}
    fleet.run("up")
    fleet.environ = {}
    try:
        yield fleet
    finally:
        fleet.run("down", "--drain-timeout", "0")


def test_a_trainer_that_dies_is_noticed_and_undone(supervised: Supervised) -> None:
    before = {state["digest"] for state in supervised.states()}
    code, said = supervised.train(SENT, 1, "--dies-after", "1")
    assert code == -signal.SIGKILL, said
    supervised.run("wait", "--for", "ready", "--timeout", str(BOUND_S))
    assert {state["digest"] for state in supervised.states()} == before
    jobs = supervised.json("jobs")["data"]["jobs"]
    assert "the trainer (pid" in jobs[-1]["error"]["message"] + jobs[0]["error"]["message"]
    code, said = supervised.train(NEXT, 2)
    assert code == 0, said
    assert {state["weight_version"] for state in supervised.states()} == {NEXT}


def test_a_server_that_restarts_after_an_update_takes_its_weights_from_its_sibling(
    supervised: Supervised,
) -> None:
    """No file has them."""
    code, said = supervised.train(SENT, 1)
    assert code == 0, said
    digests = {state["digest"] for state in supervised.states()}
    before = supervised.replicas()["stubs-1"]["pid"]
    os.kill(before, signal.SIGKILL)
    supervised.until_restarted("stubs-1", before)
    assert {state["digest"] for state in supervised.states()} == digests


def test_weights_in_no_file_are_kept_on_disk_and_the_next_update_waits_for_it(
    supervised: Supervised,
) -> None:
    """All servers restart at once: no sibling is there to take them from."""
    code, said = supervised.train(SENT, 1, "--keep")
    assert code == 0, said
    digests = {state["digest"] for state in supervised.states()}
    code, said = supervised.train(NEXT, 2)
    assert code == 0, said
    [kept] = supervised.json("weights", "kept")["data"]["kept"]
    assert kept["version"] == SENT
    code, said = supervised.train("step-3", 3, "--keep")
    assert code == 0, said
    supervised.run("sync-weights", kept["checkpoint"], "--weight-version", SENT)  # waits as well
    assert {state["digest"] for state in supervised.states()} == digests
    events = [event["message"] for event in supervised.json("events")["data"]["events"]]
    assert [f"{version} is kept in" in str(events) for version in (SENT, NEXT)] == [True, False]

    code, said = supervised.train(NEXT, 2, "--keep")
    assert code == 0, said
    digests = {state["digest"] for state in supervised.states()}
    supervised.until_event(f"{NEXT} is kept in")
    pids = {name: row["pid"] for name, row in supervised.replicas().items()}
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    for name, pid in pids.items():
        supervised.until_restarted(name, pid)
    assert {state["digest"] for state in supervised.states()} == digests


def set_faults(supervised: Supervised, *names: str, **faults: Any) -> None:
    """Of these servers, or all."""
    rows = supervised.replicas()
    for url in (rows[name]["url"] for name in names or rows):
        httpx.post(f"{url}/stub/faults", json=faults, trust_env=False).raise_for_status()


def test_a_copy_that_is_written_keeps_nobody_waiting_and_is_written_in_the_end(
    supervised: Supervised, tmp_path: Path
) -> None:
    """Beside it the fleet sleeps, wakes and recovers; its supervisor and a server may die."""

    def until_begun() -> None:
        deadline = time.monotonic() + BOUND_S
        while not [*FleetPaths(tmp_path / "home", "stubs").kept.glob("*/weights.partial")]:
            assert time.monotonic() < deadline, supervised.json("events")
            time.sleep(0.1)

    set_faults(supervised, holds_writes=True)
    code, said = supervised.train(SENT, 1, "--keep")
    assert code == 0, said
    for verb in ("sleep", "wake", "recover"):
        if verb != "wake":
            until_begun()
        supervised.run(verb, *(["--yes"] if verb == "recover" else []))
    until_begun()
    os.kill(supervised.json("status")["data"]["supervisor_pid"], signal.SIGKILL)
    supervised.run("recover", "--yes")
    set_faults(supervised)
    supervised.until_event(f"{SENT} is kept in")
    set_faults(supervised, "stubs-0", holds_writes=True)
    code, said = supervised.train(NEXT, 2, "--keep")
    assert code == 0, said
    until_begun()
    os.kill(supervised.replicas()["stubs-0"]["pid"], signal.SIGKILL)
    supervised.until_event(f"{NEXT} is kept in")
    assert "was not kept" not in str(supervised.json("events")["data"])


def test_what_no_server_could_write_is_refused_before_it_is_sent(supervised: Supervised) -> None:
    before = [state["digest"] for state in supervised.states()]
    set_faults(supervised, unwritable="its dtype is packed")
    code, said = supervised.train(SENT, 1, "--keep")
    assert code and "its dtype is packed" in said
    assert [state["digest"] for state in supervised.states()] == before


@pytest.mark.parametrize("sent_to", [0, 1, 2])
def test_a_trainer_that_dies_over_weights_in_no_file_costs_only_what_it_has_overwritten(
    supervised: Supervised, sent_to: int
) -> None:
    """A server that it had sent nothing writes them for the other; with none, all say what to do,
    and the next update is whole."""
    code, said = supervised.train(SENT, 1)
    assert code == 0, said
    before = {state["digest"] for state in supervised.states()}
    code, said = supervised.train(NEXT, 2, "--dies-after", str(sent_to))
    assert code == -signal.SIGKILL, said
    supervised.until("quarantined" if sent_to == 2 else "ready")
    report = supervised.json("recover", "--yes", expect=1 if sent_to == 2 else 0)
    rows = supervised.replicas()
    if sent_to == 2:
        for reason in (*(row["reason"] for row in rows.values()), json.dumps(report)):
            assert f"{SENT} was sent by a trainer, and no file has it" in reason
            assert "skyctl sync-weights CKPT" in reason
        supervised.run("sync-weights", "model")
    else:
        assert {row["weight_version"] for row in rows.values()} == {SENT}
        assert {state["digest"] for state in supervised.states()} == before
    supervised.until("ready")
    assert "half loaded" not in str([state["served"] for state in supervised.states()])
    code, said = supervised.train(NEXT, 3)
    assert code == 0, said
    assert {state["weight_version"] for state in supervised.states()} == {NEXT}
    if sent_to < 2:
        refused = supervised.json("sync-weights", "--rollback", expect=4)
        assert "nothing to roll back to" in refused["error"]["message"]


@pytest.mark.parametrize("point", ["push.start.done", "push.update.call", "push.published"])
def test_a_supervisor_that_dies_under_a_trainer_is_followed_by_another(
    supervised: Supervised, point: str
) -> None:
    before = {state["digest"] for state in supervised.states()}
    code, said = supervised.train(SENT, 1)
    assert code == 1, said
    rows = supervised.until("ready")
    now = {state["digest"] for state in supervised.states()}
    assert (now == before) == (point != "push.published") and len(now) == 1
    versions = {row["weight_version"] for row in rows.values()}
    assert versions == {SENT if point == "push.published" else None}
    code, said = supervised.train(NEXT, 2)
    assert code == 0, said


def test_the_page_for_trainers_sends_inside_an_update(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(supervised.directory / "home"))
    names: dict[str, Any] = {"fleet": skyctl.Fleet.load(supervised.directory / "fleet.yaml")}

    async def send_one(server: SendTarget) -> None:
        await send_to(server, names["update"].headers, 3)

    names["send"] = send_one
    code = block("trainers.md", "## A trainer with its own sender", "python")
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    asyncio.run(eval(compile(code, "trainers.md", "exec", flags=flags), names))
    assert {state["weight_version"] for state in supervised.states()} == {"step-12"}
    assert names["update"].result.version == "step-12"
