"""A frozen server is released only with the weights it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyctl.core.recovery import release
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import ServerError
from skyctl.push.verify import weights_digest
from tests.stub.faults import Fault
from tests.unit.push.fleets import Stubs


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path, count=1)


async def released(
    stubs: Stubs,
    stage: str,
    *,
    digest: str | None = None,
    thaw: bool = True,
    slept: int = 0,
    label: str = "",
) -> None:
    async with stubs.client() as client:
        server = VLLMServer(client, stubs.fleet.servers[0].target)
        how: dict[str, Any] = {"slept": slept, "wakes": slept > 0, "label": label}
        await release(server, stage=stage, thaw=thaw, digest=digest, timeout_s=5.0, **how)


async def digest_of(stubs: Stubs) -> str:
    async with stubs.client() as client:
        server = VLLMServer(client, stubs.fleet.servers[0].target)
        return (await weights_digest(server, timeout_s=5.0)).digest


@pytest.mark.parametrize("stage", ["pause", "init", "start"])
async def test_one_without_a_session_is_resumed(stubs: Stubs, stage: str) -> None:
    [engine] = stubs.engines
    await engine.pause("keep")
    await released(stubs, stage, digest=await digest_of(stubs))
    assert not engine.paused
    assert ("finish" in engine.log) is False


@pytest.mark.parametrize("woken", [True, False], ids=["awake", "not yet"])
async def test_one_that_slept_sleeps_again(stubs: Stubs, woken: bool) -> None:
    [engine] = stubs.engines
    digest = await digest_of(stubs)
    await engine.sleep(1, "abort")
    if woken:
        await engine.wake(["weights"])
    await released(stubs, "wake", digest=digest, slept=1)
    assert engine.asleep == {"weights", "kv_cache"} and engine.served == []


async def test_weights_that_a_sleep_discarded_stay_awake_and_serve_nobody(stubs: Stubs) -> None:
    [engine] = stubs.engines
    await engine.sleep(2, "abort")
    await released(stubs, "pause", digest="what it had", slept=2)
    assert engine.asleep == {"kv_cache"} and engine.paused and engine.served == []


async def test_verified_weights_are_labelled_only_where_they_are_though_it_had_slept(
    stubs: Stubs,
) -> None:
    """It was started again since they were verified."""
    [engine] = stubs.engines
    with pytest.raises(ServerError, match="not what they were"):
        await released(stubs, "resume", digest="of v2", slept=2, label="v2")
    assert engine.weight_version == "default"


@pytest.mark.parametrize("stage", ["pause", "start"])
async def test_an_open_session_is_closed_first(stubs: Stubs, stage: str) -> None:
    """Also one of a push before the one that broke off."""
    [engine] = stubs.engines
    await engine.pause("keep")
    engine.start_update()
    await released(stubs, stage)
    assert engine.log[-2:] == ["finish", "resume"] and not engine.update_open


async def test_one_that_was_paused_before_stays_so(stubs: Stubs) -> None:
    [engine] = stubs.engines
    await engine.pause("keep")
    await released(stubs, "start", thaw=False)
    assert engine.paused


async def test_one_that_holds_something_else_is_not_resumed(stubs: Stubs) -> None:
    [engine] = stubs.engines
    before = await digest_of(stubs)
    await engine.pause("keep")
    engine.digest = "something else"
    with pytest.raises(ServerError, match="not what they were"):
        await released(stubs, "start", digest=before)
    assert engine.paused


async def test_one_that_cannot_digest_its_weights_stays_paused(stubs: Stubs) -> None:
    [engine] = stubs.engines
    before = await digest_of(stubs)
    await engine.pause("keep")
    stubs.servers[0].asgi.faults["/collective_rpc"] = Fault("status", text="out of memory")
    with pytest.raises(ServerError, match="out of memory"):
        await released(stubs, "start", digest=before)
    assert engine.paused


@pytest.mark.parametrize("stage", ["update", "finish", "verify", "a stage of tomorrow"])
async def test_one_that_may_have_got_bytes_is_not_resumed_without_a_digest(
    stubs: Stubs, stage: str
) -> None:
    [engine] = stubs.engines
    await engine.pause("keep")
    with pytest.raises(ServerError, match="what its weights were"):
        await released(stubs, stage)
    assert engine.paused and engine.log == ["pause keep"]
