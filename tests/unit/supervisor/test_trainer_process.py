"""Whose process a request of the fleet URL came from: its death undoes the update."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from skyctl.store.identity import ProcessIdentity, identify, own_identity
from skyctl.supervisor.trainer_api import _client_process


@pytest.fixture
def scope() -> Iterator[dict[str, Any]]:
    """Of a request that this process has sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client:
            yield {"client": list(client.getsockname()), "server": address}


def test_the_trainer_of_the_last_update_is_known_without_a_look_at_all_processes(
    scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _client_process(scope, None) == own_identity()
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [])
    assert _client_process(scope, own_identity()) == own_identity()
    assert _client_process(scope, None) is None


def test_another_trainer_is_not_taken_for_the_last_one(scope: dict[str, Any]) -> None:
    parent = identify(psutil.Process().ppid())
    gone = ProcessIdentity(own_identity().pid, 1.0, own_identity().boot_id)
    for likely in (parent, gone):
        assert likely is not None and _client_process(scope, likely) == own_identity()
    assert _client_process({**scope, "client": ("192.0.2.1", 1)}, own_identity()) is None
