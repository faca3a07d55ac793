"""What the keeper lets through to SGLang, by what the server was started with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from skyctl.engines.sglang.inside import keeper
from tests.stub.sglang import SGLangEngine, SGLangStub


@pytest.mark.parametrize(
    ("path", "body", "passes"),
    [
        *((path, {"model_path": "nowhere"}, False) for path in keeper.UPDATES),
        (keeper.RELEASE, {"tags": ["kv_cache", "weights"]}, False),
        (keeper.RELEASE, {}, False),
        (keeper.RELEASE, {"tags": ["kv_cache"]}, True),
    ],
)
async def test_weights_that_a_cache_shares_are_neither_changed_nor_released(
    path: str, body: dict[str, Any], passes: bool
) -> None:
    """SGLang's scheduler ends by an error of its own."""
    engine = SGLangEngine(version="0.5.23")
    engine.server_args = SimpleNamespace(**vars(engine.server_args), weight_cache_mode="client")
    transport = ASGITransport(SGLangStub(engine).asgi)
    async with AsyncClient(transport=transport, base_url="http://stub") as client:
        assert (await client.post(keeper.PAUSE, json={})).status_code == 200
        answer = await client.post(path, json=body)
    refused = answer.status_code == 409 and "weight-cache-mode" in answer.json()["message"]
    assert refused == (not passes)
