"""ControlClient: what comes back, what is raised, and what is never sent twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import pytest

from skyctl.errors import DeadlineExceeded, ServerError, ServerUnreachable
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.http.transport import Answer, CannotConnect, ConnectionBroke, NoAnswer, Request

TARGET = ServerTarget("demo-0", "http://127.0.0.1:8001", "s3cret")


class Told:
    """A transport that answers as it is told, and remembers what it was asked."""

    def __init__(self, answer: Callable[[Request], Answer]) -> None:
        self._answer, self.seen = answer, list[Request]()

    async def send(self, request: Request, *, timeout_s: float) -> Answer:
        self.seen.append(request)
        return self._answer(request)

    async def aclose(self) -> None:
        """Nothing is open."""


def client(answer: Callable[[Request], Answer]) -> ControlClient:
    return ControlClient(transport=Told(answer))


def reply(status: int = 200, body: Any = None, *, text: str = "") -> Answer:
    return Answer(status, "", {}, text.encode() if body is None else json.dumps(body).encode())


async def test_a_call_sends_the_key_and_returns_the_parsed_body() -> None:
    transport = Told(lambda _: reply(body={"is_paused": True}))
    async with ControlClient(transport=transport) as control:
        body = await control.call(
            TARGET, "POST", "/wake_up", params={"tags": ["weights", "kv_cache"]}, json={"a": 1}
        )
    assert body == {"is_paused": True}
    assert transport.seen == [
        Request(
            "POST",
            "http://127.0.0.1:8001",
            "/wake_up?tags=weights&tags=kv_cache",
            {"authorization": "Bearer s3cret", "content-type": "application/json"},
            b'{"a":1}',
        )
    ]


async def test_a_query_says_flags_and_urls_as_servers_read_them() -> None:
    transport = Told(lambda _: reply())
    params = {"include_dp": True, "level": 2, "url": "http://a:1", "name[]": ("x", "y z")}
    async with ControlClient(transport=transport) as control:
        await control.call(TARGET, "GET", "/x", params=params)
    path, _, query = transport.seen[0].path.partition("?")
    assert path == "/x"
    assert parse_qs(query) == {
        "include_dp": ["true"],
        "level": ["2"],
        "url": ["http://a:1"],
        "name[]": ["x", "y z"],
    }


async def test_an_empty_body_is_none() -> None:
    async with client(lambda _: reply()) as control:
        assert await control.call(TARGET, "GET", "/health") is None


async def test_a_body_that_is_not_json_is_a_server_error() -> None:
    async with client(lambda _: reply(text="<html>proxy</html>")) as control:
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
    async with client(lambda _: reply(500, body)) as control:
        with pytest.raises(ServerError) as caught:
            await control.call(TARGET, "POST", "/pause")
    assert caught.value.status == 500
    assert caught.value.message == (
        f"demo-0: POST http://127.0.0.1:8001/pause answered 500: {text}"
    )


async def test_a_long_error_is_shortened_and_the_key_never_shown() -> None:
    async with client(lambda _: reply(500, text="s3cret " + "x" * 5000)) as control:
        with pytest.raises(ServerError) as caught:
            await control.call(TARGET, "POST", "/pause")
    assert "s3cret" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("status", "text", "hint"),
    [
        (401, "no", "api_key_env"),
        (503, "No available workers", "skyctl status"),
    ],
)
async def test_statuses_with_a_known_cause_say_what_to_change(
    status: int, text: str, hint: str
) -> None:
    async with client(lambda _: reply(status, text=text)) as control:
        with pytest.raises(ServerError) as caught:
            await control.call(TARGET, "GET", "/is_paused")
    assert hint in caught.value.hint


async def test_a_server_that_never_answers_ends_at_the_deadline() -> None:
    def never(request: Request) -> Answer:
        raise NoAnswer("no answer in time")

    async with client(never) as control:
        with pytest.raises(DeadlineExceeded, match=r"demo-0: POST .*/pause: no answer in 0\.01 s"):
            await control.call(TARGET, "POST", "/pause", timeout_s=0.01)


async def test_a_refused_connection_is_unreachable_and_not_tried_again() -> None:
    calls = 0

    def refuse(request: Request) -> Answer:
        nonlocal calls
        calls += 1
        raise CannotConnect("Connection refused")

    async with client(refuse) as control:
        with pytest.raises(ServerUnreachable, match="cannot connect") as caught:
            await control.call(TARGET, "GET", "/is_paused")
    assert calls == 1
    assert isinstance(caught.value.__cause__, CannotConnect)


@pytest.mark.parametrize(("method", "calls_made"), [("GET", 2), ("POST", 1)])
async def test_only_a_get_is_sent_again_when_its_connection_breaks(
    method: str, calls_made: int
) -> None:
    calls = 0

    def break_off(request: Request) -> Answer:
        nonlocal calls
        calls += 1
        raise ConnectionBroke("the server closed it before the whole answer")

    async with client(break_off) as control:
        with pytest.raises(ServerUnreachable, match="the connection broke"):
            await control.call(TARGET, method, "/is_paused")
    assert calls == calls_made


async def test_a_get_that_works_the_second_time_is_answered() -> None:
    answers = iter([None, reply(body={"version": "0.32.0"})])

    def answer(request: Request) -> Answer:
        following = next(answers)
        if following is None:
            raise ConnectionBroke("reset")
        return following

    async with client(answer) as control:
        assert await control.call(TARGET, "GET", "/version") == {"version": "0.32.0"}


async def test_a_server_that_sends_us_elsewhere_does_not_get_the_token_sent_there() -> None:
    elsewhere = {"location": "http://elsewhere/is_paused"}
    transport = Told(lambda _: Answer(307, "Temporary Redirect", elsewhere, b""))
    async with ControlClient(transport=transport) as control:
        with pytest.raises(ServerError, match="answered 307: Temporary Redirect"):
            await control.call(TARGET, "GET", "/is_paused")
    assert [request.url for request in transport.seen] == [TARGET.url]


async def test_a_token_that_a_server_repeats_is_not_shown() -> None:
    async with client(lambda _: reply(401, text="bad token s3cret")) as control:
        with pytest.raises(ServerError) as caught:
            await control.call(TARGET, "GET", "/is_paused")
    assert "s3cret" not in str(caught.value) and "s3cret" not in repr(TARGET)
    assert "control_token_env" in caught.value.hint
