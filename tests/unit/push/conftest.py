"""What is waited for in these tests happens at once: look more often."""

from __future__ import annotations

import pytest

from skyctl.push import freeze


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freeze, "_DRAIN_POLL_S", 0.03)
