"""What is waited for in these tests happens at once: look more often."""

from __future__ import annotations

import pytest

from skyctl.push import drain


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_POLL_S", 0.03)
