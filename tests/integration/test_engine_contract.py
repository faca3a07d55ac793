"""What skyctl asks of every engine (`engines/base.py`, `Server`), by the same tests of each: of the
stubs, of a real vLLM server, and of the SGLang server at $SKYCTL_TEST_SGLANG_URL (with
$SKYCTL_TEST_SGLANG_TOKEN, and its checkpoints in $SKYCTL_TEST_SGLANG_CHECKPOINTS, `a:b`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from skyctl import engines
from skyctl.engines.base import Refusal, Server
from skyctl.errors import ServerError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.frozen import count_tokens, require_paused
from skyctl.push.request import PushServer
from skyctl.push.servers import PushedServer
from tests.stub.app import StubServer
from tests.stub.running import running
from tests.stub.sglang import SGLangEngine, SGLangStub
from tests.stub.state import StubEngine
from tests.tiny import make_tiny_checkpoint

KINDS = [
    "vllm-stub",
    "sglang-stub",
    "sglang-stub-attached",
    "sglang-newest-stub",
    "sglang-newest-stub-attached",
    pytest.param("vllm", marks=pytest.mark.real),
    pytest.param("sglang", marks=pytest.mark.gpu),
]
OLDEST, NEWEST = "0.5.14", "0.5.23"
STUB_DELAY_S = 0.002
ANSWER_S = 2.0


@dataclass
class Subject:
    """A running server, the checkpoint that it began with, and another."""

    server: Server
    a: str
    b: str
    tokens: int  # of a long answer

    async def answer(self, tokens: int) -> str:
        body = {
            "model": (await self.server.models())[0],
            "prompt": "hello world",
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        found: dict[str, Any] = (await self.server.complete(body, timeout_s=60.0))["choices"][0]
        return f"{found['text']}|{found['finish_reason']}"

    async def long_answer(self) -> asyncio.Task[str]:
        """One that is under way."""
        task = asyncio.create_task(self.answer(self.tokens))
        await asyncio.sleep(0.1)
        assert not task.done()
        return task


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: str(make_tiny_checkpoint(root / name, seed=n)) for n, name in enumerate("ab")}


@pytest.fixture(params=KINDS)
async def subject(request: pytest.FixtureRequest, tiny: dict[str, str]) -> AsyncIterator[Subject]:
    kind: str = request.param
    if kind == "vllm":
        fleet = request.getfixturevalue("real_fleet")
        url = next(iter(fleet.data("urls")["servers"].values()))
        found = Subject(
            _server(url, "vllm", fleet.control_token),
            str(fleet.directory / "checkpoints" / "a"),
            str(fleet.directory / "checkpoints" / "b"),
            tokens=1900,
        )
    elif kind == "sglang":
        if (real := os.environ.get("SKYCTL_TEST_SGLANG_URL")) is None:
            pytest.skip("needs $SKYCTL_TEST_SGLANG_URL")
        a, b = os.environ["SKYCTL_TEST_SGLANG_CHECKPOINTS"].split(":")
        token = os.environ.get("SKYCTL_TEST_SGLANG_TOKEN")
        found = Subject(_server(real, "sglang", token), a, b, tokens=1500)
    else:
        stub: Any = (
            StubServer(StubEngine(model=tiny["a"]), token_delay_s=STUB_DELAY_S)
            if kind == "vllm-stub"
            else SGLangStub(
                SGLangEngine(
                    model=tiny["a"],
                    version=NEWEST if "newest" in kind else OLDEST,
                    cpu_backup=True,
                ),
                keeper="attached" not in kind,
                token_delay_s=STUB_DELAY_S,
            )
        )
        async with running([stub]) as [target]:
            server = _server(target.url, kind.partition("-")[0], None)
            yield Subject(server, tiny["a"], tiny["b"], tokens=200)
        return
    try:
        yield found
    finally:
        await found.server.pause("abort")
        await found.server.reload_weights(found.a, timeout_s=60.0)
        await found.server.reset_caches()
        await found.server.resume()


def _server(url: str, engine: str, token: str | None) -> Server:
    target = ServerTarget("s-0", url, token, engine)
    return engines.server(ControlClient(), target, timeout_s=30.0)


async def test_keep_holds_a_request_and_resume_ends_it_as_if_nothing_had_been(
    subject: Subject,
) -> None:
    # twice: the first answer may round otherwise than one whose prompt is in the prefix cache
    _, undisturbed = [await subject.answer(subject.tokens) for _ in range(2)]
    held = await subject.long_answer()
    await subject.server.pause("keep")
    assert await subject.server.is_paused()
    await asyncio.wait([held], timeout=ANSWER_S)
    assert not held.done()
    await subject.server.resume()
    assert not await subject.server.is_paused()
    assert await held == undisturbed


@pytest.mark.parametrize("before", [None, "keep"])
async def test_abort_ends_what_runs_and_what_is_held_and_new_requests_wait(
    subject: Subject, before: Any
) -> None:
    running_one = await subject.long_answer()
    if before:
        await subject.server.pause(before)
    await subject.server.pause("abort")
    assert (await running_one).endswith("|abort")
    late = asyncio.create_task(subject.answer(2))
    await asyncio.wait([late], timeout=0.3)
    assert not late.done()
    await subject.server.resume()
    assert (await late).endswith("|length")


async def test_wait_ends_what_runs_before_it_pauses(subject: Subject) -> None:
    running_one = await subject.long_answer()
    await subject.server.pause("wait", timeout_s=60.0)
    assert await subject.server.is_paused()
    assert (await asyncio.wait_for(running_one, ANSWER_S)).endswith("|length")
    await subject.server.resume()


async def test_pauses_and_resumes_may_be_repeated(subject: Subject) -> None:
    for mode in ("keep", "keep", "abort", "abort", "keep"):
        await subject.server.pause(mode)  # type: ignore[arg-type] # a PauseMode each
        assert await subject.server.is_paused()
    await subject.server.resume()
    await subject.server.resume()
    assert (await subject.answer(2)).endswith("|length")


async def test_a_server_that_slept_answers_as_before_and_says_what_is_awake(
    subject: Subject,
) -> None:
    before = await subject.answer(8)
    try:
        await subject.server.sleep(1)
    except ServerError as error:
        if "SGLang does not say" in error.message:
            pytest.skip("this one has no keeper")
        raise
    assert await subject.server.is_sleeping()
    await subject.server.sleep(1)
    assert await subject.server.wake(["weights"]) is False
    assert await subject.server.wake(["weights"]) is False
    assert await subject.server.wake(["kv_cache"]) is True
    assert not await subject.server.is_sleeping()
    assert await subject.server.wake() is True
    assert await subject.answer(8) == before


async def test_a_reload_brings_other_weights_and_a_label_names_them(subject: Subject) -> None:
    server = subject.server
    first, checksums = await subject.answer(64), await server.weight_checksums(timeout_s=60.0)
    await server.pause("keep")
    await server.prepare_reload()
    await server.reload_weights(subject.b, timeout_s=60.0)
    await server.reset_caches()
    assert await server.set_weight_version("step-2")
    assert await server.is_paused()
    await server.resume()
    assert await server.weight_version() == "step-2"
    assert await subject.answer(64) != first
    if checksums is not None:  # of linear layers on CPU, vLLM hashes nothing
        found = await server.weight_checksums(timeout_s=60.0)
        assert found is not None and found.keys() == checksums.keys() and found != checksums


async def test_what_is_missing_is_said_by_a_refusal(subject: Subject) -> None:
    with pytest.raises(ServerError) as caught:
        await subject.server.collective_rpc("skyctl_never_heard_of")
    assert caught.value.refusal == Refusal.NO_METHOD
    with pytest.raises(ServerError) as caught:
        await subject.server.finish_weight_update()
    assert caught.value.refusal in (Refusal.NO_SESSION, Refusal.NO_TRANSFER)


async def test_load_and_facts_are_told(subject: Subject) -> None:
    server = subject.server
    await server.health()
    assert (await server.version())[0].isdigit()
    assert await server.ranks() == (1, 1)
    assert (await server.started_with()).model
    task = await subject.long_answer()
    assert (await server.metrics()).in_flight == 1
    await server.pause("abort")
    await task
    await server.resume()
    assert (await subject.answer(2)).endswith("|length")


async def test_tokens_of_a_frozen_server_show_that_another_client_resumed_it(
    subject: Subject,
) -> None:
    """The push counts them where no guard keeps the freeze (`push/servers.py`)."""
    server = subject.server
    pushed = PushedServer(PushServer(replace(server.target, holder="")), server)
    task = await subject.long_answer()
    await server.pause("keep")
    await count_tokens(pushed)
    await asyncio.sleep(0.5)
    await require_paused(pushed)
    await server.resume()
    await task
    await server.pause("keep")
    with pytest.raises(ServerError, match="generated tokens while it was frozen"):
        await require_paused(pushed)
    assert await server.is_paused()
    await server.resume()
    assert (await subject.answer(2)).endswith("|length")
