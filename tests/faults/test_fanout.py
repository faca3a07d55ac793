"""One server hung and one failing among eight: the other six are done at once, and it is said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skyctl.core import actions as verbs
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome
from skyctl.http.target import ServerTarget
from tests.faults.command import attached, skyctl
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.running import running

HUNG, FAILING = 2, 5
HEALTHY = [n for n in range(8) if n not in (HUNG, FAILING)]


def eight_stubs() -> list[StubServer]:
    faults = {HUNG: {"*": Fault("hang")}, FAILING: {"/pause": Fault("status", text="no")}}
    return [StubServer(faults=faults.get(n)) for n in range(8)]


async def test_six_are_paused_while_the_hung_one_is_still_waited_for() -> None:
    stubs = eight_stubs()
    async with running(stubs) as targets, ControlClient() as client:
        pausing = asyncio.create_task(
            verbs.pause(client, targets, mode="keep", timeout_s=2.0, keep_partial=True)
        )
        async with asyncio.timeout(10):
            await stubs[HUNG].asgi.until("/is_paused")
            await stubs[FAILING].asgi.until("/pause")
            for n in HEALTHY:
                await stubs[n].engine.until_logged("pause keep")
        assert not pausing.done(), "the hung server is still within its deadline"
        outcomes = await pausing
    assert [o.status.value for o in outcomes] == [
        {HUNG: "timeout", FAILING: "failed"}.get(n, "ok") for n in range(8)
    ]
    assert outcomes[FAILING].detail.endswith("/pause answered 500: no")
    assert "no answer in 2 s" in outcomes[HUNG].detail
    slowest = max(outcomes[n].elapsed_ms for n in HEALTHY)
    assert slowest < outcomes[HUNG].elapsed_ms


async def test_without_being_asked_to_keep_it_the_partial_pause_is_undone() -> None:
    stubs = eight_stubs()
    async with running(stubs) as targets, ControlClient() as client:
        outcomes = await verbs.pause(
            client, targets, mode="keep", timeout_s=5.0, read_back_timeout_s=2.0
        )
    assert [o.status.value for o in outcomes] == [
        {HUNG: "timeout", FAILING: "failed"}.get(n, "rolled-back") for n in range(8)
    ]
    assert [stubs[n].engine.log for n in HEALTHY] == [["pause keep", "resume"]] * 6
    assert stubs[FAILING].engine.log == []


async def test_a_dead_server_and_a_slow_one_hide_nothing() -> None:
    stubs = [StubServer(), StubServer(faults={"/pause": Fault("delay", seconds=0.2)})]
    async with running(stubs) as targets, ControlClient() as client:
        dead = ServerTarget("dead", targets[0].url.rsplit(":", 1)[0] + ":1")
        outcomes: list[Outcome[None]] = await verbs.pause(
            client, [dead, *targets], timeout_s=5.0, keep_partial=True
        )
    assert [o.status.value for o in outcomes] == ["unreachable", "ok", "ok"]
    assert outcomes[1].elapsed_ms < outcomes[2].elapsed_ms


@pytest.mark.parametrize("keep_partial", [False, True])
async def test_the_command_says_partial_and_shows_every_server(
    tmp_path: Path, keep_partial: bool
) -> None:
    stubs = eight_stubs()
    async with running(stubs) as targets:
        file = attached(tmp_path, targets)
        flags = ["--keep-partial"] if keep_partial else []
        code, envelope = await skyctl(
            "pause", "--mode", "keep", *flags, home=tmp_path / "home", file=file
        )
    done = "ok" if keep_partial else "rolled-back"
    assert code == 3
    assert [row["status"] for row in envelope["data"]["outcomes"]] == [
        {HUNG: "timeout", FAILING: "failed"}.get(n, done) for n in range(8)
    ]
    assert envelope["error"]["kind"] == "PartialFailure"
    assert envelope["data"]["done"] == (6 if keep_partial else 0)


async def test_the_command_fails_with_1_when_all_fail_and_124_when_all_time_out(
    tmp_path: Path,
) -> None:
    failing = [StubServer(faults={"/pause": Fault("status")}) for _ in range(2)]
    async with running(failing) as targets:
        file = attached(tmp_path, targets)
        code, _ = await skyctl("pause", home=tmp_path / "a", file=file)
        assert code == 1
    hung = [StubServer(faults={"*": Fault("hang")}) for _ in range(2)]
    async with running(hung) as targets:
        file = attached(tmp_path, targets)
        code, _ = await skyctl("pause", home=tmp_path / "b", file=file)
        assert code == 124
