"""Whose weights servers have, with a fleet that only takes notes."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("google.protobuf")
from skyctl.checkpoints.staging import staged
from skyctl.errors import ConflictError, FleetDownError, SkyctlError
from skyctl.store.journal import LATEST, Job, JobState
from skyctl.tinker import files
from skyctl.tinker.weights import ServedWeights

DONE = Job("", "push", JobState.SUCCEEDED, "resume", 0, 0, {}, {}, 0.0)


class Fleet:
    """Has the checkpoint that was pushed last; `fails` makes the next push fail, `away` is how
    often its supervisor does not answer, `row` is what its servers are on record at, and `before`
    the number of pushes into servers that went down since."""

    def __init__(self) -> None:
        self.done: list[Job] = []
        self.fails = False
        self.away = self.before = 0
        self.row = SimpleNamespace(weight_version=None, checkpoint=None)

    @property
    def pushed(self) -> list[str]:
        return [Path(job.request["checkpoint"]).name for job in self.done]

    def push(self, checkpoint: str, version: str | None = None, **state: Any) -> Job:
        request = {"checkpoint": checkpoint, "weight_version": version}
        job = replace(DONE, id=f"push-{len(self.done)}", request=request, **state)
        self.done.append(job)
        return job

    async def jobs(self) -> tuple[Job, ...]:
        if self.away:
            self.away -= 1
            raise FleetDownError("no supervisor")
        return tuple(reversed(self.done))[:LATEST]

    async def weights(self) -> Any:
        return SimpleNamespace(servers=[self.row])

    async def model_path(self) -> str:
        good = [job for job in self.done[self.before :] if job.state == "succeeded"]
        return good[-1].request["checkpoint"] if good else "/base"

    async def start_push(self, request: Any) -> str:
        state: dict[str, Any] = {}
        if self.fails:
            self.fails = False
            state = {
                "error": {"kind": "PreflightError", "message": "too large"},
                "state": JobState.FAILED,
            }
        job = self.push(request.checkpoint, request.weight_version, state=JobState.RUNNING)
        await asyncio.sleep(0.02)
        self.done[-1] = replace(job, **{"state": JobState.SUCCEEDED, **state})
        return job.id

    async def wait_job(self, job_id: str) -> Job:
        return next(job for job in self.done if job.id == job_id)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyctl.tinker.weights._BUSY_S", 0.01)


@pytest.fixture
def trained(tmp_path: Path) -> dict[str, str]:
    """Two checkpoints by name."""
    made = {}
    for name in "ab":
        directory = tmp_path / "checkpoints" / name

        def write(beside: Path) -> None:
            (beside / "w").write_text("x")

        files.write_checkpoint(directory, write, {})
        made[name] = str(directory)
    return made


def served(fleet: Fleet, tmp_path: Path, *, offered: bool = True) -> ServedWeights:
    return ServedWeights(fleet, "/base", tmp_path, offered=offered)  # type: ignore[arg-type]


async def at(fleet: Fleet, weights: ServedWeights, directory: str | None) -> str:
    """The name of the checkpoint that answers."""

    async def ask() -> str:
        before = await fleet.model_path()
        await asyncio.sleep(0.02)
        return Path(before).name

    return await weights.answer(directory, ask)


async def test_models_are_served_in_turn_and_each_push_serves_all_who_wait(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    weights = served(fleet, tmp_path)
    models = [None, "a", "b", "a", None, "b"]
    answers = await asyncio.gather(
        *(at(fleet, weights, trained[model] if model else None) for model in models)
    )
    assert answers == [model or "base" for model in models]
    assert fleet.pushed == ["a", "b", "base"]


async def test_what_servers_hold_is_known_when_the_push_is_listed_no_more(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    weights = served(fleet, tmp_path)
    assert await at(fleet, weights, trained["a"]) == "a"
    fleet.row = SimpleNamespace(weight_version=fleet.done[-1].request["weight_version"])
    dry = replace(DONE, kind="dry-run", request={"checkpoint": "/other"}, state=JobState.SUCCEEDED)
    fleet.done += [replace(dry, id=f"dry-{n}") for n in range(LATEST)]
    pushes = len(fleet.done)
    assert await weights.answer(trained["a"], lambda: asyncio.sleep(0, "yes")) == "yes"
    assert len(fleet.done) == pushes, "it is there already"
    await weights.answer(None, lambda: asyncio.sleep(0))
    assert fleet.pushed[-1] == "base", "trained weights are not the fleet's own"


async def test_who_gives_up_waiting_holds_nobody_up(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    weights = served(fleet, tmp_path)
    tasks = [
        asyncio.create_task(at(fleet, weights, directory))
        for directory in (None, trained["a"], trained["b"])
    ]
    await asyncio.sleep(0.01)
    tasks[1].cancel()
    async with asyncio.timeout(5):
        assert await tasks[2] == "b"
        assert await at(fleet, weights, None) == "base"
    assert fleet.pushed == ["b", "base"]


async def test_who_gives_up_during_its_push_leaves_it_to_end_before_the_next(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    weights = served(fleet, tmp_path)
    task = asyncio.create_task(at(fleet, weights, trained["a"]))
    while not fleet.done:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    assert await at(fleet, weights, None) == "base"
    assert fleet.pushed == ["a", "base"]


async def test_what_was_answered_during_anybodys_push_is_asked_again(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    weights = served(fleet, tmp_path)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def ask() -> str:
        before = await fleet.model_path()
        begun.set()
        await go_on.wait()
        return Path(before).name

    answering = asyncio.create_task(weights.answer(trained["a"], ask))
    await begun.wait()
    job = fleet.push("/theirs", state=JobState.RUNNING)
    go_on.set()
    await asyncio.sleep(0.05)
    assert not answering.done()  # servers may answer with either
    fleet.done[-1] = replace(job, state=JobState.SUCCEEDED)
    assert await answering == "a"
    assert fleet.pushed == ["a", "theirs", "a"]


async def test_the_fleets_own_weights_are_what_it_had_before(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    fleet.push("/theirs", "v2")
    assert await at(fleet, served(fleet, tmp_path), trained["a"]) == "a"
    # also for the next process
    assert await at(fleet, served(fleet, tmp_path), None) == "theirs"
    assert fleet.pushed == ["theirs", "a", "theirs"]
    with staged(tmp_path / "weights", needed_bytes=1, in_memory=False) as memory:
        for checkpoint in (None, str(memory)):  # which goes when servers have others
            fleet.row = SimpleNamespace(weight_version="by-a-trainer", checkpoint=checkpoint)
            with pytest.raises(SkyctlError, match="in no file"):
                await at(fleet, served(fleet, tmp_path), trained["a"])


async def test_what_was_pushed_before_the_fleet_went_down_is_pushed_again(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    assert await at(fleet, served(fleet, tmp_path), trained["a"]) == "a"
    fleet.before = 1
    assert await at(fleet, served(fleet, tmp_path), trained["a"]) == "a"
    fleet.before = 2
    assert await at(fleet, served(fleet, tmp_path), None) == "base"
    assert fleet.pushed == ["a", "a"]


async def test_a_push_that_fails_is_an_error_and_the_next_is_made(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    weights = served(fleet, tmp_path)
    fleet.fails = True
    with pytest.raises(SkyctlError, match="too large"):
        await at(fleet, weights, trained["a"])
    assert await at(fleet, weights, None) == "base"  # brought: a server may have got something
    assert await at(fleet, weights, trained["b"]) == "b"
    # somebody's roll that stopped half-way: servers may have either
    fleet.push("/theirs", state=JobState.FAILED)
    assert await at(fleet, weights, trained["b"]) == "b"
    assert fleet.pushed == ["a", "base", "b", "theirs", "b"]


async def test_a_push_whose_supervisor_died_may_have_been_finished_by_recovery(
    tmp_path: Path, trained: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet()
    weights = served(fleet, tmp_path)

    async def wait_job(job_id: str) -> Job:
        fleet.done[-1] = replace(fleet.done[-1], state=JobState.INTERRUPTED)
        raise FleetDownError("the process that ran it died")

    with monkeypatch.context() as dying:
        dying.setattr(fleet, "wait_job", wait_job)
        answering = asyncio.create_task(at(fleet, weights, trained["a"]))
        while not fleet.done or fleet.done[0].state != "interrupted":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await answering == "a"
    assert fleet.pushed == ["a", "a"]
    fleet.push(trained["b"], "tinker-b", state=JobState.INTERRUPTED)  # of an earlier process
    assert await at(fleet, weights, None) == "base"
    assert fleet.pushed == ["a", "a", "b", "base"]


async def test_a_supervisor_that_is_away_is_waited_for(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    fleet.away = 2
    assert await at(fleet, served(fleet, tmp_path), trained["a"]) == "a"


async def test_weights_that_go_away_are_taken_from_the_servers_first(
    tmp_path: Path, trained: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet()
    weights = served(fleet, tmp_path)
    await at(fleet, weights, trained["a"])
    async with weights.leaving(trained["b"]):
        assert fleet.pushed == ["a"]
    async with weights.leaving(trained["a"]):
        assert fleet.pushed == ["a", "base"]
        late = asyncio.create_task(at(fleet, weights, trained["a"]))
        await asyncio.sleep(0.05)
        assert fleet.pushed == ["a", "base"]  # nobody brings them meanwhile
    await late
    fleet.fails = True
    with pytest.raises(SkyctlError, match="too large"):
        async with weights.leaving(trained["a"]):
            raise AssertionError("servers have them")
    monkeypatch.setattr("skyctl.tinker.weights._LEAVE_TIMEOUT_S", 0.05)
    stop = asyncio.Event()
    answering = asyncio.create_task(weights.answer(trained["a"], stop.wait))
    await asyncio.sleep(0.1)
    with pytest.raises(ConflictError, match="answer from these"):
        async with weights.leaving(trained["a"]):
            raise AssertionError("a sample is under way")
    stop.set()
    await answering


async def test_a_fleet_that_offers_no_whole_models_any_more_is_brought_back(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    await at(fleet, served(fleet, tmp_path), trained["a"])
    weights = served(fleet, tmp_path, offered=False)
    with pytest.raises(SkyctlError, match="not offered"):
        await at(fleet, weights, trained["a"])
    assert await at(fleet, weights, None) == "base"
    assert fleet.pushed == ["a", "base"]


async def test_a_checkpoint_that_was_damaged_since_it_was_written_is_not_pushed(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    fleet = Fleet()
    (Path(trained["a"]) / "w").write_text("y")
    os.utime(Path(trained["a"]) / files.META, (time.time() - 60,) * 2)  # by an earlier process
    with pytest.raises(SkyctlError, match="damaged"):
        await at(fleet, served(fleet, tmp_path), trained["a"])
    assert fleet.pushed == []
