"""A fleet's record of its weights, from one push to the next and when it is looked at."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.core.requests import JobQuery, Restart
from skyctl.push.request import PushRequest
from skyctl.service.attached import AttachedFleet
from skyctl.store.expected import by_files
from skyctl.store.journal import Job
from tests.faults.attached_fleet import attached_fleet
from tests.processes.supervisor.supervising import (
    bring_up,
    pid_of,
    pushable,
    routed,
    states,
    supervising,
)
from tests.processes.supervisor.supervising import pushed as push_by
from tests.stub.app import StubServer
from tests.stub.state import StubEngine
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_router


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "new", tiny_tensors(50))


@pytest.fixture
def stub(base: Path) -> StubServer:
    return StubServer(StubEngine(model=str(base)))


@pytest.fixture
async def fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub: StubServer
) -> AsyncIterator[AttachedFleet]:
    async with attached_fleet(tmp_path / "home", monkeypatch, [stub]) as fleet:
        yield fleet


async def pushed(fleet: AttachedFleet, checkpoint: Path, **changes: Any) -> Job:
    return await fleet.wait_job(await fleet.start_push(PushRequest(str(checkpoint), **changes)))


async def test_a_single_server_that_comes_to_something_else_is_quarantined(
    fleet: AttachedFleet, stub: StubServer, new: Path
) -> None:
    first = await pushed(fleet, new)
    assert first.state == "succeeded" and first.result is not None
    assert "learned" not in first.result and first.result["compared"]["tensors"]
    stub.engine.weigh = lambda updates: "something else"
    second = await pushed(fleet, new)
    assert second.state == "failed" and second.error is not None
    assert "when it was pushed before" in second.error["message"]
    assert "learned" not in second.error["details"]
    assert stub.engine.paused
    [row] = (await fleet.weights()).servers
    assert first.result["servers"][0]["weights_digest"] in (row.quarantine or "")


async def test_what_was_allowed_is_expected_from_then_on(
    fleet: AttachedFleet, stub: StubServer, new: Path
) -> None:
    await pushed(fleet, new)
    stub.engine.weigh = lambda updates: "something else"
    assert (await pushed(fleet, new, allow_unproven_reload=True)).state == "succeeded"
    assert (await pushed(fleet, new)).state == "succeeded"


async def one_report(fleet: AttachedFleet) -> dict[str, Any]:
    report = await fleet.verify_weights()
    [row] = report.servers
    return row.to_json()


async def test_a_server_is_compared_with_the_record_and_with_the_checkpoint(
    fleet: AttachedFleet, stub: StubServer, new: Path
) -> None:
    row = await one_report(fleet)
    assert (row["ok"], row["as_recorded"], row["compared"]) == (True, None, None)
    await pushed(fleet, new, weight_version="v1")
    row = await one_report(fleet)
    assert (row["ok"], row["as_recorded"]) == (True, True) and row["compared"]["tensors"]


@pytest.mark.parametrize("what", ["digest", "label", "bytes", "nothing left to compare"])
async def test_weights_that_are_not_those_on_record_are_named(
    fleet: AttachedFleet, stub: StubServer, base: Path, new: Path, what: str
) -> None:
    await pushed(fleet, new, weight_version="v1")
    if what == "digest":
        stub.engine.digest = "something else"
    elif what == "label":
        stub.engine.weight_version = "theirs"
    elif what == "bytes":
        stub.engine.contents = {
            name: (dtype, data[::-1]) for name, (dtype, data) in stub.engine.contents.items()
        }
    else:
        write_checkpoint(new, tiny_tensors(51))
    row = await one_report(fleet)
    if what == "bytes":
        assert not row["ok"] and "does not hold what was sent" in row["detail"]
    elif what == "nothing left to compare":
        assert row["as_recorded"] is True and row["compared"] is None
    else:
        assert row["ok"] and row["as_recorded"] is False
        said = "labelled theirs" if what == "label" else "other weights than those on record"
        assert said in row["detail"]


async def test_one_that_sleeps_is_not_looked_into(fleet: AttachedFleet, stub: StubServer) -> None:
    await stub.engine.sleep(1, "abort")
    row = await one_report(fleet)
    assert not row["ok"] and "is asleep" in row["detail"]
    assert stub.asgi.calls["/collective_rpc"] == 0


async def server_events(fleet: AttachedFleet, job: Job) -> list[dict[str, Any]]:
    events = (await fleet.job_changes(JobQuery(job.id))).events
    return [event.data for event in events if event.kind == "server"]


async def test_the_digest_before_a_first_push_is_in_its_journal(
    fleet: AttachedFleet, new: Path
) -> None:
    job = await pushed(fleet, new)
    seen = await server_events(fleet, job)
    assert seen[0]["state"] == "weighed" and seen[0]["detail"]
    again = await pushed(fleet, new)
    seen = await server_events(fleet, again)
    assert "weighed" not in {event["state"] for event in seen}  # it is on record now


# --- under a supervisor --------------------------------------------------------------------------


async def test_a_restarted_replica_that_comes_to_something_else_is_not_routed(
    tmp_path: Path, base: Path, new: Path
) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([pushable("a", base), pushable("b", base)], stub_router())
        await bring_up(supervisor, plan)
        await push_by(supervisor, new)
        # as if the same content had come to something else before
        supervisor.state.write("UPDATE expected_digests SET digest = 'something else'")
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: states(supervisor)["a"] == "quarantined")
        reason = supervisor.replicas["a"].row.quarantine or ""
        assert "when it was pushed before" in reason and "expected something else" in reason
        assert routed(supervisor) == {"b"}


async def test_a_link_that_moves_after_its_push_does_not_take_the_weights_along(
    tmp_path: Path, base: Path, new: Path
) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to(new)
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([pushable("a", base), pushable("b", base)], stub_router())
        await bring_up(supervisor, plan)
        await push_by(supervisor, latest)
        latest.unlink()
        latest.symlink_to(base)
        before = pid_of(supervisor, "a")
        os.kill(before, signal.SIGKILL)
        await eventually(lambda: supervisor.replicas["a"].row.weight_version is None)
        await eventually(lambda: states(supervisor)["a"] in ("ready", "quarantined"))
        a, b = (supervisor.replicas[name].row for name in "ab")
        assert states(supervisor)["a"] == "ready" and a.weights_digest == b.weights_digest
        assert a.checkpoint == str(new) and (a.weight_version or "").startswith("new@")
        [job] = supervisor.state.journal.jobs()
        assert job.request["written"] == str(latest)


@pytest.mark.parametrize("rewritten", [False, True])
async def test_what_a_server_was_launched_with_is_held_against_its_first_push(
    tmp_path: Path, base: Path, rewritten: bool
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([pushable("a", base)], stub_router()))
        identity = read_checkpoint(str(base)).identity_digest
        assert supervisor.state.expected.launches() == {"a": by_files(identity)}
        if rewritten:  # the servers hold what the directory held before
            write_checkpoint(base, tiny_tensors(9))
        await push_by(supervisor, base)
        known = supervisor.state.expected.everything()
        assert {one.origin for one in known.digests} == {"launch", "push"} and not known.broken
        assert len({one.digest for one in known.digests}) == (2 if rewritten else 1)


def write_settings(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


OTHER = {
    "weights": (lambda model: write_checkpoint(model, tiny_tensors(9)), "holds other weights"),
    "settings": (write_settings, "configuration, tokenizer or chat template were changed"),
}


@pytest.mark.parametrize("what", OTHER)
async def test_a_replica_that_restarts_from_other_files_than_its_siblings_is_not_admitted(
    tmp_path: Path, base: Path, what: str
) -> None:
    overwrite, message = OTHER[what]
    async with supervising(tmp_path) as supervisor:
        await bring_up(
            supervisor, fleet_plan([pushable("a", base), pushable("b", base)], stub_router())
        )
        rows = {name: supervisor.replicas[name].row for name in "ab"}
        assert rows["a"].weights_digest and rows["a"].weights_digest == rows["b"].weights_digest
        overwrite(base)
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: states(supervisor)["a"] == "quarantined")
        assert message in (supervisor.replicas["a"].row.quarantine or "")
        assert routed(supervisor) == {"b"} and supervisor.paths.hold_file("a").exists()
        # the others are not restarted into the same
        await supervisor.restart(Restart())
        await eventually(lambda: supervisor.under_way is None)
        assert (
            supervisor.operation is not None and "did not come back" in supervisor.operation.error
        )
        assert states(supervisor)["b"] == "ready"
        # a push gives the fleet one version again, but not the settings that a server started with
        job = await supervisor.start_push(PushRequest(str(base)))
        await eventually(lambda: supervisor.push_job is None)
        notes = [event.data.get("message") for event in supervisor.state.journal.events(job)]
        assert ("not part of this push: a (quarantined)" in notes) is (what == "settings")
        after = "ready" if what == "weights" else "quarantined"
        assert states(supervisor) == {"a": after, "b": "ready"}
        served = {"a", "b"} if what == "weights" else {"b"}
        await eventually(lambda: routed(supervisor) == served)


async def test_files_that_were_only_copied_are_the_same_base(tmp_path: Path, base: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([pushable("a", base)], stub_router()))
        before = pid_of(supervisor, "a")
        write_checkpoint(base)  # the same bytes
        os.kill(before, signal.SIGKILL)
        await eventually(lambda: states(supervisor)["a"] in ("restarting", "starting"))
        await eventually(lambda: states(supervisor)["a"] in ("ready", "quarantined"))
        assert states(supervisor)["a"] == "ready"


async def test_replicas_that_first_start_with_different_weights_do_not_both_serve(
    tmp_path: Path, base: Path, new: Path
) -> None:
    """As on machines whose directories of one name have other content."""
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([pushable("a", base), pushable("b", base)], stub_router())
        other = replace(plan.servers[1], env={**plan.servers[1].env, "STUB_LOADS": str(new)})
        supervisor.change_to(replace(plan, servers=(plan.servers[0], other)))
        await eventually(lambda: sorted(states(supervisor).values()) == ["quarantined", "ready"])


async def test_a_first_replica_that_cannot_be_compared_with_anything_does_not_serve(
    tmp_path: Path,
) -> None:
    """Its files are nowhere on this machine, and its workers fail to say what they hold."""
    silent = pushable("a", Path("org/nowhere"))
    fails = json.dumps({"/collective_rpc": {"kind": "status"}})
    silent = replace(silent, argv=(*silent.argv, "--faults", fails))
    async with supervising(tmp_path) as supervisor:
        supervisor.change_to(fleet_plan([silent], stub_router()))
        await eventually(lambda: states(supervisor).get("a") in ("ready", "quarantined"))
        assert states(supervisor) == {"a": "quarantined"}
        assert "could not be read" in (supervisor.replicas["a"].row.quarantine or "")


async def test_a_directory_that_is_written_while_servers_load_it_is_nobodys_launch(
    tmp_path: Path, base: Path
) -> None:
    async with supervising(tmp_path) as supervisor:
        slow = pushable("a", base)
        slow = replace(slow, argv=(*slow.argv, "--faults", '{"startup_delay_s": 1.5}'))
        supervisor.change_to(fleet_plan([slow], stub_router()))
        await eventually(lambda: "a" in supervisor.replicas)
        await eventually(lambda: supervisor.replicas["a"].phase == "starting")
        write_checkpoint(base, tiny_tensors(9))
        await eventually(lambda: states(supervisor)["a"] == "quarantined")
        assert "was overwritten" in (supervisor.replicas["a"].row.quarantine or "")
        assert supervisor.state.expected.launches() == {"a": ""}
