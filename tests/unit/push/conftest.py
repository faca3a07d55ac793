"""Stubs of each test's own, which are looked at more often: what is waited for happens at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.push import freeze
from tests.unit.push.fleets import Stubs


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freeze, "_POLL_S", 0.03)


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)
