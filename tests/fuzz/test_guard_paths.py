"""No spelling of a path gets past the guard to a route that its token does not open."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route, WebSocketRoute

from skyctl.engines.inside.guard import Guard
from skyctl.engines.sglang.inside import keeper, serve
from tests.fuzz import guard_paths

SGLANG = {
    "GET": "/docs /flush_cache /get_load /get_model_info /get_server_info /health /health_generate "
    "/hicache/storage-backend /metrics /model_info /ping /server_info /skyctl/state /v1/loads "
    "/v1/models /v1/models/{model:path} /v1/responses/{response_id} /weight_version",
    "POST": "/abort_request /api/generate /classify /configure_logging /dumper/{method} /encode "
    "/flush_cache /freeze_gc /generate /get_weights_by_name /load_lora_adapter /open_session "
    "/set_trace_level /slow_down /start_profile /unload_lora_adapter /update_weight_version "
    "/v1/audio/transcriptions /v1/chat/completions /v1/classify /v1/completions /v1/detokenize "
    "/v1/embeddings /v1/messages /v1/messages/count_tokens /v1/rerank /v1/responses "
    "/v1/responses/{response_id}/cancel /v1/score /v1/tokenize /weights_checker",
    "PUT": "/generate /hicache/storage-backend /set_internal_state",
    "DELETE": "/hicache/storage-backend",
    "WEBSOCKET": "/v1/realtime",
}
"""Routes of SGLang 0.5.14 (`entrypoints/http_server.py`) beside those that the keeper watches."""
SGLANG_DATA = ("v1", "classify", "encode", "generate", "get_model_info", "get_server_info")
SGLANG_DATA += ("metrics", "model_info", "server_info", "health", "ping")


def sglang_requires_control(path: str) -> bool:
    return path.split("/")[1] not in SGLANG_DATA


def sglang(key: str | None, recorder: guard_paths.Recorder) -> tuple[Any, list[tuple[str, str]]]:
    table = [(method, path) for method, paths in SGLANG.items() for path in paths.split()]
    table += [("POST", path) for path in sorted(keeper.CALLS)]
    app = Starlette(
        routes=[
            WebSocketRoute(path, recorder.endpoint(path))
            if method == "WEBSOCKET"
            else Route(path, recorder.endpoint(path), methods=[method])
            for method, path in table
        ]
    )
    recorder.stand_in(app.routes)
    environ = guard_paths.environment(serve.ROUTES.key_variable, key)
    return Guard(app, environ=environ, routes=serve.ROUTES), table


async def test_no_spelling_of_a_path_opens_a_route_of_sglang() -> None:
    result = await guard_paths.try_paths(sglang, sglang_requires_control, serve.ROUTES)
    assert (result.opened, result.closed) == ([], [])
    assert {"/skyctl/state", keeper.RELEASE, "/dumper/{method}"} < set(result.control)
    assert result.requests > 100_000


def test_no_spelling_of_a_path_opens_a_route_of_vllm() -> None:
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-m", guard_paths.__name__], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = guard_paths.Result(**json.loads(done.stdout.splitlines()[-1]))
    assert (result.opened, result.closed) == ([], [])
    assert {"/pause", "/collective_rpc", "/v1/load_lora_adapter"} < set(result.control)
    assert result.requests > 100_000
