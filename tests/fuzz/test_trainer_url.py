"""The fleet URL: nothing gets through without the key, and with it nothing breaks."""

from __future__ import annotations

import asyncio
import json
import os
import random
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from skyctl.engines.inside.guard import VLLM, Application
from skyctl.errors import SkyctlError
from skyctl.supervisor.resident import Supervisor
from skyctl.supervisor.trainer_api import TrainerApi
from tests.fuzz.guard_paths import KEY, OPEN, TOKEN, scope_of, spellings
from tests.fuzz.mutation import NASTY_TEXTS, as_json, broken, mutated, nasty
from tests.processes.supervisor.supervising import bring_up, supervising
from tests.stub.rows import trainers_update
from tests.stub.url_trainer import CALLS, body
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.supervisor.fleets import fleet_plan, stub_server

CONTROL: dict[str, Any] = {
    **{f"/{call}": body(call, "step-1", 1) for call in CALLS},
    "/shutdown_weight_transfer_engine": None,
    "/pause": None,
    "/resume": None,
    "/sleep": None,
    "/wake_up": None,
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/skyrl/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/reset_prefix_cache": None,
    "/reset_encoder_cache": None,
    "/abort_requests": None,
    "/collective_rpc": {"method": "reload_weights"},
}
"""Routes that change something, with a body that they take."""
SKYRL = ("skyrl_start_weight_update", "update_weights_nccl", "skyrl_finish_weight_update")
READ = ("/get_world_size", "/is_paused", "/is_sleeping", "/weight_info", "/v1/rl/workers",
        "/server_info")  # fmt: skip
DATA = ("/version", "/v1/version", "/v1/completions", "/v1/chat/completions", "/v1/models")
TABLE = [
    *(("POST", path) for path in CONTROL),
    *(("GET", path) for path in (*READ, *DATA, "/health", "/unknown", "/docs", "/openapi.json")),
]
QUERIES = ("mode", "level", "tags", "clear_cache", "wait", "timeout_s", "x")
KEYED = int(os.environ.get("SKYCTL_TEST_REQUESTS", "2000"))
"""10,000 of them take two minutes."""


@dataclass
class Answer:
    """What an application answered to one request."""

    status: int = 0
    """0: a websocket was closed."""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    """Names in lower case."""
    body: bytes = b""
    """All of it."""


async def call(
    app: Application,
    method: str,
    sent: str,
    content: bytes = b"",
    *,
    root: str = "",
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> Answer:
    """One request; `sent` becomes a scope as in uvicorn."""
    path, _, query = sent.partition("?")
    scope = scope_of(method, path, root, headers, query)
    answer, unread, answered = Answer(), [content], asyncio.Event()

    async def receive() -> Any:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {bytes(k).lower(): bytes(v) for k, v in message["headers"]}
        answer.body += message.get("body", b"")
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    await app(scope, receive, send)
    return answer


class Untouched:
    """In place of a supervisor: whatever a request wants of it is counted, and refused."""

    def __init__(self) -> None:
        self.touched = 0

    def __getattr__(self, name: str) -> Any:
        self.touched += 1
        raise SkyctlError(f"{name} was touched")


def basic(password: str) -> bytes:
    return b"Basic " + b64encode(f"trainer:{password}".encode())


def wrong_headers(key: str) -> Iterator[tuple[tuple[bytes, bytes], ...]]:
    """Authorizations without the control token; those without the key as well come first."""
    name, token = b"authorization", TOKEN.encode()
    for value in (b"", b"Bearer", b"Bearer ", b"Bearer " + token[:-1], b"Bearer " + token + b"t",
                  b"Bearer " + token.upper(), b"Bearer \xff" + token, b"Bearer Bearer " + token,
                  token, b"Token " + token, b"Bearer\t" + token, b"Bearer " + b"w" * 64,
                  b"Basic", b"Basic ====", b"Basic " + token, basic(""), basic(TOKEN[1:]),
                  basic(f"{TOKEN}:"), basic(f":{TOKEN}"), b"Basic " + b64encode(token),
                  b"Digest " + token, b"Bearer " + token + b", Bearer " + token):  # fmt: skip
        yield ((name, value),)
    yield ()
    yield ((name, b"Bearer w"), (name, b"Bearer " + token))  # the first counts
    yield ((b"x-api-key", token), (b"cookie", b"authorization=" + token), (b"skyctl-holder", token))
    if key:
        yield ((name, f"Bearer {key}".encode()),)
        yield ((name, basic(key)),)


@pytest.mark.parametrize("key", [KEY, ""])
async def test_nothing_gets_through_without_the_key(key: str) -> None:
    fleet, dice = Untouched(), random.Random(1)
    app = TrainerApi(fleet, token=TOKEN, key=key or None).app()  # type: ignore[arg-type]
    forms, requests, past = list(wrong_headers(key)), 0, list[str]()
    data = VLLM.data | {"/v1/version"}
    for method, route in TABLE:
        content = json.dumps(CONTROL.get(route) or {}).encode()
        plain = [("", method, route + tail) for tail in ("", "?mode=keep", "?level=1&tags=weights")]
        spelt = [(root, how, sent) for root, how, sent in spellings([(method, route)])]
        cases = [(*case, form) for case in plain for form in forms]
        cases += [(*case, dice.choice(forms)) for case in spelt]
        for root, how, sent, headers in cases:
            requests += 1
            fleet.touched = 0
            answer = await call(app, how, sent, content, root=root, headers=headers)
            path = unquote(sent.partition("?")[0])
            under = {path, path.removeprefix(root)} if root else {path}
            has_key = not key or any(KEY.encode() in v or basic(KEY) == v for _, v in headers)
            open_to_all = bool(under & OPEN) or (
                has_key and any(p.removesuffix("/") in data for p in under)
            )
            if not open_to_all and (fleet.touched or answer.status not in (401, 0)):
                past.append(f"{how} {sent} below {root!r} with {headers}: {answer.status}")
    assert past == []
    assert requests > 10_000
    for method, route in TABLE:  # and the token does open
        for value in (f"Bearer {TOKEN}".encode(), basic(TOKEN)):
            answer = await call(app, method, route, headers=((b"authorization", value),))
            assert answer.status not in (0, 401), route


class Client:
    """A client with the key, and all that it can get wrong."""

    def __init__(self, app: Application, dice: random.Random) -> None:
        self._app, self._dice = app, dice
        self.statuses: Counter[int] = Counter()

    async def ask(self) -> None:
        """One request; fails if the answer is one that no client can act on."""
        dice = self._dice
        method, path = dice.choice(TABLE)
        if path == "/v1/load_lora_adapter" and dice.random() < 0.5:
            path = "/update_weights"
        if dice.random() < 0.05:
            method = dice.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"))
        sent = path + self._query()
        content = self._content(path) if method == "POST" else b""
        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        if dice.random() < 0.05:
            headers.append((b"content-type", dice.choice((b"\xff", b"text/plain", b""))))
        answer = await call(self._app, method, sent, content, headers=tuple(headers))
        self.statuses[answer.status] += 1
        told = f"{method} {sent} {content[:300]!r}: {answer.status} {answer.body[:300]!r}"
        allowed = {200, 400, 401, 404, 405, 409}
        if path in DATA:
            allowed |= {422, 500, 503}  # what a server answers is passed on
        assert answer.status in allowed, told
        assert b"Traceback" not in answer.body and b"supervisor's log" not in answer.body, told
        if answer.status in (400, 404, 409) and method != "HEAD":
            assert json.loads(answer.body)["error"]["message"], told

    def _query(self) -> str:
        dice = self._dice
        if dice.random() < 0.6:
            return ""
        name = dice.choice(QUERIES)
        if name in ("wait", "timeout_s"):
            return f"?{name}={quote(str(nasty(dice)).encode(errors='replace'))[:500]}&timeout_s=0"
        values = (
            "keep",
            "abort",
            "wait",
            "0",
            "1",
            "2",
            "-1",
            "1e9",
            "nan",
            "weights",
            *NASTY_TEXTS,
        )
        return f"?{name}={quote(dice.choice(values).encode(errors='replace'))}"

    def _content(self, path: str) -> bytes:
        dice = self._dice
        right = CONTROL.get(path)
        if path == "/update_weights" and dice.random() < 0.5:
            right = body("update_weights", "", dice.randrange(9))
        if path == "/update_weights" and dice.random() < 0.1:
            right = {"weight_dir": "/none"}
        if path == "/finish_weight_update":
            right = {"weight_version": f"step-{dice.randrange(10**6)}"}
        if path == "/collective_rpc" and dice.random() < 0.7:
            kwargs = {"update_info": trainers_update(dice.randrange(9))}
            right = {"method": dice.choice(SKYRL), "kwargs": kwargs}
        kind = dice.random()
        if kind < 0.45:
            return json.dumps(right).encode() if right is not None else b""
        if kind < 0.75:
            return as_json(dice, mutated(dice, right if right is not None else {}))
        if kind < 0.9:
            return as_json(dice, nasty(dice))
        return broken(dice, json.dumps(right or {"a": 1}).encode())


async def test_nothing_breaks_for_a_client_with_the_key(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "model", tiny_tensors(1)))
    backend = '{"backend": "sparse_nccl"}'
    servers = []
    for name in ("a", "b"):
        spec = stub_server(name, faults={"/none": {"kind": "delay", "seconds": 0.0}})
        argv = (*spec.argv, "--model", model, "--weight-transfer-config", backend)
        servers.append(replace(spec, argv=argv))
    transfer = {"backend": "sparse_nccl", "update_timeout_s": 20}
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan(servers, auth="all", weight_transfer=transfer, control_timeout_s=5)
        await bring_up(supervisor, plan)
        api = TrainerApi(supervisor, token=TOKEN, key=None)
        client = Client(api.app(), random.Random(7))
        try:
            for _ in range(KEYED):
                await client.ask()
            assert client.statuses[200] > KEYED / 10 < client.statuses[400]
            await update_well(api.app(), supervisor)
        finally:
            await api.close()


async def update_well(app: Application, supervisor: Supervisor) -> None:
    """What the fuzz left is no reason to refuse a trainer that does all as it should."""
    bearer = ((b"authorization", f"Bearer {TOKEN}".encode()),)

    async def ask(path: str) -> int:
        return (await call(app, "POST", path, headers=bearer)).status

    await call(app, "POST", "/finish_weight_update", headers=bearer)  # what it may have left open
    async with asyncio.timeout(60):
        while await ask("/wake_up") == await ask("/wake_up?tags=weights") == 409:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # what a push had left half done is put right
    for name in CALLS:
        content = json.dumps(body(name, "step-last", 77)).encode()
        answer = await call(app, "POST", f"/{name}", content, headers=bearer)
        assert answer.status == 200, answer.body
    assert await ask("/wake_up") == await ask("/resume") == 200
    assert {r.row.weight_version for r in supervisor.replicas.values()} == {"step-last"}
    assert {r.state for r in supervisor.replicas.values()} == {"ready"}
