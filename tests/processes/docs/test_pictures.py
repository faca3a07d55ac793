"""Pictures are recorded from commands in a terminal of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.docs.terminal import load_terminal


@pytest.fixture(scope="module")
def terminal() -> ModuleType:
    return load_terminal()


def test_a_command_has_a_terminal_of_the_given_size_and_its_exit_code(
    terminal: ModuleType, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-c",
        "import os, sys; print(*os.get_terminal_size(), sys.stdin.readline().strip()); sys.exit(3)",
    ]
    typed = iter(["hello\n"])
    shown = terminal.show(
        command,
        cwd=tmp_path,
        environ=dict(os.environ),
        columns=71,
        rows=9,
        timeout_s=30,
        keys=lambda seconds: next(typed, ""),
    )
    assert shown.code == 3
    assert "71 9 hello" in shown.end


def test_a_command_that_does_not_end_is_ended(terminal: ModuleType, tmp_path: Path) -> None:
    endless = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(TimeoutError):
        terminal.show(endless, cwd=tmp_path, environ=dict(os.environ), timeout_s=0.3)
