"""A command in this process: what it printed, and how it ended."""

from __future__ import annotations

import sys

import pytest

from skyctl import startup
from skyctl.cli import app


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["skyctl", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.main()
    startup.hold_interrupts(False)  # this process goes on
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err
