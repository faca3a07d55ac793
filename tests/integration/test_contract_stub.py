"""What the stub claims of vLLM, asserted of the stub and of a real server by the same tests.

The real server is the shared fleet's first replica, or the one at $SKYCTL_TEST_SERVER_URL
(with $SKYCTL_TEST_SERVER_TOKEN, where it asks for one).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from skyctl.engines.vllm.server import PauseMode, VLLMServer
from skyctl.errors import ServerError
from skyctl.generate.prompts import GenerationRequest
from skyctl.generate.requests import Endpoint, GenerationClient, GenerationResult
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from tests.stub.app import StubServer
from tests.stub.running import running

TOKENS = 1500
REQUEST = GenerationRequest(
    "r", {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}, prompt="hello world"
)


@pytest.fixture
def real_server_url(request: pytest.FixtureRequest) -> str:
    url = os.environ.get("SKYCTL_TEST_SERVER_URL")
    if url is None:
        servers = request.getfixturevalue("real_fleet").data("urls")["servers"]
        url = next(iter(servers.values()))
    return str(url)


@pytest.fixture
def real_server_token(request: pytest.FixtureRequest) -> str | None:
    if "SKYCTL_TEST_SERVER_URL" in os.environ:
        return os.environ.get("SKYCTL_TEST_SERVER_TOKEN")
    return str(request.getfixturevalue("real_fleet").control_token)


@pytest.fixture(params=["stub", pytest.param("real", marks=pytest.mark.real)])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[VLLMServer]:
    """One server, awake and running before and after each test."""
    async with ControlClient() as client:
        if request.param == "stub":
            async with running([StubServer()]) as targets:
                yield VLLMServer(client, targets[0], timeout_s=10)
            return
        url = request.getfixturevalue("real_server_url")
        token = request.getfixturevalue("real_server_token")
        real = VLLMServer(client, ServerTarget("real", url, token), timeout_s=30)
        await real.resume()
        yield real
        if await real.is_sleeping():
            await real.wake()


@pytest.fixture
async def generation(server: VLLMServer) -> AsyncIterator[GenerationClient]:
    (model,) = await server.models()
    target = server.target
    async with GenerationClient(Endpoint(target.url, model, target.api_key)) as client:
        yield client


async def refusal(call: object) -> int:
    """The status with which a call is refused."""
    with pytest.raises(ServerError) as caught:
        await call  # type: ignore[misc]
    return caught.value.status


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_a_pause_is_seen_by_both_probes_and_a_resume_ends_it(
    server: VLLMServer, mode: PauseMode
) -> None:
    await server.pause(mode)
    assert (await server.is_paused(), await server.is_sleeping()) == (True, True)
    await server.pause(mode)
    await server.resume()
    assert (await server.is_paused(), await server.is_sleeping()) == (False, False)
    await server.resume()


async def test_a_pause_mode_or_sleep_level_that_is_not_one_is_a_400(server: VLLMServer) -> None:
    assert await refusal(server.pause("nonsense")) == 400  # type: ignore[arg-type]
    assert await refusal(server.sleep(7)) == 400
    assert await server.is_paused() is False


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_pauses_and_waking_in_parts_resumes_with_the_last_part(
    server: VLLMServer, level: int
) -> None:
    await server.sleep(level)
    assert (await server.is_paused(), await server.is_sleeping()) == (True, True)
    assert (await server.metrics()).sleep_level == level
    assert await server.wake(["weights"]) is False
    assert await server.wake(["weights"]) is False  # ignored the second time
    assert (await server.is_paused(), await server.is_sleeping()) == (True, True)
    # nothing tells that the weights are awake: skyctl remembers it
    assert (await server.metrics()).sleep_level == level
    assert await server.wake(["kv_cache"]) is True
    assert (await server.is_paused(), await server.is_sleeping()) == (False, False)
    assert (await server.metrics()).sleep_level == 0


async def test_the_sleep_level_in_the_metrics_is_not_moved_by_a_pause(server: VLLMServer) -> None:
    await server.pause("keep")
    assert (await server.metrics()).sleep_level == 0


async def test_a_full_wake_resumes_what_was_only_paused(server: VLLMServer) -> None:
    await server.pause("keep")
    assert await server.wake() is True
    assert await server.is_paused() is False


async def test_a_weight_version_is_kept_until_the_next(server: VLLMServer) -> None:
    before = await server.weight_version()
    assert before is not None
    assert await server.set_weight_version("step-7") is True
    assert await server.weight_version() == "step-7"
    await server.set_weight_version(before)


async def test_an_update_is_started_once_and_finished_once(server: VLLMServer) -> None:
    await open_update(server)
    assert await refusal(server.start_weight_update()) == 500
    await server.finish_weight_update()
    assert await refusal(server.finish_weight_update()) == 500
    assert await refusal(server.update_weights({"any": "thing"})) == 500
    assert await server.is_paused() is False


async def open_update(server: VLLMServer) -> None:
    """Start an update; skip where there is nothing to start."""
    try:
        await server.start_weight_update()
    except ServerError as error:
        if "not configured" in error.message:
            pytest.skip("this server was started without a weight-transfer backend")
        raise


async def test_a_chunk_that_fails_closes_the_session_and_the_next_start_says_so_once(
    server: VLLMServer, generation: GenerationClient
) -> None:
    short = replace(REQUEST, body={**REQUEST.body, "max_tokens": 8})
    before = await generation.generate_one(short)
    await server.pause("keep")
    await open_update(server)
    assert await refusal(server.update_weights({"any": "thing"})) == 500
    # vLLM forgets its session, not what that did to the layers
    assert await refusal(server.finish_weight_update()) == 500
    assert await refusal(server.update_weights({"any": "thing"})) == 500
    assert await refusal(server.start_weight_update()) == 500
    await server.start_weight_update()
    await server.finish_weight_update()
    await server.resume()
    # nothing was loaded: after the scrub the old weights are there
    assert (await generation.generate_one(short)).token_ids == before.token_ids


async def test_a_pause_and_a_resume_do_not_touch_an_open_update(server: VLLMServer) -> None:
    await open_update(server)
    await server.pause("keep")
    await server.resume()
    assert await server.is_paused() is False
    assert await refusal(server.start_weight_update()) == 500
    await server.finish_weight_update()


async def test_a_finish_labels_the_weights_only_when_it_is_told_to(server: VLLMServer) -> None:
    before = await server.weight_version()
    assert before is not None
    await open_update(server)
    await server.finish_weight_update()
    assert await server.weight_version() == before
    await open_update(server)
    await server.finish_weight_update("step-9")
    assert await server.weight_version() == "step-9"
    await server.set_weight_version(before)


async def test_an_unknown_worker_method_is_a_500_and_the_server_lives_on(
    server: VLLMServer,
) -> None:
    assert await refusal(server.collective_rpc("no_such_method")) == 500
    assert await server.is_paused() is False


async def test_the_rest_of_the_facts_are_of_the_same_kind(server: VLLMServer) -> None:
    await server.health()
    assert await server.version() >= "0.26"
    assert await server.ranks() == (1, 1)
    assert await server.reset_prefix_cache() is True
    assert (await server.metrics()).in_flight == 0
    assert (await server.server_info())["vllm_config"]["model_config"]["model"]
    assert await server.weight_checksums()


async def test_a_generation_frozen_by_keep_goes_on_with_the_same_tokens(
    server: VLLMServer, generation: GenerationClient
) -> None:
    undisturbed = await generation.generate_one(REQUEST)
    result = await caught_midway(server, generation, "keep")
    assert (result.token_ids, result.retries) == (undisturbed.token_ids, 0)


async def test_an_aborted_generation_is_gone_on_with_after_the_resume(
    server: VLLMServer, generation: GenerationClient
) -> None:
    undisturbed = await generation.generate_one(REQUEST)
    result = await caught_midway(server, generation, "abort")
    assert (result.token_ids, result.finish_reason) == (undisturbed.token_ids, "length")
    assert result.text == undisturbed.text
    assert result.retries >= 1


async def test_a_request_sent_while_paused_waits_for_the_resume(
    server: VLLMServer, generation: GenerationClient
) -> None:
    await server.pause("abort")
    task, _ = begin(generation)
    # neither metrics nor anything else tells of a queued request while the scheduler is paused
    done, _ = await asyncio.wait({task}, timeout=0.5)
    assert not done
    await server.resume()
    assert len((await task).token_ids) == TOKENS


async def caught_midway(
    server: VLLMServer, generation: GenerationClient, mode: PauseMode
) -> GenerationResult:
    """What comes of a generation that was paused in its middle and resumed."""
    for _ in range(8):  # on a busy machine a tiny model may be done before the pause arrives
        task, begun = begin(generation)
        await begun.wait()
        await server.pause(mode)
        caught = not task.done()
        await server.resume()
        result = await task
        # an abort that came after the last token, with the answer still on its way, caught nothing
        if caught and (mode == "keep" or result.retries):
            return result
    raise AssertionError("no generation could be caught in its middle")


def begin(client: GenerationClient) -> tuple[asyncio.Task[GenerationResult], asyncio.Event]:
    """A generation under way, and the event of its first text."""
    begun = asyncio.Event()
    task = asyncio.create_task(client.generate_one(REQUEST, on_text=lambda _: begun.set()))
    return task, begun
