"""ControlClient: what comes back, what is raised, and what is never sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from skyctl.control.http import ControlClient
from skyctl.control.target import ServerTarget
from skyctl.errors import DeadlineExceeded, ServerError, ServerUnreachable

TARGET = ServerTarget("demo-0", "http://127.0.0.1:8001", "s3cret")


def client(handler: Callable[[httpx.Request], httpx.Response]) -> ControlClient:
    return ControlClient(transport=httpx.MockTransport(handler))


async def test_a_call_sends_the_key_and_returns_the_parsed_body() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"is_paused": True})

    async with client(answer) as control:
        body = await control.call(
            TARGET, "POST", "/wake_up", params={"tags": ["weights", "kv_cache"]}, json={"a": 1}
        )
    assert body == {"is_paused": True}
    assert str(seen[0].url) == "http://127.0.0.1:8001/wake_up?tags=weights&tags=kv_cache"
    assert seen[0].headers["authorization"] == "Bearer s3cret"
    assert seen[0].content == b'{"a":1}'


async def test_an_empty_body_is_none() -> None:
    async with client(lambda _: httpx.Response(200)) as control:
        assert await control.call(TARGET, "GET", "/health") is None


async def test_a_body_that_is_not_json_is_a_server_error() -> None:
    async with client(lambda _: httpx.Response(200, text="<html>proxy</html>")) as control:
        with pytest.raises(ServerError, match=r"demo-0: GET .*/is_paused .*not JSON.*<html>"):
            await control.call(TARGET, "GET", "/is_paused")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "Engine died", "code": 500}}, "Engine died"),
        ({"error": "Failed to pause"}, "Failed to pause"),
        ({"detail": "Not here"}, "Not here"),
        ({"detail": [{"loc": "mode"}]}, '[{"loc": "mode"}]'),
        ({}, "{}"),
    ],
)
async def test_the_servers_own_words_are_in_the_message(body: object, text: str) -> None:
    async with client(lambda _: httpx.Response(500, json=body)) as control:
        with pytest.raises(ServerError) as caught:
            await control.call(TARGET, "POST", "/pause")
    assert caught.value.status == 500
    assert caught.value.message == (
        f"demo-0: POST http://127.0.0.1:8001/pause answered 500: {text}"
    )


async def test_a_long_error_is_shortened_and_the_key_never_shown() -> None:
    async with client(lambda _: httpx.Response(500, text="s3cret " + "x" * 5000)) as control:
        with pytest.raises(ServerError) as caught:
            await control.call(TARGET, "POST", "/pause")
    assert "s3cret" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(("status", "hint"), [(401, "api_key_env"), (404, "VLLM_SERVER_DEV_MODE")])
async def test_statuses_with_a_known_cause_say_what_to_change(status: int, hint: str) -> None:
    async with client(lambda _: httpx.Response(status, text="no")) as control:
        with pytest.raises(ServerError) as caught:
            await control.call(TARGET, "GET", "/is_paused")
    assert hint in caught.value.hint


async def test_a_server_that_never_answers_ends_at_the_deadline() -> None:
    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with ControlClient(transport=httpx.MockTransport(hang)) as control:
        with pytest.raises(DeadlineExceeded, match=r"demo-0: POST .*/pause: no answer in 0\.01 s"):
            await control.call(TARGET, "POST", "/pause", timeout_s=0.01)


async def test_a_refused_connection_is_unreachable_and_not_tried_again() -> None:
    calls = 0

    def refuse(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        raise httpx.ConnectError("Connection refused")

    async with client(refuse) as control:
        with pytest.raises(ServerUnreachable, match="cannot connect") as caught:
            await control.call(TARGET, "GET", "/is_paused")
    assert calls == 1
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


@pytest.mark.parametrize(("method", "calls_made"), [("GET", 2), ("POST", 1)])
async def test_only_a_get_is_sent_again_when_its_connection_breaks(
    method: str, calls_made: int
) -> None:
    calls = 0

    def break_off(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        raise httpx.RemoteProtocolError("Server disconnected without sending a response.")

    async with client(break_off) as control:
        with pytest.raises(ServerUnreachable, match="the connection broke"):
            await control.call(TARGET, method, "/is_paused")
    assert calls == calls_made


async def test_a_get_that_works_the_second_time_is_answered() -> None:
    answers = iter([None, httpx.Response(200, json={"version": "0.32.0"})])

    def answer(request: httpx.Request) -> httpx.Response:
        following = next(answers)
        if following is None:
            raise httpx.ReadError("reset")
        return following

    async with client(answer) as control:
        assert await control.call(TARGET, "GET", "/version") == {"version": "0.32.0"}


async def test_a_server_that_sends_us_elsewhere_does_not_get_the_token_sent_there() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.host)
        return httpx.Response(307, headers={"location": "http://elsewhere/is_paused"})

    async with client(answer) as control:
        with pytest.raises(ServerError, match="answered 307"):
            await control.call(TARGET, "GET", "/is_paused")
    assert seen == ["127.0.0.1"]


async def test_a_token_that_a_server_repeats_is_not_shown() -> None:
    async with client(lambda _: httpx.Response(401, text="bad token s3cret")) as control:
        with pytest.raises(ServerError) as caught:
            await control.call(TARGET, "GET", "/is_paused")
    assert "s3cret" not in str(caught.value) and "s3cret" not in repr(TARGET)
    assert "control_token_env" in caught.value.hint
