"""What the stub and the simulated engine claim of vLLM, asserted of them and of a real server by
the same tests.

The real server is the shared fleet's first replica, or the one at $SKYCTL_TEST_SERVER_URL
(with $SKYCTL_TEST_SERVER_TOKEN, where it asks for one).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.middleware import Middleware

from skyctl.engines.inside.gate import Gate
from skyctl.engines.inside.guard import SHORTEST_TOKEN, TOKEN_VARIABLE, Guard
from skyctl.engines.vllm.server import VLLMServer, read_start
from skyctl.errors import DeadlineExceeded, ServerError
from skyctl.generate.prompts import GenerationRequest
from skyctl.generate.requests import Endpoint, GenerationClient, GenerationResult
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.verify import weights_digest
from skyctl.states import PauseMode
from tests.simulation.alone import Alone
from tests.stub.app import StubServer
from tests.stub.memory_sender import Sender
from tests.stub.running import running
from tests.stub.state import StubEngine
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

TOKENS = 500
ANSWER_S = 2.0
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


@pytest.fixture
async def sender(server: VLLMServer, tmp_path: Path) -> AsyncIterator[Sender]:
    if server.target.name in ("real", "simulated"):
        model = (await server.started_with()).model
    else:
        model = str(write_checkpoint(tmp_path / "model", tiny_tensors()))
    sender = Sender(model)
    transport = server._client._transport
    if isinstance(transport, Alone):
        slots = {
            chunk["slot"]: dict(zip(chunk["names"], chunk["crc32"], strict=True))
            for chunk in sender.chunks
        }
        transport.offer(os.getpid(), sender.session, slots)
    yield sender
    sender.close()


STUBS = {"stub": "0.32.0", "guarded": "0.33.0"}  # the newer one behind skyctl's layers


@pytest.fixture(params=[*STUBS, "simulated", pytest.param("real", marks=pytest.mark.real)])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[VLLMServer]:
    """One server, awake and running before and after each test."""
    if request.param == "simulated":
        alone = Alone(tmp_path)
        async with ControlClient(transport=alone) as client:
            yield VLLMServer(client, alone.target, timeout_s=10)
        return
    async with ControlClient() as client:
        if version := STUBS.get(request.param):
            token = "t" * SHORTEST_TOKEN
            layers = [Middleware(Guard, environ={TOKEN_VARIABLE: token}), Middleware(Gate)]
            layers = layers if request.param == "guarded" else []
            stub = StubServer(StubEngine(version=version), middleware=layers)
            async with running([stub]) as targets:
                yield VLLMServer(client, replace(targets[0], api_key=token), timeout_s=10)
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
    if server.target.name == "simulated":
        pytest.skip("a simulated engine makes no tokens")
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


@pytest.mark.parametrize("tags", [[], ["weights"]])
async def test_a_wake_of_all_or_a_part_resumes_what_was_only_paused(
    server: VLLMServer, tags: list[str]
) -> None:
    await server.pause("keep")
    assert await server.wake(tags) is True
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
    server: VLLMServer,
) -> None:
    before = await digest(server)
    await server.pause("keep")
    await open_update(server)
    assert await refusal(server.update_weights({"any": "thing"})) == 500
    # vLLM forgets its session, not what that did to the layers
    assert await refusal(server.finish_weight_update()) == 500
    assert await refusal(server.update_weights({"any": "thing"})) == 500
    assert await refusal(server.start_weight_update()) == 500
    await server.start_weight_update()
    await server.finish_weight_update()
    # nothing was loaded: after the scrub the old weights are there
    assert await digest(server) == before
    await server.resume()
    assert await answers(server)


async def digest(server: VLLMServer) -> str:
    """Of what it computes with."""
    return (await weights_digest(server, timeout_s=60)).digest


async def answers(server: VLLMServer) -> bool:
    """Whether it generates now; what is asked of one that does not is withdrawn."""
    (model,) = await server.models()
    asked = {"model": model, "prompt": "hello", "max_tokens": 2}
    try:
        await server._client.call(
            server.target, "POST", "/v1/completions", json=asked, timeout_s=ANSWER_S
        )
    except DeadlineExceeded:
        return False
    return True


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_nobody_is_answered_from_a_pause_to_its_resume(
    server: VLLMServer, mode: PauseMode
) -> None:
    assert await answers(server)
    await server.pause(mode)
    assert not await answers(server)
    await server.resume()
    assert await answers(server)


async def test_without_the_gate_a_newer_server_refuses_requests_in_a_pause() -> None:
    """As vLLM 0.33 does; a stub alone, for the gate is in front of every real server here."""
    stub = StubServer(StubEngine(version="0.33.0"))
    async with ControlClient() as client, running([stub]) as targets:
        server = VLLMServer(client, targets[0], timeout_s=10)
        for mode in ("abort", "wait"):
            await server.pause(mode)  # type: ignore[arg-type]
            assert await refusal(answers(server)) == 503
            await server.pause("keep")
            assert not await answers(server)
            await server.resume()
            assert await answers(server)
        await server.sleep(1)
        assert not await answers(server)


@pytest.mark.parametrize("level", [0, 1])
async def test_nobody_is_answered_from_a_sleep_to_its_end(server: VLLMServer, level: int) -> None:
    await server.sleep(level)
    assert await server.is_paused() and not await answers(server)
    if level:
        await server.wake(["weights"])
        assert not await answers(server)
        await server.wake(["kv_cache"])
    else:
        assert await server.wake() is True
    assert await answers(server)


async def begin_update(server: VLLMServer, sender: Sender) -> None:
    await server.pause("keep")
    await server.init_weight_transfer(sender.init)
    await server.start_weight_update()


async def update_whole(server: VLLMServer, sender: Sender) -> str:
    """A whole update that begins with a start, as the scrub of a second attempt has it; the digest
    of the weights, which are those it was started with."""
    await server.init_weight_transfer(sender.init)
    await server.start_weight_update()
    for chunk in sender.chunks:
        await server.update_weights(chunk)
    await server.finish_weight_update()
    found = await digest(server)
    await server.resume()
    return found


async def test_all_chunks_are_a_whole_update_which_may_be_repeated(
    server: VLLMServer, sender: Sender
) -> None:
    await server.pause("keep")
    first = await update_whole(server, sender)
    await server.pause("keep")
    assert await update_whole(server, sender) == first
    assert await answers(server)


@pytest.mark.parametrize("times", [1, 2])
async def test_whoever_introduces_himself_may_begin_and_finish_without_a_chunk(
    server: VLLMServer, sender: Sender, times: int
) -> None:
    before = await digest(server)
    await server.pause("keep")
    for _ in range(times):
        await server.init_weight_transfer(sender.init)
    await server.start_weight_update()
    await server.finish_weight_update()
    assert await digest(server) == before
    assert await refusal(server.finish_weight_update()) == 500
    await server.resume()


BROKEN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "out of order": lambda chunk: {**chunk, "chunk": 7},
    "damaged": lambda chunk: {**chunk, "crc32": [crc ^ 1 for crc in chunk["crc32"]]},
    "not understood": lambda chunk: {"any": "thing"},
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("after", [0, 1])
async def test_an_update_that_breaks_off_half_way_is_scrubbed_and_can_be_made_anew(
    server: VLLMServer, sender: Sender, broken: str, after: int
) -> None:
    if server.target.name not in ("real", "simulated"):
        pytest.skip("the stub looks at no chunk")
    await server.pause("keep")
    whole = await update_whole(server, sender)
    await begin_update(server, sender)
    for chunk in sender.chunks[:after]:
        await server.update_weights(chunk)
    assert await refusal(server.update_weights(BROKEN[broken](sender.chunks[after]))) == 500
    assert await refusal(server.update_weights(sender.chunks[after])) == 500
    assert await refusal(server.finish_weight_update()) == 500
    assert await refusal(server.start_weight_update()) == 500
    await server.start_weight_update()
    await server.finish_weight_update()
    assert await update_whole(server, sender) == whole
    assert await answers(server)


async def update_half(server: VLLMServer, sender: Sender) -> str:
    """Pause it, and leave an update half-way; returns the digest of its whole weights."""
    if server.target.name not in ("real", "simulated"):
        pytest.skip("the stub counts no tensors")
    await server.pause("keep")
    whole = await update_whole(server, sender)
    await begin_update(server, sender)
    await server.update_weights(sender.chunks[0])
    return whole


async def test_an_update_that_is_finished_half_way_is_refused_and_can_be_made_anew(
    server: VLLMServer, sender: Sender
) -> None:
    whole = await update_half(server, sender)
    assert await refusal(server.finish_weight_update()) == 500
    assert await refusal(server.start_weight_update()) == 500  # vLLM keeps the session
    await server.finish_weight_update()
    assert await update_whole(server, sender) == whole


async def test_a_pusher_that_comes_amid_an_update_of_another_may_finish_it(
    server: VLLMServer, sender: Sender
) -> None:
    whole = await update_half(server, sender)
    await server.init_weight_transfer(sender.init)
    await server.finish_weight_update()
    assert await update_whole(server, sender) == whole


async def test_a_sender_that_is_not_there_is_refused_and_changes_nothing(
    server: VLLMServer, sender: Sender
) -> None:
    if server.target.name not in ("real", "simulated"):
        pytest.skip("the stub opens no memory before a chunk")
    before = await digest(server)
    assert await refusal(server.init_weight_transfer({**sender.init, "session": "00000000"})) == 500
    assert await server.is_paused() is False and await digest(server) == before
    assert await answers(server)


async def test_a_route_that_is_none_is_a_404(server: VLLMServer) -> None:
    call = server._client.call
    assert await refusal(call(server.target, "POST", "/no_such_route", timeout_s=10)) == 404


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
    config = (await server.server_info())["vllm_config"]
    assert config["model_config"]["model"]
    assert await server.started_with() == read_start(config)
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
