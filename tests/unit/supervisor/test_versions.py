"""A command and a supervisor of another skyctl: refused before anything is done, with a hint."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from skyctl.errors import ServerError, VersionMismatch
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor.api import make_app
from skyctl.supervisor.interface import SupervisorClient, own_handlers
from skyctl.supervisor.resident import Supervisor
from skyctl.supervisor.wire import VERSION_HEADER, own_version
from tests.stub.through_httpx import ThroughHttpx


def client(handler: httpx.AsyncBaseTransport) -> SupervisorClient:
    return SupervisorClient("stubs", ThroughHttpx(handler))


def answering(status: int, **headers: str) -> httpx.MockTransport:
    found = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.MockTransport(lambda _: httpx.Response(status, text="oh", headers=found))


async def test_a_supervisor_refuses_another_protocol_before_it_does_anything(
    tmp_path: Path,
) -> None:
    paths = FleetPaths(tmp_path, "stubs").prepare()
    with FleetState(paths.database) as state:
        supervisor = Supervisor(paths, state)
        app = httpx.ASGITransport(make_app(own_handlers(supervisor), ready=Mock()))
        async with httpx.AsyncClient(transport=app, base_url="http://supervisor") as other:
            refused = await other.post("/v1/down", headers={VERSION_HEADER: "9.9.9/99"}, json={})
            assert refused.status_code == 409
            assert refused.json()["error"]["kind"] == "VersionMismatch"
            assert not supervisor.finished.is_set()
        async with client(app) as ours:
            assert (await ours.status()).name == "stubs"
        await supervisor.client.aclose()


async def test_an_old_supervisor_that_does_not_understand_is_said_to_be_old() -> None:
    with pytest.raises(VersionMismatch, match="an old one") as caught:
        await client(answering(404)).findings()
    assert "skyctl recover" in caught.value.hint


async def test_one_that_goes_on_with_files_that_were_replaced_is_said_to_be_old() -> None:
    with pytest.raises(VersionMismatch):
        await client(answering(500, **{VERSION_HEADER: f"{own_version()}/0"})).status()


async def test_an_error_of_one_like_ours_is_an_error() -> None:
    failing = Mock(status=Mock(side_effect=RuntimeError))
    app = httpx.ASGITransport(
        make_app(own_handlers(failing), ready=Mock()), raise_app_exceptions=False
    )
    with pytest.raises(ServerError, match="answered 500") as caught:
        await client(app).status()
    assert caught.value.hint == "look: skyctl logs supervisor"
