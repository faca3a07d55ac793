"""Spellings of paths, sent through the guard to applications that have an engine's routes.

`python -m tests.fuzz.guard_paths` builds vLLM's own application, with all tasks and development
routes, and prints a `Result` as JSON: importing vLLM takes ten seconds, and leaves traces.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from skyctl.engines.inside.guard import HOLDER_HEADER, TOKEN_VARIABLE, VLLM, Routes

TOKEN, KEY = "t" * 64, "k" * 64
OPEN = frozenset({"/health", "/ping"})
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "WEBSOCKET")
ROOTS = ("", "/api", "/v1", "/v1/")
ENDINGS = (
    *("", "/", "//", "/.", "/..", "/../", "/x", ";x", "%3Fx", "%23", "%2F", "%2f..", "%252F"),
    *("%0A", "%0A%0A", "/%0A", "%0A/", "%0D", "%0D%0A", "%00", "%09", "%0B", "%0C", "%1C", "%20"),
    *("%C2%85", "%C2%A0", "%E2%80%A8", "%E2%80%A9", "%EF%BB%BF", "%FF", "%c0%af"),
    *("%0A/v1/completions", "/%2e%2e/v1/completions", "/..%2Fv1/models"),
)
PREFIXES = (
    *("/", "//", "/.", "/..", "/%2e%2e", "/%0A", "/%00", "/api", "/v1", "/v1/", "/v1/..", "/V1"),
    *("/health", "/health/..", "/metrics", "/metrics/..", "/v1/models/x/..", "http://h"),
)
ENCODINGS: tuple[Callable[[str], str], ...] = (
    lambda path: "".join(f"%{ord(letter):02x}" for letter in path),
    lambda path: path[:1] + f"%{ord(path[1]):02X}" + path[2:],
    lambda path: path[:-1] + f"%{ord(path[-1]):02X}",
    lambda path: path[:-1] + f"%25{ord(path[-1]):02X}",
    lambda path: path[:1] + path[1:].replace("/", "%2F"),
    lambda path: path.replace("/", "//"),
    lambda path: path.upper(),
    lambda path: path[:-1] + quote(chr(ord(path[-1]) + 0xFEE0)),  # a full-width letter
)


@dataclass
class Result:
    """What was seen of one application."""

    requests: int = 0
    """How many were sent."""
    control: list[str] = field(default_factory=list)
    """Routes for which the control token is required."""
    opened: list[str] = field(default_factory=list)
    """Requests that reached a route without the token that it requires, or an unprintable path."""
    closed: list[str] = field(default_factory=list)
    """Requests that did not reach a route although they had its token."""


class Recorder:
    """Stands for the routes of an application, and records which of them are reached."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    def endpoint(self, template: str) -> Any:
        async def record(scope: Any, receive: Any, send: Any) -> None:
            self.reached.append(template)
            kind = "http.response.start" if scope["type"] == "http" else "websocket.close"
            await send({"type": kind, "status": 200, "headers": []})
            if scope["type"] == "http":
                await send({"type": "http.response.body", "body": b""})

        return record

    def stand_in(self, routes: list[BaseRoute]) -> list[tuple[str, str]]:
        """Take the place of all endpoints. Returns their methods and paths."""
        table = []
        for route in routes:
            assert isinstance(route, Route | WebSocketRoute | Mount), route
            route.app = self.endpoint(route.path)
            methods = getattr(route, "methods", None) or {"GET"}
            if isinstance(route, WebSocketRoute):
                methods = {"WEBSOCKET"}
            table += [(method, route.path) for method in sorted(methods)]
        return table


def spellings(table: list[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """(root path, method, path as it is sent) of every route in every spelling."""
    for method, template in table:
        path = template.replace("{", "").replace("}", "")
        for ending in ENDINGS:
            for root in ROOTS:
                yield root, method, path + ending
                yield root, method, root + path + ending
        for encode in ENCODINGS:
            for ending in ("", "/", "%0A"):
                yield "", method, encode(path) + ending
        for prefix in PREFIXES:
            for ending in ("", "%0A"):
                yield "", method, prefix + path + ending
        for other in METHODS:
            for ending in ("", "/", "%0A"):
                yield "", other, path + ending


def scope_of(
    method: str,
    path: str,
    root: str,
    headers: Iterable[tuple[bytes, bytes]],
    query: str = "",
) -> dict[str, Any]:
    """A request's scope, as in uvicorn."""
    scope: dict[str, Any] = {
        "type": "websocket" if method == "WEBSOCKET" else "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "server": ("h", 80),
        "client": ("c", 1),
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": root,
        "query_string": query.encode(),
        "headers": [(b"host", b"h"), *headers],
    }
    if method != "WEBSOCKET":
        scope["method"] = method
    return scope


async def send(
    app: Any,
    recorder: Recorder,
    root: str,
    method: str,
    sent: str,
    given: str,
    holder: str = "",
) -> Any:
    """The template of the route that a request reaches, or None. `sent` becomes a scope as in
    uvicorn. `holder`: the fleet that it acts for.
    """
    authorization = (b"authorization", f"Bearer {given}".encode())
    scope = scope_of(method, sent, root, [authorization])
    if holder:
        scope["headers"].append((HOLDER_HEADER.encode(), holder.encode()))

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def ignore(message: Any) -> None:
        pass

    recorder.reached.clear()
    await app(scope, receive, ignore)
    return recorder.reached[0] if recorder.reached else None


async def try_paths(
    build: Callable[[str | None, Recorder], tuple[Any, list[tuple[str, str]]]],
    is_control: Callable[[str], bool],
    routes: Routes = VLLM,
) -> Result:
    """`build` makes the guarded application, with or without an API key."""
    result = Result()
    for key in (KEY, None):
        recorder = Recorder()
        app, table = build(key, recorder)
        result.control = sorted({path for _, path in table if is_control(path)})
        for request in spellings(table):
            for given in ("", "w" * 64, KEY):
                result.requests += 1
                route = await send(app, recorder, *request, given)
                if route and route not in OPEN and (is_control(route) or (key and given != KEY)):
                    result.opened.append(f"{request} {given[:1]!r} reached {route}")
            if not unquote(request[2]).isprintable():
                result.requests += 1
                if route := await send(app, recorder, *request, TOKEN):
                    result.opened.append(f"{request} with the control token reached {route}")
        for method, path in table:
            plain = path.replace("{", "").replace("}", "").replace(":path", "")
            for given in (TOKEN,) if is_control(path) else (TOKEN, KEY):
                result.requests += 1
                if await send(app, recorder, "", method, plain, given) != path:
                    result.closed.append(f"{method} {plain} {given[:1]!r}")
        await _try_frozen(app, recorder, table, is_control, routes, result)
    return result


async def _try_frozen(
    app: Any,
    recorder: Recorder,
    table: list[tuple[str, str]],
    is_control: Callable[[str], bool],
    routes: Routes,
    result: Result,
) -> None:
    """The same spellings with the control token, while another fleet's freeze lasts."""
    [pause] = routes.pauses
    await send(app, recorder, "", "POST", pause, TOKEN, "a fleet a")
    for request in spellings(table):
        for holder in ("", "b fleet b"):
            result.requests += 1
            route = await send(app, recorder, *request, TOKEN, holder)
            if route and route not in OPEN | routes.reports and is_control(route):
                result.opened.append(f"{request} for {holder!r} reached the frozen {route}")
    for method, path in table:
        if is_control(path) and path not in routes.thaws:
            result.requests += 1
            plain = path.replace("{", "").replace("}", "").replace(":path", "")
            if await send(app, recorder, "", method, plain, TOKEN, "a fleet a") != path:
                result.closed.append(f"{method} {plain} of the fleet that froze")


def environment(key_variable: str, key: str | None) -> dict[str, str]:
    return {TOKEN_VARIABLE: TOKEN, **({key_variable: key} if key else {})}


def _vllm(key: str | None, recorder: Recorder) -> tuple[Any, list[tuple[str, str]]]:
    import typing
    from unittest.mock import MagicMock

    from prometheus_client import REGISTRY
    from vllm.entrypoints.launchers.app import build_app
    from vllm.tasks import SupportedTask
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # before 0.33
        from vllm.entrypoints.launchers.cli_args import make_arg_parser

    os.environ.pop("VLLM_API_KEY", None)
    os.environ |= environment("VLLM_API_KEY", key)
    guard = ["--middleware", "skyctl.engines.inside.guard.Guard"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(guard)
    arguments.enable_fault_tolerance = True
    for collector in list(REGISTRY._collector_to_names):
        REGISTRY.unregister(collector)
    app = build_app(arguments, typing.get_args(SupportedTask), MagicMock())
    table = recorder.stand_in(app.routes)
    app.middleware_stack = app.build_middleware_stack()
    return app, table


def vllm_requires_control(path: str) -> bool:
    """Which of vLLM's routes run no inference and do more than report, by their first segment."""
    if path.endswith(("load_lora_adapter", "abort_requests")):
        return True
    inference = ("v1", "v2", "inference", "cohere", "tokenize", "detokenize", "invocations")
    inference += ("pooling", "classify", "score", "rerank", "generative_scoring")
    reports = ("health", "ping", "metrics", "version", "load", "tokenizer_info")
    return path.split("/")[1] not in inference + reports


def main() -> None:
    os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    print(json.dumps(asdict(asyncio.run(try_paths(_vllm, vllm_requires_control)))))


if __name__ == "__main__":
    main()
