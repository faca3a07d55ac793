"""Servers of these tests are up within a tenth of a second: look more often."""

from __future__ import annotations

import pytest

from skyctl.supervisor import replica


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "READY_POLL_S", 0.03)
