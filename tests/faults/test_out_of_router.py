"""Pushes that take servers out of the router: users never hear weights that nobody accepted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skyctl.core.requests import Pause
from skyctl.push.request import PushRequest
from skyctl.push.trial_file import read_trial
from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import Job
from skyctl.supervisor.fleet import report
from skyctl.supervisor.resident import Supervisor
from tests.faults.killing.cycle import Dice
from tests.faults.killing.supervised import supervised_fleet
from tests.processes.supervisor.supervising import (
    PROMPT,
    TOKENS,
    asking,
    bring_up,
    ended,
    pushable,
    routed,
    set_faults,
    states,
    stub_state,
    supervising,
)
from tests.stub.generation import next_token
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_router


def answer_of(digest: str) -> str:
    tokens = [ord(character) for character in PROMPT]
    for _ in range(TOKENS):
        tokens.append(next_token(digest, tokens))
    return "".join(map(chr, tokens[len(PROMPT) :]))


def trial(tmp_path: Path, **expect: Any) -> dict[str, Any]:
    file = tmp_path / "trial.json"
    file.write_text(json.dumps([{"prompt": PROMPT, "max_tokens": TOKENS, "expect": expect}]))
    return read_trial(file)


@asynccontextmanager
async def fleet_at(tmp_path: Path, *, replicas: int = 2) -> AsyncIterator[Supervisor]:
    """Stubs behind a router at version step-1."""
    base = write_checkpoint(tmp_path / "base")
    write_checkpoint(tmp_path / "one", tiny_tensors(50))
    write_checkpoint(tmp_path / "two", tiny_tensors(90))
    async with supervising(tmp_path) as supervisor:
        servers = [pushable(name, base) for name in "abcd"[:replicas]]
        await bring_up(supervisor, fleet_plan(servers, stub_router()))
        job = await pushed(supervisor, PushRequest(str(tmp_path / "one"), weight_version="step-1"))
        assert job.state == "succeeded", job.error
        yield supervisor


async def pushed(supervisor: Supervisor, request: PushRequest) -> Job:
    job = await supervisor.start_push(request)
    await eventually(lambda: supervisor.push_job is None)
    return supervisor.state.journal.job(job)


async def test_users_never_hear_weights_whose_trial_failed(tmp_path: Path) -> None:
    async with fleet_at(tmp_path) as supervisor:
        before = answer_of((await stub_state(supervisor, "a"))["digest"])
        request = PushRequest(
            str(tmp_path / "two"),
            weight_version="step-2",
            trial=trial(tmp_path, contains="Z"),
            pause_mode="wait",
        )
        async with asking(supervisor) as client:
            job = await pushed(supervisor, request)
        assert job.state == "failed" and job.error is not None
        assert job.error["kind"] == "TrialFailed"
        assert "step-1 was pushed back" in job.error["message"]
        assert set(client.answers) == {before}
        assert set(client.failures) <= {503}  # while nobody was in the router
        assert supervisor.state.weights().version == "step-1"
        assert in_doubt(supervisor.state) == {}
        assert states(supervisor) == {"a": "ready", "b": "ready"}
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        assert (await report(supervisor)).health == "healthy"
        assert {(await stub_state(supervisor, n))["weight_version"] for n in "ab"} == {"step-1"}


async def test_the_version_of_a_first_push_whose_trial_failed_is_the_one_of_the_start(
    tmp_path: Path,
) -> None:
    async with fleet_at(tmp_path) as supervisor:
        supervisor.state.set("weights", "{}")
        for name in "ab":
            supervisor.replicas[name].forget_weights()
        plan = supervisor.require_plan()
        object.__setattr__(plan, "model_path", str(tmp_path / "base"))
        request = PushRequest(
            str(tmp_path / "two"), trial=trial(tmp_path, contains="Z"), pause_mode="wait"
        )
        job = await pushed(supervisor, request)
        assert job.state == "failed" and job.error is not None
        assert "the checkpoint before was pushed back" in job.error["message"]
        assert supervisor.state.weights().version is None
        assert [row.weight_version for row in supervisor.state.servers()] == [None, None]
        assert [found.condition for found in await supervisor.findings()] == ["healthy", "healthy"]


async def test_servers_without_a_version_to_go_back_to_are_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_at(tmp_path) as supervisor:
        supervisor.state.set("weights", "{}")
        # what they were started with is in no file that a push reads
        monkeypatch.setattr("skyctl.supervisor.pushes.committed", lambda state, plan: None)
        for name in "ab":
            supervisor.replicas[name].forget_weights()
        request = PushRequest(
            str(tmp_path / "two"), trial=trial(tmp_path, contains="Z"), pause_mode="wait"
        )
        job = await pushed(supervisor, request)
        assert job.error is not None and job.error["hint"] == "skyctl recover"
        assert [row["state"] for row in job.error["details"]["servers"]] == ["quarantined"] * 2
        # the supervisor recovers by itself
        await eventually(lambda: (op := supervisor.operation) is not None and op.kind == "recover")
        assert await ended(supervisor) == ""
        assert [one.action for one in supervisor.recovered] == ["restart", "restart"]
        assert states(supervisor) == {"a": "ready", "b": "ready"}
        assert {(await stub_state(supervisor, n))["weight_version"] for n in "ab"} == {"default"}


@pytest.mark.parametrize("point", ["push.trial.call", "push.part.done"])
async def test_a_push_whose_process_died_out_of_the_router_goes_back_to_what_was_committed(
    tmp_path: Path, point: str
) -> None:
    def cycle() -> tuple[list[str], bool, set[str]]:
        with supervised_fleet(tmp_path) as fleet:
            came = fleet.cycle(Dice(point, 7, f"{point}:1", 1024, False))
            return came.violations, came.killed, {s["weight_version"] for s in fleet._states()}

    violations, killed, versions = await asyncio.to_thread(cycle)
    assert violations == []
    assert killed
    assert {version.partition("@")[0] for version in versions} == {"b"}  # pushed before: not a


async def test_no_request_fails_while_a_push_rolls(tmp_path: Path) -> None:
    async with fleet_at(tmp_path) as supervisor:
        before = answer_of((await stub_state(supervisor, "a"))["digest"])
        request = PushRequest(
            str(tmp_path / "two"),
            weight_version="step-2",
            rolling=1,
            trial=trial(tmp_path, min_logprob=-1),
            pause_mode="wait",
        )
        seen: set[tuple[str, str | None]] = set()
        async with asking(supervisor) as client:
            job = await supervisor.start_push(request)
            while supervisor.push_job is not None:
                status = await report(supervisor, fresh=False)
                seen.add((status.health, status.rollout))
                await asyncio.sleep(0.02)
        assert supervisor.state.journal.job(job).state == "succeeded"
        after = answer_of((await stub_state(supervisor, "a"))["digest"])
        assert client.failures == []
        assert set(client.answers) == {before, after}
        # two versions serve for a while: that is no fault
        assert {health for health, _ in seen} == {"healthy", "partial"}
        assert (f"{job}: 1 of 2 servers updated") in {rollout for _, rollout in seen}
        assert supervisor.state.weights().version == "step-2"


async def test_a_roll_that_stops_leaves_two_versions_and_recovery_goes_back(
    tmp_path: Path,
) -> None:
    async with fleet_at(tmp_path) as supervisor:
        await set_faults(supervisor, "b", {"/init_weight_transfer_engine": {"kind": "status"}})
        request = PushRequest(
            str(tmp_path / "two"), weight_version="step-2", rolling=1, pause_mode="wait"
        )
        job = await pushed(supervisor, request)
        assert job.error is not None and job.error["message"].startswith("the roll stopped at b")
        versions = {row.name: row.weight_version for row in supervisor.state.servers()}
        assert versions == {"a": "step-2", "b": "step-1"}
        assert supervisor.state.weights().version == "step-1"
        status = await report(supervisor)
        assert (status.health, status.reasons[0].hint) == ("degraded", "skyctl recover")
        await set_faults(supervisor, "b", {})
        supervisor.begin_recovery()
        assert await ended(supervisor) == ""
        assert {(await stub_state(supervisor, n))["weight_version"] for n in "ab"} == {"step-1"}
        assert (await report(supervisor)).health == "healthy"


async def test_a_roll_begins_with_a_server_that_is_leaving(tmp_path: Path) -> None:
    """The only other one that is ready could not leave the router before it."""
    async with fleet_at(tmp_path) as supervisor:
        supervisor.held_out.add("b")  # as scaling does, until its requests have ended
        await eventually(lambda: routed(supervisor) == {"a"})
        request = PushRequest(str(tmp_path / "two"), rolling=1, pause_mode="wait")
        async with asking(supervisor) as client:
            job = await pushed(supervisor, request)
        assert job.state == "succeeded", job.error
        assert client.failures == []
        assert routed(supervisor) == {"a", "b"}


async def test_the_last_server_that_serves_is_not_taken_out(tmp_path: Path) -> None:
    async with fleet_at(tmp_path) as supervisor:
        await supervisor.pause(Pause(mode="keep", servers=("b",), timeout_s=5.0))
        request = PushRequest(str(tmp_path / "two"), rolling=1, pause_mode="wait")
        async with asking(supervisor) as client:
            job = await pushed(supervisor, request)
        assert job.error is not None
        assert "no other server is ready to serve meanwhile" in job.error["message"]
        assert client.failures == []
