"""LoRA adapters on real servers behind the real router, against torch's own arithmetic.

What the stub of a server claims of adapters is asserted of it and of a real server by one test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import httpx
import pytest

import skyctl
from skyctl.adapters.peft import WEIGHTS
from skyctl.adapters.requests import LoadAdapter
from skyctl.checkpoints.staging import staged
from skyctl.core.registry import find
from skyctl.engines.base import Refusal
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import ServerError, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.service import connect
from tests.integration.fleet_cli import (
    UP_TIMEOUT_S,
    FleetCli,
    bearer,
    greedy,
    greedy_body,
)
from tests.integration.reference import PROMPTS, TOKENS, Reference
from tests.stub.app import StubServer
from tests.stub.running import running
from tests.unit.adapters.files import leave_in_memory

load_file = pytest.importorskip("safetensors.torch").load_file
digest_on_device = pytest.importorskip("skyctl.wire.device_digest").digest_on_device

pytestmark = [pytest.mark.beside, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

FLEET = """
name: lora
model: {model}
served_model_name: base
replicas: 2
device: cpu
args: {{max-model-len: 1024, enforce-eager: true, num-gpu-blocks-override: 512}}
router: {{policy: round_robin}}
lora: {{max_adapters: 2, max_rank: 16, adapters: {{first: {first}}}}}
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    pytest.importorskip("vllm")
    return Reference(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def fleet(reference: Reference) -> Iterator[FleetCli]:
    root = reference.root
    fleet = FleetCli(root / "fleet", root / "home")
    fleet.directory.mkdir()
    text = FLEET.format(model=root / "a", first=root / "x1")
    (fleet.directory / "fleet.yaml").write_text(text)
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet
    finally:
        fleet.run("down", expect=None)


@pytest.mark.real
def test_adapters_through_syncs_restarts_and_pushes(
    fleet: FleetCli, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, key, root = fleet.data("urls")["router"], fleet.key, reference.root

    def answers(model: str) -> list[list[int]]:
        """By the router, which takes turns: both servers answer each prompt."""
        both = [[greedy(url, model, p, TOKENS, key=key) for p in PROMPTS] for _ in range(2)]
        assert both[0] == both[1], model
        return both[0]

    base, first = reference.tokens("a"), reference.tokens("a", "x1")
    assert base != first
    assert answers("first") == first  # from the fleet file
    assert answers("base") == base

    fleet.run("adapters", "load", "x", str(root / "x2"))
    assert answers("x") == reference.tokens("a", "x2")
    wanted = reference.tokens("a", "x3")
    monkeypatch.setenv("SKYCTL_HOME", str(fleet.home))
    config = {"r": 8, "lora_alpha": 16}
    adapters = skyctl.Fleet.named("lora").adapters
    change = asyncio.run(adapters.sync("x", reference.tensors("x3"), config))
    assert change.adapter is not None and change.adapter.served_as == "x@2"
    assert answers("x") == wanted  # the same name and prompts: no KV block is stale
    lines = root / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in PROMPTS))
    asked = ("generate", "--input", str(lines), "--max-tokens", str(TOKENS), "--ignore-eos")
    told = fleet.data(*asked, "--temperature", "0", "--model", "x")
    assert [row["token_ids"] for row in told["results"]] == wanted

    # one batch with all of them, on each server: every row gets its own
    batch = [(model, prompt) for model in ("base", "x", "first") for prompt in PROMPTS] * 4
    expected = {"base": base, "x": wanted, "first": first}
    with ThreadPoolExecutor(len(batch)) as pool:
        mixed = pool.map(lambda one: greedy(url, one[0], one[1], TOKENS, key=key), batch)
    assert all(
        tokens == expected[model][PROMPTS.index(prompt)]
        for tokens, (model, prompt) in zip(mixed, batch, strict=True)
    )

    refused = fleet.run("adapters", "sync", "x", str(root / "rank32"), expect=1)
    assert "rank 32, and this fleet takes 16" in refused.stderr
    body = {**greedy_body("x", PROMPTS[0], 1), "prompt_logprobs": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=bearer(key), timeout=60)
    assert answer.status_code == 400 and "prompt log-probabilities" in answer.text
    both = httpx.post(
        f"{url}/v1/completions", json={**body, "model": "base"}, headers=bearer(key), timeout=60
    )
    assert both.status_code == 200

    fleet.run("restart", "lora-0", timeout_s=UP_TIMEOUT_S)
    assert answers("x") == wanted
    assert answers("first") == first

    pushed = fleet.run("sync-weights", str(root / "b"))
    assert "adapters stay: first@1, x@2" in pushed.stderr
    assert answers("x") == reference.tokens("b", "x3")
    assert answers("base") == reference.tokens("b")

    fleet.run("adapters", "unload", "x")
    for _ in range(2):
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=bearer(key), timeout=60)
        assert answer.status_code == 404
    [left] = fleet.data("adapters")["adapters"]
    assert (left["name"], left["servers"]) == ("first", ["lora-0", "lora-1"])


@pytest.mark.real
def test_adapters_out_of_memory_are_compared_and_outlive_their_sender(
    fleet: FleetCli, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands for a trainer's GPU: it is all that a CPU server can map."""
    monkeypatch.setenv("SKYCTL_HOME", str(fleet.home))
    url, root = fleet.data("urls")["router"], reference.root
    trainer = root / "trainer"
    copytree(root / "x2", trainer)
    numbers = digest_on_device(list(load_file(trainer / WEIGHTS).values()))
    model = asyncio.run(skyctl.Fleet.named("lora").model_path())
    wanted = reference.tokens(Path(str(model)).name, "x2")

    async def send(numbers: list[int]) -> str:
        async with connect(find(None, "lora")) as service:
            place = await service.staging()
            with staged(place.adapters, needed_bytes=1) as directory:
                sent = leave_in_memory(trainer, directory, numbers)
                request = LoadAdapter(name="m", directory=str(directory), new=None, sent=sent)
                change = await service.load_adapter(request)
        assert change.adapter is not None
        return change.adapter.path

    def answers() -> list[list[int]]:
        return [greedy(url, "m", p, TOKENS, key=fleet.key) for p in (*PROMPTS, *PROMPTS)]

    with pytest.raises(SkyctlError) as caught:
        asyncio.run(send([number + 1 for number in numbers]))
    assert "is not what was sent" in str(caught.value.details)
    assert "m" not in {adapter["name"] for adapter in fleet.data("adapters")["adapters"]}

    path = asyncio.run(send(numbers))
    rmtree(trainer)
    assert answers() == [*wanted, *wanted]
    fleet.run("restart", "lora-0", timeout_s=UP_TIMEOUT_S)  # of its sibling's file
    assert answers() == [*wanted, *wanted]
    assert digest_on_device(list(load_file(Path(path) / WEIGHTS).values())) == numbers
    fleet.run("adapters", "unload", "m")


@pytest.fixture(params=["stub", pytest.param("real", marks=pytest.mark.real)])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[VLLMServer]:
    async with ControlClient() as client:
        if request.param == "stub":
            async with running([StubServer()]) as targets:
                yield VLLMServer(client, targets[0], timeout_s=10)
            return
        fleet = request.getfixturevalue("fleet")
        url = fleet.data("urls")["servers"]["lora-1"]
        yield VLLMServer(client, ServerTarget("real", url, fleet.control_token), timeout_s=30)


async def test_what_the_stub_says_of_adapters_is_what_a_server_says(
    server: VLLMServer, reference: Reference
) -> None:
    async def mine() -> list[tuple[str, str, bool]]:
        found = [(one.name, one.path, one.in_flight) for one in await server.adapters()]
        return [one for one in found if one[0].startswith("c")]

    async def refusal(call: Any) -> tuple[int, str]:
        with pytest.raises(ServerError) as caught:
            await call
        return caught.value.status, caught.value.message

    one, two = str(reference.root / "x1"), str(reference.root / "x2")
    model = (await server.models())[0]
    await server.load_adapter("c@1", one)
    await server.name_adapter("c", "c@1")
    await server.name_adapter("c", "c@1")
    assert await mine() == [("c", one, False)]
    answer = await server.complete({"model": "c", "prompt": [97], "max_tokens": 2})
    assert answer["model"] == "c@1"
    status, words = await refusal(server.load_adapter("c", two))
    assert status == 400 and "already been loaded" in words
    await server.load_adapter("c@2", two)
    await server.name_adapter("c", "c@2")
    assert await mine() == [("c", two, False)]
    for name, loaded in (("c", "c@9"), (model, "c")):
        status, words = await refusal(server.name_adapter(name, loaded))
        assert status == 404 and "which is not loaded" in words
    assert (await refusal(server.load_adapter("d", "/nowhere")))[0] == 404
    status, words = await refusal(server.load_adapter("d", str(reference.root / "rank32")))
    assert status == 500 and "rank 32 is greater than max_lora_rank 16" in words
    asked = {"model": "c", "prompt": [97], "max_tokens": 1, "prompt_logprobs": 0}
    status, words = await refusal(server.complete(asked))
    assert status == 400 and "prompt log-probabilities" in words
    for _ in range(2):
        await server.unload_adapter("c")
    assert await mine() == []
    assert (await refusal(server.complete({**asked, "prompt_logprobs": None})))[0] == 404


async def test_a_server_that_takes_no_adapters_says_so() -> None:
    stub = StubServer()
    stub.adapters.enabled = False
    async with ControlClient() as client, running([stub]) as [target]:
        with pytest.raises(ServerError) as caught:
            await VLLMServer(client, target).load_adapter("x", "/x")
    assert caught.value.refusal == Refusal.NO_ADAPTERS
