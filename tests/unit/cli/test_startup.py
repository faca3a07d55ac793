"""What a command does to start quickly stays its own."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from skyctl import startup


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = gc.get_threshold()
    monkeypatch.setattr(startup, "_ours", set())
    yield
    gc.set_threshold(*before)


def test_those_it_starts_get_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "")  # taken back at the end, as is all of it
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS")
    startup.hurry()
    assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "__all__"
    assert "PYDANTIC_DISABLE_PLUGINS" not in startup.inherited()
    assert startup.inherited()["PATH"] == os.environ["PATH"]


def test_what_the_user_said_of_plugins_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "logfire")
    startup.hurry()
    assert startup.inherited()["PYDANTIC_DISABLE_PLUGINS"] == "logfire"
