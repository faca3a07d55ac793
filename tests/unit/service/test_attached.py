"""A fleet that skyctl did not start: the same verbs, straight to its servers."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from skyctl.core import actions, verbs
from skyctl.core.arbiter import Act, Arbiter
from skyctl.core.recovery import clear
from skyctl.core.requests import Pause, Resume, Sleep, Wake
from skyctl.errors import (
    ConflictError,
    NotFoundError,
    ServerError,
    StateUnwritable,
    UsageError,
    WeightsGone,
)
from skyctl.http.fanout import Outcome
from skyctl.push.request import PushRequest
from skyctl.service import attached_recovery
from skyctl.service.attached_recovery import _Actions
from skyctl.service.endpoint import find_endpoint
from skyctl.store import locks
from skyctl.store.in_doubt import InDoubt, in_doubt, leave_to_next_push, put_in_doubt, touch
from skyctl.store.journal import JobEvent
from skyctl.store.paths import fleet_paths
from skyctl.store.server_locks import ServerLocks
from skyctl.store.server_names import name_servers, record_names
from skyctl.store.state import FleetState
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.inprocess import StubTransport
from tests.unit.service.attached_stubs import attached, push_nothing


async def test_verbs_change_the_servers_and_status_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(tmp_path, monkeypatch, StubServer(), StubServer()) as fleet:
        assert (await fleet.status()).health == "healthy"
        outcomes = await fleet.pause(Pause(mode="keep", clear_cache=False))
        assert [outcome.status for outcome in outcomes] == ["ok", "ok"]
        assert [r.state for r in (await fleet.status()).replicas] == ["paused", "paused"]
        outcomes = await fleet.resume(Resume(servers=("far-1", "far-1")))
        assert [outcome.server for outcome in outcomes] == ["far-1"]
        assert [r.state for r in (await fleet.status()).replicas] == ["paused", "ready"]


def no_room(path: Path, flags: int = 0) -> int:
    raise StateUnwritable(f"cannot open {path}: No space left on device")


@pytest.mark.parametrize("full", [True, False])
async def test_a_pause_that_fails_thaws_no_server_that_another_fleet_may_push_to_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """A disk without room for the locks of servers keeps nobody from a pause, nor, once it has
    room, another fleet from a push."""
    async with attached(tmp_path, monkeypatch, *(stubs := (StubServer(), StubServer()))) as fleet:
        stubs[1].asgi.faults["/pause"] = Fault("status")
        if full:
            monkeypatch.setattr(locks, "create_private_file", no_room)
        outcomes = await fleet.pause(Pause(mode="keep", clear_cache=False))
        assert [str(row.status) for row in outcomes] == ["ok" if full else "rolled-back", "failed"]
        assert stubs[0].engine.paused == fleet.state.server("far-0").paused == full


@pytest.mark.parametrize("answers", [True, False])
async def test_a_pause_put_on_record_for_a_server_that_starts_outlives_an_earlier_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    resume, stub = actions.resume, StubServer()

    async def started_anew(*arguments: Any, **more: Any) -> list[Outcome[None]]:
        outcomes = await resume(*arguments, **more)
        with fleet.state.transaction():  # as a supervisor does for a replica that starts
            fleet.state.update_server("far-0", paused=True)
            verbs.count(fleet.state)
        if answers:
            await stub.engine.pause("keep")
        else:
            stub.asgi.faults["/is_paused"] = Fault("status")
        return outcomes

    monkeypatch.setattr(actions, "resume", started_anew)
    async with attached(tmp_path, monkeypatch, stub) as fleet:
        await fleet.resume()
        assert fleet.state.server("far-0").paused


async def test_of_a_pause_and_a_resume_at_once_what_the_server_took_last_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume, taken, paused = actions.resume, asyncio.Event(), asyncio.Event()

    async def answered_late(*arguments: Any, **more: Any) -> list[Outcome[None]]:
        outcomes = await resume(*arguments, **more)
        taken.set()
        await paused.wait()
        return outcomes

    monkeypatch.setattr(actions, "resume", answered_late)
    async with attached(tmp_path, monkeypatch, StubServer()) as fleet:
        resuming = asyncio.create_task(fleet.resume())
        await taken.wait()
        await fleet.pause(Pause(mode="keep", clear_cache=False))
        paused.set()
        [outcome] = await resuming
        assert (outcome.ok, outcome.detail) == (False, "paused by another command meanwhile")
        assert fleet.state.server("far-0").paused
        assert [outcome.ok for outcome in await fleet.resume()] == [True]
        assert not fleet.state.server("far-0").paused


async def test_a_paused_server_that_slept_is_paused_again_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(tmp_path, monkeypatch, StubServer()) as fleet:
        await fleet.pause(Pause(mode="keep", clear_cache=False))
        await fleet.sleep(Sleep(level=1))
        assert (await fleet.status()).replicas[0].state == "asleep"
        [skipped] = await fleet.resume()
        assert skipped.status == "skipped" and "skyctl wake" in skipped.detail
        await fleet.wake()
        assert (await fleet.status()).replicas[0].state == "paused"


async def test_status_does_not_say_to_resume_what_a_push_has_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = StubServer(), StubServer()
    async with attached(tmp_path, monkeypatch, *stubs) as fleet:
        await fleet.pause(Pause(servers=("far-1",)))
        await stubs[0].engine.pause("keep")
        fleet.state.update_server("far-0", weight_version="default")
        with Arbiter(fleet.state.locks).take(Act.PUSH, "a push that is just starting") as turn:
            turn.rename("push-1")
            status = await fleet.status()
        assert [replica.state for replica in status.replicas] == ["updating", "paused"]
        assert status.health == "updating"
        assert [reason.hint for reason in status.reasons if reason.hint] == ["skyctl resume far-1"]


@pytest.mark.parametrize(
    ("label", "cause"),
    [("default", "it was started again"), ("theirs", "a program other than skyctl, or another")],
)
async def test_status_says_why_a_server_holds_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str, cause: str
) -> None:
    stub = StubServer()
    async with attached(tmp_path, monkeypatch, stub) as fleet:
        await fleet.resume()
        fleet.state.update_server("far-0", weight_version="v1")
        stub.engine.weight_version = label
        (reason,) = (await fleet.status()).reasons
        assert cause in reason.message


async def test_a_server_that_another_fleet_has_woken_is_not_shown_as_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = StubServer()
    async with attached(tmp_path, monkeypatch, stub) as fleet:
        await fleet.sleep()
        await stub.engine.wake([])
        status = await fleet.status()
        assert status.replicas[0].state == "ready" and status.health == "healthy"


@pytest.mark.parametrize("verb", ["pause", "resume", "wake", "sleep"])
async def test_no_verb_takes_a_server_that_serves_for_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    stub = StubServer()
    async with attached(tmp_path, monkeypatch, stub) as fleet:
        await fleet.sleep(Sleep(level=2))
        await stub.engine.wake([])  # by another fleet, or it was started again
        with pytest.raises(ConflictError):
            await fleet.wake()  # it may hold what the sleep has left
        stub.engine.weight_version = "theirs"
        [outcome] = await getattr(fleet, verb)()
        assert outcome.ok and stub.engine.paused == (verb in ("pause", "sleep"))
        row = fleet.state.server("far-0")
        assert (row.intended, row.sleep_level) == {
            "pause": ("paused", 0),
            "sleep": ("asleep", 1),
        }.get(verb, ("running", 0))


@pytest.mark.parametrize("sleep", ["on record", "lost", "lost, and then resumed"])
async def test_waking_discarded_weights_is_refused_until_they_are_pushed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep: str
) -> None:
    stub = StubServer()
    async with attached(tmp_path, monkeypatch, stub) as fleet:
        await fleet.sleep(Sleep(level=2))
        if "resumed" in sleep:  # by a request that was late, or by another program
            await stub.engine.resume()
        if "lost" in sleep:  # the command died, or its answer was lost: the server says it
            fleet.state.update_server("far-0", sleep_level=0)
            [finding] = await fleet.findings()
            assert finding.action == "nothing" and "type: skyctl wake" in finding.explained
        with pytest.raises(ConflictError) as caught:
            await fleet.wake()
        assert "skyctl wake --tags weights" in caught.value.hint
        [partly] = await fleet.wake(Wake(tags=("weights",)))
        assert partly.status == "ok"
        with pytest.raises(ConflictError):
            await fleet.wake(Wake(tags=("kv_cache",)))
        stub.engine.weight_version = "v1"
        fleet.state.update_server("far-0", sleep_level=1, weight_version="v1")  # as a push does
        await fleet.wake(Wake(tags=("kv_cache",)))
        assert (await fleet.status()).replicas[0].state == "ready"


async def test_what_only_a_supervisor_can_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(tmp_path, monkeypatch, StubServer()) as fleet:
        with pytest.raises(UsageError, match="did not start"):
            await fleet.restart()
        with pytest.raises(UsageError, match="did not start"):
            await fleet.scale(3)
        with pytest.raises(NotFoundError, match="far-9"):
            await fleet.pause(Pause(servers=("far-9",)))


async def test_a_push_runs_here_with_the_same_journal_and_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_nothing(monkeypatch)
    async with attached(tmp_path, monkeypatch, StubServer(), StubServer()) as fleet:
        with (
            FleetState(fleet.ref.paths.database) as other,
            Arbiter(other.locks).take(Act.PUSH, "push-0"),
        ):
            for verb in (fleet.pause, fleet.resume, fleet.wake):
                with pytest.raises(ConflictError, match=r"busy: push-0 \(pid"):
                    await verb()
            with pytest.raises(ConflictError, match="push-0") as caught:
                await fleet.start_push(PushRequest("/c"))
            assert caught.value.hint == "wait for it: skyctl jobs wait push-0"
        heard: list[str] = []
        job_id = await fleet.start_push(PushRequest("/c"))
        job = await fleet.wait_job(job_id, lambda event: heard.append(event.kind), timeout_s=10)
        assert job.state == "succeeded" and job.result is not None
        assert heard == ["stage", "progress", "end"]
        weights = await fleet.weights()
        assert {row.weight_version for row in weights.servers} == {"v7"}
        assert [record.version for record in weights.pushes] == ["v7"]


async def test_recovery_freezes_a_server_that_another_program_woke_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = StubServer()
    async with attached(tmp_path, monkeypatch, stub) as fleet:
        await fleet.sleep(Sleep(level=2))
        await stub.engine.wake([])
        [found] = await fleet.findings()
        assert found.action == "nothing"  # it may have been started again
        stub.engine.weight_version = "v1"
        fleet.state.update_server("far-0", weight_version="v1")
        [found] = await fleet.findings()
        assert found.detail.endswith("another program woke it") and not stub.engine.paused
        [repair] = await fleet.recover()  # the fleet has no weights yet that could be pushed
        assert not repair.ok and stub.engine.paused
        row = fleet.state.server("far-0")
        assert row.quarantine and (row.sleep_level, row.weights_awake) == (0, False)
        assert in_doubt(fleet.state)["far-0"].half_updated
        [left] = await fleet.resume()
        assert left.status == "skipped" and stub.engine.paused


async def test_what_sleeps_in_part_sleeps_whole_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM answers with 200 to a sleep while a part is asleep, and frees nothing."""
    stub = StubServer()
    async with attached(tmp_path, monkeypatch, stub) as fleet:
        await fleet.sleep(Sleep())
        await fleet.wake(Wake(tags=("weights",)))
        [slept] = await fleet.sleep(Sleep())
        assert slept.status == "ok" and stub.engine.asleep == {"weights", "kv_cache"}
        row = fleet.state.server("far-0")
        assert (row.sleep_level, row.weights_awake) == (1, False)
        await fleet.wake(Wake(tags=("weights",)))
        fleet.state.update_server("far-0", quarantine="push-1 broke off")
        [left] = await fleet.sleep(Sleep())  # the rest would wake, and answer from half of them
        assert left.status == "skipped" and stub.engine.asleep == {"kv_cache"}


@pytest.mark.parametrize("partly", [False, True])
async def test_a_second_sleep_does_not_make_discarded_weights_wakable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partly: bool
) -> None:
    stub = StubServer()
    async with attached(tmp_path, monkeypatch, stub) as fleet:
        await fleet.sleep(Sleep(level=2))
        if partly:
            await fleet.wake(Wake(tags=("weights",)))
        with pytest.raises(ConflictError) if partly else nullcontext():
            await fleet.sleep(Sleep(level=1))
        with pytest.raises(ConflictError, match="discarded the weights"):
            await fleet.wake()
        assert stub.engine.asleep and stub.engine.digest == "discarded"


@pytest.mark.parametrize("verb", ["resume", "wake"])
@pytest.mark.parametrize("quarantined", [True, False])
async def test_what_a_dead_push_left_is_not_thawed_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, quarantined: bool
) -> None:
    async with attached(tmp_path, monkeypatch, StubServer(), StubServer()) as fleet:
        await fleet.pause(Pause(mode="keep", clear_cache=False))
        touch(fleet.state, "far-0")
        if quarantined:
            fleet.state.update_server("far-0", quarantine="push-1 broke off")
        skipped, done = await getattr(fleet, verb)()
        assert (skipped.status, done.status) == ("skipped", "ok")
        assert "skyctl recover" in skipped.detail


async def test_with_the_turn_in_hand_a_push_that_is_said_to_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process lives, and could not put on record that it left a server half loaded."""
    async with attached(tmp_path, monkeypatch, StubServer()) as fleet:
        await fleet.pause()  # as each push does, it records which server is which
        job = fleet.state.journal.begin("push", PushRequest("/c").to_json())
        for stage in ("pause", "update"):
            fleet.state.journal.add_events(job.id, JobEvent.stage(stage))
        fleet.state.journal.add_events(job.id, JobEvent.server("far-0", "updating"))
        [outcome] = await fleet.resume()
        assert outcome.status == "skipped" and "skyctl recover" in outcome.detail
        assert (await fleet.job(job.id)).state == "interrupted"


async def test_a_push_that_recovery_makes_fails_as_what_it_failed_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery goes on differently for weights that are gone, and for a full disk."""
    target = StubTransport([StubServer()]).targets[0]
    failed = WeightsGone("/new was overwritten since it was pushed as v1", hint="push again")

    async def push(*_: Any) -> Any:
        return SimpleNamespace(error=failed.to_json())

    actions = _Actions(Mock(), {target.name: target}, Mock(), Mock())
    monkeypatch.setattr(actions, "_push", push)
    monkeypatch.setattr(actions, "_fleets", push)
    with pytest.raises(WeightsGone) as caught:
        await actions.bring(target.name)
    assert caught.value.to_json() == failed.to_json()


async def test_before_a_first_push_recovery_mixes_no_base_with_what_another_fleet_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = StubServer(), StubServer()
    async with attached(tmp_path, monkeypatch, *stubs) as fleet:
        await fleet.recover()
        stubs[1].engine.weight_version = "elsewhere"
        fleet.state.update_server("far-0", quarantine="it did not answer")
        repairs = await fleet.recover()
        assert [repair.ok for repair in repairs] == [False, True]
        assert "far-1 holds elsewhere" in repairs[0].detail
        assert "skyctl sync-weights CKPT" in repairs[0].detail
        assert fleet.state.weights().version is None and not await fleet.jobs()


async def test_what_another_fleets_push_left_is_found_and_is_that_fleets_to_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = StubServer(), StubServer()
    async with attached(tmp_path, monkeypatch, *stubs) as fleet:
        target, _ = await fleet._servers.locate()
        paths = fleet_paths("near")
        paths.prepare()
        with FleetState(paths.database) as near:
            record_names(near, name_servers("near", [("", target.url)], {}))
            locks = ServerLocks(paths, lambda: in_doubt(near))
            claim = locks.take_all({"near-0": target.url}, "push-1", shared=False, pushes=True)
            doubt = InDoubt("near-0", "push-1", "update", half_updated=True, thaw=True)
            put_in_doubt(near, {"near-0": doubt})
            claim.release()
            found, _ = await fleet.findings()
            assert found.detail.endswith("type: skyctl recover --fleet near")
            repair, _ = await fleet.recover()
            assert not repair.ok and repair.detail == found.detail
            with pytest.raises(ConflictError, match="fleet near, which has not repaired it"):
                await fleet.resume(Resume(servers=("far-0",)))
            for engine in (stub.engine for stub in stubs):
                await engine.pause("keep")
            for verb in (fleet.wake, fleet.resume):
                outcomes = await verb()
                assert [outcome.status for outcome in outcomes] == ["skipped", "ok"]
                assert outcomes[0].detail.endswith("first: skyctl recover --fleet near")
            assert [stub.engine.paused for stub in stubs] == [True, False]
            clear(near, "near-0")
            leave_to_next_push(near, "near-0")  # whole weights: nobody need wait
            assert [outcome.status for outcome in await fleet.resume()] == ["ok", "ok"]
            assert [found.detail for found in await fleet.findings()] == ["", ""]


async def test_a_server_that_another_fleet_repairs_meanwhile_is_left_to_the_next_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is not this recovery's."""
    async with attached(tmp_path, monkeypatch, StubServer()) as fleet:
        await fleet.resume()
        fleet.state.update_server("far-0", weight_version="v1")  # the other's is on it
        marks = [{"far-0": "push-1 broke off"}, {}]
        monkeypatch.setattr(
            attached_recovery, "unrepaired_by_others", lambda *_: marks.pop(0) if marks else {}
        )
        (repair,) = await fleet.recover()
        assert (repair.action, repair.ok) == ("nothing", False)
        assert repair.detail == "push-1 broke off"


async def test_an_only_server_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(tmp_path, monkeypatch, StubServer()) as fleet:
        with pytest.raises(ServerError, match=r"^far-0: "):  # nothing listens at a stub's URL
            await find_endpoint(fleet)
