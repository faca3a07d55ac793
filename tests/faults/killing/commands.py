"""Commands of a cycle. What they leave may hold their output open: it goes to files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import forking

_ROOT = Path(__file__).parents[3]


class Commands:
    """Runs `skyctl`, with its output in `directory`."""

    def __init__(
        self,
        directory: Path,
        start: Callable[..., subprocess.Popen[str]] = forking.command,
        timeout_s: float = 60.0,
    ) -> None:
        self._out, self._err = directory / "command.out", directory / "command.err"
        self._start, self._timeout_s = start, timeout_s

    def run(
        self, *argv: str, cwd: Path, env: dict[str, str], guardian: bool
    ) -> tuple[int, dict[str, Any], str]:
        """One command: its exit code (negative: the signal; 124: it took too long, and was killed),
        its envelope if any, and stderr. Those that are not forked have their guardian always.
        """
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
        cycle = {forking.CYCLE: "guarded" if guardian else "by hand"}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            process = self._start(
                [sys.executable, "-m", "skyctl", *argv],
                cwd=cwd,
                env={**inherited, "PYTHONPATH": str(_ROOT), **cycle, **env},
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        try:
            code = process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = 124
        try:
            envelope: dict[str, Any] = json.loads(self._out.read_text())
        except ValueError:
            envelope = {}
        return code, envelope, self._err.read_text()
