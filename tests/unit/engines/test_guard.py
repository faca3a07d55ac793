"""The guard as vLLM loads it: who gets past it to what, and what the others are told."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from skyctl.engines.inside.guard import Guard, is_data, route_path
from tests.unit.supervisor.fleets import eventually

TOKEN, KEY = "t" * 64, "k" * 64
CONTROL = ("/pause", "/collective_rpc", "/update_weights", "/openapi.json", "/docs", "/", "/new")
DATA = ("/v1/completions", "/tokenize", "/metrics", "/metrics/", "/version", "/load")


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers 200 with the Authorization header that reached it."""
    headers = dict(scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": headers.get(b"authorization", b"")})


def guard(key: str | None = KEY, token: str = TOKEN, held: Path | None = None) -> Guard:
    environ = {"SKYCTL_CONTROL_TOKEN": token, **({"VLLM_API_KEY": key} if key else {})}
    environ |= {"SKYCTL_HELD_WHILE": str(held)} if held else {}
    return Guard(app, environ=environ)


def ask(
    path: str,
    given: str | None = None,
    *,
    method: str = "GET",
    key: str | None = KEY,
    held: Path | None = None,
) -> httpx.Response:
    headers = {} if given is None else {"Authorization": given}

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(guard(key, held=held))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(call())


@pytest.mark.parametrize("path", [*CONTROL, *DATA])
@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        f"Basic {TOKEN}",
        TOKEN,
    ],
)
def test_without_the_right_token_nothing_is_reached(path: str, given: str | None) -> None:
    assert ask(path, given).status_code == 401
    assert ask(path, given, method="POST").status_code == 401
    assert ask(path, given, method="OPTIONS").status_code == 401


@pytest.mark.parametrize("path", [*CONTROL, *DATA])
def test_the_control_token_opens_every_route(path: str) -> None:
    assert ask(path, f"Bearer {TOKEN}").status_code == 200
    assert ask(path, f"bearer {TOKEN}").status_code == 200


def test_the_api_key_opens_inference_and_nothing_else() -> None:
    assert {ask(path, f"Bearer {KEY}").status_code for path in DATA} == {200}
    assert {ask(path, f"Bearer {KEY}").status_code for path in CONTROL} == {401}


def test_without_an_api_key_inference_is_open_and_control_is_not() -> None:
    assert {ask(path, key=None).status_code for path in DATA} == {200}
    assert {ask(path, key=None).status_code for path in CONTROL} == {401}
    assert {ask(path, "Bearer ", key=None).status_code for path in CONTROL} == {401}


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_open(path: str) -> None:
    assert ask(path).status_code == 200
    assert ask(path + "/x").status_code == 401


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter/", "/inference/v1/abort_requests"]
)
def test_control_below_a_prefix_of_inference_wants_the_control_token(path: str) -> None:
    assert ask(path, f"Bearer {KEY}", method="POST").status_code == 401
    assert ask(path, f"Bearer {TOKEN}", method="POST").status_code == 200
    assert ask(path, key=None, method="POST").status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/../pause", "/v1//../pause", "//pause", "/V1/completions", "/v1", "/health/.."),
        *("/v1/load_lora_adapter\n", "/inference/v1/abort_requests\n", "/v1/responses/x\n/cancel"),
        *("/v1/completions\u2028", "/v1/completions/x", "/v1/new", "/v1/responses/.."),
    ],
)
def test_no_spelling_of_a_path_opens_more(path: str) -> None:
    async def status(given: str) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request"}

        headers = [(b"authorization", given.encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await guard()(scope, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(status("")) == 401
    assert asyncio.run(status(f"Bearer {KEY}")) == 401


def test_inference_is_known_by_whole_names() -> None:
    assert not any(is_data(path) for path in ("/pause/v1/", "/metricsx", "/v3/x", "/versions"))


def test_vllm_is_given_the_key_it_asks_for_itself() -> None:
    assert ask("/v1/models", f"Bearer {TOKEN}").text == f"Bearer {KEY}"
    assert ask("/v1/models", f"Bearer {TOKEN}", key=None).text == f"Bearer {TOKEN}"


def test_routes_are_known_below_a_root_path_too() -> None:
    def path(path: str, root: str) -> str:
        return route_path({"path": path, "root_path": root})

    assert path("/api/pause", "/api") == "/pause"
    # the API key must not open /pause by way of a root path that looks like inference
    assert path("/v1/pause", "/v1") == "/pause"
    assert path("/v1x/pause", "/v1") == "/v1x/pause"
    assert path("/pause", "/v1") == "/pause"


def test_a_refusal_says_what_to_send_and_holds_no_secret() -> None:
    control, data = ask("/pause"), ask("/v1/models", "Bearer wrong")
    for response, word in ((control, "control token"), (data, "API key")):
        error = response.json()["error"]
        assert word in error["message"] and "Authorization: Bearer" in error["message"]
        assert error["code"] == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in response.text and KEY not in response.text


def test_websockets_are_closed_and_what_is_unknown_is_not_served() -> None:
    async def drive(kind: str, given: str | None = None, held: bool = False) -> list[Any]:
        sent: list[Any] = []
        reached: list[Any] = []

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            reached.append("reached")

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {}

        headers = [(b"authorization", given.encode())] if given else []
        environ = {"SKYCTL_CONTROL_TOKEN": TOKEN, "VLLM_API_KEY": KEY}
        environ |= {"SKYCTL_HELD_WHILE": __file__} if held else {}
        scope = {"type": kind, "path": "/v1/realtime", "headers": headers}
        await Guard(inner, environ=environ)(scope, receive, send)
        return sent + reached

    (closed,) = asyncio.run(drive("websocket"))
    assert (closed["type"], closed["code"]) == ("websocket.close", 1008)
    assert asyncio.run(drive("websocket", f"Bearer {KEY}")) == ["reached"]
    (closed,) = asyncio.run(drive("websocket", f"Bearer {KEY}", held=True))
    assert (closed["type"], closed["code"]) == ("websocket.close", 1013)
    assert asyncio.run(drive("lifespan")) == ["reached"]
    assert asyncio.run(drive("something.new", f"Bearer {TOKEN}")) == []


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("again", [True, False], ids=["replaced", "removed"])
async def test_a_fleets_directory_that_is_removed_neither_opens_nor_closes_its_servers(
    tmp_path: Path, closed: bool, again: bool
) -> None:
    file = tmp_path / "fleet" / "s-0.held"
    file.parent.mkdir()
    file.touch()
    transport = httpx.ASGITransport(guard(held=file))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:

        async def answer(path: str, token: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            return (await client.post(path, headers=headers)).status_code

        assert await answer("/v1/completions", KEY) == 503
        if not closed:
            file.unlink()
            assert await answer("/is_paused", TOKEN) == 200  # the supervisor's next probe
        shutil.rmtree(file.parent)
        if again:
            file.parent.mkdir()
        assert await answer("/v1/completions", KEY) == (503 if closed else 200)


@pytest.mark.parametrize("key", [KEY, None])
def test_while_a_server_is_held_only_the_control_token_opens_inference(
    tmp_path: Path, key: str | None
) -> None:
    held = tmp_path / "s-0.held"
    user = f"Bearer {key}" if key else None

    def asked(path: str, given: str | None, method: str = "POST") -> int:
        return ask(path, given, method=method, key=key, held=held).status_code

    assert asked("/v1/completions", user) == 200
    held.touch()
    refused = ask("/v1/completions", user, method="POST", key=key, held=held)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert "does not have its fleet's weights yet" in refused.json()["error"]["message"]
    assert asked("/v1/completions", user, "PUT") == asked("/v1/completions", user, "QUERY") == 503
    assert asked("/v1/completions", f"Bearer {TOKEN}") == 200
    assert asked("/v1/models", user, "GET") == asked("/health", None, "GET") == 200
    assert asked("/pause", f"Bearer {TOKEN}") == 200
    assert asked("/pause", user) == 401  # who may not ask anyway learns nothing of it
    if key:
        assert asked("/v1/completions", None) == 401
    held.unlink()
    assert asked("/v1/completions", user) == 200


@pytest.mark.parametrize("token", ["", "(set at its start)", "short"])
def test_a_server_without_a_token_does_not_start(token: str) -> None:
    with pytest.raises(ValueError, match="holds no control token") as caught:
        guard(token=token)
    assert "short" not in str(caught.value)


async def test_refused_requests_are_not_in_the_access_log_and_long_ones_are_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(guard(), log_level="info", lifespan="off")
    server = uvicorn.Server(config)
    access = logging.getLogger("uvicorn.access")
    others = logging.getLogger("uvicorn")
    for logger in (access, others):  # uvicorn's do not propagate
        logger.addHandler(caplog.handler)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url, long = f"http://127.0.0.1:{listener.getsockname()[1]}", "x" * 20_000
    try:
        async with httpx.AsyncClient(base_url=url) as client:
            await eventually(lambda: server.started)
            for path in ("/pause", "/v1/completions", f"/pause?{long}", f"/{long}"):
                assert (await client.get(path)).status_code == 401
            assert (await client.get("/health")).status_code == 200
            assert (await client.get(f"/health?{long}")).status_code == 200
            own = {"Authorization": f"Bearer {TOKEN}"}
            assert (await client.get("/pause", headers=own)).status_code == 200
    finally:
        server.should_exit = True
        await serving
        for logger in (access, others):
            logger.removeHandler(caplog.handler)
    lines = [r.getMessage() for r in caplog.records if r.name == "uvicorn.access"]
    assert [line.split('"')[1].split("?")[0] for line in lines] == [
        "GET /health HTTP/1.1", "GET /health", "GET /pause HTTP/1.1"
    ]  # fmt: skip
    assert max(map(len, lines)) < 600
    said = [r.getMessage() for r in caplog.records if r.name == "uvicorn.error"]
    counted = [line for line in said if "refused" in line]
    assert counted == ["requests without the right token that were refused: 1"]


def frozen(*steps: tuple[str, str, dict[str, str]]) -> list[int]:
    """The statuses of requests to one server: method and path, the fleet, more headers."""

    async def call() -> list[int]:
        transport = httpx.ASGITransport(guard())
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [
                (
                    await client.post(
                        path,
                        headers={"Authorization": f"Bearer {TOKEN}"}
                        | ({"skyctl-holder": f"{holder} fleet {holder}"} if holder else {})
                        | more,
                    )
                ).status_code
                for path, holder, more in steps
            ]

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("requests", "answers", "last"),
    [
        (["/resume of b", "/pause of a"], {0: 200, 1: 200}, 409),
        (["/resume of b", "/pause of a"], {0: 200, 1: 500}, 200),
        (["/pause of a", "/resume of a"], {1: 200, 0: 200}, 200),
        (["/pause of a", "/resume of a"], {1: 200, 0: 500}, 200),
        (["/pause of a", "/resume of a"], {1: 500, 0: 200}, 409),
        (["/pause of a", "/pause of a"], {1: 200, 0: 500}, 409),
        (["/pause of a", "/pause of a"], {0: 500, 1: 500}, 200),
        (["/pause of a", "/pause of a"], {1: 500, 0: 500}, 200),
        (["/pause of a", "/pause of a"], {0: 200, 1: 500}, 409),
        (["/pause of a", "/pause of a"], {1: 500}, 409),
    ],
)
async def test_a_freeze_lasts_until_a_thaw_that_came_after_it(
    requests: list[str], answers: dict[int, int], last: int
) -> None:
    """The engine takes requests in the order in which they come, whenever it answers them."""
    taken: list[asyncio.Future[int]] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        taken.append(asyncio.get_running_loop().create_future())
        await send({"type": "http.response.start", "status": await taken[-1], "headers": []})
        await send({"type": "http.response.body"})

    async def post(request: str) -> int:
        path, _, holder = request.partition(" of ")
        headers = {"Authorization": f"Bearer {TOKEN}", "skyctl-holder": f"{holder} fleet"}
        return (await client.post(path, headers=headers)).status_code

    transport = httpx.ASGITransport(Guard(engine, environ={"SKYCTL_CONTROL_TOKEN": TOKEN}))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        tasks = []
        for number, request in enumerate(requests):
            tasks.append(asyncio.create_task(post(request)))
            await eventually(lambda number=number: len(taken) > number)  # type: ignore[misc]
        for number, status in answers.items():
            taken[number].set_result(status)
            assert await tasks[number] == status
        other = asyncio.create_task(post("/resume of b"))
        await eventually(lambda: other.done() or len(taken) > len(requests))
        for future in taken:
            if not future.done():
                future.set_result(200)
        assert await other == last


TAKE_OVER, RELEASE = {"skyctl-freeze": "take-over"}, {"skyctl-freeze": "release"}


@pytest.mark.parametrize(
    ("steps", "last"),
    [
        ([("/pause", "a", {}), ("/resume", "a", {}), ("/resume", "b", {})], 200),
        ([("/pause", "a", {}), ("/resume", "", {})], 409),
        ([("/pause", "a", {}), ("/resume", "b", {})], 409),
        ([("/pause", "", {}), ("/resume", "b", {})], 200),
        ([("/pause", "a", {}), ("/pause", "b", {}), ("/resume", "b", {})], 409),
        ([("/pause", "a", {}), ("/wake_up?tags=weights", "a", {}), ("/resume", "b", {})], 409),
        ([("/pause", "a", {}), ("/wake_up", "a", {}), ("/resume", "b", {})], 200),
        ([("/pause", "a", {}), ("/resume", "b", TAKE_OVER), ("/pause", "b", {})], 200),
        ([("/pause", "a", {}), ("/pause", "a", RELEASE), ("/resume", "", {})], 200),
        ([("/pause", "a", {}), ("/update_weights", "", {})], 409),
        ([("/pause", "a", {}), ("/update_weights", "a", {})], 200),
        ([("/pause", "a", {}), ("/v1/load_lora_adapter", "b", {})], 409),
        ([("/pause", "a", {}), ("/whatever/comes", "b", {})], 409),
        ([("/pause", "a", {}), ("/is_paused", "b", {})], 200),
        ([("/pause", "", {}), ("/update_weights", "b", {})], 200),
        ([("/pause", "a", {}), ("/resume", "a", {}), ("/update_weights", "b", {})], 200),
        ([("/pause", "a", {}), ("/v1/completions", "", {})], 200),
    ],
)
def test_a_freeze_belongs_to_the_fleet_that_made_it(
    steps: list[tuple[str, str, dict[str, str]]], last: int
) -> None:
    assert frozen(*steps)[-1] == last
