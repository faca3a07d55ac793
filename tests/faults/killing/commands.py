"""Commands of a cycle. What they leave may hold their output open: it goes to files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyctl import kill_points
from tests import forking

_ROOT = Path(__file__).parents[3]


class Commands:
    """Runs `skyctl` in `directory`, with its state in `home` there."""

    def __init__(
        self,
        directory: Path,
        start: Callable[..., subprocess.Popen[str]] = forking.command,
        timeout_s: float = 60.0,
    ) -> None:
        self._directory = directory
        self._out, self._err = directory / "command.out", directory / "command.err"
        self._start, self._timeout_s = start, timeout_s

    def run(
        self, *argv: str, kill_at: str = "", guardian: bool = False
    ) -> tuple[int, dict[str, Any], str]:
        """One command: its exit code (negative: the signal; 124: it took too long, and was killed),
        its envelope if any, and stderr. Those that are not forked have their guardian always.
        """
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
        ours = {
            "PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "SKYCTL_HOME": str(self._directory / "home"),
            forking.CYCLE: "guarded" if guardian else "by hand",
            **({kill_points.VARIABLE: kill_at} if kill_at else {}),
        }
        with self._out.open("wb") as out, self._err.open("wb") as err:
            process = self._start(
                [sys.executable, "-m", "skyctl", *argv, "--json"],
                cwd=self._directory,
                env={**inherited, **ours},
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
