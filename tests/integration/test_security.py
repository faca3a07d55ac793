"""Real vLLM servers as another user of the machine meets them: every route they have, no token."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.fleet_cli import FleetCli, bearer

pytestmark = pytest.mark.real

OPEN = {"/health", "/ping"}
# Answered with the token, they would end or change the fleet that other tests share: for these it
# must be enough that they refuse without it.
HARMFUL = re.compile(
    r"sleep|pause|weight|scale|profile|release|collective|abort|fault|lora|invocations|reset|wake"
)


class Servers:
    """The fleet's servers, the routes they list, and what opens them."""

    def __init__(self, fleet: FleetCli) -> None:
        self.fleet = fleet
        self.urls: dict[str, str] = fleet.data("urls")["servers"]
        self.router: str = fleet.data("urls")["router"]
        self.token, self.key = fleet.control_token, fleet.key
        url = next(iter(self.urls.values()))
        answer = httpx.get(f"{url}/openapi.json", headers=self.bearer, timeout=60)
        paths: dict[str, dict[str, Any]] = answer.raise_for_status().json()["paths"]
        self.routes = [
            (method.upper(), re.sub(r"\{\w+\}", "x", path))
            for path, methods in paths.items()
            for method in methods
        ]
        # what FastAPI does not list: its own pages, mounts, and a path that nobody has
        hidden = ("/openapi.json", "/docs", "/redoc", "/metrics", "/metrics/", "/", "/nobody/has")
        self.routes += [("GET", path) for path in hidden]

    @property
    def bearer(self) -> dict[str, str]:
        return bearer(self.token)


@pytest.fixture(scope="module")
def servers(real_fleet: FleetCli) -> Servers:
    return Servers(real_fleet)


def status(method: str, url: str, headers: dict[str, str] | None = None) -> int:
    body = {"json": {}} if method == "POST" else {}
    return httpx.request(method, url, headers=headers, timeout=30, **body).status_code


def test_every_route_a_server_lists_is_refused_without_a_token(servers: Servers) -> None:
    listed = {path for _, path in servers.routes}
    assert {"/pause", "/collective_rpc", "/update_weights", "/v1/completions"} <= listed
    assert len(servers.routes) >= 40
    answered: dict[str, int] = {}
    for name, url in servers.urls.items():
        for method, path in servers.routes:
            for headers in (None, bearer("w" * 64), {"Authorization": servers.token}):
                code = status(method, url + path, headers)
                if (code == 401) is (path in OPEN):
                    answered[f"{name} {method} {path}"] = code
    assert answered == {}


def test_every_route_is_there_for_who_has_the_token(servers: Servers) -> None:
    url = next(iter(servers.urls.values()))
    refused = [
        f"{method} {path}"
        for method, path in servers.routes
        if not HARMFUL.search(path) and status(method, url + path, servers.bearer) == 401
    ]
    assert refused == []
    assert status("GET", url + "/is_paused", servers.bearer) == 200


def test_the_api_key_opens_inference_and_no_control_route(servers: Servers) -> None:
    url, headers = next(iter(servers.urls.values())), bearer(servers.key)
    assert status("GET", url + "/v1/models", headers) == 200
    assert status("GET", url + "/metrics", headers) == 200
    for method, path in servers.routes:
        if HARMFUL.search(path) and not path.startswith(("/v1/", "/invocations")):
            for ending in ("", "%0A", "/%0A", "%E2%80%A8"):
                assert status(method, url + path + ending, headers) == 401, path
    for path in (
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/inference/v1/abort_requests",
    ):
        for ending in ("", "/", "%0A", "/%0A"):
            assert status("POST", url + path + ending, headers) == 401, path
            assert status("POST", url + path + "%0A", servers.bearer) == 400, path


def test_a_websocket_is_refused_before_it_opens(servers: Servers) -> None:
    url = next(iter(servers.urls.values()))
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "c2t5Y3RsLXRlc3QtdGVzdA==",
    }
    assert httpx.get(url + "/v1/realtime", headers=upgrade, timeout=60).status_code == 403


def test_the_router_lets_nobody_through_to_a_server_without_the_key(servers: Servers) -> None:
    model = servers.fleet.data("urls")["model"]
    body = {"model": model, "prompt": "hi", "max_tokens": 1}
    url = servers.router
    assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 401
    for path in ("/pause", "/collective_rpc", "/update_weights", "/is_paused"):
        code = httpx.post(url + path, json={}, headers=servers.bearer, timeout=60).status_code
        assert code in (401, 403, 404, 405), path  # the router takes the token off: closed to all
    stream = {**body, "stream": True}
    for sent in (body, stream):
        answer = httpx.post(
            url + "/v1/completions", json=sent, headers=bearer(servers.key), timeout=60
        )
        assert answer.status_code == 200


def test_the_token_is_nowhere_but_in_its_file_and_the_servers_environment(
    servers: Servers,
) -> None:
    fleet = servers.fleet
    fleet.run("generate", "hi", "--max-tokens", "2")
    commands = (
        ("plan",),
        ("plan", "--json"),
        ("status", "--json"),
        ("urls", "--json"),
        ("urls", "--format", "env"),
        ("weights", "--json"),
        ("jobs", "--json"),
        ("doctor", "--json"),
        ("logs", "-n", "2000"),
    )
    shown = {}
    for command in commands:
        done = fleet.run(*command, expect=None)
        shown[" ".join(command)] = done.stdout + done.stderr
    for process in psutil.process_iter(["cmdline"]):
        shown[f"argv of {process.pid}"] = " ".join(process.info["cmdline"] or ())
    for path in fleet.home.rglob("*"):
        if path.is_file() and path.name not in ("control.token", "api.key"):
            shown[str(path)] = path.read_bytes().decode(errors="replace")
    assert any("vllm.inside.serve" in text for text in shown.values())
    for secret in (servers.token, servers.key):
        assert [where for where, text in shown.items() if secret in text] == []
    assert json.loads(shown["status --json"])["data"]["health"] == "healthy"
