"""Following a push job from its journal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skyctl.core import following
from skyctl.core.arbiter import Act, Arbiter, Turn
from skyctl.core.jobs import open_push
from skyctl.core.recorded import RecordedFleet
from skyctl.errors import NotFoundError
from skyctl.push.request import PushRequest
from skyctl.store.journal import JobEvent
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState


def recorded(state: FleetState) -> RecordedFleet:
    return RecordedFleet(FleetPaths(state.path.parent, "stubs"), state)


async def test_who_hears_that_a_push_is_over_may_start_the_next(tmp_path: Path) -> None:
    state = FleetState(tmp_path / "stubs" / "state.db")
    arbiter = Arbiter(state.locks)
    turn = arbiter.take(Act.PUSH, "a push")
    job = open_push(state.journal, turn, PushRequest("ckpt"))
    heard = asyncio.create_task(recorded(state).wait_job(job.id, timeout_s=30))
    state.journal.end(job.id, "succeeded", result={"version": "v1"})
    done, _ = await asyncio.wait({heard}, timeout=0.3)  # its owner still holds the fleet
    assert not done
    turn.release()
    assert (await asyncio.wait_for(heard, 10)).ended
    arbiter.take(Act.PUSH, "the next").release()
    state.close()


async def test_who_follows_a_job_of_this_process_hears_of_its_end_without_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FOLLOW_POLL_S", 3600.0)
    with FleetState(tmp_path / "stubs" / "state.db") as state:
        turn = Arbiter(state.locks).take(Act.PUSH, "a push")
        job = open_push(state.journal, turn, PushRequest("ckpt"))
        heard: list[str] = []
        hear = recorded(state).wait_job(job.id, lambda event: heard.append(event.kind))
        follower = asyncio.create_task(hear)
        await asyncio.sleep(0)
        state.journal.add_events(job.id, JobEvent.server("a-0", "pausing"))
        state.journal.progress(job.id, 5, 10)
        state.journal.end(job.id, "succeeded", result={"version": "v1"})
        await asyncio.sleep(0)
        turn.release()
        ended = await asyncio.wait_for(follower, 30)
        assert heard == ["server", "progress", "end"]
        assert ended.servers == {"a-0": {"state": "pausing", "detail": ""}}


def test_dry_runs_take_no_numbers_of_pushes(tmp_path: Path) -> None:
    ids = []
    with FleetState(tmp_path / "stubs" / "state.db") as state:
        for dry in (True, True, False, True, False):
            job = open_push(state.journal, Turn(None), PushRequest("ckpt", dry_run=dry))
            state.journal.add_events(job.id, JobEvent.stage("plan"))
            state.journal.end(job.id, "succeeded")
            ids.append(job.id)
            assert state.journal.job(job.id).stage == "plan"
            assert [event.kind for event in state.journal.events(job.id)] == ["stage", "end"]
        assert ids == ["dry-run-1", "dry-run-2", "push-1", "dry-run-3", "push-2"]
        assert [job.id for job in state.journal.jobs()] == ids[::-1]
        for wrong in ("push-3", "dry-run-9", "push--1", "push-0", "x", "dry-run-"):
            with pytest.raises(NotFoundError):
                state.journal.job(wrong)
