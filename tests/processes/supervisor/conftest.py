"""Servers of these tests are up within a tenth of a second: look more often."""

from __future__ import annotations

import pytest

from skyctl.supervisor import replica
from tests.processes.supervisor.played import FakeCheckpoint, FakePush


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "READY_POLL_S", 0.03)


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch) -> FakePush:
    fake = FakePush()
    monkeypatch.setattr("skyctl.push.transaction.push", fake)
    return fake


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> type[FakeCheckpoint]:
    monkeypatch.setattr("skyctl.core.repeated.read_checkpoint", lambda path: FakeCheckpoint)
    return FakeCheckpoint
