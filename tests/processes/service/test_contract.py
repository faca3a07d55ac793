"""One suite for every implementation of a fleet's verbs: who asks need not know which it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from skyctl.api.updates import updating
from skyctl.core import verb_table
from skyctl.core.handlers import handlers
from skyctl.core.requests import (
    CancelJob,
    CloseUpdate,
    EventQuery,
    Forget,
    JobQuery,
    Pause,
    Resume,
    Sleep,
    Wake,
)
from skyctl.core.service import FleetService
from skyctl.core.verb_table import Verb
from skyctl.errors import ConflictError, NotFoundError, PushError
from skyctl.push.request import PushRequest
from skyctl.push.trainer import Rendezvous
from skyctl.states import TRAINER
from skyctl.supervisor.api import make_app
from skyctl.supervisor.client import RemoteFleet
from skyctl.supervisor.interface import SupervisorClient, own_handlers
from tests.faults.attached_fleet import attached_fleet
from tests.processes.supervisor.supervising import bring_up, pushable, supervising
from tests.stub.app import StubServer
from tests.stub.state import StubEngine
from tests.stub.through_httpx import ThroughHttpx
from tests.stub.trainer import send
from tests.unit.push.checkpoints import write_checkpoint
from tests.unit.service.attached_stubs import push_nothing
from tests.unit.supervisor.fleets import fleet_plan

NAMES = ["far-0", "far-1"]


@pytest.fixture(params=["attached", "supervisor", "remote"])
async def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FleetService]:
    """Two servers `far-0` and `far-1`, with the same checkpoint."""
    model = write_checkpoint(tmp_path / "base")
    async with AsyncExitStack() as stack:
        if request.param == "attached":
            stubs = [StubServer(StubEngine(model=str(model))) for _ in NAMES]
            home = tmp_path / "home"
            yield await stack.enter_async_context(attached_fleet(home, monkeypatch, stubs))
            return
        supervisor = await stack.enter_async_context(supervising(tmp_path))
        await bring_up(supervisor, fleet_plan([pushable(name, model) for name in NAMES]))
        if request.param == "supervisor":
            yield supervisor
            return
        app = httpx.ASGITransport(make_app(handlers(supervisor), ready=supervisor.readiness))
        yield await stack.enter_async_context(RemoteFleet("far", ThroughHttpx(app)))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Pushes move nothing, and end when it is set."""
    gate = asyncio.Event()
    push_nothing(monkeypatch, gate)
    return gate


async def states(fleet: FleetService) -> list[str]:
    return [replica.state for replica in (await fleet.status()).replicas]


async def test_servers_are_frozen_and_thawed(fleet: FleetService) -> None:
    outcomes = await fleet.pause(Pause(mode="keep", clear_cache=False))
    assert [(one.server, one.status) for one in outcomes] == [(name, "ok") for name in NAMES]
    assert await states(fleet) == ["paused", "paused"]
    [outcome] = await fleet.resume(Resume(servers=("far-1",)))
    assert outcome.server == "far-1" and await states(fleet) == ["paused", "ready"]
    with pytest.raises(NotFoundError, match="far-9"):
        await fleet.pause(Pause(servers=("far-9",)))
    await fleet.sleep(Sleep(servers=("far-1",)))
    skipped = (await fleet.resume())[1]
    assert skipped.status == "skipped" and "skyctl wake" in skipped.detail
    await fleet.wake(Wake(servers=("far-1",)))
    assert await states(fleet) == ["ready", "ready"]
    said = [event.message for event in await fleet.events(EventQuery(10))]
    assert said[-1] == "wake" and "pause (mode keep): 2 of 2 servers" in said


async def test_a_push_is_a_job_that_anybody_follows(
    fleet: FleetService, gate: asyncio.Event
) -> None:
    job_id = await fleet.start_push(PushRequest("/c", weight_version="v7"))
    for refused in (fleet.pause(), fleet.start_push(PushRequest("/other"))):
        with pytest.raises(ConflictError, match=job_id):
            await refused
    heard: list[str] = []
    following = asyncio.create_task(
        fleet.wait_job(job_id, lambda event: heard.append(event.kind), timeout_s=30)
    )
    assert not (await fleet.job(job_id)).ended
    gate.set()
    job = await following
    assert (job.state, heard) == ("succeeded", ["stage", "progress", "end"])
    assert job == await fleet.job(job_id) == (await fleet.jobs())[0]
    assert [e.kind for e in (await fleet.job_changes(JobQuery(job_id))).events] == ["stage", "end"]
    weights = await fleet.weights()
    assert [(row.name, row.weight_version) for row in weights.servers] == [
        (name, "v7") for name in NAMES
    ]
    assert weights.pushes[0].version == "v7" and weights.pushes[0].job == job_id
    assert await fleet.start_push(PushRequest("/c")) != job_id, "who hears of the end may push"


async def test_a_push_is_cancelled_once_and_the_fleet_is_free(
    fleet: FleetService, gate: asyncio.Event
) -> None:
    for wait_s in (0.0, 1.0):  # as it begins, and amid it
        job_id = await fleet.start_push(PushRequest("/c"))
        await asyncio.sleep(wait_s)
        await fleet.cancel_job(CancelJob(job_id))
        await fleet.cancel_job(CancelJob(job_id))
        job = await fleet.wait_job(job_id, timeout_s=10)
        assert job.state == "interrupted"
        await fleet.cancel_job(CancelJob(job_id))  # it has ended: no error
        assert await states(fleet) == ["ready", "ready"]
    gate.set()
    later = await fleet.wait_job(await fleet.start_push(PushRequest("/c")), timeout_s=10)
    assert later.state == "succeeded"
    with pytest.raises(NotFoundError, match="push-9"):
        await fleet.cancel_job(CancelJob("push-9"))


async def test_a_trainer_sends_the_weights_itself(fleet: FleetService) -> None:
    request = PushRequest("", transport=TRAINER, weight_version="step-1")
    suggested = Rendezvous("127.0.0.1", 12345)
    targets = await fleet.rendezvous(suggested)
    assert [(one.server, one.rank_offset, one.world_size) for one in targets] == [
        ("far-0", 1, 3),
        ("far-1", 2, 3),
    ]
    async with updating(fleet, request, on_event=lambda event: None, timeout_s=20) as update:
        assert [replace(one, init_info=None) for one in update.servers] == list(targets)
        assert await states(fleet) in (["updating"] * 2, ["paused"] * 2)
        with pytest.raises(ConflictError, match=update.job):
            await fleet.start_push(PushRequest("/c"))
        await send(update, 1)
    assert update.result is not None and await states(fleet) == ["ready", "ready"]
    rows = (await fleet.weights()).servers
    assert {(row.weight_version, row.checkpoint) for row in rows} == {("step-1", None)}
    await fleet.close_update(CloseUpdate(update.job, "too late"))
    assert (await fleet.job(update.job)).state == "succeeded"


async def test_servers_of_a_late_trainer_serve_nobody_until_it_has_left(
    fleet: FleetService,
) -> None:
    request = PushRequest("", transport=TRAINER, weight_version="step-1")
    with pytest.raises(PushError, match="not sent its weights within"):
        async with updating(fleet, request, on_event=lambda e: None, timeout_s=0.05) as update:
            assert (await fleet.wait_job(update.job, lambda e: None, 20)).state == "failed"
            recovered = await fleet.recover()
            assert [(one.action, one.ok) for one in recovered] == [("quarantine", False)] * 2
            assert all("may still send" in one.detail for one in recovered)
            with pytest.raises(ConflictError, match="far-0, far-1: its trainer"):
                await fleet.start_push(PushRequest("/c"))
            await send(update, 1)  # as if it were on time: nobody serves it
            assert all(row.quarantine for row in (await fleet.weights()).servers)
            assert "ready" not in await states(fleet)
    await fleet.recover()  # a supervisor has begun by itself
    assert await states(fleet) == ["ready", "ready"]
    assert not any(row.quarantine for row in (await fleet.weights()).servers)


async def test_what_is_asked_of_a_healthy_fleet(fleet: FleetService, tmp_path: Path) -> None:
    assert [(one.server, one.condition) for one in await fleet.findings()] == [
        (name, "healthy") for name in NAMES
    ]
    assert [(one.server, one.action, one.ok) for one in await fleet.recover()] == [
        (name, "nothing", True) for name in NAMES
    ]
    verified = await fleet.verify_weights()
    assert verified.agree is True and [row.server for row in verified.servers] == NAMES
    urls = await fleet.urls()
    assert list(urls.servers) == NAMES and urls.engine == "vllm"
    assert (await fleet.model_path() or "").startswith(("stub-model", str(tmp_path)))
    assert {row.name for row in (await fleet.processes()).rows} <= set(NAMES)
    assert (await fleet.staging()).directory.name == "weights"


async def test_what_is_not_there_is_not_found(fleet: FleetService) -> None:
    assert await fleet.kept_versions() == ()
    for asked in (fleet.forget_version(Forget("v1")), fleet.job("push-9")):
        with pytest.raises(NotFoundError) as caught:
            await asked
        assert caught.value.hint


def test_every_verb_has_a_handler_and_none_but_the_supervisors_own_takes_a_plan() -> None:
    fleet = SupervisorClient("f", Mock())
    listed = {verb for verb in vars(verb_table).values() if isinstance(verb, Verb)}
    assert set(handlers(fleet)) == listed
    names = {"preview", "reconcile", "adopt", "undo"}
    assert {verb.name for verb in set(own_handlers(fleet)) - listed} == names
