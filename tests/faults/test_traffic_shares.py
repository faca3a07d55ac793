"""A canary gets its share of the requests, and the fleet its weights back, whatever dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyctl.core import jobs
from skyctl.core.arbiter import Act
from skyctl.core.canary import CanaryRequest
from skyctl.engines.traffic import ServerTraffic
from skyctl.errors import ConflictError, NotFoundError, SkyctlError, StateUnwritable, UsageError
from skyctl.fleetfile.sections import RouterSection
from skyctl.push.request import PushRequest
from skyctl.store.fleet_weights import CanaryStage
from skyctl.supervisor import admission, canary, healing, weights
from skyctl.supervisor.fleet import report
from skyctl.supervisor.resident import Supervisor
from tests.processes.supervisor.supervising import (
    asking,
    bring_up,
    ended,
    pid_of,
    pushable,
    routed,
    set_faults,
    states,
    stub_state,
    supervising,
)
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_router


@asynccontextmanager
async def fleet_of(
    tmp_path: Path, *, replicas: int = 3, pushed: bool = True
) -> AsyncIterator[Supervisor]:
    """Stubs behind a router that counts requests, at version step-1 or never pushed to."""
    base = write_checkpoint(tmp_path / "base")
    write_checkpoint(tmp_path / "one", tiny_tensors(50))
    write_checkpoint(tmp_path / "two", tiny_tensors(90))
    async with supervising(tmp_path) as supervisor:
        servers = [pushable(name, base) for name in "abcd"[:replicas]]
        plan = fleet_plan(servers, stub_router())
        counting = {"router": RouterSection(policy="round_robin")}
        plan = replace(plan, config=plan.config.model_copy(update=counting))
        await bring_up(supervisor, plan)
        if pushed:
            await pushing(
                supervisor,
                await supervisor.start_push(
                    PushRequest(str(tmp_path / "one"), weight_version="step-1")
                ),
            )
        yield supervisor


async def pushing(supervisor: Supervisor, job: str, *, state: str = "succeeded") -> None:
    await eventually(lambda: supervisor.push_job is None)
    assert supervisor.state.journal.job(job).state == state, supervisor.state.journal.job(job).error


async def started(
    supervisor: Supervisor, tmp_path: Path, *, state: str = "succeeded", **fields: Any
) -> None:
    push = PushRequest(str(tmp_path / "two"), weight_version="step-2")
    request = CanaryRequest("start", push, share=0.25)
    begun = await supervisor.canary(replace(request, **fields))
    await pushing(supervisor, begun.job, state=state)


async def rolled_back(supervisor: Supervisor) -> None:
    assert (await supervisor.canary(CanaryRequest("rollback"))).operation > 0
    assert await ended(supervisor) == ""


async def versions(supervisor: Supervisor) -> dict[str, str]:
    return {
        name: (await stub_state(supervisor, name))["weight_version"] for name in supervisor.replicas
    }


async def at_one_version(supervisor: Supervisor, version: str) -> None:
    """All servers have it, are routed to alike, and nothing of a canary is on record."""
    await eventually(lambda: supervisor.state.canary() is None)
    assert set((await versions(supervisor)).values()) == {version}
    await eventually(lambda: routed(supervisor) == {*supervisor.replicas})
    assert supervisor.entries() == {}
    status = await report(supervisor)
    assert (status.health, status.reasons, status.canary) == ("healthy", (), None)


# --- its life ------------------------------------------------------------------------------------


async def test_a_canary_serves_beside_the_fleet_and_no_request_fails(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as supervisor:
        async with asking(supervisor) as client:
            await started(supervisor, tmp_path)
            status = await report(supervisor)
            assert (status.health, status.weight_version) == ("healthy", "step-1")
            [reason] = status.reasons
            assert "canary step-2 is serving on a, for 25% of the requests" in reason.message
            assert supervisor.entries() == {"a": 2, "b": 3, "c": 3}
            assert await versions(supervisor) == {"a": "step-2", "b": "step-1", "c": "step-1"}
            findings = await supervisor.findings()
            assert {finding.condition for finding in findings} == {"healthy"}
            assert (await supervisor.verify_weights()).agree
            await rolled_back(supervisor)
        assert client.failures == []
        assert len(set(client.answers)) == 2  # both versions, and no answer of a mixture
        await at_one_version(supervisor, "step-1")


async def test_a_canary_that_is_promoted_is_the_fleets_version(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await started(supervisor, tmp_path)
        begun = await supervisor.canary(CanaryRequest("promote"))
        await pushing(supervisor, begun.job)
        await at_one_version(supervisor, "step-2")
        assert supervisor.state.weights().version == "step-2"


async def test_a_fleet_that_was_never_pushed_to_gets_its_start_back(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, replicas=2, pushed=False) as supervisor:
        await started(supervisor, tmp_path)
        assert await versions(supervisor) == {"a": "step-2", "b": "default"}
        await rolled_back(supervisor)
        await at_one_version(supervisor, "default")


async def test_a_server_that_takes_a_canarys_weights_while_it_ends_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushes, go_on, pushed = asyncio.Event(), asyncio.Event(), weights._pushed

    async def later(*arguments: Any) -> Any:
        pushes.set()
        await go_on.wait()
        return await pushed(*arguments)

    async with fleet_of(tmp_path, replicas=2, pushed=False) as supervisor:
        await started(supervisor, tmp_path)
        monkeypatch.setattr(weights, "_pushed", later)
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await asyncio.wait_for(pushes.wait(), 20)
        await rolled_back(supervisor)
        go_on.set()
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        await at_one_version(supervisor, "default")


async def test_a_canary_under_the_fleets_label_is_routed_once_it_has_the_fleets_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, recover = list[set[str]](), healing.recover

    async def looking(*arguments: Any) -> Any:
        seen.append({*supervisor.desired()})
        return await recover(*arguments)

    async with fleet_of(tmp_path) as supervisor:
        push = PushRequest(str(tmp_path / "two"), weight_version="step-1")
        await started(supervisor, tmp_path, push=push)
        monkeypatch.setattr(healing, "recover", looking)
        await rolled_back(supervisor)
        assert seen == [{"b", "c"}]
        assert len({r.row.checkpoint for r in supervisor.replicas.values()}) == 1
        await at_one_version(supervisor, "step-1")


async def test_what_would_not_fit_a_canary_is_refused_while_it_runs(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as supervisor:
        with pytest.raises(NotFoundError, match="no canary"):
            await supervisor.canary(CanaryRequest("promote"))
        push = PushRequest(str(tmp_path / "one"))
        with pytest.raises(UsageError, match="a canary's"):
            await supervisor.start_push(replace(push, servers=("b",)))
        await started(supervisor, tmp_path)
        with pytest.raises(ConflictError, match="step-2 is serving on a"):
            await supervisor.start_push(push)
        with pytest.raises(ConflictError, match="step-2 is serving on a"):
            await supervisor.canary(CanaryRequest("start", push, share=0.5))
        plan = supervisor.require_plan()
        for servers in (plan.servers[:1], plan.servers[1:]):
            with pytest.raises(UsageError, match="the canary needs a and another server"):
                supervisor.change_to(replace(plan, servers=servers))
        supervisor.change_to(replace(plan, servers=plan.servers[:2]))
        assert await ended(supervisor) == ""
        assert supervisor.entries() == {"a": 1, "b": 3}


async def test_nothing_is_touched_before_the_canary_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_of(tmp_path) as supervisor:

        def full(canary: object) -> None:
            raise StateUnwritable("no space")

        with monkeypatch.context() as patched:
            patched.setattr(supervisor.state, "set_canary", full)
            with pytest.raises(StateUnwritable):
                await started(supervisor, tmp_path)
        assert supervisor.push_job is None
        await at_one_version(supervisor, "step-1")


# --- beside another push or a rollback -----------------------------------------------------------


def stage_of(supervisor: Supervisor) -> CanaryStage | None:
    recorded = supervisor.state.canary()
    return recorded and recorded.stage


async def test_a_canary_that_waits_for_a_push_to_end_is_not_that_pushs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, refresh_all = asyncio.Event(), admission.refresh_all

    async def later(*arguments: Any) -> Any:
        await go_on.wait()
        return await refresh_all(*arguments)

    async with fleet_of(tmp_path, pushed=False) as supervisor:
        monkeypatch.setattr(admission, "refresh_all", later)
        push = PushRequest(str(tmp_path / "one"), weight_version="step-1")
        job = await supervisor.start_push(push)
        await eventually(lambda: supervisor.state.journal.job(job).ended)
        starting = asyncio.create_task(started(supervisor, tmp_path))
        await eventually(lambda: stage_of(supervisor) is CanaryStage.STARTING)
        with pytest.raises(ConflictError, match="cannot be rolled back now"):
            await supervisor.canary(CanaryRequest("rollback"))
        go_on.set()
        await starting
        assert await versions(supervisor) == {"a": "step-2", "b": "step-1", "c": "step-1"}
        assert stage_of(supervisor) is CanaryStage.SERVING
        assert supervisor.state.weights().version == "step-1"


async def test_a_version_that_is_rolled_back_meanwhile_is_not_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, go_on, published = threading.Event(), threading.Event(), canary.published

    def later(*arguments: Any, **options: Any) -> PushRequest:
        read.set()
        go_on.wait(20)
        return published(*arguments, **options)

    async with fleet_of(tmp_path) as supervisor:
        await started(supervisor, tmp_path)
        monkeypatch.setattr(canary, "published", later)
        promoting = asyncio.create_task(supervisor.canary(CanaryRequest("promote")))
        await eventually(read.is_set)
        assert (await supervisor.canary(CanaryRequest("rollback"))).operation > 0
        go_on.set()
        with pytest.raises(ConflictError, match="ended meanwhile"):
            await promoting
        assert await ended(supervisor) == ""
        await at_one_version(supervisor, "step-1")


async def test_a_push_that_was_asked_for_before_the_canary_is_refused_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on, resolved = threading.Event(), threading.Event(), jobs.resolved

    def later(request: PushRequest) -> PushRequest:
        if not request.servers:
            asked.set()
            go_on.wait(20)
        return resolved(request)

    async with fleet_of(tmp_path) as supervisor:
        monkeypatch.setattr(jobs, "resolved", later)
        pushing_on = asyncio.create_task(supervisor.start_push(PushRequest(str(tmp_path / "one"))))
        await eventually(asked.is_set)
        await started(supervisor, tmp_path)
        go_on.set()
        with pytest.raises(ConflictError, match="step-2 is serving on a"):
            await pushing_on
        assert await versions(supervisor) == {"a": "step-2", "b": "step-1", "c": "step-1"}


async def test_a_rollback_that_is_refused_or_fails_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_: Supervisor) -> None:
        raise SkyctlError("no answer")

    async with fleet_of(tmp_path) as supervisor:
        await started(supervisor, tmp_path)
        with await supervisor.arbiter.turn(Act.SLEEP, "a sleep"), pytest.raises(ConflictError):
            await supervisor.canary(CanaryRequest("rollback"))
        assert stage_of(supervisor) is CanaryStage.SERVING
        with monkeypatch.context() as patched:
            patched.setattr(healing, "find", fails)
            await supervisor.canary(CanaryRequest("rollback"))
            assert await ended(supervisor) == "no answer"
            assert stage_of(supervisor) is CanaryStage.ENDING
        await supervisor.canaries.tend()
        assert await ended(supervisor) == ""
        await at_one_version(supervisor, "step-1")


# --- what fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/update_weights"])
async def test_a_canary_whose_push_fails_leaves_the_fleet_as_it_was(
    tmp_path: Path, route: str
) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await set_faults(supervisor, "a", {route: {"kind": "status"}})
        async with asking(supervisor) as client:
            await started(supervisor, tmp_path, state="failed")
            await at_one_version(supervisor, "step-1")
        assert client.failures == []
        assert len(set(client.answers)) == 1


async def test_a_canary_that_is_cancelled_leaves_the_fleet_as_it_was(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await set_faults(supervisor, "a", {"/pause": {"kind": "delay", "seconds": 0.5}})
        push = PushRequest(str(tmp_path / "two"), weight_version="step-2")
        begun = await supervisor.canary(CanaryRequest("start", push, share=0.25))
        await supervisor.pushes.cancel(supervisor.state.journal.job(begun.job))
        await pushing(supervisor, begun.job, state="interrupted")
        await at_one_version(supervisor, "step-1")


async def test_a_promotion_that_fails_leaves_the_canary_as_it_was(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await started(supervisor, tmp_path)
        await set_faults(supervisor, "b", {"/init_weight_transfer_engine": {"kind": "status"}})
        begun = await supervisor.canary(CanaryRequest("promote"))
        await pushing(supervisor, begun.job, state="failed")
        assert await versions(supervisor) == {"a": "step-2", "b": "step-1", "c": "step-1"}
        assert (await report(supervisor)).health == "healthy"
        assert supervisor.entries() == {"a": 2, "b": 3, "c": 3}


@pytest.mark.parametrize(("name", "version"), [("a", "step-2"), ("b", "step-1")])
async def test_a_server_that_dies_comes_back_with_its_own_version(
    tmp_path: Path, name: str, version: str
) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await started(supervisor, tmp_path)
        process = supervisor.replicas[name].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda: states(supervisor)[name] != "ready")
        await eventually(lambda: states(supervisor)[name] == "ready")
        assert (await versions(supervisor))[name] == version
        await eventually(lambda: routed(supervisor) == {"a", "b", "c"})
        assert supervisor.entries() == {"a": 2, "b": 3, "c": 3}
        assert (await report(supervisor)).health == "healthy"


async def test_a_server_whose_version_cannot_be_taken_back_is_restarted(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await started(supervisor, tmp_path)
        await set_faults(supervisor, "a", {"/init_weight_transfer_engine": {"kind": "status"}})
        await rolled_back(supervisor)
        await at_one_version(supervisor, "step-1")


# --- rules ---------------------------------------------------------------------------------------


async def answered(supervisor: Supervisor, name: str, count: int) -> None:
    """So many requests to one server, whatever it answers."""
    body = {"model": "stub-model", "prompt": "ab", "max_tokens": 2}
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        for _ in range(count):
            await http.post(f"{supervisor.replicas[name].spec.url}/v1/completions", json=body)


async def test_a_canary_that_breaks_its_rule_is_rolled_back(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await started(supervisor, tmp_path, rollback_if=("errors>1%",))
        await eventually(lambda: bool((canary := supervisor.state.canary()) and canary.counted))
        await answered(supervisor, "a", 30)
        await supervisor.canaries.tend()
        assert supervisor.state.canary() is not None
        await set_faults(supervisor, "a", {"/v1/completions": {"kind": "status"}})
        await answered(supervisor, "a", 5)
        await supervisor.canaries.tend()
        assert await ended(supervisor) == ""
        await at_one_version(supervisor, "step-1")
        reasons = [event.message for event in supervisor.state.events()]
        assert "canary step-2 ends: errors 14.3% (5 of 35) > 1%" in reasons


def without(supervisor: Supervisor, missing: str) -> Callable[[], Any]:
    """What the servers have answered, of which this one does not say it."""
    answers = supervisor.canaries._answers

    async def others() -> dict[str, ServerTraffic]:
        return {name: counted for name, counted in (await answers()).items() if name != missing}

    return others


async def test_nothing_from_before_a_canary_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await answered(supervisor, "a", 30)
        with monkeypatch.context() as patched:
            patched.setattr(supervisor.canaries, "_answers", without(supervisor, "a"))
            await started(supervisor, tmp_path, rollback_if=("errors>1%",))
            assert supervisor.canaries._counting is not None
            await supervisor.canaries._counting
        assert (await supervisor.canary()).versions[0].requests == 0
        await supervisor.canaries.tend()
        await answered(supervisor, "a", 2)
        assert (await supervisor.canary()).versions[0].requests == 2


async def test_a_canary_is_not_promoted_before_all_its_servers_say_how_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await started(supervisor, tmp_path, replicas=2, promote_after_s=0.0)
        await eventually(lambda: bool((canary := supervisor.state.canary()) and canary.counted))
        await answered(supervisor, "a", 20)
        with monkeypatch.context() as patched:
            patched.setattr(supervisor.canaries, "_answers", without(supervisor, "b"))
            await supervisor.canaries.tend()
            assert supervisor.push_job is None
        await supervisor.canaries.tend()
        assert supervisor.push_job is not None
        await eventually(lambda: supervisor.push_job is None)


@pytest.mark.parametrize("gone", [False, True])
async def test_a_promotion_by_rule_that_fails_is_not_begun_again(
    tmp_path: Path, gone: bool
) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await started(supervisor, tmp_path, promote_after_s=0.0)
        await eventually(lambda: bool((canary := supervisor.state.canary()) and canary.counted))
        await answered(supervisor, "a", 20)
        if gone:
            shutil.rmtree(tmp_path / "two")
        await set_faults(supervisor, "b", {"/init_weight_transfer_engine": {"kind": "status"}})
        await supervisor.canaries.tend()
        assert (supervisor.push_job is None) is gone
        await eventually(lambda: supervisor.push_job is None)
        jobs_so_far = supervisor.state.journal.jobs()
        await supervisor.canaries.tend()
        assert supervisor.push_job is None
        assert supervisor.state.journal.jobs() == jobs_so_far
        [event] = [e.message for e in supervisor.state.events() if "by rule" in e.message]
        assert ("step-2 is gone" in event) is gone
        assert (await supervisor.canary()).promote_after_s is None
        assert await versions(supervisor) == {"a": "step-2", "b": "step-1", "c": "step-1"}


async def test_a_canary_that_kept_its_rules_is_promoted(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as supervisor:
        await started(supervisor, tmp_path, rollback_if=("errors>1%",), promote_after_s=0.0)
        await eventually(lambda: bool((canary := supervisor.state.canary()) and canary.counted))
        await supervisor.canaries.tend()
        assert supervisor.push_job is None  # nothing was tried
        await answered(supervisor, "a", 20)
        await supervisor.canaries.tend()
        await eventually(lambda: supervisor.push_job is None)
        await at_one_version(supervisor, "step-2")


# --- deaths of the supervisor ---------------------------------------------------------------------


# --- load balancers in front ----------------------------------------------------------------------


# --- shares, by the real router -------------------------------------------------------------------
