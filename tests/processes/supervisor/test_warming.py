"""When a supervisor rehearses a push, and what ends a rehearsal."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyctl.core.plan import FleetPlan
from skyctl.core.requests import Sleep
from skyctl.errors import PreflightError, ServerUnreachable
from skyctl.push import rehearsal
from skyctl.push.request import PushFleet, PushRequest, PushServer
from skyctl.push.servers import PushedServer
from skyctl.store.fleet_weights import FleetWeights
from skyctl.supervisor import replica
from skyctl.supervisor.resident import Supervisor
from tests.processes.supervisor.supervising import bring_up, pid_of, supervising
from tests.unit.push.checkpoints import write_checkpoint
from tests.unit.push.deliveries import site
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_server


class Rehearsals:
    """In place of `rehearse`; goes on until `may_end`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.ends: list[str] = []
        self.may_end = asyncio.Event()
        self.failing = False
        self.reads = False

    async def __call__(
        self, request: PushRequest, fleet: PushFleet, *, asking: Any, **_: Any
    ) -> tuple[PushedServer, ...]:
        self.asked.append((request.checkpoint, [server.name for server in fleet.servers]))
        try:
            with nullcontext() if self.reads else asking():
                await self.may_end.wait()
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise
        self.ends.append("ended")
        if self.failing:
            raise PreflightError("the checkpoint is gone")
        return tuple(self.weighed(server) for server in fleet.servers)

    def weighed(self, server: PushServer) -> PushedServer:
        one = site(None, name=server.name)
        one.proof.digest_before = f"digest-of-{server.name}"
        return one


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> Rehearsals:
    found = Rehearsals()
    monkeypatch.setattr(rehearsal, "rehearse", found)
    return found


def plan_of(model: Path, *names: str, **policies: Any) -> FleetPlan:
    plan = fleet_plan([stub_server(name) for name in names], **policies)
    return replace(plan, model_path=str(write_checkpoint(model)))


def digests(supervisor: Supervisor) -> list[str | None]:
    return [row.weights_digest for row in supervisor.state.servers()]


async def test_a_push_is_rehearsed_once_all_servers_are_up_and_their_digests_are_kept(
    tmp_path: Path, rehearsals: Rehearsals
) -> None:
    model = tmp_path / "model"
    rehearsals.may_end.set()
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, plan_of(model, "a", "b"))
        await eventually(lambda: digests(supervisor) == ["digest-of-a", "digest-of-b"])
        assert rehearsals.asked == [(str(model), ["a", "b"])]
        os.kill(pid_of(supervisor, "b"), signal.SIGKILL)
        await eventually(lambda: len(rehearsals.asked) == 2)  # another process knows nothing of it
        await eventually(lambda: digests(supervisor) == ["digest-of-a", "digest-of-b"])


@pytest.mark.parametrize(
    "policies",
    [{"weight_transfer": {"warm": False}}, {"share_gpus": True}],
    ids=["switched off", "the GPUs are not the fleet's own"],
)
async def test_nothing_is_rehearsed_where_nobody_wants_it(
    policies: dict[str, Any], tmp_path: Path, rehearsals: Rehearsals
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, plan_of(tmp_path / "model", "a", **policies))
        supervisor.pushes.warming.begin_if_due()
        await asyncio.sleep(0)
        assert rehearsals.asked == []


async def test_cpu_servers_that_were_pushed_to_are_not_rehearsed_with(
    tmp_path: Path, rehearsals: Rehearsals
) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = plan_of(tmp_path / "model", "a", weight_transfer={"warm": False})
        await bring_up(supervisor, plan)
        supervisor.state.set_weights(FleetWeights("v1", plan.model_path))
        supervisor.plan = replace(plan, config=plan_of(tmp_path / "model", "a").config)
        supervisor.pushes.warming.begin_if_due()
        await asyncio.sleep(0)
        assert rehearsals.asked == []


async def test_a_rehearsal_that_fails_changes_nothing(
    tmp_path: Path, rehearsals: Rehearsals
) -> None:
    rehearsals.failing = True
    rehearsals.may_end.set()
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, plan_of(tmp_path / "model", "a"))
        await eventually(lambda: rehearsals.ends == ["ended"])
        supervisor.pushes.warming.begin_if_due()
        await asyncio.sleep(0)
        assert len(rehearsals.asked) == 1 and digests(supervisor) == [None]


@pytest.mark.parametrize("reads", [False, True], ids=["asked", "reading"])
async def test_a_server_is_not_taken_for_dead_while_a_rehearsal_asks_it_and_no_longer(
    reads: bool, tmp_path: Path, rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsals.reads = reads
    probes = 0

    async def unanswered(*_: Any) -> bool:
        nonlocal probes
        probes += 1
        raise ServerUnreachable("a: no answer")

    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, plan_of(tmp_path / "model", "a"))
        await eventually(lambda: len(rehearsals.asked) == 1)
        pid = pid_of(supervisor, "a")
        with monkeypatch.context() as patched:
            patched.setattr(replica, "probe_alive", unanswered)
            if not reads:
                await eventually(lambda: probes > 5)
                assert psutil.pid_exists(pid)
                rehearsals.may_end.set()
            await eventually(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize("asked", ["push", "sleep", "down", "restart"])
async def test_whoever_needs_the_servers_ends_a_rehearsal(
    asked: str, tmp_path: Path, rehearsals: Rehearsals
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, plan_of(tmp_path / "model", "a"))
        await eventually(lambda: len(rehearsals.asked) == 1)
        if asked == "push":
            job = await supervisor.start_push(PushRequest(str(tmp_path / "none")))
            assert rehearsals.ends == ["cancelled"] and len(rehearsals.asked) == 1
            await eventually(lambda: supervisor.state.journal.job(job).ended)
            await eventually(lambda: len(rehearsals.asked) == 2)  # nothing has come of that push
        elif asked == "sleep":
            await supervisor.sleep(Sleep(level=1, timeout_s=5.0))
        elif asked == "restart":
            await supervisor.restart()
            await eventually(lambda: len(rehearsals.asked) == 2)
        else:
            await supervisor.down()
        assert rehearsals.ends == ["cancelled"]
        assert digests(supervisor) in ([None], [])
        rehearsals.may_end.set()
