"""Requests that arrive while a server is paused, at the gate before a stub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.middleware import Middleware

from skyctl.engines.inside import gate
from skyctl.engines.inside.gate import HOLD_VARIABLE, Gate
from tests.stub.app import StubServer
from tests.stub.running import running
from tests.stub.state import StubEngine

BODY = {"model": "stub", "prompt": "ab", "max_tokens": 3}


class Served:
    """A stub behind its gate."""

    def __init__(self, stub: StubServer, gate: Gate, client: httpx.AsyncClient) -> None:
        self.stub, self.gate, self.client = stub, gate, client

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        return await self.client.post(path, json=body)

    def waiting(self, count: int = 1) -> list[asyncio.Task[httpx.Response]]:
        return [asyncio.create_task(self.post("/v1/completions", BODY)) for _ in range(count)]

    async def until_waiting(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.gate._waiting < count:  # noqa: ASYNC110 - over a socket
                await asyncio.sleep(0.01)


@asynccontextmanager
async def served(hold_s: float = 30.0) -> AsyncIterator[Served]:
    stub = StubServer()
    inner = stub.asgi
    stub.asgi = Gate(inner, environ={HOLD_VARIABLE: str(hold_s)})  # type: ignore[assignment]
    async with (
        running([stub]) as [target],
        httpx.AsyncClient(base_url=target.url, trust_env=False, timeout=30) as client,
    ):
        yield Served(stub, stub.asgi, client)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_the_engine_queues_what_passed_the_gate_before_a_pause(mode: str) -> None:
    """0.33 would refuse it."""
    stub = StubServer(StubEngine(version="0.33.0"), middleware=[Middleware(Gate, environ={})])
    async with running([stub]) as [target], httpx.AsyncClient(base_url=target.url) as client:
        assert (await client.post(f"/pause?mode={mode}")).status_code == 200
        assert stub.engine.paused and not stub.engine.refuses_arrivals


@pytest.mark.parametrize("path", ["/pause?mode=abort", "/pause?mode=wait", "/pause?mode=keep",
                                  "/sleep?level=1"])  # fmt: skip
@pytest.mark.parametrize("thaw", ["/resume", "/wake_up"])
async def test_requests_wait_in_every_mode_and_are_answered_after_the_thaw(
    path: str, thaw: str
) -> None:
    async with served() as server:
        assert (await server.post(path)).status_code == 200
        waiting = server.waiting(3)
        await server.until_waiting(3)
        assert server.stub.engine.queued == 0, "none has reached the engine"
        assert (await server.client.get("/v1/models")).status_code == 200
        assert (await server.post(thaw)).status_code == 200
        for answer in await asyncio.gather(*waiting):
            assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_a_pause_that_failed_closes_nothing() -> None:
    async with served() as server:
        assert (await server.post("/pause?mode=soon")).status_code == 400
        assert (await server.post("/v1/completions", BODY)).status_code == 200
        await server.post("/pause?mode=keep")
        assert (await server.post("/pause?mode=soon")).status_code == 400
        [waiting] = server.waiting()
        await server.until_waiting(1)
        await server.post("/resume")
        assert (await waiting).status_code == 200


async def test_a_wait_is_bounded_and_so_is_the_number_of_waiting_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(hold_s=0.2) as server:
        await server.post("/pause?mode=keep")
        [late] = server.waiting()
        answer = await late
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "paused for too long" in answer.json()["error"]["message"]
        monkeypatch.setattr(gate, "MOST_WAITING", 0)
        assert "too many" in (await server.post("/v1/completions", BODY)).text


async def test_a_client_that_hangs_up_waits_no_longer() -> None:
    async with served() as server:
        await server.post("/pause?mode=keep")
        [waiting] = server.waiting()
        await server.until_waiting(1)
        waiting.cancel()
        async with asyncio.timeout(10):
            while server.gate._waiting:  # noqa: ASYNC110 - over a socket
                await asyncio.sleep(0.01)
        await server.post("/resume")
        assert server.stub.engine.prompt_tokens == 0


async def test_an_engine_that_something_else_thawed_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "_ASK_INTERVAL_S", 0.05)
    async with served() as server:
        await server.post("/pause?mode=keep")
        [waiting] = server.waiting()
        await server.until_waiting(1)
        await server.stub.engine.resume()
        assert (await waiting).status_code == 200


async def test_a_long_body_that_waited_arrives_whole() -> None:
    async with served() as server:
        await server.post("/pause?mode=keep")
        body = {**BODY, "prompt": [97] * 200_000}
        waiting = asyncio.create_task(server.post("/v1/completions", body))
        await server.until_waiting(1)
        await server.post("/resume")
        assert (await waiting).status_code == 200
        assert server.stub.engine.prompt_tokens == 200_000


class Engine:
    """As vLLM's API server keeps it: `app.state.engine_client.engine_core`."""

    def __init__(self) -> None:
        self.paused: list[dict[str, Any]] = []
        self.state = self.engine_client = self.engine_core = self

    async def pause_scheduler_async(self, **arguments: Any) -> None:
        self.paused.append(arguments)


@pytest.mark.parametrize(
    ("request_line", "by_gate"),
    [
        (("POST", "/pause?mode=keep&clear_cache=false"), True),
        (("POST", "/pause?mode=keep"), False),  # vLLM clears the cache of images
        (("POST", "/pause?mode=abort&clear_cache=false"), False),
        (("GET", "/pause?mode=keep&clear_cache=false"), False),
        (("POST", "/resume?mode=keep&clear_cache=false"), False),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_freeze_is_answered_as_soon_as_the_engine_is_frozen(
    request_line: tuple[str, str], by_gate: bool, known: bool
) -> None:
    engine = Engine()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"vLLM"})

    inner = Gate(app, environ={})

    async def with_app(scope: Any, receive: Any, send: Any) -> None:
        await inner({**scope, "app": engine if known else object()}, receive, send)

    async def call() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(with_app), base_url="http://server"
        ) as client:
            return await client.request(*request_line)

    answer = asyncio.run(call())
    assert answer.status_code == 200
    if known and by_gate:
        assert answer.json() == {"status": "paused"}
        assert engine.paused == [{"mode": "keep", "clear_cache": False}]
    else:
        assert (engine.paused, answer.text) == ([], "vLLM")
