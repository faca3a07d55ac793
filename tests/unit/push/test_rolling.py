"""A push that rolls: part after part, and what a failure leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.core import jobs
from skyctl.core.arbiter import Turn
from skyctl.errors import PreflightError, PushError, TrialFailed
from skyctl.push.request import PushRequest, PushResult, RecordedState
from skyctl.push.rolling import push_rolling
from skyctl.store.in_doubt import InDoubt, in_doubt, put_in_doubt
from skyctl.store.state import FleetState
from tests.stub.faults import Fault
from tests.unit.push.fleets import Recorder, Rotation, Stubs, written_anew


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path, count=3)


async def roll(
    stubs: Stubs,
    *,
    rotation: Rotation | None = None,
    observer: Recorder | None = None,
    parts: list[PushResult] | None = None,
    **changes: Any,
) -> PushResult:
    asked: dict[str, Any] = {"rolling": 1, "pause_mode": "wait", "weight_version": "step-2"}
    request = PushRequest(str(stubs.new), **{**asked, **changes})
    async with stubs.client() as client:
        return await push_rolling(
            request,
            stubs.fleet,
            client=client,
            observer=observer or Recorder(),
            rotation=rotation or Rotation(stubs),
            on_part=(parts if parts is not None else []).append,
        )


def versions(error: PushError) -> list[tuple[str, str | None]]:
    return [(row["state"], row["version"]) for row in error.details["servers"]]


async def test_servers_leave_are_updated_and_rejoin_part_by_part(stubs: Stubs) -> None:
    rotation, parts = Rotation(stubs), list[PushResult]()
    result = await roll(stubs, rotation=rotation, parts=parts, rolling=2)
    assert rotation.log == [
        "leave demo-0 demo-1",
        "rejoin demo-0 demo-1",
        "leave demo-2",
        "rejoin demo-2",
    ]
    assert [[row.server for row in part.servers] for part in parts] == [
        ["demo-0", "demo-1"],
        ["demo-2"],
    ]
    assert [(row.server, row.version) for row in result.servers] == [
        (f"demo-{number}", "step-2") for number in range(3)
    ]
    assert result.freeze_window_s == max(part.freeze_window_s for part in parts)
    assert {engine.weight_version for engine in stubs.engines} == {"step-2"}


async def test_a_made_up_version_is_the_same_for_all_parts(stubs: Stubs) -> None:
    result = await roll(stubs, weight_version=None)
    assert {engine.weight_version for engine in stubs.engines} == {result.version}


async def test_what_is_wrong_with_the_last_server_is_known_before_the_first_leaves(
    stubs: Stubs,
) -> None:
    stubs.engines[2].version = "0.31.0"
    rotation = Rotation(stubs)
    with pytest.raises(PreflightError, match="different versions of vLLM"):
        await roll(stubs, rotation=rotation)
    assert rotation.log == []


async def test_a_failure_stops_the_roll_and_names_what_is_where(stubs: Stubs) -> None:
    stubs.servers[1].asgi.faults["/start_weight_update"] = Fault("status")
    rotation, parts = Rotation(stubs), list[PushResult]()
    with pytest.raises(PushError) as caught:
        await roll(stubs, rotation=rotation, parts=parts)
    error = caught.value
    assert error.message.startswith("the roll stopped at demo-1: demo-0 at step-2, the others")
    assert "skyctl recover" in error.hint and "the same command again" in error.hint
    assert versions(error) == [("ready", "step-2"), ("ready", "default"), ("ready", "default")]
    assert "version" not in error.details
    assert len(parts) == 1
    assert rotation.routed == {"demo-0", "demo-1", "demo-2"}
    assert "init" not in stubs.engines[2].log
    stubs.servers[1].asgi.faults = {}
    again = await roll(stubs)
    assert all(row.version == "step-2" for row in again.servers)


async def test_a_server_in_doubt_that_the_roll_did_not_come_to_stays_in_doubt(
    stubs: Stubs, tmp_path: Path
) -> None:
    last = stubs.fleet.servers[2]
    left = replace(last, recorded=RecordedState(in_doubt=True, thaw=True))
    stubs.fleet = replace(stubs.fleet, servers=(*stubs.fleet.servers[:2], left))
    await stubs.engines[2].pause("keep")
    stubs.engines[2].start_update()
    stubs.servers[0].asgi.faults["/start_weight_update"] = Fault("status")
    request = PushRequest(str(stubs.new), rolling=1, pause_mode="wait")
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        put_in_doubt(state, {last.name: InDoubt(last.name, "push-0", "start", False, True)})
        job = jobs.open_push(state.journal, Turn(None), request)
        async with stubs.client() as client:
            await jobs.run_push(
                job,
                request,
                stubs.fleet,
                client=client,
                state=state,
                rotation=Rotation(stubs),
                kept=tmp_path / "kept",
            )
        assert state.journal.job(job.id).error is not None
        assert in_doubt(state).keys() == {last.name}
        assert state.server(last.name).quarantine


async def test_a_failed_trial_in_a_later_part_stops_it(stubs: Stubs) -> None:
    stubs.engines[1].logprob = -50.0
    trial = {"prompts": [{"prompt": "ab", "expect": {"min_logprob": -1}}]}
    with pytest.raises(TrialFailed) as caught:
        await roll(stubs, trial=trial)
    assert versions(caught.value)[0] == ("ready", "step-2")
    assert versions(caught.value)[1] == ("quarantined", None)  # nothing is known to go back to
    assert "init" not in stubs.engines[2].log


async def test_pairs_are_not_pushed_to_one_after_the_other(stubs: Stubs) -> None:
    servers = tuple(
        replace(server, target=replace(server.target, role=role))
        for server, role in zip(stubs.fleet.servers, ("prefill", "decode", "decode"), strict=True)
    )
    stubs.fleet = replace(stubs.fleet, servers=servers)
    with pytest.raises(PreflightError, match="computed with other weights"):
        await roll(stubs)
    assert not any(engine.log for engine in stubs.engines)


@pytest.mark.parametrize("count", [3, 4])
async def test_all_at_once_is_no_roll(stubs: Stubs, count: int) -> None:
    with pytest.raises(PreflightError, match="all 3 servers out of the router") as caught:
        await roll(stubs, rolling=count)
    assert caught.value.hint == "--rolling 2 or less"


async def test_a_part_of_fewer_servers_than_none_is_refused(stubs: Stubs) -> None:
    with pytest.raises(PreflightError, match="--rolling -1"):
        await roll(stubs, rolling=-1)


async def test_a_checkpoint_that_is_written_anew_in_the_middle_stops_it(stubs: Stubs) -> None:
    observer = written_anew(stubs.new, "resume")
    with pytest.raises(PushError, match=r"overwritten since it was pushed as step-2"):
        await roll(stubs, observer=observer)
    assert [engine.weight_version for engine in stubs.engines] == ["step-2", "default", "default"]


async def test_cancelled_in_a_part_it_stops_after_it(stubs: Stubs) -> None:
    observer = Recorder()
    parts: list[PushResult] = []
    task = asyncio.ensure_future(roll(stubs, observer=observer, parts=parts))

    def cancel(done: int) -> None:
        if done and not task.cancelling():
            task.cancel()

    observer.on_progress = cancel
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [engine.weight_version for engine in stubs.engines] == ["step-2", "default", "default"]
    assert len(parts) == 1
    assert not any(engine.paused for engine in stubs.engines)


async def test_a_server_that_somebody_paused_is_updated_and_stays_paused(stubs: Stubs) -> None:
    await stubs.engines[1].pause("keep")
    stubs.engines[1].requests = 1  # frozen: it does not end by waiting
    result = await roll(stubs)
    assert [row.state for row in result.servers] == ["ready", "paused", "ready"]
