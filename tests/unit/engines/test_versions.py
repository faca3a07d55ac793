"""Which weights answer which request, before a stub whose tokens depend on its weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from skyctl.engines.inside.versions import Demand, Versioned, Versions
from tests.stub.app import StubServer
from tests.stub.running import running

BODY = {"model": "stub", "prompt": "ab", "max_tokens": 4}


def exact(label: str) -> dict[str, str]:
    return {"X-Weight-Version-Exact": label}


def least(label: str) -> dict[str, str]:
    return {"X-Weight-Version-Min": label}


@pytest.mark.parametrize(
    ("demand", "met"),
    [
        (Demand(), True),
        (Demand(exact="b@12345678"), True),
        (Demand(exact="b"), True),
        (Demand(exact="a"), False),
        (Demand(exact="base"), False),
        (Demand(least="base"), True),
        (Demand(least="default"), True),
        (Demand(least="a"), True),
        (Demand(least="b"), True),
        (Demand(least="c"), False),
        (Demand(exact="b", least="a"), True),
    ],
)
def test_a_demand_is_met_by_its_label_or_by_later_ones(demand: Demand, met: bool) -> None:
    versions = Versions()
    versions.name("a")
    versions.name("b@12345678")
    assert versions.meets(demand) == met


def test_a_rollback_is_no_later_version_and_a_new_server_knows_the_fleets() -> None:
    versions = Versions()
    assert versions.meets(Demand(exact="default")) and versions.meets(Demand(exact="base"))
    versions.name("c", ["a", "b"])
    assert versions.meets(Demand(least="b"))
    versions.name("a", ["a", "b", "c"])
    assert versions.meets(Demand(least="a")) and not versions.meets(Demand(least="b"))


class Served:
    """A stub that says which weights answer."""

    def __init__(self, stub: StubServer, client: httpx.AsyncClient) -> None:
        self.stub, self.client = stub, client

    async def push(self, label: str, digest: str, **more: Any) -> None:
        """What a push does to a server, as far as it matters here."""
        await self.stub.engine.pause("keep")
        self.stub.engine.digest = digest
        answer = await self.client.post(
            "/update_weight_version", json={"new_version": label, **more}
        )
        assert answer.status_code == 200
        await self.stub.engine.resume()

    async def ask(self, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={**BODY, **more}, headers=headers)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    stub = StubServer()
    stub.asgi = Versioned(stub.asgi)  # type: ignore[assignment]
    async with (
        running([stub]) as [target],
        httpx.AsyncClient(base_url=target.url, trust_env=False, timeout=30) as client,
    ):
        yield Served(stub, client)


def versions_of(answer: httpx.Response) -> tuple[str | None, str | None]:
    names = ("x-weight-version-begin", "x-weight-version-end")
    return answer.headers.get(names[0]), answer.headers.get(names[1])


async def test_answers_say_the_version_they_began_and_ended_with() -> None:
    async with served() as server:
        assert versions_of(await server.ask()) == ("base", "base")
        server.stub.gate.hold()
        asking = asyncio.create_task(server.ask({"X-Weight-Version-Fields": "true"}))
        async with asyncio.timeout(10):
            while not server.stub.engine.requests:  # noqa: ASYNC110 - over a socket
                await asyncio.sleep(0.01)
        await server.push("b", "other")
        server.stub.gate.grant(10)
        answer = await asking
        assert versions_of(answer) == ("base", "b")
        assert answer.json()["weight_versions"] == {"begin": "base", "end": "b"}
        assert answer.json()["choices"], "and all that the server said"


async def test_a_stream_counts_the_tokens_of_each_version() -> None:
    async with served() as server:
        server.stub.gate.hold()
        server.stub.gate.grant(1)
        headers = {"X-Weight-Version-Fields": "true"}
        async with server.client.stream(
            "POST", "/v1/completions", json={**BODY, "stream": True}, headers=headers
        ) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": weight-version base"
            assert await anext(lines) == ""
            assert (await anext(lines)).startswith("data: {")
            assert answer.headers["x-weight-version-begin"] == "base"
            await server.push("b", "other")
            server.stub.gate.grant(3)
            text = [line async for line in lines]
        [comment] = [line for line in text if line.startswith(": weight-versions ")]
        assert json.loads(comment.partition("versions ")[2]) == {
            "begin": "base",
            "end": "b",
            "spans": [{"version": "base", "tokens": 1}, {"version": "b", "tokens": 3}],
        }
        assert text.index(comment) < text.index("data: [DONE]")
        assert [line for line in text if line.startswith(": weight-version ")] == [
            ": weight-version b"
        ]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (exact("base"), 409),
        (exact("b"), 200),
        (least("base"), 200),
        (least("b"), 200),
        (least("c"), 409),
        (exact(""), 400),
        ({"X-Weight-Version-Exact": "x" * 500}, 400),
    ],
)
async def test_a_demand_that_is_not_met_is_refused(headers: dict[str, str], status: int) -> None:
    async with served() as server:
        await server.push("b", "other")
        before = server.stub.engine.prompt_tokens
        answer = await server.ask(headers)
        assert answer.status_code == status
        if status == 409:
            assert answer.json()["error"]["weight_version"] == "b"
            assert answer.headers["retry-after"] == "1"
            assert server.stub.engine.prompt_tokens == before, "nothing was computed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_overtaken_brings_no_token_of_another_version(
    stream: bool,
) -> None:
    async with served() as server:
        server.stub.gate.hold()
        server.stub.gate.grant(2)
        asking = asyncio.create_task(server.ask(exact("base"), stream=stream))
        async with asyncio.timeout(10):
            while server.stub.engine.generation_tokens < 2:  # noqa: ASYNC110 - over a socket
                await asyncio.sleep(0.01)
        await server.push("b", "other")
        answer = await asking  # the gate is still held: it ends because of the label
        server.stub.gate.grant(10)
        assert answer.status_code == (200 if stream else 409)
        if stream:
            events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            assert len(events) == 3 and "[DONE]" not in answer.text
            assert json.loads(events[-1][6:])["error"]["code"] == 409
        assert (await server.ask(exact("b"))).status_code == 200


async def test_an_older_server_without_labels_has_them_here() -> None:
    stub = StubServer()
    stub.engine.version = "0.26.0"
    stub.asgi = Versioned(StubServer(stub.engine).asgi)  # type: ignore[assignment]
    async with (
        running([stub]) as [target],
        httpx.AsyncClient(base_url=target.url, trust_env=False, timeout=30) as client,
    ):
        label = await client.post("/update_weight_version", json={"new_version": "b"})
        assert label.status_code == 404
        answer = await client.post("/v1/completions", json=BODY, headers=exact("b"))
        assert (answer.status_code, versions_of(answer)) == (200, ("b", "b"))
