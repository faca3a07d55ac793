"""Which weights answer which request, before a stub whose tokens depend on its weights."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from skyctl.engines.inside.versions import Demand, Versioned, Versions
from tests.stub.app import StubServer
from tests.stub.running import running

BODY = {"model": "stub", "prompt": "ab", "max_tokens": 4}
BODY_SENT = json.dumps({**BODY, "stream": True}).encode()
STREAM = [(b"content-type", b"text/event-stream")]
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'


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


async def post(
    versioned: Versioned,
    path: str,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    send: Callable[[Any], Awaitable[None]] | None = None,
) -> None:
    """One request without a socket, whose buffers would hide how slowly a client reads."""

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def ignore(message: Any) -> None: ...

    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await versioned(scope, receive, send or ignore)


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


async def test_a_token_is_counted_when_it_is_made_however_slowly_the_client_reads() -> None:
    labelled, reads = asyncio.Event(), asyncio.Event()
    received: list[bytes] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        if scope["path"] != "/v1/completions":
            await send({"type": "http.response.body"})
            return
        for _ in range(3):
            await send({"type": "http.response.body", "body": TOKEN, "more_body": True})
        await post(versioned, "/update_weight_version", b'{"new_version": "b"}')
        labelled.set()
        for part in (TOKEN, b"data: [DONE]\n\n"):
            await send({"type": "http.response.body", "body": part, "more_body": part is TOKEN})

    async def read(message: Any) -> None:
        if body := message.get("body"):
            await reads.wait()
            received.append(body)

    versioned = Versioned(engine)
    fields = [(b"x-weight-version-fields", b"true")]
    answering = asyncio.create_task(post(versioned, "/v1/completions", BODY_SENT, fields, read))
    async with asyncio.timeout(10):
        await labelled.wait()
        assert received == [] and not answering.done()
        reads.set()
        await answering
    [comment] = [part for part in received if b": weight-versions " in part]
    assert json.loads(comment.splitlines()[0].partition(b"versions ")[2])["spans"] == [
        {"version": "base", "tokens": 3},
        {"version": "b", "tokens": 1},
    ]


async def test_a_client_that_hangs_up_ends_its_answer() -> None:
    """Also while the engine is ahead of what was sent."""

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        while True:
            await send({"type": "http.response.body", "body": TOKEN, "more_body": True})
            await asyncio.sleep(0)

    async def gone(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("the client is gone")

    fields = [(b"x-weight-version-fields", b"true")]
    with pytest.raises(OSError, match="the client is gone"):
        async with asyncio.timeout(10):
            await post(Versioned(engine), "/v1/completions", BODY_SENT, fields, gone)


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


async def test_a_client_that_breaks_when_its_answer_is_given_up_is_not_logged() -> None:
    """Nobody waits for it any more: an engine that fails sends no last message."""
    logged: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: logged.append(context))
    sending, broke = asyncio.Event(), asyncio.Event()

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await send({"type": "http.response.body", "body": TOKEN, "more_body": True})
        await sending.wait()
        raise RuntimeError("the engine is dead")

    async def stalled(message: Any) -> None:
        if message["type"] == "http.response.body":
            sending.set()
            try:
                await loop.create_future()
            finally:
                broke.set()
                raise OSError("the client is gone")

    fields = [(b"x-weight-version-fields", b"true")]
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="the engine is dead"):
            await post(Versioned(engine), "/v1/completions", BODY_SENT, fields, stalled)
        await broke.wait()
    gc.collect()
    assert logged == []
