"""`scripts/demo.py`, which newcomers run and then type after."""

from __future__ import annotations

import subprocess
from pathlib import Path
from runpy import run_path

import pytest

DEMO = Path(__file__).resolve().parents[3] / "scripts" / "demo.py"


def test_a_command_is_shown_as_it_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    run_path(str(DEMO))["Demo"](tmp_path).show("generate", "the fleet is up", "--max-tokens", "12")
    assert "$ skyctl generate 'the fleet is up' --max-tokens 12" in capsys.readouterr().out
